"""The simulator's disk: files, uploads under way, ledger, snapshots. It forgets what is not synced, or some of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from coordinator.fold import Outer, Part
from coordinator.inbox import Stored
from coordinator.ledger import Row

FREE_BYTES = 2**40


@dataclass(frozen=True)
class File:
    """A name on the disk; as much of a path as the inbox asks for."""

    disk: Disk
    name: str

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the file, in a way that a crash may undo."""
        if self.disk.files.pop(self.name, None) is not None:
            self.disk.changes += 1

    @property
    def path(self) -> Path:
        """Itself, for code that is annotated with real paths."""
        return cast(Path, self)


@dataclass(frozen=True, kw_only=True)
class MemoryStored(Stored):
    """A stored part whose bytes are in the simulated disk."""

    disk: Disk

    def part(self) -> Part:
        return Part(pieces=self.pieces, codecs=self.codecs, payload=self.disk.files[self.path.name])

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(kw_only=True)
class Partial:
    """The two files of an upload under way. Nothing of them is synced."""

    data: bytearray = field(default_factory=bytearray)
    sums: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, length and checksum of each chunk."""

    def crash(self, rng: random.Random) -> None:
        """Either file keeps a beginning, or its size with other bytes at the end."""
        size = len(self.data)
        kept = rng.randint(0, size)
        if rng.random() < 0.3:
            del self.data[kept:]
        else:
            self.data[kept:] = rng.randbytes(size - kept)
        del self.sums[rng.randint(0, len(self.sums)) if rng.random() < 0.5 else len(self.sums) :]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A snapshot."""

    outers: tuple[Outer, ...]
    rounds: tuple[int, ...]


class Disk:
    """What outlives a coordinator."""

    def __init__(self) -> None:
        self.files: dict[str, Tensor] = {}
        """As a running process sees them."""
        self.synced: dict[str, Tensor] = {}
        self.archive: dict[str, Tensor] = {}
        """Every file that was ever synced, for the checker."""
        self.partials: dict[str, Partial] = {}
        self.ledger: list[tuple[str, str]] = []
        """(kind, body as JSON) of every row that is durable, behind a compacted beginning."""
        self.transaction: list[tuple[str, dict[str, Any]]] = []
        """Rows written and not yet synced."""
        self.compaction: tuple[int, list[tuple[str, str]]] | None = None
        """How many rows are to be replaced by which; written and not yet synced."""
        self.snapshots: list[Saved] = []
        self.free_bytes = FREE_BYTES
        self.failing = ""
        """Why nothing can be written at the moment."""
        self.changes = 0
        """Changes of `files` and `partials`."""

    def file(self, name: str) -> File:
        """A name on this disk."""
        return File(self, name)

    def check(self) -> None:
        """Raises `OSError` while nothing can be written."""
        if self.failing:
            raise OSError(self.failing)

    @property
    def kept_bytes(self) -> int:
        """Bytes of contributions and updates."""
        return sum(data.numel() for data in self.files.values())

    def write(self, name: str, data: Tensor) -> None:
        """Writes a file without syncing it."""
        self.check()
        self.files[name] = data
        self.changes += 1

    def sync(self, name: str) -> None:
        """Makes a file durable under its name."""
        self.check()
        if name in self.files:
            self.synced[name] = self.archive[name] = self.files[name]

    def append(self, rows: list[tuple[str, dict[str, Any]]]) -> None:
        """Writes a transaction of the ledger without syncing it."""
        self.check()
        self.transaction += rows

    def commit(self) -> list[tuple[str, dict[str, Any]]]:
        """Makes the written transaction durable; returns its rows. A disk that fails loses it."""
        rows, self.transaction = self.transaction, []
        self.check()
        self.ledger += [(kind, json.dumps(body)) for kind, body in rows]
        return rows

    def replace(self, count: int, rows: Sequence[tuple[float, str, dict[str, Any]]]) -> None:
        """Writes, without syncing it, that `rows` take the place of the first `count` of the ledger."""
        self.check()
        self.compaction = count, [(kind, json.dumps(body)) for _, kind, body in rows]

    def compact(self) -> None:
        """Makes the replacement durable. A disk that fails loses it."""
        found, self.compaction = self.compaction, None
        self.check()
        if found:
            self.ledger[: found[0]] = found[1]

    def crash(self, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
        """Loses what is not synced, or some of it; returns the rows that became durable after all."""
        for name in sorted(self.files.keys() - self.synced.keys()):
            if rng.random() < 0.3:
                self.synced[name] = self.files[name]
        for name in sorted(self.synced.keys() - self.files.keys()):  # removed, but the folder was not synced
            if rng.random() < 0.7:
                del self.synced[name]
        self.files = dict(self.synced)
        for name in sorted(self.partials):
            if rng.random() < 0.2:
                del self.partials[name]
            elif rng.random() < 0.9:  # a process that is killed loses nothing; a machine does
                self.partials[name].crash(rng)
        self.changes += 1
        if rng.random() < 0.3 and not self.failing:
            self.compact()
        kept = self.commit() if rng.random() < 0.3 and not self.failing else []
        self.transaction, self.compaction = [], None
        return kept

    def rows(self) -> Iterator[Row]:
        """The durable rows of the ledger."""
        for seq, (kind, text) in enumerate(self.ledger, 1):
            yield Row(seq=seq, at=0.0, kind=kind, body=json.loads(text))
