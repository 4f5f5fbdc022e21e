"""Error feedback on the island: what the up-link codec drops of a contribution is kept for a later one.

    to encode = pseudo-gradient + decay * residual          left = to encode - what its payload decodes to

What becomes of a fragment's residual is known when its round has ended here, from two things: what the coordinator
said of the contribution, and what became of the round. Nothing else settles it.

| the round | the contribution counts | it is carried into a later round | it was dropped, or there is no receipt |
|---|---|---|---|
| was committed | left | left | residual + (1 - alpha) * pseudo-gradient |
| was not | residual | left - pseudo-gradient | residual |
| is passed over, the anchor taken anew | left | left | residual |

Where a round is committed, mixing leaves alpha of the pseudo-gradient in the local parameters, so the next one has it
again; the rest would be lost without a contribution that counts. Where it is not committed, the island trains on from
the same anchor and the next pseudo-gradient has this one in it: nothing is to be added, and what is carried all the
same is to be taken off. Where the anchor is taken anew, what was not contributed is given up, as with every codec;
the residual stays, since nobody has applied it. Where training was not finite, all residuals are forgotten.

All ranks of an island settle alike: a contribution counts where every rank's part does. An island that joins, again or
started anew, hears from the coordinator in which rounds its contributions count. That settles what was in flight; and
residuals that are older than the last round which counts are forgotten, since what they hold may have been sent since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from diloco.codec import Codec

AT_ONCE = 2**20
"""Values of a tensor that are encoded at a time, so that the first bytes leave early."""


class Fate(Enum):
    """What the coordinator has said of a contribution."""

    UNKNOWN = "no receipt"
    COUNTS = "counts in its round"
    CARRIED = "came late and counts in a later round"
    DROPPED = "dropped"


_FIRMEST = (Fate.COUNTS, Fate.CARRIED, Fate.UNKNOWN, Fate.DROPPED)


def agreed(fates: Iterable[Fate]) -> Fate:
    """What becomes of a contribution from what each rank has heard of its part.

    A part counts as far as it knows; the rank whose part came last hears that all came late, or too late.
    """
    return max(fates, key=_FIRMEST.index, default=Fate.COUNTS)


@dataclass(frozen=True, slots=True)
class Counted:
    """What a coordinator knows of an island's contributions to a fragment."""

    oldest: int
    """The first round that it still knows of."""
    open: int
    """The round that is open."""
    rounds: frozenset[int]
    """Rounds from there on to which a contribution of the island's counts, in that round or late in another."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """All that `Feedback` holds, as it outlives a process. Its tensors never change."""

    round: int
    """Of the last contribution."""
    residuals: Mapping[int, Tensor]
    """By piece: what was kept before it, or after it where it is settled (fp32, flat)."""
    left: Mapping[int, Tensor]
    """By piece: what the codec left of it, while it is in flight."""
    fate: Fate


class Ending(Enum):
    """What became of a contribution's round on this island."""

    COMMITTED = "the anchor has moved, and is mixed into the local parameters"
    NOT_COMMITTED = "the anchor stays, and so do the local parameters"
    PASSED_OVER = "anchor and local parameters are taken anew"


def settled(residual: Tensor, moved: Tensor, left: Tensor, fate: Fate, ending: Ending, alpha: float) -> Tensor:
    """The residual after a round: one cell of the table above. Changes none of its arguments.

    Args:
        residual: what was kept before it.
        moved: the pseudo-gradient.
        left: what the codec dropped of both.
        alpha: share of the local parameters that mixing keeps.
    """
    counts = fate in (Fate.COUNTS, Fate.CARRIED)
    match ending:
        case Ending.COMMITTED:
            return left if counts else torch.add(residual, moved, alpha=1 - alpha)
        case Ending.NOT_COMMITTED:
            return left - moved if fate is Fate.CARRIED else residual
        case Ending.PASSED_OVER:
            return left if counts else residual


class Feedback:
    """Residuals of the pieces of one fragment that this rank sends, and its contribution in flight, if any.

    fp32 on the CPU: one value per element between rounds, three while a contribution is in flight.

    Args:
        decay: factor on a residual when it is sent.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._residuals: dict[int, Tensor] = {}
        self._flight: dict[int, tuple[Tensor, Tensor]] = {}
        """Per piece: the pseudo-gradient, and what the codec left of it and the residual."""
        self._fate = Fate.UNKNOWN
        self._round = -1
        """Of the last contribution; -1 before the first."""

    def residual(self, piece: int, numel: int) -> Tensor:
        """What is kept of a piece, the so-manyth that this rank sends: fp32 [numel]."""
        kept = self._residuals.get(piece)
        return torch.zeros(numel, dtype=torch.float32) if kept is None else kept

    def begin(self, round_: int) -> None:
        """Begins a contribution to a round. One before it that was never settled leaves the residual as it was."""
        self._land()
        self._round = round_

    def _land(self) -> None:
        self._flight = {}
        self._fate = Fate.UNKNOWN

    def encode(self, piece: int, moved: Tensor, codec: Codec, payload: Tensor) -> Iterator[Tensor]:
        """Encodes a piece's pseudo-gradient (fp32 [n], kept) with its residual into `payload`; yields it as it is made.

        The contribution is complete once all has been asked for.
        """
        residual, left = self._residuals.get(piece), torch.empty_like(moved)
        for values, bytes_ in codec.slices(moved.numel(), AT_ONCE):
            before = 0.0 if residual is None else residual[values]
            total = torch.add(moved[values], before, alpha=self._decay)
            codec.encode(total, payload[bytes_])
            codec.decode(payload[bytes_], left[values])
            torch.sub(total, left[values], out=left[values])
            yield payload[bytes_]
        self._flight[piece] = moved, left

    @property
    def fate(self) -> Fate:
        """What the coordinator has said of the contribution in flight."""
        return self._fate

    def receipt(self, fate: Fate) -> None:
        """Hears what the coordinator says of the contribution in flight."""
        self._fate = fate

    def end(self, ending: Ending, alpha: float) -> None:
        """Settles the contribution in flight, if there is one."""
        for piece, (moved, left) in self._flight.items():
            before = self.residual(piece, moved.numel())
            self._residuals[piece] = settled(before, moved, left, self._fate, ending, alpha)
        self._land()

    def rejoin(self, counted: Counted) -> None:
        """Settles what is in flight where the anchor is taken anew, by what the coordinator knows of it."""
        if self._round > counted.open or any(round_ > self._round for round_ in counted.rounds):
            self.forget()  # of another past of the run, or older than the last contribution
        if self._flight and self._round >= counted.oldest:
            self._fate = Fate.COUNTS if self._round in counted.rounds else Fate.DROPPED
        self.end(Ending.PASSED_OVER, 0.0)

    def forget(self) -> None:
        """Drops the residuals and what is in flight."""
        self._residuals = {}
        self._land()

    def keep(self) -> Kept:
        """All that is held, for `restore` in another process."""
        left = {piece: left for piece, (_, left) in self._flight.items()}
        return Kept(round=self._round, residuals=dict(self._residuals), left=left, fate=self._fate)

    def restore(self, kept: Kept) -> None:
        """Takes up what an earlier process held. What was in flight is to be settled by `rejoin`."""
        self._residuals, self._round, self._fate = dict(kept.residuals), kept.round, kept.fate
        self._flight = {piece: (torch.empty(0), left) for piece, left in kept.left.items()}
