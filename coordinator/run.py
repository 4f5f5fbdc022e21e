"""One run: the shell around the cores. It takes events, asks `rounds` what follows, and does it with tensors and files.

Everything here happens on one asyncio loop; folds, file writes and checks of bulk data run in a worker thread, one at a
time. The outer state is there once and is folded in place, so each fragment has a lock: for its fold, and for whoever
reads its tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from coordinator import facts, rounds
from coordinator.admission import Admission
from coordinator.anchors import Anchors, Pinned
from coordinator.facts import Aborted, Committed, Ended, Skipped
from coordinator.fold import Outer, Part, fold, update_size
from coordinator.intake import Intake
from coordinator.keeper import Keeper
from coordinator.recovery import Recovered, clean, folded_row, layout_row, recover, run_row
from coordinator.results import Outcome, Progress, Totals
from coordinator.snapshots import Draft
from coordinator.state import revive
from coordinator.store import UPDATES_KEPT, Store
from coordinator.updates import Update
from coordinator.upload import Uploads
from coordinator.words import announce
from diloco.codec.policy import down_choice, up_choice
from diloco.config import RunConfig
from diloco.digest import show
from diloco.errors import (
    DigestMismatch,
    Expired,
    Malformed,
    Overload,
    Refused,
    RunMismatch,
)
from diloco.failpoints import failpoint
from diloco.fragments import coordinator_of, kept, partition
from diloco.layout import Layout

log = logging.getLogger("diloco.coordinator")
DISK_RETRY_S = 1.0
"""How long to leave a disk alone that has failed or is full."""
ANCHOR_S = 60.0
"""How long a request for an anchor waits for the fold of its fragment."""
T = TypeVar("T")
Key = tuple[int, int]
"""Fragment and round."""
Row = tuple[str, dict[str, Any]]
"""Kind and body of a row of the ledger."""


class Run:
    """A run and its outer state.

    Args:
        config: the run's settings.
        store: its state folder; a snapshot in it is taken up.
        clock: seconds on a monotonic clock.
    """

    def __init__(self, config: RunConfig, store: Store, clock: Callable[[], float]) -> None:
        self.config, self.store, self.clock = config, store, clock
        found = recover(store.ledger, config, store.root, files=store.files)
        self.state = revive(found.state, clock())
        self.layout, self.fragments = found.layout, found.fragments
        self.outers: list[Outer] = found.outers
        self.ended: list[int] = found.ended
        """Rounds of each fragment whose outcome is published."""
        self.progress = {island: Progress() for island in self.state.members}
        self.outcomes: dict[Key, Outcome] = {}
        self.going: dict[Key, Update] = {}  # of rounds whose fold is under way
        committed = sum(outer.version for outer in found.outers)
        aborted = sum(isinstance(end, Aborted) for end, _ in found.ends.values())
        self.totals = Totals(committed=committed, skipped=sum(found.ended) - committed - aborted, aborted=aborted)
        self.participation: dict[int, float] = {}
        """By fragment: islands folded into its last commit, over the islands that were active then."""
        self._digests = found.digests
        self.changed = asyncio.Condition()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopped = asyncio.Event()
        """Set once a run that was told to stop has been left by everybody."""
        self.troubles: dict[str, str] = {}
        """By what the run was about to do: why its disk does not let it, in words; empty where it does."""
        self._closing = False
        self._turn = asyncio.Lock()
        self.inbox = found.inbox
        self.intake = Intake(self)
        self._ends: asyncio.Queue[Ended] = asyncio.Queue()
        for end in found.pending:
            self._ends.put_nowait(end)
        self._tasks: list[asyncio.Task[None]] = []
        self._under_way: set[asyncio.Future[Any]] = set()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._scribe = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self.up, self.down = up_choice(config.wire), down_choice(config.wire)
        """Codecs of contributions and of updates."""
        self._locks: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By fragment: who folds its tensors or reads them."""
        self._moving: set[int] = set()
        """Fragments whose tensors are not, or not yet, what is published."""
        self._room = torch.empty(0, dtype=torch.uint8)
        """Where the largest update was, for the next one."""
        self._keeper = Keeper(store, config, self._draft, self.still, self._saved, lambda: DISK_RETRY_S)
        self._offered = committed
        """Commits when a snapshot was last asked for."""
        self._oldest: Sequence[int] = ()
        """Rounds that the oldest snapshot kept holds, of each fragment; empty before this life has taken one."""
        self.uploads = Uploads(store.root / "inbox", store.files)
        self.admission = Admission(config.limits)
        self.anchors = Anchors(config.rounds.lease_s, clock, store.drop_anchor)
        if found.fresh:
            store.record([run_row(config)])
        else:
            clean(store.root, found)
            store.recount()
            self._recall(found)
            versions = [o.version for f, o in zip(self.fragments, self.outers, strict=False) if not f.elsewhere]
            log.info("taken up from the ledger: versions %s, %d rounds to fold", versions, len(found.pending))

    # -- life -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts the clock of leases and deadlines, and the folding of rounds."""
        self._tasks = [
            asyncio.create_task(self._guard(work)) for work in (self._tick, self._end_rounds, self._keeper.work)
        ]

    async def finish(self) -> None:
        """Stops, with a last snapshot of what has been committed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._under_way, return_exceptions=True)
        if self.totals.unsaved and self.outers:
            try:
                await self._keeper.write()
            except (OSError, Refused) as error:
                log.error("no last snapshot (%s); the ledger has what is not in the one before", error)
        if self.outers:
            await self._keeper.finish()
        self._keeper.close()
        await self.uploads.close(self.intake.over)
        self._worker.shutdown()
        self._scribe.shutdown()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise

    @property
    def working(self) -> bool:
        """Whether the tasks that decide and fold are alive."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    @property
    def settled(self) -> bool:
        """Whether every round that has been decided is published."""
        return all(now.round == ended for now, ended in zip(self.state.rounds, self.ended, strict=False))

    async def hurry(self) -> None:
        """From now on nobody waits here for a round to end: those who ask are told that it is open."""
        self._closing = True
        async with self.changed:
            self.changed.notify_all()

    async def settle(self, within_s: float) -> bool:
        """Waits until every round that has been decided is published; returns whether that came about in time."""
        try:
            async with asyncio.timeout(within_s), self.changed:
                await self.changed.wait_for(lambda: self.settled or not self.working)
        except TimeoutError:
            return False
        return self.settled

    async def _tick(self) -> None:
        caught_up = False
        while True:
            try:
                if not caught_up:
                    await self.in_turn(self.intake.catch_up)
                    caught_up = True
                await asyncio.sleep(min(1.0, self.config.rounds.lease_s / 10))
                await self.take(rounds.Tick())
                self._see_stopped()
                await self.uploads.prune(self.intake.over)
                self.anchors.expire()
                self._waits("decide")
            except OSError as error:
                self._waits("decide", f"nothing can be decided: {error}")
                await asyncio.sleep(min(1.0, self.config.rounds.lease_s / 10))

    def _waits(self, what: str, trouble: str = "") -> None:
        """Keeps why the run waits for its disk, and logs it where it is news."""
        if trouble and trouble != self.troubles.get(what):
            log.error("%s", trouble)
        self.troubles[what] = trouble

    def _see_stopped(self) -> None:
        left = not any(member.present for member in self.state.members.values())
        if self.state.stopping and left and self.settled:
            self.stopped.set()

    def _recall(self, found: Recovered) -> None:
        """Publishes again how the last rounds ended that the snapshot holds, as far as their updates are kept."""
        for past in found.past():
            path = self.store.update_path(past.fragment, past.round)
            committed = past.ended == "committed"
            if path.exists() or not committed:
                outcome = Outcome(past.ended, past.reason, past.version, past.digest, path if committed else None)
                self.outcomes[past.fragment, past.round] = outcome

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Runs blocking work in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    # -- events and decisions ---------------------------------------------------------------------------------------

    async def take(self, event: rounds.Event) -> None:
        """Takes one event: finds the facts, makes them durable, and does what they ask.

        Raises:
            StaleEpoch, Malformed: as `rounds.step` does; nothing has changed.
            OSError: the facts could not be made durable; nothing has changed.
        """
        await self.in_turn(lambda: self.take_in_turn(event))

    async def in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Does work alone, and to its end also where the caller goes away: what is durable must be known here too."""

        async def alone() -> T:
            async with self._turn:
                return await work()

        return await self.to_its_end(alone())

    async def to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Goes on with work also where the caller goes away, as when a client hangs up."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended_work)
        return await asyncio.shield(task)

    def _ended_work(self, task: asyncio.Future[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and task.exception():
            log.debug("a request ended with %r", task.exception())  # its caller is told, if it is still there

    async def take_in_turn(
        self, event: rounds.Event, with_row: Row | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """As `take`, for work that has the turn.

        `with_row` becomes durable in one with the event's facts, and `then` is done before they act.
        """
        state, found = rounds.step(self.state, event, self.clock())
        rows = [*([with_row] if with_row else []), *(facts.encode(fact) for fact in found)]
        if rows:
            ends = any(isinstance(fact, Ended) for fact in found)
            if ends:
                failpoint("round-decided")
            await self.record(rows)
            if ends:
                failpoint("round-recorded")
        if then:
            then()
        self.state = state
        for fact in found:
            self._act(fact)
        if found:
            async with self.changed:
                self.changed.notify_all()

    async def record(self, rows: list[Row]) -> None:
        """Makes rows of the ledger durable."""
        await asyncio.get_running_loop().run_in_executor(self._scribe, self.store.record, rows)

    def _act(self, fact: facts.Fact) -> None:
        if line := announce(fact):
            log.log(*line)
        match fact:
            case Committed():
                on_time = [name for name in fact.shares if "@" not in name]
                active = {m.id for m in self.state.members.values() if m.awaited}.union(on_time)
                self.participation[fact.fragment] = len(on_time) / len(active)
                self._ends.put_nowait(fact)
            case Skipped() | Aborted():
                keep_partial = bool(self.config.rounds.late_window)
                self.inbox.close(fact.fragment, fact.round, keep_partial=keep_partial)
                self._ends.put_nowait(fact)
            case facts.Carried():
                self.inbox.carry(fact.fragment, fact.round, fact.entry.island, fact.into)

    async def _end_rounds(self) -> None:
        """Publishes the outcomes of ended rounds in the order they were decided."""
        while True:
            decision = await self._ends.get()
            if isinstance(decision, Committed):
                await self._fold(decision)
            else:
                outer, skipped = self.outers[decision.fragment], isinstance(decision, Skipped)
                self.totals.skipped += skipped
                self.totals.aborted += not skipped
                how = "skipped" if skipped else "aborted"
                self._publish(decision, Outcome(how, decision.reason, outer.version, outer.digest, None))
            async with self.changed:
                self.changed.notify_all()
            if self.totals.committed - self._offered >= self.config.snapshot.every_rounds:
                self._offered = self.totals.committed
                self._keeper.offer()

    async def _until_durable(self, work: Callable[[], Awaitable[T]]) -> T:
        """Does work that changes nothing where the disk fails it, again and again until the disk takes it."""
        while True:
            try:
                done = await work()
                self._waits("fold")
                return done
            except OSError as error:
                self._waits("fold", f"the run waits for its disk: {error}")
                await asyncio.sleep(DISK_RETRY_S)

    async def _fold(self, decision: Committed) -> None:
        """Folds a round, which moves the fragment's tensors once however often the disk fails, and publishes it.

        Its update goes out while it is made, as the decision is durable.
        """
        number, inbox, key = decision.fragment, self.inbox, (decision.fragment, decision.round)

        def load() -> dict[str, list[Part]]:
            return {island: [stored.part() for stored in inbox.parts(*key, island)] for island in decision.shares}

        def work() -> tuple[Outer, Tensor]:
            fragment, outer = self.fragments[number], self.outers[number]
            moved = fold(fragment, outer, parts, decision.shares, self.config.outer, self.down, self._room, made)
            failpoint("fold-computed")
            return moved

        def made(payload: Tensor, until: int) -> None:
            with contextlib.suppress(OSError):  # what the disk does not take now it is asked to take at the end
                update.take(payload, until)

        failpoint("fold-begun")
        async with self._locks[number]:
            parts = await self._until_durable(lambda: self.in_worker(load))
            async with self._going_out(decision) as update:
                self._moving.add(number)
                new, payload = await self.to_its_end(self.in_worker(work))
                self._room = max(self._room, payload, key=Tensor.numel)
                path = await self._until_durable(lambda: self._keep_update(decision, new, update, payload))
                self.outers[number] = new
                self._moving.discard(number)
        self.totals.committed += 1
        self.totals.unsaved += 1
        self._publish(decision, Outcome("committed", decision.reason, new.version, new.digest, path))

    @contextlib.asynccontextmanager
    async def _going_out(self, decision: Committed) -> AsyncIterator[Update]:
        """Begins an update, and lets it be fetched while it is made."""
        fragment, key = decision.fragment, (decision.fragment, decision.round)

        def begin() -> Update:
            path, size = self.store.update_path(*key), update_size(self.fragments[fragment], self.down)
            return Update(self.store.files, path, size, self.outers[fragment].version + 1, decision.reason)

        update = self.going[key] = await self._until_durable(lambda: self.in_worker(begin))
        try:
            async with self.changed:
                self.changed.notify_all()
            yield update
        finally:
            del self.going[key]
            update.close()

    async def _keep_update(self, decision: Committed, new: Outer, update: Update, payload: Tensor) -> Path:
        """Keeps an update in its file, and makes durable what the fold came to."""
        key = decision.fragment, decision.round

        def keep() -> Path:
            update.take(payload, payload.numel())
            return self.store.keep_update(*key, update)

        path = await self.in_worker(keep)
        failpoint("fold-written")
        known = self._digests.get((decision.fragment, new.version), "")
        if known and known != show(new.digest):
            raise DigestMismatch(
                f"fragment {decision.fragment} version {new.version} folds to {show(new.digest)}, and the ledger says "
                f"{known}: a contribution in {self.store.root} is damaged",
                fragment=decision.fragment,
                version=new.version,
            )
        if not known:
            await self.record([folded_row(*key, new)])
        failpoint("fold-recorded")
        return path

    @contextlib.asynccontextmanager
    async def still(self, fragment: int) -> AsyncIterator[tuple[Outer, int]]:
        """The outer state of a fragment as it is published, and rounds ended; no fold moves it meanwhile.

        Raises:
            Refused: a fold of it came to no end.
        """
        async with self._locks[fragment]:
            if fragment in self._moving:
                raise Refused(f"fragment {fragment} is between two versions: start the coordinator again")
            yield self.outers[fragment], self.ended[fragment]

    def _publish(self, decision: Ended, outcome: Outcome) -> None:
        self.outcomes[decision.fragment, decision.round] = outcome
        self.ended[decision.fragment] = decision.round + 1
        self.outcomes.pop((decision.fragment, decision.round - UPDATES_KEPT), None)

    async def snapshot(self) -> list[int]:
        """Takes a snapshot of what is published; returns the fragments' versions in it.

        Raises:
            Refused: the run has no first parameters yet.
            OSError: the disk does not take it.
        """
        if not self.outers:
            raise Refused("there is nothing to take a snapshot of: the run has no first parameters yet")
        versions = await self.to_its_end(self._keeper.write())
        return [version for f, version in zip(self.fragments, versions, strict=True) if not f.elsewhere]

    def make_room(self) -> None:
        """Has a snapshot taken, where contributions are kept only because old snapshots lack their rounds.

        Each brings the oldest kept one on: a disk budget below what `snapshot` keeps delays, and blocks nothing.
        """
        if self.outers and list(self._oldest) != self.ended:
            self._keeper.offer()

    def _draft(self) -> Draft:
        assert self.layout is not None
        store = self.store
        return Draft(store.root, self.config, self.layout, self.fragments, self.state.last_epoch, store.files)

    def _saved(self, versions: Sequence[int], needed_from: Sequence[int]) -> None:
        """Forgets contributions that no snapshot kept needs."""
        self.totals.unsaved = self.totals.committed - sum(versions)
        self._oldest = needed_from
        late = self.config.rounds.late_window
        for fragment, needed in enumerate(needed_from):
            self.inbox.forget(fragment, before=needed - late)
            self.store.sweep(fragment, before=needed - late, holds=self.inbox.holds)

    # -- joining ----------------------------------------------------------------------------------------------------

    async def join(self, island: str, ranks: int, run_id: str, layout: Layout, *, resumes: bool = False) -> int:
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
        return await self.in_turn(lambda: self._join(island, ranks, layout, resumes))

    async def _join(self, island: str, ranks: int, layout: Layout, resumes: bool) -> int:
        self.admission.lease(island, [member.id for member in self.state.members.values() if member.present])
        first = self.layout is None
        fragments = kept(partition(layout, self.config.sync), self.config.run) if first else self.fragments
        if self.layout is not None and layout.digest != self.layout.digest:
            raise RunMismatch(
                f"run '{self.config.run.id}' trains a model with layout {self.layout.digest[:16]}, and island "
                f"'{island}' has layout {layout.digest[:16]}: {self.layout.difference(layout)}"
            )

        def then() -> None:
            self.fragments, self.layout, self.progress[island] = fragments, layout, Progress()

        failpoint("join-begun")
        joined = rounds.Joined(island=island, ranks=ranks, resumes=resumes)
        await self.take_in_turn(joined, layout_row(layout) if first else None, then)
        failpoint("join-recorded")
        self.progress = {known: told for known, told in self.progress.items() if known in self.state.members}
        if first:
            log.info("model layout %s from island %s: %d elements", layout.digest[:16], island, layout.numel)
        return self.state.members[island].epoch

    def lease(self, run_id: str, island: str, epoch: int) -> None:
        """Raises unless the island holds a lease under `epoch` in this run."""
        if run_id != self.config.run.id:
            raise RunMismatch(f"this coordinator serves run '{self.config.run.id}', not '{run_id}'")
        rounds.member_of(self.state, island, epoch)

    def here(self, fragment: int) -> None:
        """Raises `Malformed` where another coordinator keeps a fragment."""
        run, keeper = self.config.run, coordinator_of(fragment, self.config.run)
        if keeper != run.coordinator_index:
            raise Malformed(
                f"coordinator {keeper} ({run.coordinators[keeper]}) keeps fragment {fragment}, and this is coordinator "
                f"{run.coordinator_index}: ask that one"
            )

    @property
    def step(self) -> int:
        """The furthest inner step that an active island has reported."""
        return max((self.progress[m.id].step for m in self.state.members.values() if m.awaited), default=0)

    async def plant(self, anchors: Sequence[Tensor]) -> None:
        """Makes the first parameters (fp32, one flat tensor per fragment) durable, then shows them.

        Raises:
            OSError: the disk does not take them; nothing has changed.
        """

        async def work() -> None:
            if self.state.seeded:
                return  # another request of the same part was first
            pairs = list(zip(self.fragments, anchors, strict=True))
            ended = [0] * len(pairs)
            outers = await self.in_worker(lambda: [Outer.first(fragment, anchor) for fragment, anchor in pairs])
            failpoint("plant-begun")
            await self._keeper.write(lambda fragment: contextlib.nullcontext((outers[fragment], 0)))
            failpoint("plant-saved")
            await self.take_in_turn(rounds.Seeded())
            failpoint("plant-recorded")
            self.outers, self.ended = outers, ended

        await self.in_turn(work)

    # -- updates ----------------------------------------------------------------------------------------------------

    async def outcome(self, fragment: int, round_: int, wait_s: float) -> Outcome | None:
        """How a round ended; waits at most `wait_s` for it, and returns none where it is still open."""
        return await self._known(fragment, round_, wait_s, self.outcomes.get)

    async def update(self, fragment: int, round_: int, wait_s: float) -> Outcome | Update | None:
        """As `outcome`, or already what its fold is making."""
        return await self._known(fragment, round_, wait_s, lambda key: self.outcomes.get(key) or self.going.get(key))

    async def _known(self, fragment: int, round_: int, wait_s: float, look: Callable[[Key], T | None]) -> T | None:
        key = fragment, round_
        if not 0 <= fragment < len(self.state.rounds):
            raise Malformed(f"fragment {fragment} has no rounds; there are {len(self.state.rounds)} fragments")
        self.here(fragment)

        if not look(key) and self.ended and round_ < self.ended[fragment]:
            raise Expired(f"the update of round {round_} is no longer kept: fetch anchors", fragment=fragment)
        try:
            async with asyncio.timeout(wait_s), self.changed:
                await self.changed.wait_for(lambda: look(key) or self._closing)
        except TimeoutError:
            return None
        return look(key)

    async def anchor(self, fragment: int, version: int | None) -> Pinned:
        """The anchor of a fragment at `version` where that is still kept, else as it stands.

        Raises:
            Malformed: there is none.
            Overload: its fold takes long, or the disk does not take the file that it is sent from.
        """
        if not 0 <= fragment < len(self.outers):
            raise Malformed(f"fragment {fragment} has no anchor: the run has {len(self.outers)} seeded fragments")
        pin = self.anchors.find(fragment, version, self.outers[fragment].version)
        if pin:
            return pin
        try:
            async with asyncio.timeout(ANCHOR_S):
                return await self.to_its_end(self._pin(fragment))
        except TimeoutError:
            raise Overload(f"fragment {fragment} is being folded", retry_after_s=DISK_RETRY_S) from None
        except OSError as error:
            raise Overload(
                f"the coordinator cannot put an anchor aside: {error}", retry_after_s=DISK_RETRY_S
            ) from error

    async def _pin(self, fragment: int) -> Pinned:
        async with self.still(fragment) as (outer, ended):
            known = self.anchors.find(fragment, outer.version)  # somebody else may have asked meanwhile
            if known:
                return known
            anchor = await self.in_worker(lambda: self.store.write_anchor(fragment, outer.version, outer.anchor))
            pin = Pinned(version=outer.version, ended=ended, digest=outer.digest, anchor=anchor)
            return self.anchors.keep(fragment, pin)
