"""The synchronous twin of `coordinator/run.py` and `service.py` for the simulator: the same steps, one yield apart.

Every point where the real coordinator waits for a disk or lets others run is a `_point`: there a crash may fall, and
other requests interleave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from coordinator import facts, recovery, rounds
from coordinator.facts import Aborted, Carried, Committed, Ended, Entry, Fact, Skipped
from coordinator.fold import Outer, fold
from coordinator.inbox import SeedBed
from coordinator.recovery import folded_row
from coordinator.results import Outcome
from coordinator.state import State, revive
from coordinator.store import UPDATES_KEPT
from diloco.codec import CODECS, by_id
from diloco.config import RunConfig
from diloco.errors import DilocoError
from diloco.fragments import Fragment
from diloco.layout import Box, Layout, Piece
from wan.sim_world import Disk, Gate, Lock, MemoryStored, Owner, Saved, Work, World

ROOT = Path("disk")
TICK_S = 1.0
Row = tuple[str, dict[str, Any]]
IO_S = 0.02
"""Longest that one operation of the disk takes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an island sends: a method's name and its arguments."""

    method: str
    island: str
    epoch: int = 0
    rank: int = 0
    fragment: int = 0
    round: int = 0
    version: int = 0
    pieces: tuple[Piece, ...] = ()
    codec: tuple[int, int] = (0, 0)
    layout: Layout | None = None
    seed: bool = False
    reason: str = ""
    messages: tuple[bytes, ...] = ()
    total_bytes: int = 0
    tokens: int = 0
    steps: int = 0
    step: int = 0
    ready: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the coordinator answers."""

    epoch: int = 0
    phase: str = ""
    step: int = 0
    positions: tuple[tuple[int, int], ...] = ()
    """(version, rounds ended) of each fragment; empty before the first parameters."""
    seeder: str = ""
    directive: str = ""
    dropped: str = ""
    duplicate: bool = False
    outcome: str = ""
    version: int = 0
    round: int = 0
    digest: int = 0
    payload: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Watcher(Protocol):
    """Who is told what the coordinator does: the checker, and the adversary."""

    def point(self, label: str) -> None:
        """The coordinator is between two operations; it may be killed now."""

    def durable(self, rows: list[Row]) -> None:
        """Rows of the ledger cannot be lost any more."""

    def restarted(self, coordinator: SimCoordinator) -> None:
        """A coordinator has taken up the disk."""

    def published(self, fragment: int, round_: int, outcome: Outcome) -> None:
        """Islands can hear of an outcome."""

    def answered(self, request: Request, reply: Reply) -> None:
        """A reply is on its way."""

    def refused(self, request: Request, error: DilocoError, changes: int) -> None:
        """A refusal is on its way; the request made so many changes."""

    def planted(self, outers: list[Outer]) -> None:
        """The first parameters are there."""

    def stopped(self) -> None:
        """A coordinator that was told to stop has nobody left to wait for."""


class SimCoordinator(Owner):
    """One life of the coordinator.

    Args:
        world: time and chance.
        disk: what outlives it.
        config: the run's settings.
        base: what its monotonic clock shows at the world's time 0.
        watcher: who is told what happens.
    """

    def __init__(self, world: World, disk: Disk, config: RunConfig, base: float, watcher: Watcher) -> None:
        super().__init__()
        self.world, self.disk, self.config, self.base, self.watcher = world, disk, config, base, watcher
        self.began = world.now
        found = recovery.replay(disk.rows(), config, ROOT, self.locate)
        if not found.state.seeded:
            disk.snapshots.clear()
        else:
            found.over(disk.snapshots[-1].outers, disk.snapshots[-1].rounds)
        self.state = revive(found.state, self.clock())
        self.fragments: tuple[Fragment, ...] = found.fragments
        self.layout = found.layout
        self.seedbed: SeedBed | None = None
        self.outers: list[Outer] = found.outers
        self.ended: list[int] = found.ended
        self.steps: dict[str, int] = {}
        self.outcomes = {
            (past.fragment, past.round): Outcome(past.ended, past.reason, past.version, past.digest, path)
            for past in found.past()
            if (path := self._update(past)) is None or path.name in disk.files
        }
        self.inbox = found.inbox
        self.changed = Gate()
        self.down = CODECS[config.wire.down]
        self.unsaved = 0
        self._ends: list[Ended] = list(found.pending)
        self._ended_more = Gate()
        self._turn, self._worker, self._scribe = Lock(), Lock(), Lock()
        for name in [n for n in disk.files if n.startswith("f") and not self.inbox.holds(disk.file(n).path)]:
            disk.file(name).unlink()
        watcher.restarted(self)
        for work in (self._ticks(), self._end_rounds()):
            world.spawn(work, self)

    def _update(self, past: recovery.Past) -> Path | None:
        return self.disk.file(f"update-{past.fragment}-{past.round}").path if past.ended == "committed" else None

    def clock(self) -> float:
        """Seconds on this life's monotonic clock."""
        return self.world.now + self.base

    def locate(self, body: dict[str, Any]) -> MemoryStored:
        """The stored bytes that a `part` row speaks of."""
        return MemoryStored(
            pieces=tuple(Piece(t, Box(tuple(offset), tuple(size))) for t, offset, size in body["pieces"]),
            codec=by_id(*body["codec"]),
            path=self.disk.file(body["file"]).path,
            digest=body["digest"],
            disk=self.disk,
        )

    # -- time, disk and threads -------------------------------------------------------------------------------------

    def _point(self, label: str) -> Work[None]:
        self.watcher.point(label)
        yield self.world.rng.random() * IO_S

    def _in_thread(self, thread: Lock, work: Work[Any]) -> Work[Any]:
        """Waits for work of a thread, which goes on where the waiting ends early."""
        return self.world.spawn(thread.hold(work), self, inherit=True).result()

    def _to_its_end(self, work: Work[Any]) -> Work[Any]:
        """Waits for work that a caller who hangs up does not end."""
        return self.world.spawn(work, self, inherit=True).result()

    def _count(self) -> None:
        if self.world.current:
            self.world.current.root.changes += 1

    def _record(self, rows: list[Row]) -> Work[None]:
        yield from self._in_thread(self._scribe, self._write_rows(rows))
        self._count()

    def _write_rows(self, rows: list[Row]) -> Work[None]:
        yield from self._point("before the ledger")
        self.disk.append(rows)
        yield from self._point("ledger written")
        self.watcher.durable(self.disk.commit())
        yield from self._point("ledger synced")

    def _write_file(self, name: str, data: Tensor) -> Work[None]:
        self.disk.write(name, data)
        yield from self._point("file written")
        self.disk.sync(name)
        yield from self._point("file synced")

    # -- events and decisions ---------------------------------------------------------------------------------------

    def take(self, event: rounds.Event) -> Work[None]:
        """Takes one event, as `Run.take` does."""
        yield from self._to_its_end(self._turn.hold(self._take(event)))

    def find(self, event: rounds.Event) -> tuple[State, list[Fact]]:
        """The pure core's answer to an event."""
        return rounds.step(self.state, event, self.clock())

    def _take(
        self, event: rounds.Event, with_row: Row | None = None, then: Callable[[], None] | None = None
    ) -> Work[None]:
        state, found = self.find(event)
        rows = [*([with_row] if with_row else []), *(facts.encode(fact) for fact in found)]
        if rows:
            yield from self._record(rows)
        if then:
            then()
        self._adopt(state, found)

    def _adopt(self, state: State, found: list[Fact]) -> None:
        self.state = state
        for fact in found:
            if isinstance(fact, Ended):
                self._ends.append(fact)
            if isinstance(fact, Skipped | Aborted):
                self.inbox.close(fact.fragment, fact.round, keep_partial=self.config.rounds.late != "drop")
            if isinstance(fact, Carried):
                self.inbox.carry(fact.fragment, fact.round, fact.entry.island, fact.into)
        if found:
            self._ended_more.open()
            self.changed.open()

    def _ticks(self) -> Work[None]:
        while True:
            try:
                for fragment in range(len(self.state.rounds) if self.state.seeded else 0):
                    yield from self._turn.hold(self.accept_whole(fragment))
                yield TICK_S
                yield from self.take(rounds.Tick())
            except OSError:
                yield TICK_S
            left = not any(member.present for member in self.state.members.values())
            published = all(ended == r.round for ended, r in zip(self.ended, self.state.rounds, strict=False))
            if self.state.stopping and left and published:
                self.watcher.stopped()

    def accept_whole(self, fragment: int) -> Work[None]:
        """Enters complete contributions that do not count yet, as `Run._accept_whole` does."""
        for round_, island, inbound in list(self.inbox.whole(fragment)):
            member, current = self.state.members[island], self.state.rounds[fragment]
            held = member.present and member.epoch == inbound.epoch
            known = rounds.counted(self.state, fragment, round_, island) is not None
            if not held or known or (round_ == current.round and island in current.refused):
                continue
            entry = Entry(island=island, epoch=inbound.epoch, tokens=inbound.tokens, steps=inbound.steps)
            yield from self._take(rounds.Contributed(fragment=fragment, round=round_, entry=entry))
            if rounds.counted(self.state, fragment, round_, island) is None:
                self.inbox.drop(fragment, round_, island)

    def _end_rounds(self) -> Work[None]:
        while True:
            while not self._ends:
                yield self._ended_more
            decision = self._ends.pop(0)
            if isinstance(decision, Committed):
                yield from self._until_durable(partial(self._fold, decision))
            else:
                outer = self.outers[decision.fragment]
                ended = "skipped" if isinstance(decision, Skipped) else "aborted"
                self._publish(decision, Outcome(ended, decision.reason, outer.version, outer.digest, None))
            self.changed.open()
            if self.unsaved >= self.config.snapshot.every_rounds:
                yield from self._until_durable(lambda: self._in_thread(self._worker, self.save()))

    def _until_durable(self, work: Callable[[], Work[Any]]) -> Work[None]:
        while True:
            try:
                yield from work()
            except OSError:
                yield TICK_S
            else:
                return

    def compute(self, decision: Committed) -> tuple[Outer, Tensor]:
        """What a committed round comes to."""
        key, outer = (decision.fragment, decision.round), self.outers[decision.fragment]
        parts = {island: [stored.part() for stored in self.inbox.parts(*key, island)] for island in decision.shares}
        chart = self.fragments[decision.fragment]
        return fold(chart, outer, parts, decision.shares, self.config.outer, self.down)

    def _fold(self, decision: Committed) -> Work[None]:
        fragment, round_ = decision.fragment, decision.round
        name = f"update-{fragment}-{round_}"

        def work() -> Work[Outer]:
            new, update = self.compute(decision)
            yield from self._point("fold done")
            yield from self._write_file(name, update)
            self.disk.file(f"update-{fragment}-{round_ - UPDATES_KEPT}").unlink()
            return new

        new = yield from self._in_thread(self._worker, work())
        yield from self._record([folded_row(fragment, round_, new)])
        self.outers[fragment] = new
        self.unsaved += 1
        path = self.disk.file(name).path
        self._publish(decision, Outcome("committed", decision.reason, new.version, new.digest, path))

    def _publish(self, decision: Ended, outcome: Outcome) -> None:
        self.outcomes[decision.fragment, decision.round] = outcome
        self.ended[decision.fragment] = decision.round + 1
        self.outcomes.pop((decision.fragment, decision.round - UPDATES_KEPT), None)
        self.watcher.published(decision.fragment, decision.round, outcome)

    def save(self) -> Work[None]:
        """Takes a snapshot, as `Run._save` does."""
        saved = Saved(outers=tuple(self.outers), rounds=tuple(self.ended))
        yield from self._point("snapshot written")
        self.disk.check()
        self.unsaved = 0
        self.disk.snapshots = [*self.disk.snapshots, saved][-self.config.snapshot.keep :]
        yield from self._point("manifest written")
        late = self.config.rounds.late_window
        for fragment, needed in enumerate(self.disk.snapshots[0].rounds):
            self.inbox.forget(fragment, before=needed - late)
            for name in [n for n in self.disk.files if n.startswith(f"f{fragment}-r")]:
                if int(name.split("-")[1][1:]) < needed - late and not self.inbox.holds(self.disk.file(name).path):
                    self.disk.file(name).unlink()
