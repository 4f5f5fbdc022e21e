"""When each fragment sends and applies: period H, offsets, overlap tau.

Round r of fragment p syncs at inner step `offset[p] + r * H`. Its contribution is sent tau steps earlier, and its
update is applied at the sync step (Streaming DiLoCo, arXiv 2501.18512, section 2). Steps count from 1; rounds from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco.config import RunConfig
from diloco.fragments import coordinator_of


@dataclass(frozen=True, slots=True)
class Send:
    """Send the fragment's pseudo-gradient for a round."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Wait for the round's outcome and apply its update."""

    fragment: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The run's sync schedule; the same on every island. A coordinator has that of the fragments it keeps."""

    every: int
    offsets: tuple[int, ...]
    overlap: int
    steps: int
    elsewhere: frozenset[int] = frozenset()
    """Fragments that another coordinator keeps: here they have no rounds."""

    @classmethod
    def of(cls, config: RunConfig) -> Schedule:
        """The schedule that a run's settings describe."""
        sync = config.sync
        return cls(every=sync.every_steps, offsets=sync.offsets, overlap=sync.overlap_steps, steps=config.run.steps)

    @classmethod
    def kept(cls, config: RunConfig) -> Schedule:
        """The schedule of the fragments that coordinator `run.coordinator_index` keeps."""
        whole, run = cls.of(config), config.run
        theirs = (f for f in range(len(whole.offsets)) if coordinator_of(f, run) != run.coordinator_index)
        return replace(whole, elsewhere=frozenset(theirs))

    def sync_step(self, fragment: int, round_: int) -> int:
        """Inner step at which a round's update is applied."""
        return self.offsets[fragment] + round_ * self.every

    def rounds(self, fragment: int) -> int:
        """Rounds of a fragment in the whole run."""
        if fragment in self.elsewhere:
            return 0
        return max(0, (self.steps - self.offsets[fragment]) // self.every + 1)

    def due(self, step: int) -> list[Send | Apply]:
        """What happens at the edge after inner step `step`: sends before applies, fragments in order."""
        sends: list[Send | Apply] = []
        applies: list[Send | Apply] = []
        for fragment, offset in enumerate(self.offsets):
            round_, early = divmod(step + self.overlap - offset, self.every)
            if not early and 0 <= round_ < self.rounds(fragment):
                sends.append(Send(fragment, round_))
            round_, early = divmod(step - offset, self.every)
            if not early and 0 <= round_ < self.rounds(fragment):
                applies.append(Apply(fragment, round_))
        return sends + applies

    def position(self, rounds: Sequence[int], step: int = 0) -> int:
        """The inner step at which an island takes up the run whose fragments have ended `rounds` rounds each.

        It is the newest sync step passed, or the `step` that others are at, yet before every sync step still to come.
        """
        passed = max(self.sync_step(p, r - 1) if r else 0 for p, r in enumerate(rounds))
        ahead = min((self.sync_step(p, r) for p, r in enumerate(rounds) if r < self.rounds(p)), default=self.steps + 1)
        return max(0, min(max(passed, step), ahead - 1))

    def finished(self, rounds: Sequence[int]) -> bool:
        """Whether every fragment has ended all its rounds."""
        return all(r >= self.rounds(p) for p, r in enumerate(rounds))
