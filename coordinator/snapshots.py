"""Snapshots: the outer state of a whole run as files, with a manifest that is written last."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from torch import Tensor

from coordinator.files import REAL, Files
from coordinator.fold import Outer, digest_of
from diloco.config import RunConfig, load_run
from diloco.digest import show
from diloco.errors import ConfigError, DigestMismatch, EnvironmentFault, InputError, LayoutError
from diloco.failpoints import failpoint
from diloco.fragments import Fragment, kept, partition
from diloco.layout import Layout, TensorSpec
from diloco.settings import to_toml

log = logging.getLogger("diloco.coordinator")
FORMAT = 1
TENSORS = ("anchor", "momentum", "residual")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The outer state of a whole run, as it was found. Each fragment is as it stood at a moment of its own."""

    config: RunConfig
    layout: Layout
    fragments: tuple[Fragment, ...]
    outers: tuple[Outer, ...]
    rounds: tuple[int, ...]
    """Rounds ended of each fragment."""
    last_epoch: int = 0
    """Of the islands' leases at that time; 0 where it is not known."""

    def tensors(self) -> dict[str, Tensor]:
        """The outer parameters: canonical name -> fp32 tensor of the full shape."""
        return {
            spec.name: outer.anchor[start : start + spec.numel].view(spec.shape)
            for fragment, outer in zip(self.fragments, self.outers, strict=True)
            for spec, start in zip(fragment.specs, fragment.starts, strict=True)
        }


# -- writing --------------------------------------------------------------------------------------------------------


class Draft:
    """A snapshot that is being written, one fragment at a time; they may be of different moments.

    Args:
        root: the state folder.
        config, layout, fragments: of the run.
        last_epoch: of the islands' leases.
        files: how files are written.
    """

    def __init__(
        self,
        root: Path,
        config: RunConfig,
        layout: Layout,
        fragments: Sequence[Fragment],
        last_epoch: int,
        files: Files = REAL,
    ) -> None:
        self._root, self._files, self.fragments = root, files, fragments
        self._head = {
            "format": FORMAT,
            "run_id": config.run.id,
            "config_digest": config.digest,
            "config_toml": to_toml(config),
            "last_epoch": last_epoch,
            "layout_digest": layout.digest,
            "layout": [[s.name, list(s.shape), s.kind] for s in layout.tensors],
        }
        self._rows: list[dict[str, Any]] = []

    @property
    def versions(self) -> list[int]:
        """Versions of the fragments that it has."""
        return [row["version"] for row in self._rows]

    def add(self, outer: Outer, round_: int) -> None:
        """Writes the file of the next fragment unless it is there. Its tensors must not change meanwhile.

        Args:
            outer: its outer state.
            round_: rounds ended.

        Raises:
            OSError: the disk is full or failed.
        """
        fragment, digest = self.fragments[len(self._rows)], show(outer.digest)
        name = f"f{fragment.index:04d}-v{outer.version:08d}-{digest}.safetensors"
        path = self._root / "fragments" / name
        if not path.exists():
            tensors = {name: getattr(outer, name) for name in TENSORS}
            self._files.save(path, tensors, {"xxh3_64": json.dumps(_checksums(fragment, tensors))})
        self._rows.append({"file": name, "version": outer.version, "round": round_, "digest": digest})

    def finish(self, keep: int) -> tuple[Path, tuple[int, ...]]:
        """Writes the manifest once all fragments are there; then removes old snapshots.

        Returns:
            The manifest, and rounds ended of each fragment in the oldest snapshot kept: what came before it is no
            longer needed.

        Raises:
            OSError: the disk is full or failed. What was kept before is still there; it may be tried again.
        """
        root, files = self._root, self._files
        files.sync(root / "fragments")  # also for files that an earlier try has left
        failpoint("snapshot-fragments")
        numbers = [number_of(path) for path in manifests(root)]
        path = root / f"manifest-{(numbers[-1] if numbers else 0) + 1:08d}.json"
        files.write(path, json.dumps({**self._head, "fragments": self._rows}, indent=1).encode())
        failpoint("snapshot-manifest")
        for old, _ in _readable(root, files)[:-keep]:
            files.unlink(old)
        sweep(root, files)
        return path, oldest_rounds(root, files)


def oldest_rounds(root: Path, files: Files = REAL) -> tuple[int, ...]:
    """Rounds ended of each fragment in the oldest snapshot kept, so in all of them. Raises `InputError` without one."""
    found = _readable(root, files)
    if not found:
        raise InputError(f"no snapshot in {root} can be read")
    return tuple(int(row["round"]) for row in found[0][1]["fragments"])


def sweep(root: Path, files: Files) -> None:
    """Removes fragment files that no manifest names."""
    named = {row["file"] for _, manifest in _readable(root, files) for row in manifest["fragments"]}
    for path in (root / "fragments").iterdir():
        if path.name not in named:
            files.unlink(path)


def _checksums(fragment: Fragment, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """By tensor of the model, XXH3-64 (hex) of its part of the anchor, the momentum and the residual."""
    spans = zip(fragment.specs, fragment.starts, strict=True)
    return {
        spec.name: [xxhash.xxh3_64_hexdigest(tensors[n][start : start + spec.numel].numpy().data) for n in TENSORS]
        for spec, start in spans
    }


def _damage(fragment: Fragment, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """What of a fragment's file is not as it was written, in words; empty where all is."""
    if "xxh3_128" in metadata:  # files of earlier versions have one checksum for all
        checksum = xxhash.xxh3_128()
        for tensor in tensors.values():
            checksum.update(tensor.numpy().data)
        return "" if checksum.hexdigest() == metadata["xxh3_128"] else "it"
    try:
        written = json.loads(metadata["xxh3_64"])
    except (KeyError, ValueError):
        return "its list of checksums"
    found = _checksums(fragment, tensors)
    wrong = [
        f"the {part} of '{name}'"
        for name, values in found.items()
        for part, value, right in zip(TENSORS, values, written.get(name, [""] * len(TENSORS)), strict=True)
        if value != right
    ]
    return ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")


# -- reading --------------------------------------------------------------------------------------------------------


def manifests(root: Path) -> list[Path]:
    """The manifests in a folder, oldest first."""
    return sorted(root.glob("manifest-*.json"))


def number_of(manifest: Path) -> int:
    """The number of a snapshot."""
    return int(manifest.stem.removeprefix("manifest-"))


def load_snapshot(root: Path, *, oldest: bool = False, files: Files = REAL) -> Snapshot | None:
    """The newest (or oldest) complete snapshot in a state folder; none where there is none yet.

    Raises:
        InputError: no such folder, a manifest that is damaged or of a newer format, or a file that is missing.
        DigestMismatch: a fragment's bits are not those that were written.
        EnvironmentFault: the disk cannot be read.
    """
    if not root.is_dir():
        raise InputError(f"no state folder at {root}: name the --state of a coordinator")
    found = manifests(root)
    if not found:
        return None
    return load(found[0 if oldest else -1], files)


def load_newest_good(root: Path, files: Files = REAL) -> Snapshot | None:
    """The newest snapshot whose files are as they were written; damaged ones that are newer are set aside.

    The ledger leads on from any snapshot kept, since the contributions that came after it are kept as well.

    Raises:
        InputError, DigestMismatch: there are snapshots, and all are damaged; or one is of a newer format.
    """
    found = manifests(root)
    first: InputError | DigestMismatch | None = None
    for place in reversed(range(len(found))):
        try:
            snapshot = load(found[place], files)
        except (InputError, DigestMismatch) as error:
            if "format" in error.ids:
                raise
            first = first or error
            if place:
                log.error("%s; going back to the snapshot before it, %s", error.message, found[place - 1].name)
            continue
        for damaged in found[place + 1 :]:
            files.rename(damaged, damaged.with_suffix(".damaged"))
        if first:
            sweep(root, files)  # damaged files must not stand for good ones of the same name
        return snapshot
    if first:
        raise first
    return None


def _readable(root: Path, files: Files) -> list[tuple[Path, dict[str, Any]]]:
    """The manifests that are not damaged, oldest first; the others are set aside."""
    found = []
    for path in manifests(root):
        try:
            found.append((path, read_manifest(path, files)))
        except InputError as error:
            if "format" in error.ids:
                raise
            log.error("%s", error.message)
            files.rename(path, path.with_suffix(".damaged"))
    return found


def read_manifest(path: Path, files: Files = REAL) -> dict[str, Any]:
    """The content of a manifest. Raises `InputError` where it is damaged or of a newer format."""
    try:
        manifest: dict[str, Any] = json.loads(files.read(path))
        if manifest["format"] > FORMAT:
            raise InputError(
                f"{path} has format {manifest['format']}, newer than {FORMAT}, the newest this version reads",
                format=manifest["format"],
            )
        for row in manifest["fragments"]:
            str(row["file"]), int(row["version"]), int(row["round"]), str(row["digest"])
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}): {REMEDY}") from error
    return manifest


REMEDY = "put its copy back, or remove this manifest to go on from the snapshot before it"


def load(path: Path, files: Files = REAL) -> Snapshot:
    """The snapshot of a manifest. Raises what `load_snapshot` raises."""
    try:
        manifest = read_manifest(path, files)
        config = load_run(manifest["config_toml"], str(path)).value
        layout = Layout(TensorSpec(name, tuple(shape), kind) for name, shape, kind in manifest["layout"])
        fragments = kept(partition(layout, config.sync), config.run)
        rows = list(zip(fragments, manifest["fragments"], strict=True))
        rounds, last_epoch = tuple(int(row["round"]) for _, row in rows), int(manifest.get("last_epoch", 0))
    except (ConfigError, LayoutError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}): {REMEDY}") from error
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error}") from error
    outers = tuple(_load_outer(path, fragment, row, files) for fragment, row in rows)
    return Snapshot(
        config=config, layout=layout, fragments=fragments, outers=outers, rounds=rounds, last_epoch=last_epoch
    )


def _load_outer(manifest: Path, fragment: Fragment, row: Mapping[str, Any], files: Files) -> Outer:
    path = manifest.parent / "fragments" / row["file"]
    try:
        tensors, metadata = files.read_tensors(path, TENSORS)
    except FileNotFoundError:
        raise InputError(f"{path} is missing, but a manifest in {manifest.parent} names it: {manifest.name}") from None
    except SafetensorError as error:
        raise DigestMismatch(f"{path} is damaged: {error}", fragment=fragment.index) from error
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error}") from error
    if any(tensor.numel() != fragment.numel for tensor in tensors.values()):
        raise DigestMismatch(f"{path} is damaged: its tensors are not of the fragment's size", fragment=fragment.index)
    damage = _damage(fragment, tensors, metadata)
    if damage:
        raise DigestMismatch(f"{path} is damaged: {damage} is not as it was written", fragment=fragment.index)
    found = digest_of(fragment, tensors["anchor"])
    if show(found) != row["digest"]:
        raise DigestMismatch(
            f"{path} has digest {show(found)}, but its manifest says {row['digest']}: the file is damaged",
            fragment=fragment.index,
        )
    return Outer(version=row["version"], digest=found, **tensors)
