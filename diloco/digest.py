"""A digest of a fragment that every rank can add its own part to.

The digest is the sum (mod 2^64) over all elements of `h + 2^32 g`, where h is a 32-bit mix of (flat index in the
fragment, fp32 bit pattern) and g is a second mix of h. A sum has no order, so it is the same for every shard layout,
and one all-reduce of an int64 adds the ranks' parts. For a given index h is a bijection of the bits, so any change of
a single element shows; elements exactly 2^32 apart may change places unseen. It detects faults; it does not resist an
adversary.

A compiled kernel gives the same sum on the CPU, where it is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codec import native
from diloco.layout import Box

# Odd multipliers: the golden ratio, and those of the 32-bit finaliser of MurmurHash3. Signed, as int32 holds them.
_INDEX = 0x9E3779B9 - 2**32
_MIX_1 = 0x85EBCA6B - 2**32
_MIX_2 = 0xC2B2AE35 - 2**32
_MIX_3 = 0x27D4EB2F
_BLOCK = 1 << 15


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
    if native.usable(values):
        return native.digest(values, starts + start)
    bits = values.contiguous().view(torch.int32).view(-1, length)
    firsts = _wrap((starts + start) * _INDEX).to(bits.device)
    width = min(length, _BLOCK)
    rows = max(1, _BLOCK // length)
    ramp = _wrap(torch.arange(width, dtype=torch.int64) * _INDEX).to(bits.device)
    low, high = (torch.zeros((), dtype=torch.int64, device=bits.device) for _ in range(2))
    for column in range(0, length, width):
        shift = _signed(column * _INDEX)
        for row in range(0, len(firsts), rows):
            part = bits[row : row + rows, column : column + width]
            x = part + ramp[: part.shape[1]]
            x += firsts[row : row + rows, None] + shift
            low += _mix(x, _MIX_1, _MIX_2).sum()
            high += _mix(x, _MIX_3).sum()
    return combine(int(low), int(high) << 32)


def _mix(x: Tensor, *multipliers: int) -> Tensor:
    """Multiplies and folds the high half into the low one, in place; a bijection of int32 for odd multipliers."""
    for multiplier in multipliers:
        x.mul_(multiplier)
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x


def _signed(value: int) -> int:
    """An integer mod 2^32, as int32 holds it."""
    return (value + 2**31) % 2**32 - 2**31


def _wrap(values: Tensor) -> Tensor:
    """int64 values mod 2^32, as int32."""
    return ((values + 2**31) % 2**32 - 2**31).to(torch.int32)


def combine(*parts: int) -> int:
    """Adds digest parts mod 2^64, as a signed integer."""
    total = sum(parts) & (2**64 - 1)
    return total - 2**64 if total >= 2**63 else total


def show(value: int) -> str:
    """A digest as people see it: 16 hex digits."""
    return f"{value & (2**64 - 1):016x}"
