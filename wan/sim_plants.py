"""Faults to plant in the simulated coordinator and islands, to prove that the checker can fail."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor

from coordinator import facts, rounds
from coordinator.facts import Committed, Fact, Standing
from coordinator.fold import Outer, fold
from coordinator.intake import Intake
from coordinator.run import Run
from coordinator.state import State, with_member
from coordinator.upload import Slot
from diloco.config import RunConfig
from diloco.errors import StaleEpoch
from diloco.feedback import Fate
from diloco.framing import Assembly
from diloco.replica import Position
from wan.sim_coordinator import Row, Watcher
from wan.sim_disk import Disk
from wan.sim_island import SimIsland, Stand
from wan.sim_service import SimService
from wan.sim_stream import SimUpload, SimUploads, Stream
from wan.sim_wire import Reply, Request
from wan.sim_world import Process, Work, World


class Plant(NamedTuple):
    """Who is there instead of the sound ones."""

    coordinator: type[SimService] = SimService
    island: type[SimIsland] = SimIsland


class AckBeforeFsync(SimService):
    """Acknowledges a part as soon as it is in memory; file and ledger follow."""

    def received(self, request: Request, upload: SimUpload) -> Work[Reply]:
        """Starts what makes the part durable, and does not wait for it."""
        if request.seed:
            return (yield from super().received(request, upload))
        self.world.spawn(super().received(request, upload), self, inherit=True)
        yield from self.point("answering early")
        return Reply()


class _Forgetful:
    """A run in whose eyes an epoch is the island's current one."""

    def __init__(self, run: SimService, island: str, epoch: int) -> None:
        self._run, self._island, self._epoch = run, island, epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    @property
    def state(self) -> State:
        state = self._run.state
        member = state.members.get(self._island)
        if member is None:
            return state
        renewed = replace(member, epoch=self._epoch, standing=Standing.ACTIVE, dismissed=False)
        return replace(state, members={**state.members, self._island: renewed})


class ForgetEpoch(SimService):
    """Takes requests of epochs that are over."""

    def lease(self, request: Request) -> None:
        """Lets everybody in."""

    def intake_for(self, request: Request) -> Intake:
        """Takes a part whatever its epoch."""
        if request.seed:
            return self.intake
        return Intake(cast(Run, _Forgetful(self, request.island, request.epoch)))

    def find(self, event: rounds.Event) -> tuple[State, list[Fact]]:
        """Takes a contribution of an old epoch as if that were the current one."""
        try:
            return super().find(event)
        except StaleEpoch:
            if not isinstance(event, rounds.Contributed) or event.entry.island not in self.state.members:
                raise
            member = self.state.members[event.entry.island]
            renewed = replace(member, epoch=event.entry.epoch, standing=Standing.ACTIVE, dismissed=False)
            state, found = rounds.step(with_member(self.state, renewed), event, self.clock())
            return with_member(state, member), found


class StaleDivisor(SimService):
    """Divides by the islands that were expected, not by those that arrived."""

    def find(self, event: rounds.Event) -> tuple[State, list[Fact]]:
        """Scales the shares of a commit."""
        state, found = super().find(event)
        expected = max(1, sum(m.standing is Standing.ACTIVE for m in state.members.values()))
        return state, [self._scaled(f, expected) if isinstance(f, Committed) else f for f in found]

    @staticmethod
    def _scaled(fact: Committed, expected: int) -> Committed:
        factor = len(fact.shares) / max(expected, len(fact.shares))
        return replace(fact, shares={island: share * factor for island, share in fact.shares.items()})


class ApplyTwice(SimService):
    """Folds the first contribution of a round twice where it comes under load: here, in every third round."""

    def compute(self, decision: Committed) -> tuple[Outer, Tensor]:
        """Folds with one contribution counted double."""
        if decision.round % 3 != 1:
            return super().compute(decision)
        key = (decision.fragment, decision.round)
        parts = {island: [stored.part() for stored in self.inbox.parts(*key, island)] for island in decision.shares}
        first = next(iter(parts))
        parts[first] = parts[first] * 2
        chart, outer = self.fragments[decision.fragment], self.outers[decision.fragment]
        return fold(chart, outer, parts, decision.shares, self.config.outer, self.down)


class FoldAgain(SimService):
    """Folds again where the disk fails the update, and so moves the tensors twice: here, in every third round."""

    def compute(self, decision: Committed) -> tuple[Outer, Tensor]:
        """Folds twice."""
        moved = super().compute(decision)
        return super().compute(decision) if decision.round % 3 == 1 else moved


class ReadWhileMoving(SimService):
    """Reads the tensors of a fragment whether or not a fold has moved them that nobody has heard of."""

    def still(self, fragment: int) -> Work[tuple[Outer, int]]:
        """Waits for nobody."""
        yield from self.point("a fragment is read")
        return self.outers[fragment].copy(), self.ended[fragment]


class FoldUnsyncedDecision(SimService):
    """Acts on facts before the ledger has them."""

    async def take_in_turn(
        self, event: rounds.Event, with_row: Row | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """Decides, acts, and only then writes."""
        state, found = self.find(event)
        rows = [*([with_row] if with_row else []), *(facts.encode(fact) for fact in found)]
        if then:
            then()
        self.adopt(state, found)
        if rows:
            await self.record(rows)


class HangUp(SimService):
    """Abandons an event half way where the caller hangs up."""

    def held(self, work: Work[Any], coroutine: Coroutine[Any, Any, Any] | None = None) -> Work[Any]:
        """Does it on behalf of the caller alone."""
        return (yield from work)


class ForgetOutcomes(SimService):
    """Knows no outcome after a restart but those it folds again."""

    def __init__(self, world: World, disk: Disk, config: RunConfig, base: float, watcher: Watcher) -> None:
        super().__init__(world, disk, config, base, watcher)
        self.outcomes.clear()


class _TrustedUpload(SimUpload):
    def add(self, message: bytes) -> bool:
        """Keeps the digest of what has come beside the file."""
        moved = super().add(message)
        cast(Any, self.file).known = self._assembly
        return moved

    def reread(self, until: int) -> Assembly:
        """Goes on with that digest, where the file has as many bytes."""
        known: Assembly | None = getattr(self.file, "known", None)
        return known if known and known.have <= min(until, len(self.file.data)) else super().reread(until)


class _TrustedUploads(SimUploads):
    upload = _TrustedUpload


class TrustUnsyncedPartial(SimService):
    """Goes on with an upload after a crash without reading again what is there."""

    uploads_kind = _TrustedUploads


class _ForgetfulUploads(SimUploads):
    def supersede(self, slot: Slot) -> Work[None]:
        """Lets the older stream go on."""
        yield 0.0

    def begin(self, slot: Slot, total_bytes: int, process: Process) -> tuple[SimUpload, Stream]:
        """Has each stream keep its own account of what has come."""
        upload = self.uploads[slot] = SimUpload(self.disk, slot, total_bytes)
        upload.stream = stream = Stream(process)
        return upload, stream


class ForgetSuperseded(SimService):
    """Lets two streams write one upload."""

    uploads_kind = _ForgetfulUploads


class LateCountsTwice(SimService):
    """Does not remember who contributed to rounds that have ended."""

    def find(self, event: rounds.Event) -> tuple[State, list[Fact]]:
        """Forgets it before it looks."""
        forgot = tuple(replace(r, past=tuple(replace(p, islands={}) for p in r.past)) for r in self.state.rounds)
        self.state = replace(self.state, rounds=forgot)
        return super().find(event)


class IgnorePause(SimService):
    """Ends rounds by the clock while the run is paused."""

    def find(self, event: rounds.Event) -> tuple[State, list[Fact]]:
        """Looks at a tick as if there were no pause."""
        if not isinstance(event, rounds.Tick) or not self.state.paused:
            return super().find(event)
        why, at = self.state.paused, self.state.paused_at
        state, found = rounds.step(replace(self.state, paused=""), event, self.clock())
        return replace(state, paused=why, paused_at=at), found


class CompactTooFar(SimService):
    """Compacts as if the newest snapshot were the only one."""

    def oldest(self) -> Sequence[int]:
        """Rounds that the newest snapshot holds."""
        return self.disk.snapshots[-1].rounds


class SilentNewcomer(SimIsland):
    """Only waits for a round whose send step it missed."""

    def missed(self, fragment: int, round_: int) -> None:
        """Waits."""
        self._flights[fragment, round_] = [
            self.world.spawn(self._fetch_update(fragment, round_, rank, self._sessions), self)
            for rank in range(self.shape.ranks)
        ]


class UnknownAnchor(SimIsland):
    """Takes the anchors it has for those of the run when it joins again."""

    def take_up(self, fragment: int, stand: Stand) -> Work[None]:
        """Notes where the run stands, and fetches nothing."""
        if self.replicas[0].taken[fragment] is None:
            yield from super().take_up(fragment, stand)
            return
        for replica in self.replicas:
            replica.position[fragment], replica.taken[fragment] = Position(*stand[:2]), stand[1]


class SettleUnheard(SimIsland):
    """Takes what it has sent for what counts."""

    def heard(self, receipt: Reply) -> Fate:
        """Does not look at what the coordinator says."""
        return Fate.COUNTS


class SettleAlone(SimIsland):
    """Every rank settles by what it has heard of its own part."""

    def fates(self, fragment: int) -> list[Fate]:
        """Does not ask the others."""
        return [replica.fate(fragment) for replica in self.replicas]


PLANTS: dict[str, Plant] = {
    "ack-before-fsync": Plant(coordinator=AckBeforeFsync),
    "forget-epoch": Plant(coordinator=ForgetEpoch),
    "stale-divisor": Plant(coordinator=StaleDivisor),
    "apply-twice": Plant(coordinator=ApplyTwice),
    "fold-again": Plant(coordinator=FoldAgain),
    "read-while-moving": Plant(coordinator=ReadWhileMoving),
    "fold-unsynced-decision": Plant(coordinator=FoldUnsyncedDecision),
    "hang-up": Plant(coordinator=HangUp),
    "forget-outcomes": Plant(coordinator=ForgetOutcomes),
    "trust-unsynced-partial": Plant(coordinator=TrustUnsyncedPartial),
    "forget-superseded": Plant(coordinator=ForgetSuperseded),
    "late-counts-twice": Plant(coordinator=LateCountsTwice),
    "ignore-pause": Plant(coordinator=IgnorePause),
    "compact-too-far": Plant(coordinator=CompactTooFar),
    "silent-newcomer": Plant(island=SilentNewcomer),
    "keep-training-from-unknown-anchor": Plant(island=UnknownAnchor),
    "settle-without-receipt": Plant(island=SettleUnheard),
    "settle-alone": Plant(island=SettleAlone),
}
"""By the name that `--plant` takes."""
