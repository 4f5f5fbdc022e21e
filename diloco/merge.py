"""Merging contributions: their weights, and the weighted mean in a fixed order."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.codec import Codec
from diloco.config import Weighting
from diloco.layout import Box


def weight(policy: Weighting, *, tokens: int, steps: int, period: int) -> int:
    """What a contribution weighs before it is set against the others.

    Args:
        policy: "tokens": what was trained on; "uniform": one each, for whoever trained a whole period.
        tokens, steps: trained since the island adopted the fragment's anchor. 0 steps: not known, so a whole period.
        period: inner steps between two contributions to a fragment. Under "uniform" whoever came in the middle of it
            weighs by the steps it took, so a newcomer never dilutes a mean that it has not trained for.
    """
    return tokens if policy == "tokens" else min(steps, period) or period


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Each contribution's share of the mean, in the order of ids.

    The divisor is what has arrived, never what was expected. Where nobody weighs anything, all weigh the same.

    Returns:
        id -> share; the shares sum to 1. Iteration order is the order in which to add contributions, so the mean does
        not depend on the order of arrival.
    """
    ordered = {island: weights[island] for island in sorted(weights)}
    total = sum(ordered.values())
    if not total:
        return {island: 1 / len(ordered) for island in ordered}
    return {island: weight / total for island, weight in ordered.items()}


class Addend(NamedTuple):
    """One piece of a contribution to a tensor: `share` times what `payload` (uint8) decodes to, in `box`."""

    share: float
    codec: Codec
    box: Box
    payload: Tensor


@dataclass(frozen=True)
class Runs:
    """A box as contiguous runs of the flattened tensor, of `length` values each.

    Run j begins at `base` plus the sum of digit times stride, where the digits of j count in `sizes`, the last fastest.
    """

    base: int
    length: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, box: Box, shape: Sequence[int]) -> Runs:
        """The runs of a box that has elements."""
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        split = len(shape)
        while split and box.size[split - 1] == shape[split - 1]:
            split -= 1
        length = math.prod(box.size[max(0, split - 1) :])
        counted = [(box.size[d], strides[d]) for d in range(split - 1) if box.size[d] > 1]
        base = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
        return cls(base, length, tuple(size for size, _ in counted), tuple(stride for _, stride in counted))

    @property
    def count(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)

    def start(self, run: int) -> int:
        """Where a run begins."""
        at = self.base
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            run, digit = divmod(run, size)
            at += digit * stride
        return at

    def before(self, at: int) -> int:
        """How many values of the box lie before position `at` of the flattened tensor."""
        begun = bisect_left(range(self.count), at, key=self.start)
        return (begun - 1) * self.length + min(self.length, at - self.start(begun - 1)) if begun else 0

    def positions(self, begin: int, end: int) -> Tensor:
        """Where values `begin` to `end` of the box lie: int64 [end - begin]."""
        value = torch.arange(begin, end)
        run, at = value // self.length, value % self.length + self.base
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            at += run % size * stride
            run = run // size
        return at


def weighted_sum(addends: Iterable[tuple[Addend, Runs]], first: int, end: int) -> Tensor:
    """The sum over addends of share times value, from `first` to `end` of the flattened tensor: fp32 [end - first].

    It starts with 0, and takes the addends in their order; product and sum are rounded once, as a fused multiplication
    and addition does. Raises `CodecError` for a payload that does not decode.
    """
    total = torch.zeros(end - first, dtype=torch.float32)
    for addend, runs in addends:
        begin, behind = runs.before(first), runs.before(end)
        if begin == behind:
            continue
        values = addend.codec.window(addend.payload, addend.box.numel, begin, behind)
        if begin // runs.length == (behind - 1) // runs.length:
            at = runs.start(begin // runs.length) + begin % runs.length - first
            total[at : at + behind - begin].add_(values, alpha=addend.share)
        else:
            places = runs.positions(begin, behind).sub_(first)
            total[places] = total[places].add_(values, alpha=addend.share)
    return total


def place(codec: Codec, payload: Tensor, box: Box, shape: Sequence[int], out: Tensor) -> None:
    """Writes what a box's payload decodes to into its tensor (fp32 [numel], flat), block by block.

    Raises `CodecError` for a payload that does not decode.
    """
    if not box.numel:
        return
    runs = Runs.of(box, shape)
    for begin in range(0, box.numel, codec.at_once):
        end = min(begin + codec.at_once, box.numel)
        out[runs.positions(begin, end)] = codec.window(payload, box.numel, begin, end)
