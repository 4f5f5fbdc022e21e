"""The synchronous twin of `coordinator/run.py` and `keeper.py` for the simulator: the same steps, one yield apart.

Every point where the real coordinator waits for a disk or lets others run is a `point`: there a crash may fall, and
other requests interleave.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from coordinator import facts, recovery, rounds
from coordinator.admission import Admission
from coordinator.anchors import Anchors
from coordinator.compaction import behind, replacement
from coordinator.facts import Aborted, Carried, Committed, Ended, Fact, Skipped
from coordinator.fold import Outer, fold
from coordinator.intake import Intake
from coordinator.recovery import folded_row, run_row
from coordinator.results import Outcome
from coordinator.run import Run
from coordinator.state import State, revive
from coordinator.store import UPDATES_KEPT
from diloco.codec.policy import down_choice, up_choice
from diloco.config import RunConfig
from diloco.digest import show
from diloco.errors import DigestMismatch, DilocoError, InputError
from diloco.fragments import Fragment
from diloco.layout import Layout
from wan.sim_disk import Disk, MemoryStored, Saved
from wan.sim_stream import SimUploads
from wan.sim_wire import Reply, Request, Served
from wan.sim_world import Gate, Lock, Owner, Process, Steps, Work, World, drive

T = TypeVar("T")
ROOT = Path("disk")
TICK_S = 1.0
Row = tuple[str, dict[str, Any]]
IO_S = 0.02
"""Longest that one operation of the disk takes."""
COMPACT_ROWS = 3
"""Rows of the ledger that must be able to go."""


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

    def stored(self, request: Request, have: int) -> None:
        """So many bytes of a push have come, from the first."""

    def resumed(self, request: Request, have: int) -> None:
        """A push is told to go on at byte `have`."""

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

    uploads_kind: type[SimUploads] = SimUploads

    def __init__(self, world: World, disk: Disk, config: RunConfig, base: float, watcher: Watcher) -> None:
        super().__init__()
        self.world, self.disk, self.config, self.base, self.watcher = world, disk, config, base, watcher
        found = recovery.replay((row for row in disk.rows() if row.kind != "run"), config, ROOT, self.locate)
        if not found.state.seeded:
            disk.snapshots.clear()
        else:
            found.forget(disk.snapshots[0].rounds)
            found.over([outer.copy() for outer in disk.snapshots[-1].outers], disk.snapshots[-1].rounds)
        self.found = found
        """Where it takes the run up."""
        self.state = revive(found.state, self.clock())
        self.fragments: tuple[Fragment, ...] = found.fragments
        self.layout: Layout | None = found.layout
        self.outers: list[Outer] = found.outers
        self.ended: list[int] = found.ended
        self.steps: dict[str, int] = {}
        self.outcomes = {
            (past.fragment, past.round): Outcome(past.ended, past.reason, past.version, past.digest, path)
            for past in found.past()
            if (path := self._update(past)) is None or path.name in disk.files
        }
        self.digests = found.digests
        self.inbox = found.inbox
        self.changed = Gate()
        self.up, self.down = up_choice(config.wire), down_choice(config.wire)
        self.committed = self._offered = sum(outer.version for outer in self.outers)
        self._ends: list[Ended] = list(found.pending)
        self._ended_more = Gate()
        self._turn, self._worker, self._scribe = Lock(), Lock(), Lock()
        self._locks: dict[int, Lock] = defaultdict(Lock)
        """By fragment: who folds its tensors or reads them."""
        self._snapshot_wanted = False
        self._snapshot_offered = Gate()
        self.admission = Admission(config.limits)
        self.anchors = Anchors(config.rounds.lease_s, self.clock, lambda *_: None)
        self.uploads = self.uploads_kind(disk)
        self.intake = Intake(cast(Run, self))
        self.ticks = 0
        self.served: dict[Process, Served] = {}
        """Requests under way, and some that are done."""
        for name in [n for n in disk.files if n.startswith("f") and not self.inbox.holds(disk.file(n).path)]:
            disk.file(name).unlink()
        watcher.restarted(self)
        for work in (self._tick(), self._end_rounds(), self._keep()):
            world.spawn(work, self)

    def _update(self, past: recovery.Past) -> Path | None:
        return self.disk.file(f"update-{past.fragment}-{past.round}").path if past.ended == "committed" else None

    def clock(self) -> float:
        """Seconds on this life's monotonic clock."""
        return self.world.now + self.base

    def locate(self, body: dict[str, Any]) -> MemoryStored:
        """The stored bytes that a `part` row speaks of."""
        return MemoryStored(
            pieces=recovery.pieces_of(body),
            codecs=recovery.codecs_of(body),
            path=self.disk.file(body["file"]).path,
            digest=body["digest"],
            disk=self.disk,
        )

    # -- time, disk and threads -------------------------------------------------------------------------------------

    def point(self, label: str) -> Work[None]:
        """A place to be killed at, and for others to run."""
        self.watcher.point(label)
        yield self.world.rng.random() * IO_S

    def _in_thread(self, thread: Lock, work: Work[Any]) -> Work[Any]:
        """Waits for work of a thread, which goes on where the waiting ends early."""
        return self.world.spawn(thread.hold(work), self, inherit=True).result()

    def held(self, work: Work[Any], coroutine: Coroutine[Any, Any, Any] | None = None) -> Work[Any]:
        """Waits for work that a caller who hangs up does not end."""
        return self.world.spawn(work, self, inherit=True, coroutine=coroutine).result()

    def _count(self) -> None:
        if self.world.current:
            self.world.current.root.changes += 1

    def _write_rows(self, rows: list[Row]) -> Work[None]:
        yield from self.point("before the ledger")
        self.disk.append(rows)
        yield from self.point("ledger written")
        self.watcher.durable(self.disk.commit())
        yield from self.point("ledger synced")

    def write_file(self, name: str, data: Tensor) -> Work[None]:
        """Writes a file, then makes it durable."""
        self.disk.write(name, data)
        yield from self.point("file written")
        self.disk.sync(name)
        yield from self.point("file synced")

    # -- what the real `Intake` asks of a run -------------------------------------------------------------------------

    def in_worker(self, work: Callable[[], Any]) -> Steps[Any]:
        """Does work in the worker thread; what it returns may be steps still to take there."""

        def steps() -> Work[Any]:
            yield from self.point("work in the thread")
            done = work()
            return (yield from done) if isinstance(done, Generator) else done

        return Steps(self._in_thread(self._worker, steps()))

    def in_turn(self, work: Callable[[], Awaitable[Any]]) -> Steps[Any]:
        """Does work alone, and to its end also where the caller goes away."""

        def alone() -> Work[Any]:
            return (yield from drive(work()))

        return Steps(self.held(self._turn.hold(alone())))

    def to_its_end(self, work: Coroutine[Any, Any, Any]) -> Steps[Any]:
        """Goes on with work also where the caller goes away."""
        return Steps(self.held(drive(work), work))

    def record(self, rows: list[Row]) -> Steps[None]:
        """Makes rows of the ledger durable."""
        return Steps(self._record(rows))

    def _record(self, rows: list[Row]) -> Work[None]:
        yield from self._in_thread(self._scribe, self._write_rows(rows))
        self._count()

    def take(self, event: rounds.Event) -> Steps[None]:
        """Takes one event, as `Run.take` does."""
        return self.in_turn(lambda: self.take_in_turn(event))

    def find(self, event: rounds.Event) -> tuple[State, list[Fact]]:
        """The pure core's answer to an event."""
        return rounds.step(self.state, event, self.clock())

    async def take_in_turn(
        self, event: rounds.Event, with_row: Row | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """As `take`, for work that has the turn."""
        state, found = self.find(event)
        rows = [*([with_row] if with_row else []), *(facts.encode(fact) for fact in found)]
        if rows:
            await self.record(rows)
        if then:
            then()
        self.adopt(state, found)

    async def plant(self, anchors: Sequence[Tensor]) -> None:
        """Makes the first parameters durable, then shows them."""

        async def work() -> None:
            if self.state.seeded:
                return
            outers = [Outer.first(f, anchor) for f, anchor in zip(self.fragments, anchors, strict=True)]
            ended = [0] * len(outers)
            await self.in_worker(lambda: self._first_snapshot(outers))
            await self.take_in_turn(rounds.Seeded())
            self.outers, self.ended = outers, ended

        await self.in_turn(work)

    def _first_snapshot(self, outers: list[Outer]) -> Work[None]:
        yield from self.point("first snapshot written")
        self.disk.check()
        self.disk.snapshots = [Saved(outers=tuple(o.copy() for o in outers), rounds=(0,) * len(outers))]
        self.watcher.planted(outers)
        yield from self.point("first manifest written")

    # -- decisions --------------------------------------------------------------------------------------------------

    def adopt(self, state: State, found: list[Fact]) -> None:
        """Acts on facts that are durable."""
        self.state = state
        for fact in found:
            if isinstance(fact, Ended):
                self._ends.append(fact)
            if isinstance(fact, Skipped | Aborted):
                keep_partial = bool(self.config.rounds.late_window)
                self.inbox.close(fact.fragment, fact.round, keep_partial=keep_partial)
            if isinstance(fact, Carried):
                self.inbox.carry(fact.fragment, fact.round, fact.entry.island, fact.into)
        if found:
            self._ended_more.open()
            self.changed.open()

    def _tick(self) -> Work[None]:
        while True:
            try:
                if self.state.seeded:
                    yield from drive(self.in_turn(self.intake.catch_up))
                yield TICK_S
                yield from drive(self.take(rounds.Tick()))
                self.uploads.prune(self.intake.over)
                self.anchors.expire()
                self.ticks += 1
            except OSError:
                yield TICK_S
            left = not any(member.present for member in self.state.members.values())
            published = all(ended == r.round for ended, r in zip(self.ended, self.state.rounds, strict=False))
            if self.state.stopping and left and published:
                self.watcher.stopped()

    def _end_rounds(self) -> Work[None]:
        while True:
            while not self._ends:
                yield self._ended_more
            decision = self._ends.pop(0)
            if isinstance(decision, Committed):
                yield from self._locks[decision.fragment].hold(self._fold(decision))
            else:
                outer = self.outers[decision.fragment]
                ended = "skipped" if isinstance(decision, Skipped) else "aborted"
                self._publish(decision, Outcome(ended, decision.reason, outer.version, outer.digest, None))
            self.changed.open()
            if self.committed - self._offered >= self.config.snapshot.every_rounds:
                self._offered = self.committed
                self._snapshot_wanted = True
                self._snapshot_offered.open()

    def _until_durable(self, work: Callable[[], Work[T]]) -> Work[T]:
        while True:
            try:
                return (yield from work())
            except OSError:
                yield TICK_S

    def compute(self, decision: Committed) -> tuple[Outer, Tensor]:
        """What a committed round comes to."""
        key, outer = (decision.fragment, decision.round), self.outers[decision.fragment]
        try:
            parts = {island: [stored.part() for stored in self.inbox.parts(*key, island)] for island in decision.shares}
        except KeyError as error:
            raise InputError(f"round {decision.round} of fragment {decision.fragment} lacks {error}") from error
        chart = self.fragments[decision.fragment]
        return fold(chart, outer, parts, decision.shares, self.config.outer, self.down)

    def _fold(self, decision: Committed) -> Work[None]:
        """Moves the fragment's tensors once, however often the disk fails, and publishes the round."""

        def work() -> Work[tuple[Outer, Tensor]]:
            moved = self.compute(decision)
            yield from self.point("fold done")
            return moved

        new, update = yield from self._in_thread(self._worker, work())
        yield from self._until_durable(lambda: self._keep_update(decision, new, update))
        self.outers[decision.fragment] = new
        self.committed += 1
        path = self.disk.file(f"update-{decision.fragment}-{decision.round}").path
        self._publish(decision, Outcome("committed", decision.reason, new.version, new.digest, path))

    def _keep_update(self, decision: Committed, new: Outer, update: Tensor) -> Work[None]:
        fragment, round_ = decision.fragment, decision.round

        def work() -> Work[None]:
            self.disk.write(f"update-{fragment}-{round_}", update)
            yield from self.point("update written")
            self.disk.file(f"update-{fragment}-{round_ - UPDATES_KEPT}").unlink()

        yield from self._in_thread(self._worker, work())
        known = self.digests.get((fragment, new.version), "")
        if known and known != show(new.digest):
            raise DigestMismatch(f"fragment {fragment} version {new.version} folds to other bits than before")
        if not known:
            yield from self._record([folded_row(fragment, round_, new)])

    def still(self, fragment: int) -> Work[tuple[Outer, int]]:
        """A copy of a fragment's outer state as it is published, and rounds ended; no fold moves it meanwhile."""

        def read() -> Work[tuple[Outer, int]]:
            outer, ended = self.outers[fragment], self.ended[fragment]
            yield from self.point("a fragment is read")
            return outer.copy(), ended

        return (yield from self._locks[fragment].hold(read()))

    def _publish(self, decision: Ended, outcome: Outcome) -> None:
        self.outcomes[decision.fragment, decision.round] = outcome
        self.ended[decision.fragment] = decision.round + 1
        self.outcomes.pop((decision.fragment, decision.round - UPDATES_KEPT), None)
        self.watcher.published(decision.fragment, decision.round, outcome)

    # -- beside the run ---------------------------------------------------------------------------------------------

    def _keep(self) -> Work[None]:
        """Writes the snapshots that are asked for, as `Keeper.work` does."""
        while True:
            while not self._snapshot_wanted:
                yield self._snapshot_offered
            self._snapshot_wanted = False
            try:
                yield from self._save()
            except OSError:
                self._snapshot_wanted = True
                yield TICK_S

    def _save(self) -> Work[None]:
        outers, rounds_ = [], []
        for fragment in range(len(self.outers)):
            outer, ended = yield from self.still(fragment)
            outers.append(outer)
            rounds_.append(ended)
        saved = Saved(outers=tuple(outers), rounds=tuple(rounds_))
        yield from self.point("snapshot written")
        self.sync_updates()
        yield from self.point("updates synced")
        self.disk.check()
        self.disk.snapshots = [*self.disk.snapshots, saved]
        yield from self.point("manifest written")
        self.disk.check()
        self.disk.snapshots = self.disk.snapshots[-self.config.snapshot.keep :]
        yield from self.point("older snapshots removed")
        with contextlib.suppress(OSError):  # another time
            yield from self._compact()
        self._forget(self.disk.snapshots[0].rounds)

    def sync_updates(self) -> None:
        """Makes the updates durable that are kept, as `Store.sync_updates` does."""
        for name, data in sorted(self.disk.files.items()):
            if name.startswith("update-") and self.disk.synced.get(name) is not data:
                self.disk.sync(name)

    def _compact(self) -> Work[None]:
        """Replaces what the oldest snapshot holds, as `compaction.compact` does."""
        oldest = self.oldest()
        rows = list(self.disk.rows())
        rows = rows[: behind(rows, oldest)]
        if len(rows) < COMPACT_ROWS:
            return
        replaced = replacement(rows, self.config, ROOT, self.locate, oldest)
        if len(rows) - len(replaced) < COMPACT_ROWS:
            return
        self.disk.replace(len(rows), replaced)
        yield from self.point("compaction written")
        self.disk.compact()
        yield from self.point("ledger compacted")

    def oldest(self) -> Sequence[int]:
        """Rounds of each fragment that all snapshots kept hold."""
        return self.disk.snapshots[0].rounds

    def _forget(self, needed_from: Sequence[int]) -> None:
        late = self.config.rounds.late_window
        for fragment, needed in enumerate(needed_from):
            self.inbox.forget(fragment, before=needed - late)
            for name in [n for n in self.disk.files if n.startswith(f"f{fragment}-r")]:
                if int(name.split("-")[1][1:]) < needed - late and not self.inbox.holds(self.disk.file(name).path):
                    self.disk.file(name).unlink()

    def first_rows(self) -> None:
        """What a fresh ledger begins with."""
        if not self.disk.ledger:
            self.disk.append([run_row(self.config)])
            self.watcher.durable(self.disk.commit())
