"""A digest of a fragment that every rank can add its own part to.

The digest is the sum (mod 2^64) over all elements of a mix of (flat index in the fragment, fp32 bit pattern). A sum
has no order, so it is the same for every shard layout, and one all-reduce of an int64 adds the ranks' parts.
It detects faults; it does not resist an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.layout import Box

_INDEX = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_LOW_32 = 0xFFFFFFFF
_BLOCK = 1 << 16


def digest(values: Tensor, start: int, shape: tuple[int, ...], box: Box) -> int:
    """The part that one box of one tensor adds to its fragment's digest.

    Args:
        values: the box, fp32, of `box.size` (any strides, any device).
        start: flat offset of the tensor in its fragment.
        shape: full shape of the tensor.
        box: where `values` lies in it.

    Returns:
        A signed 64-bit integer; add parts with `combine`.
    """
    if not box.numel:
        return 0
    starts, length = box.runs(shape)
    bits = values.contiguous().view(torch.int32).view(-1, length)
    starts = (starts + start).to(bits.device)
    rows = max(1, _BLOCK // length)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for column in range(0, length, _BLOCK):
        width = min(_BLOCK, length - column)
        ramp = torch.arange(column, column + width, dtype=torch.int64, device=bits.device)
        for row in range(0, len(starts), rows):
            index = starts[row : row + rows, None] + ramp
            total += _mix(index, bits[row : row + rows, column : column + width]).sum()
    return int(total)


def _mix(index: Tensor, bits: Tensor) -> Tensor:
    """A 64-bit finaliser in the manner of splitmix64 over index and bits; overwrites `index`."""
    x = index.mul_(_INDEX).add_(bits)
    for multiplier in (_MIX_1, _MIX_2):
        x.bitwise_xor_((x >> 32).bitwise_and_(_LOW_32)).mul_(multiplier)
    return x.bitwise_xor_((x >> 32).bitwise_and_(_LOW_32))


def combine(*parts: int) -> int:
    """Adds digest parts mod 2^64, as a signed integer."""
    total = sum(parts) & (2**64 - 1)
    return total - 2**64 if total >= 2**63 else total


def show(value: int) -> str:
    """A digest as people see it: 16 hex digits."""
    return f"{value & (2**64 - 1):016x}"
