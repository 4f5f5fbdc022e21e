"""The state folder: contributions and updates as files, outer state as snapshots whose manifest is written last.

lock                     held while a coordinator uses the folder
address                  where the coordinator listens, or last did
ledger.sqlite            every fact of the run, in order; events.jsonl is the same for people to follow
inbox/                   parts of contributions of open rounds; *.partial and *.sums are uploads under way
updates/                 payloads of the last updates
fragments/               outer state of one fragment at one version (safetensors)
manifest-NNNNNNNN.json   a snapshot: which fragment files, which layout, which run
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coordinator.fold import Outer, digest_of
from coordinator.ledger import Ledger
from diloco.config import RunConfig, load_run
from diloco.digest import show
from diloco.errors import DigestMismatch, DilocoError, EnvironmentFault, InputError, RunMismatch
from diloco.fragments import Fragment, partition
from diloco.layout import Layout, TensorSpec
from diloco.settings import to_toml

log = logging.getLogger("diloco.coordinator")
FORMAT = 1
UPDATES_KEPT = 8


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The outer state of a whole run at one moment."""

    config: RunConfig
    layout: Layout
    fragments: tuple[Fragment, ...]
    outers: tuple[Outer, ...]
    rounds: tuple[int, ...]

    def tensors(self) -> dict[str, Tensor]:
        """The outer parameters: canonical name -> fp32 tensor of the full shape."""
        return {
            spec.name: outer.anchor[start : start + spec.numel].view(spec.shape)
            for fragment, outer in zip(self.fragments, self.outers, strict=True)
            for spec, start in zip(fragment.specs, fragment.starts, strict=True)
        }


class Store:
    """A coordinator's state folder, locked for as long as the store is open.

    Raises:
        EnvironmentFault: another coordinator uses the folder, or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            for name in ("inbox", "updates", "fragments"):
                (root / name).mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (root / "lock").open("w")
        except OSError as error:
            raise EnvironmentFault(f"cannot write the state folder {root}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise EnvironmentFault(
                f"the state folder {root} is in use by another coordinator: stop it or name another --state"
            ) from None
        for folder in ("updates", "fragments"):  # those in the inbox are uploads that go on
            for stale in (root / folder).glob("*.partial"):
                stale.unlink()
        try:
            self.ledger = Ledger(root / "ledger.sqlite")
        except DilocoError:
            self._lock.close()
            raise

    def close(self) -> None:
        """Gives the folder back."""
        self.ledger.close()
        self._lock.close()

    # -- facts ----------------------------------------------------------------------------------------------------

    def record(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Makes rows of the ledger durable, and shows them to people in `events.jsonl`.

        Raises:
            OSError: the disk is full or failed; none of the rows is written.
        """
        at = time.time()
        last = self.ledger.append(rows, at)
        lines = (
            json.dumps({"seq": seq, "at": at, "kind": kind, **body}) + "\n"
            for seq, (kind, body) in enumerate(rows, last - len(rows) + 1)
        )
        try:
            with (self.root / "events.jsonl").open("a", encoding="utf-8") as events:
                events.writelines(lines)
        except OSError as error:  # the rows are in the ledger; this is for people only
            log.warning("events.jsonl cannot be written: %s", error)

    # -- contributions and updates --------------------------------------------------------------------------------

    def inbox_path(self, name: str) -> Path:
        """Where a part of a contribution is kept until its round has ended."""
        return self.root / "inbox" / name

    def update_path(self, fragment: int, round_: int) -> Path:
        """Where the update that ended a round is kept."""
        return self.root / "updates" / f"f{fragment:04d}-r{round_:08d}.bin"

    def write_update(self, fragment: int, round_: int, payload: Tensor) -> Path:
        """Keeps an update, and forgets the one that is `UPDATES_KEPT` rounds older."""
        path = self.update_path(fragment, round_)
        write_atomic(path, payload.numpy())
        self.update_path(fragment, round_ - UPDATES_KEPT).unlink(missing_ok=True)
        return path

    # -- snapshots ------------------------------------------------------------------------------------------------

    def save(self, snapshot: Snapshot, keep: int) -> tuple[int, ...]:
        """Writes a snapshot: fragment files that are not there yet, then the manifest; then removes old ones.

        Returns:
            Rounds ended of each fragment in the oldest snapshot kept: what came before it is no longer needed.
        """
        files = []
        for fragment, outer in zip(snapshot.fragments, snapshot.outers, strict=True):
            name = f"f{fragment.index:04d}-v{outer.version:08d}-{show(outer.digest)}.safetensors"
            files.append(name)
            path = self.root / "fragments" / name
            if not path.exists():
                partial = path.with_suffix(".partial")
                tensors = {"anchor": outer.anchor, "momentum": outer.momentum, "residual": outer.residual}
                save_file(tensors, partial, metadata={"xxh3_128": _checksum(tensors)})
                publish(partial, path)
        manifests = sorted(self.root.glob("manifest-*.json"))
        number = int(manifests[-1].stem.removeprefix("manifest-")) + 1 if manifests else 1
        manifest = {
            "format": FORMAT,
            "run_id": snapshot.config.run.id,
            "config_digest": snapshot.config.digest,
            "config_toml": to_toml(snapshot.config),
            "layout_digest": snapshot.layout.digest,
            "layout": [[s.name, list(s.shape), s.kind] for s in snapshot.layout.tensors],
            "fragments": [
                {"file": f, "version": o.version, "round": r, "digest": show(o.digest)}
                for f, o, r in zip(files, snapshot.outers, snapshot.rounds, strict=True)
            ],
        }
        text = json.dumps(manifest, indent=1).encode()
        write_atomic(self.root / f"manifest-{number:08d}.json", text)
        manifests.append(self.root / f"manifest-{number:08d}.json")
        for old in manifests[:-keep]:
            old.unlink()
        kept = [json.loads(path.read_text())["fragments"] for path in manifests[-keep:]]
        names = {row["file"] for rows in kept for row in rows}
        for path in (self.root / "fragments").iterdir():
            if path.name not in names:
                path.unlink()
        return tuple(int(row["round"]) for row in kept[0])


def load_snapshot(root: Path, *, oldest: bool = False) -> Snapshot | None:
    """The newest (or oldest) complete snapshot in a state folder; none where there is none yet.

    Raises:
        InputError: no such folder, a manifest of a newer format, or a file that is missing.
        DigestMismatch: a fragment's bits are not those that were written.
    """
    if not root.is_dir():
        raise InputError(f"no state folder at {root}: name the --state of a coordinator")
    manifests = sorted(root.glob("manifest-*.json"))
    if not manifests:
        return None
    path = manifests[0 if oldest else -1]
    manifest: dict[str, Any] = json.loads(path.read_text())
    if manifest["format"] > FORMAT:
        raise InputError(f"{path} has format {manifest['format']}, newer than {FORMAT}, the newest this version reads")
    config = load_run(manifest["config_toml"], str(path)).value
    layout = Layout(TensorSpec(name, tuple(shape), kind) for name, shape, kind in manifest["layout"])
    fragments = partition(layout, config.sync)
    outers = tuple(
        _load_outer(root, fragment, row) for fragment, row in zip(fragments, manifest["fragments"], strict=True)
    )
    rounds = tuple(int(row["round"]) for row in manifest["fragments"])
    return Snapshot(config=config, layout=layout, fragments=fragments, outers=outers, rounds=rounds)


def _load_outer(root: Path, fragment: Fragment, row: Mapping[str, Any]) -> Outer:
    path = root / "fragments" / row["file"]
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("anchor", "momentum", "residual")}
            checksum = (file.metadata() or {}).get("xxh3_128")
    except FileNotFoundError:
        raise InputError(f"{path} is missing, but a manifest in {root} names it") from None
    except SafetensorError as error:
        raise DigestMismatch(f"{path} is damaged: {error}", fragment=fragment.index) from error
    found = digest_of(fragment, tensors["anchor"])
    if show(found) != row["digest"]:
        raise DigestMismatch(
            f"{path} has digest {show(found)}, but its manifest says {row['digest']}: the file is damaged",
            fragment=fragment.index,
        )
    if _checksum(tensors) != checksum:
        raise DigestMismatch(f"{path} does not have the checksum it names: it is damaged", fragment=fragment.index)
    return Outer(version=row["version"], digest=found, **tensors)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """XXH3-128 (hex) of all tensors' bytes; the digest covers the anchor alone."""
    checksum = xxhash.xxh3_128()
    for tensor in tensors.values():
        checksum.update(tensor.numpy().data)
    return checksum.hexdigest()


def check_same_run(old: RunConfig, config: RunConfig, root: Path) -> None:
    """Raises `RunMismatch` where a state folder belongs to another run or other settings than `config`."""
    if old.run.id != config.run.id:
        raise RunMismatch(
            f"{root} holds run '{old.run.id}' (settings {old.digest[:12]}), not '{config.run.id}' "
            f"(settings {config.digest[:12]}): name another --state"
        )
    if old.digest != config.digest:
        raise RunMismatch(
            f"{root} was written with settings {old.digest[:12]}, and these are {config.digest[:12]}: "
            "a run keeps its settings; restore the run file or name another --state"
        )


def read_payload(path: Path) -> Tensor:
    """The bytes of a file as a private memory map (uint8)."""
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0).byte()


def write_atomic(path: Path, data: Any) -> None:
    """Writes a file so that it is there whole and durable, or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
    publish(partial, path)


def publish(partial: Path, path: Path) -> None:
    """Makes a finished temporary file durable under its name: fsync, rename, fsync of the folder."""
    _fsync(partial)
    partial.rename(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
