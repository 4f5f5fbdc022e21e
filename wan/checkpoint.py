"""Checkpoints of the outer parameters: read from a coordinator's state or an exported folder, exported, evaluated."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coordinator.snapshots import Snapshot, load_snapshot
from diloco.config import ModelConfig, RunConfig, RunSection, SyncConfig
from diloco.errors import InputError
from diloco.layout import named_tensors
from island.model import allocate, build_meta, exported, exported_config, fill, imported


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The outer parameters of a run and the shape of its model."""

    model: ModelConfig
    tensors: dict[str, Tensor]
    """Canonical name -> fp32."""
    versions: tuple[int, ...]
    """Outer steps of each fragment."""

    def built(self) -> nn.Module:
        """The model with these parameters, on the CPU, in evaluation mode.

        Raises:
            InputError: the tensors are not those of the model.
            ConfigError, EnvironmentFault: the model cannot be made here (`island.model.build_meta`).
        """
        run = RunConfig(run=RunSection(id="checkpoint"), model=self.model, sync=SyncConfig(buffers="average"))
        model = allocate(build_meta(run), "cpu")
        if not self.model.ours:
            fill(model, run)  # what is no part of a run, such as buffers that are not saved
        own = {name: tensor for name, tensor, kind in named_tensors(model) if kind != "buffer" or name in self.tensors}
        expected, found = ({(n, t.shape) for n, t in named.items()} for named in (own, self.tensors))
        if expected != found:
            odd = sorted({name for name, _ in expected ^ found})
            raise InputError(f"the checkpoint is not of its model: {odd[0]} differs ({len(odd)} tensors)")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.tensors[name])
        return model.eval()


def load(path: Path, *others: Path) -> Checkpoint:
    """Reads a coordinator's state folder (its newest snapshot) or a folder that `export` wrote.

    Args:
        path: the folder.
        others: state folders of the other coordinators of the run, where it has several.

    Raises:
        InputError: neither of the two, a state folder without a snapshot yet, or not those of all coordinators.
        DigestMismatch: damaged snapshot files.
    """
    if not others and any((path / name).is_file() for name in ("diloco.json", "config.json")):
        return _load_export(path)
    snapshots = {found.config.run.coordinator_index: found for found in map(_snapshot, (path, *others))}
    first = snapshots[min(snapshots)]
    run = first.config.run
    missing = [str(index) for index in range(run.coordinator_count) if index not in snapshots]
    if missing or len(snapshots) <= len(others) or len({s.config.digest for s in snapshots.values()}) > 1:
        raise InputError(
            f"the state folders must be those of all {run.coordinator_count} coordinators of run '{run.id}', each "
            f"once; missing: {', '.join(missing) or 'none'}"
        )
    together = zip(*(snapshot.outers for snapshot in snapshots.values()), strict=True)
    return Checkpoint(
        model=first.config.model,
        tensors={name: tensor for snapshot in snapshots.values() for name, tensor in snapshot.tensors().items()},
        versions=tuple(max(outer.version for outer in outers) for outers in together),
    )


def _snapshot(path: Path) -> Snapshot:
    snapshot = load_snapshot(path)
    if snapshot is None:
        raise InputError(f"{path} has no snapshot yet: its run has no first parameters, or it is no state folder")
    return snapshot


def _load_export(path: Path) -> Checkpoint:
    try:
        extra = json.loads((path / "diloco.json").read_text())
        tensors = load_file(path / "model.safetensors")
        model = ModelConfig.model_validate(extra["model"])
        return Checkpoint(
            model=model,
            tensors=imported(tensors, model),
            versions=tuple(extra["versions"]),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"{path} is not a folder that `diloco export` wrote, or is damaged: {error}") from error


def export(checkpoint: Checkpoint, to: Path) -> None:
    """Writes safetensors, and a config.json with which transformers loads them where the model is no function's.

    The folder appears whole or not at all.

    Raises:
        InputError: `to` exists already, or cannot be made; or transformers has no architecture for the model.
    """
    config = exported_config(checkpoint.model)
    if to.exists():
        raise InputError(f"{to} exists already: name a new folder with --to")
    partial = to.with_name(to.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot make {to} ({error.strerror}): name another folder with --to") from error
    save_file(exported(checkpoint.tensors, checkpoint.model), partial / "model.safetensors", metadata={"format": "pt"})
    if config:
        (partial / "config.json").write_text(json.dumps(config, indent=2))
    extra = {"model": checkpoint.model.model_dump(mode="json"), "versions": list(checkpoint.versions)}
    (partial / "diloco.json").write_text(json.dumps(extra, indent=2))
    partial.rename(to)
