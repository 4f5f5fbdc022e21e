"""One run: the shell around the cores. It takes events, asks `rounds` what follows, and does it with tensors and files.

Everything here happens on one asyncio loop, so no state needs a lock; folds, file writes and checks of bulk data run
in a worker thread, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coordinator import rounds
from coordinator.fold import Outer, Part, fold
from coordinator.inbox import Coverage, Inbound, SeedBed, Stored
from coordinator.rounds import Committed, Skipped
from coordinator.store import UPDATES_KEPT, Snapshot, Store, check_same_run, load_snapshot
from diloco.codec import CODECS
from diloco.config import RunConfig
from diloco.errors import DilocoError, DivergedError, Malformed, RunMismatch, StaleEpoch
from diloco.fragments import Fragment, partition
from diloco.layout import Layout
from diloco.schedule import Schedule

log = logging.getLogger("diloco.coordinator")
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How a round ended, published once its update is durable."""

    committed: bool
    reason: str
    version: int
    digest: int
    update: Path | None


@dataclass(kw_only=True)
class Progress:
    """What an island last said of itself."""

    ranks: int
    step: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    loss: float = float("nan")
    outer_loss: float = float("nan")
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(kw_only=True)
class Totals:
    """Counts since the run began."""

    committed: int = 0
    skipped: int = 0
    unsaved: int = 0


class Run:
    """A run and its outer state.

    Args:
        config: the run's settings.
        store: its state folder; a snapshot in it is taken up.
        clock: seconds on a monotonic clock.
    """

    def __init__(self, config: RunConfig, store: Store, clock: Callable[[], float]) -> None:
        self.config, self.store, self.clock = config, store, clock
        self.state = rounds.start(config.rounds, config.merge.weights, Schedule.of(config))
        self.epoch_base = store.next_incarnation() << 32
        self.state = rounds.resume(self.state, epoch=self.epoch_base)
        self.layout: Layout | None = None
        self.fragments: tuple[Fragment, ...] = ()
        self.outers: list[Outer] = []
        self.ended: list[int] = []
        """Rounds of each fragment whose outcome is published."""
        self.progress: dict[str, Progress] = {}
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.totals = Totals()
        self.changed = asyncio.Condition()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox: dict[tuple[int, int], dict[str, Inbound]] = {}
        self._seedbed: SeedBed | None = None
        self._ends: asyncio.Queue[Committed | Skipped] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._down = CODECS[config.wire.down]
        self._resume()

    def _resume(self) -> None:
        snapshot = load_snapshot(self.store.root)
        if snapshot is None:
            return
        check_same_run(snapshot, self.config, self.store.root)
        self.layout, self.fragments = snapshot.layout, snapshot.fragments
        self.outers, self.ended = list(snapshot.outers), list(snapshot.rounds)
        self.state = rounds.resume(
            self.state, epoch=self.epoch_base, versions=[o.version for o in self.outers], ended=self.ended
        )
        self.totals.committed = sum(o.version for o in snapshot.outers)
        log.info("taken up from a snapshot: versions %s", [o.version for o in self.outers])

    # -- life -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts the clock of leases and deadlines, and the folding of rounds."""
        self._tasks = [asyncio.create_task(self._guard(work)) for work in (self._tick, self._end_rounds)]

    async def finish(self) -> None:
        """Stops, with a last snapshot of what has been committed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.totals.unsaved and self.outers:
            await self.in_worker(self._save)
        self._worker.shutdown()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.config.rounds.lease_s / 10))
            await self.take(rounds.Tick())

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Runs blocking work in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    # -- events and decisions ---------------------------------------------------------------------------------------

    async def take(self, event: rounds.Event) -> None:
        """Takes one event and does what it decides. Raises what `rounds.step` raises, having changed nothing."""
        self.state, decisions = rounds.step(self.state, event, self.clock())
        for decision in decisions:
            self._act(decision)
        if decisions or not isinstance(event, rounds.Tick | rounds.Beat):
            async with self.changed:
                self.changed.notify_all()

    def _act(self, decision: rounds.Decision) -> None:
        match decision:
            case Committed():
                log.info(
                    "fragment %d round %d commits version %d: %s",
                    decision.fragment,
                    decision.round,
                    decision.version,
                    decision.reason,
                )
                self._ends.put_nowait(decision)
            case Skipped():
                log.warning("fragment %d round %d is skipped: %s", decision.fragment, decision.round, decision.reason)
                self._ends.put_nowait(decision)
            case rounds.Dropped():
                log.warning(
                    "contribution of %s to fragment %d round %d is dropped: %s",
                    decision.island,
                    decision.fragment,
                    decision.round,
                    decision.reason,
                )
            case rounds.Admitted():
                log.info("island %s joins under epoch %d: %s", decision.island, decision.epoch, decision.reason)
            case rounds.Gone():
                level = logging.INFO if decision.standing is rounds.Standing.LEFT else logging.WARNING
                log.log(level, "island %s is %s: %s", decision.island, decision.standing, decision.reason)
            case rounds.Moved():
                log.info("the run is %s: %s", decision.phase, decision.reason)

    async def _end_rounds(self) -> None:
        """Publishes the outcomes of ended rounds in the order they were decided."""
        while True:
            decision = await self._ends.get()
            if isinstance(decision, Committed):
                await self._fold(decision)
            else:
                outer = self.outers[decision.fragment]
                self.totals.skipped += 1
                self._publish(decision, Outcome(False, decision.reason, outer.version, outer.digest, None))
            async with self.changed:
                self.changed.notify_all()

    async def _fold(self, decision: Committed) -> None:
        fragment, outer = self.fragments[decision.fragment], self.outers[decision.fragment]
        inbound = self._inbox[decision.fragment, decision.round]

        def work() -> tuple[Outer, Path]:
            parts = {i: [stored.part() for stored in inbound[i].parts.values()] for i in decision.shares}
            new, update = fold(fragment, outer, parts, decision.shares, self.config.outer, self._down)
            return new, self.store.write_update(decision.fragment, decision.round, update)

        new, path = await self.in_worker(work)
        self.outers[decision.fragment] = new
        self.totals.committed += 1
        self.totals.unsaved += 1
        self._publish(decision, Outcome(True, decision.reason, new.version, new.digest, path))
        if self.totals.unsaved >= self.config.snapshot.every_rounds:
            await self.in_worker(self._save)

    def _publish(self, decision: Committed | Skipped, outcome: Outcome) -> None:
        self.outcomes[decision.fragment, decision.round] = outcome
        self.ended[decision.fragment] = decision.round + 1
        self.outcomes.pop((decision.fragment, decision.round - UPDATES_KEPT), None)
        for inbound in self._inbox.pop((decision.fragment, decision.round), {}).values():
            inbound.discard()

    def _save(self) -> None:
        assert self.layout is not None
        self.totals.unsaved = 0
        snapshot = Snapshot(
            config=self.config,
            layout=self.layout,
            fragments=self.fragments,
            outers=tuple(self.outers),
            rounds=tuple(self.ended),
        )
        self.store.save(snapshot, self.config.snapshot.keep)

    # -- joining ----------------------------------------------------------------------------------------------------

    async def join(self, island: str, ranks: int, run_id: str, layout: Layout) -> int:
        """Enters an island; returns its epoch.

        Raises:
            RunMismatch: it means another run, or has another model.
            ConfigError: the run's fragments do not fit the model (first island only).
        """
        layout = layout.under(self.config.sync.buffers)
        if run_id and run_id != self.config.run.id:
            mine = self.layout.digest[:16] if self.layout else "none yet"
            raise RunMismatch(
                f"this coordinator serves run '{self.config.run.id}' (model layout {mine}), and the island means to "
                f"join run '{run_id}' (model layout {layout.digest[:16]}): check the address or island.run_id"
            )
        if self.layout is None:
            self.fragments = partition(layout, self.config.sync)
            self.layout = layout
            log.info("model layout %s from island %s: %d elements", layout.digest[:16], island, layout.numel)
        elif layout.digest != self.layout.digest:
            raise RunMismatch(
                f"run '{self.config.run.id}' trains a model with layout {self.layout.digest[:16]}, and island "
                f"'{island}' has layout {layout.digest[:16]}: {self.layout.difference(layout)}"
            )
        self.progress[island] = Progress(ranks=ranks)
        await self.take(rounds.Joined(island=island))
        return self.state.members[island].epoch

    def lease(self, run_id: str, island: str, epoch: int) -> None:
        """Raises unless the island holds a lease under `epoch` in this run."""
        if run_id != self.config.run.id:
            raise RunMismatch(f"this coordinator serves run '{self.config.run.id}', not '{run_id}'")
        rounds.member_of(self.state, island, epoch)

    @property
    def step(self) -> int:
        """The furthest inner step that an active island has reported."""
        active = [m.id for m in self.state.members.values() if m.standing is rounds.Standing.ACTIVE]
        return max((self.progress[i].step for i in active), default=0)

    # -- contributions ----------------------------------------------------------------------------------------------

    async def seed(self, island: str, epoch: int, rank: int, fragment: int, part: Part, digest: str) -> bool:
        """Takes one rank's part of the first parameters; returns whether it was known already."""
        rounds.member_of(self.state, island, epoch)
        bed = self._seedbed if self._seedbed and self._seedbed.epoch == epoch else None
        if self.state.seeded:
            if bed and bed.known(fragment, rank, digest):
                return True
            raise StaleEpoch("the run has its first parameters already: fetch them")
        if self.state.seeder != island:
            raise Malformed(f"first parameters are to come from {self.state.seeder}, not from {island}")
        if bed is None:
            bed = self._seedbed = SeedBed(epoch, self.fragments)
        duplicate = await self.in_worker(lambda: bed.add(fragment, rank, part, digest))
        anchors = bed.harvest() if bed is self._seedbed else []
        if anchors:
            pairs = list(zip(self.fragments, anchors, strict=True))
            self.outers = await self.in_worker(lambda: [Outer.first(f, a) for f, a in pairs])
            self.ended = [0] * len(self.fragments)
            self.totals.unsaved = 1
            await self.in_worker(self._save)
            await self.take(rounds.Seeded())
        return duplicate

    def expected(self, fragment: int, round_: int, base_version: int) -> str:
        """Checks the key of a contribution: "" where it can count, else why it would be dropped.

        Raises:
            Malformed: a round that cannot be open, or a base version that it never had.
        """
        late = rounds.lateness(self.state, fragment, round_)
        version = self.state.rounds[fragment].version
        if not late and base_version != version:
            raise Malformed(
                f"the contribution is based on version {base_version} of fragment {fragment}, "
                f"and round {round_} continues from version {version}"
            )
        return late

    async def contribute(
        self, island: str, epoch: int, rank: int, fragment: int, round_: int, stored: Stored, tokens: int
    ) -> tuple[bool, str]:
        """Takes one rank's part of a contribution, already durable; its file goes unless the round keeps it.

        Returns:
            (whether it was known already, why it is dropped or "").
        """
        contributed = rounds.Contributed(
            fragment=fragment, round=round_, entry=rounds.Entry(island=island, epoch=epoch, tokens=tokens)
        )
        try:
            rounds.member_of(self.state, island, epoch)
            late = rounds.lateness(self.state, fragment, round_)
            if late:
                await self.take(contributed)
                return False, late
            refused = self.state.rounds[fragment].refused
            if island in refused:
                return False, refused[island]
            islands = self._inbox.setdefault((fragment, round_), {})
            known = islands.get(island)
            if known and known.epoch != epoch and known.coverage.whole:
                return False, f"{island} has already contributed to round {round_} under epoch {known.epoch}"
            same = known if known and known.epoch == epoch else None
            inbound = same or Inbound(epoch=epoch, coverage=Coverage(self.fragments[fragment]))
            duplicate = inbound.add(rank, stored)
            if known and known is not inbound:
                known.discard()
            islands[island] = inbound
            if inbound.coverage.whole and not duplicate:
                await self.take(contributed)
            return duplicate, ""
        finally:
            kept = self._inbox.get((fragment, round_), {}).get(island)
            if kept is None or not kept.holds(stored.path):
                stored.path.unlink(missing_ok=True)

    async def check(self, island: str, epoch: int, fragment: int, round_: int, part: Part) -> str:
        """Looks at a part's values; returns why its contribution cannot be used, or ""."""
        try:
            await self.in_worker(part.check_finite)
        except DivergedError as error:
            event = rounds.Spoiled(fragment=fragment, round=round_, island=island, epoch=epoch, reason=error.message)
            await self.take(event)
            return error.message
        return ""

    # -- updates ----------------------------------------------------------------------------------------------------

    async def outcome(self, fragment: int, round_: int, wait_s: float) -> Outcome | None:
        """How a round ended; waits at most `wait_s` for it, and returns none where it is still open."""
        if not 0 <= fragment < len(self.state.rounds):
            raise Malformed(f"fragment {fragment} has no rounds; there are {len(self.state.rounds)} fragments")

        def known() -> bool:
            return (fragment, round_) in self.outcomes

        if not known() and self.ended and round_ < self.ended[fragment]:
            raise DilocoError(f"the update of round {round_} is no longer kept: fetch anchors", fragment=fragment)
        try:
            async with asyncio.timeout(wait_s), self.changed:
                await self.changed.wait_for(known)
        except TimeoutError:
            return None
        return self.outcomes[fragment, round_]

    def anchor(self, fragment: int) -> Outer:
        """The outer state of a fragment as it stands. Its tensors never change, so they may be read at leisure."""
        if not 0 <= fragment < len(self.outers):
            raise Malformed(f"fragment {fragment} has no anchor: the run has {len(self.outers)} seeded fragments")
        return self.outers[fragment]
