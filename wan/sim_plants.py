"""Faults to plant in the simulated coordinator and islands, to prove that the checker can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from coordinator import facts, rounds
from coordinator.facts import Committed, Fact, Standing
from coordinator.fold import Outer, fold
from coordinator.state import State
from diloco.config import RunConfig
from diloco.errors import StaleEpoch
from wan.sim_coordinator import Reply, Request, Row, Watcher
from wan.sim_island import SimIsland
from wan.sim_service import SimService
from wan.sim_world import Disk, MemoryStored, Work, World


class AckBeforeFsync(SimService):
    """Acknowledges a part as soon as it is in memory; file and ledger follow."""

    def contribute(self, request: Request, stored: MemoryStored, payload: Tensor) -> Work[Reply]:
        """Starts what makes the part durable, and does not wait for it."""
        self.world.spawn(super().contribute(request, stored, payload), self, inherit=True)
        yield from self._point("answering early")
        return Reply()


class ForgetEpoch(SimService):
    """Takes requests of epochs that are over."""

    def lease(self, request: Request) -> None:
        """Lets everybody in."""

    def find(self, event: rounds.Event) -> tuple[State, list[Fact]]:
        """Takes an event of an old epoch for one of the current."""
        try:
            return super().find(event)
        except StaleEpoch:
            if not isinstance(event, rounds.Contributed) or event.entry.island not in self.state.members:
                raise
            current = self.state.members[event.entry.island].epoch
            return super().find(replace(event, entry=replace(event.entry, epoch=current)))


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


class FoldUnsyncedDecision(SimService):
    """Acts on facts before the ledger has them."""

    def _take(
        self, event: rounds.Event, with_row: Row | None = None, then: Callable[[], None] | None = None
    ) -> Work[None]:
        state, found = self.find(event)
        rows = [*([with_row] if with_row else []), *(facts.encode(fact) for fact in found)]
        if then:
            then()
        self._adopt(state, found)
        if rows:
            yield from self._point("acted, not decided")
            yield from self._record(rows)


class HangUp(SimService):
    """Abandons an event half way where the caller hangs up."""

    def _to_its_end(self, work: Work[Any]) -> Work[Any]:
        return (yield from work)


class ForgetOutcomes(SimService):
    """Knows no outcome after a restart but those it folds again."""

    def __init__(self, world: World, disk: Disk, config: RunConfig, base: float, watcher: Watcher) -> None:
        super().__init__(world, disk, config, base, watcher)
        self.outcomes.clear()


class SilentNewcomer(SimIsland):
    """Only waits for a round whose send step it missed."""

    def _missed(self, fragment: int, round_: int) -> None:
        self._flights[fragment, round_] = [
            self.world.spawn(self._fetch_update(fragment, round_, rank), self) for rank in range(self.shape.ranks)
        ]


PLANTS: dict[str, type[SimService] | type[SimIsland]] = {
    "ack-before-fsync": AckBeforeFsync,
    "forget-epoch": ForgetEpoch,
    "stale-divisor": StaleDivisor,
    "apply-twice": ApplyTwice,
    "fold-unsynced-decision": FoldUnsyncedDecision,
    "hang-up": HangUp,
    "forget-outcomes": ForgetOutcomes,
    "silent-newcomer": SilentNewcomer,
}
"""By the name that `--plant` takes: coordinators, and an island."""
