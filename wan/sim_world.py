"""The simulator's world: a virtual clock, processes that are generators, and a disk that forgets what is not synced.

A process yields how long to sleep (seconds), a `Gate` to wait at, or (gate, seconds) for whichever comes first. It
belongs to an owner; where the owner is no longer alive the process never runs again, not even its `finally` blocks
have an effect, as after SIGKILL.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from torch import Tensor

from coordinator.fold import Outer, Part
from coordinator.inbox import Stored
from coordinator.ledger import Row
from diloco.errors import DilocoError

T = TypeVar("T")
Wait: TypeAlias = "float | Gate | tuple[Gate, float]"
Work: TypeAlias = Generator[Wait, None, T]


class Owner:
    """What processes belong to: one life of a coordinator or of an island."""

    def __init__(self) -> None:
        self.alive = True
        self.asleep_until = 0.0
        """Its processes make no progress before this time."""
        self.processes: list[Process] = []

    def kill(self) -> None:
        """Ends all its processes where they stand. What they do on the way out must look at `alive`."""
        self.alive = False
        processes, self.processes = self.processes, []
        for process in processes:
            if process.running:  # it is the one that asks for it, and goes no further than its next wait
                process.world.at(0.0, process.work.close)
            else:
                process.work.close()


class Gate:
    """Where processes wait until somebody opens it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Process, int]] = []

    def open(self) -> None:
        """Lets everybody who waits go on."""
        waiting, self.waiting = self.waiting, []
        for process, token in waiting:
            process.world.at(0.0, partial(process.resume, token))


class Process:
    """A generator under way."""

    def __init__(self, world: World, work: Work[Any], owner: Owner, root: Process | None) -> None:
        self.world, self.work, self.owner = world, work, owner
        self.root: Process = root or self
        """The process on whose behalf it runs."""
        self.changes = 0
        """Changes to durable or decided state that were made on its behalf."""
        self.running = False
        self.done, self.value, self.error = False, cast(Any, None), cast("DilocoError | OSError | None", None)
        self.finished = Gate()
        self._token = 0

    def resume(self, token: int) -> None:
        """Runs on to the next wait."""
        if self.done or token != self._token or not self.owner.alive:
            return
        if self.owner.asleep_until > self.world.now:
            self.world.at(self.owner.asleep_until - self.world.now, lambda: self.resume(token))
            return
        self._token += 1
        token, self.world.current, self.running = self._token, self, True
        try:
            wait = next(self.work)
        except StopIteration as stop:
            self._end(stop.value, None)
        except (DilocoError, OSError) as error:
            self._end(None, error)
        else:
            self.running = False
            gate, seconds = wait if isinstance(wait, tuple) else (wait, None)
            if isinstance(gate, Gate):
                gate.waiting.append((self, token))
            else:
                seconds = gate
            if seconds is not None:
                self.world.at(seconds, lambda: self.resume(token))

    def cancel(self) -> None:
        """Ends it where it stands, as when a caller hangs up; what it has started goes on."""
        if not self.done and self.owner.alive:
            self.work.close()
            self._end(None, DilocoError("cancelled"))

    def result(self) -> Work[Any]:
        """Waits for its end; returns or raises what it came to."""
        while not self.done:
            yield self.finished
        if self.error:
            raise self.error
        return self.value

    def _end(self, value: Any, error: DilocoError | OSError | None) -> None:
        self.running = False
        self.done, self.value, self.error = True, value, error
        if self in self.owner.processes:
            self.owner.processes.remove(self)
        self.finished.open()


class World:
    """A heap of what is still to happen, and the time. `rng` is the only source of chance."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.current: Process | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay: float, call: Callable[[], None]) -> None:
        """Calls `call` after `delay` seconds; at equal times, in the order of asking."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, call))

    def spawn(self, work: Work[Any], owner: Owner, *, inherit: bool = False) -> Process:
        """Starts a process. `inherit`: on behalf of the process that runs now."""
        process = Process(self, work, owner, self.current.root if inherit and self.current else None)
        owner.processes.append(process)
        self.at(0.0, lambda: process.resume(0))
        return process

    def step(self) -> bool:
        """Lets the next thing happen; whether there was one."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        self.current = None
        call()
        return True


class Lock:
    """One at a time, in the order of asking."""

    def __init__(self) -> None:
        self._queue: list[Gate] = []

    def hold(self, work: Work[T]) -> Work[T]:
        """Runs `work` while holding the lock."""
        mine = Gate()
        self._queue.append(mine)
        try:
            while self._queue[0] is not mine:
                yield mine
            return (yield from work)
        finally:
            self._queue.remove(mine)
            if self._queue:
                self._queue[0].open()


# -- the disk -------------------------------------------------------------------------------------------------------


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
        return Part(pieces=self.pieces, codec=self.codec, payload=self.disk.files[self.path.name])


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A snapshot."""

    outers: tuple[Outer, ...]
    rounds: tuple[int, ...]


class Disk:
    """Files, ledger and snapshots; what has been written and not synced may or may not outlive a crash."""

    def __init__(self) -> None:
        self.files: dict[str, Tensor] = {}
        """As a running process sees them."""
        self.synced: dict[str, Tensor] = {}
        self.archive: dict[str, Tensor] = {}
        """Every file that was ever synced, for the checker."""
        self.ledger: list[tuple[str, str]] = []
        """(kind, body as JSON) of every row that is durable."""
        self.transaction: list[tuple[str, str]] = []
        """Rows written and not yet synced."""
        self.snapshots: list[Saved] = []
        self.failing = ""
        """Why nothing can be written at the moment."""
        self.changes = 0
        """Changes of `files`."""

    def file(self, name: str) -> File:
        """A name on this disk."""
        return File(self, name)

    def check(self) -> None:
        """Raises `OSError` while nothing can be written."""
        if self.failing:
            raise OSError(self.failing)

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
        self.transaction += [(kind, json.dumps(body)) for kind, body in rows]

    def commit(self) -> list[tuple[str, dict[str, Any]]]:
        """Makes the written transaction durable; returns its rows. A disk that fails loses it."""
        rows, self.transaction = self.transaction, []
        self.check()
        self.ledger += rows
        return [(kind, json.loads(text)) for kind, text in rows]

    def crash(self, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
        """Loses what is not synced, or some of it; returns the rows that became durable after all."""
        for name in sorted(self.files.keys() - self.synced.keys()):
            if rng.random() < 0.3:
                self.synced[name] = self.files[name]
        for name in sorted(self.synced.keys() - self.files.keys()):  # removed, but the folder was not synced
            if rng.random() < 0.7:
                del self.synced[name]
        self.files = dict(self.synced)
        self.changes += 1
        kept = self.commit() if rng.random() < 0.3 and not self.failing else []
        self.transaction = []
        return kept

    def rows(self) -> Iterator[Row]:
        """The durable rows of the ledger."""
        for seq, (kind, text) in enumerate(self.ledger, 1):
            yield Row(seq=seq, at=0.0, kind=kind, body=json.loads(text))
