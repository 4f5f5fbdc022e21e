"""Codecs with one scale per block of 256 values.

A code times its scale is exact in fp32 and never subnormal: scales have at most 8 significant bits (or are powers of
two) and are 2^-126 at least. So a product has the same bits on every device, also where it is fused with an addition.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from diloco.codec.blocks import LIMIT_BITS, Blocked, pack, put16, short_float, take16, tree_sum, unpack, viewed
from diloco.codec.native import Kernel

TINY = 1 << 23
"""Bits of 2^-126, the smallest normal number."""
_MAGNITUDE = 0x7FFFFFFF


def largest(values: Tensor) -> Tensor:
    """Bits (int32 [blocks, 1]) of the largest magnitude of each block."""
    return (values.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)


class _Scaled(Blocked):
    block = 256

    def scale_of(self, records: Tensor, least: int = TINY) -> Tensor:
        """The checked bf16 scales (fp32 [blocks, 1]) at the head of records."""
        bits = take16(records[:, :2])
        if not ((bits >= least) & (bits <= LIMIT_BITS)).all():
            raise self.bad("a scale is out of range")
        return bits.view(torch.float32)


class Integer(_Scaled):
    """Integers from -`top` to `top` times a scale: the block's largest magnitude over `top`, rounded up to bf16.

    Record: the scale (bf16), then a code per value. Error: at most 0.504 times the largest magnitude of the block over
    `top`, or 2^-127 where that is more.
    """

    top: ClassVar[int]

    def scaled(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Bits of the scales, and codes (fp32, integers), of blocks."""
        reciprocal = torch.tensor(1 / self.top, dtype=torch.float32, device=values.device)
        scale = short_float(largest(values).view(torch.float32) * reciprocal, TINY)
        return scale, torch.round(values * scale.view(torch.float32).reciprocal())


class Int8(Integer):
    """8 bits a value and 16 a block: 8.0625 bits."""

    id, name, top, kernel = 4, "int8", 127, Kernel("int8")

    def record(self, numel: int) -> int:
        return 2 + numel

    def encode_blocks(self, values: Tensor) -> Tensor:
        scale, codes = self.scaled(values)
        return torch.cat([put16(scale), codes.to(torch.int8).view(torch.uint8)], 1)

    def decode_blocks(self, records: Tensor, numel: int) -> Tensor:
        scale = self.scale_of(records)
        return viewed(records[:, 2:], torch.int8).to(torch.float32) * scale


class Int4(Integer):
    """4 bits a value (the code plus 8) and 16 a block: 4.0625 bits."""

    id, name, top, kernel, feedback = 5, "int4", 7, Kernel("int4"), True

    def record(self, numel: int) -> int:
        return 2 + (numel + 1) // 2

    def encode_blocks(self, values: Tensor) -> Tensor:
        scale, codes = self.scaled(values)
        return torch.cat([put16(scale), pack(codes + 8, 4)], 1)

    def decode_blocks(self, records: Tensor, numel: int) -> Tensor:
        scale = self.scale_of(records)
        return (unpack(records[:, 2:], 4, numel).to(torch.float32) - 8) * scale


class E3m0(_Scaled):
    """A sign and one of 0, 2^-6, 2^-5, ..., 1 times a power of two S, to the nearest (Streaming DiLoCo,
    arXiv 2501.18512). 4 bits a value and 8 a block: 4.03125 bits.

    Record: the biased exponent of S, then codes: the sign, and 0 or 1 to 7. S is the block's largest magnitude rounded
    to the nearest power of two. Error: at most a third of the value, or 2^-7 S (2^-126 at least) where that is more.
    """

    id, name, kernel, feedback = 6, "e3m0", Kernel("e3m0"), True

    def record(self, numel: int) -> int:
        return 1 + (numel + 1) // 2

    def encode_blocks(self, values: Tensor) -> Tensor:
        u = values.view(torch.int32) & _MAGNITUDE
        half = 1 << 22  # carries into the exponent from 1.5 on
        top = ((u.amax(1, keepdim=True) + half) >> 23).clamp(min=8)
        code = torch.maximum(((u + half) >> 23) - top + 7, (u >= (top - 7) << 23).to(torch.int32))
        sign = (values.view(torch.int32) >> 28) & 8
        return torch.cat([top.to(torch.uint8), pack(code | sign, 4)], 1)

    def decode_blocks(self, records: Tensor, numel: int) -> Tensor:
        top = records[:, :1].to(torch.int32)
        if not ((top >= 8) & (top <= LIMIT_BITS >> 23)).all():
            raise self.bad("a scale is out of range")
        code = unpack(records[:, 1:], 4, numel).to(torch.int32)
        level = code & 7
        bits = torch.where(level > 0, (top - 7 + level) << 23, level) | (code & 8) << 28
        return bits.view(torch.float32)


class Int2(_Scaled):
    """One of -3, -1, 1 and 3 times a scale h. 2 bits a value and 16 a block: 2.0625 bits. Only with error feedback.

    Record: h (bf16), then codes 0 to 3. h is 5/8 of the block's mean magnitude, rounded up: near the best step of a
    uniform quantiser of 4 levels for normal values. Error: what is left of a block is always smaller than the block,
    |x - y|^2 <= |x|^2 - 0.85 (sum |x|)^2 / n, whatever the values; so error feedback stays bounded. Blocks whose h is
    below 2^-126 become zeros.
    """

    id, name, kernel, feedback = 7, "int2", Kernel("int2"), True

    def record(self, numel: int) -> int:
        return 2 + (numel + 3) // 4

    def encode_blocks(self, values: Tensor) -> Tensor:
        size = values.abs()
        scale = short_float(tree_sum(size) * (0.625 / values.shape[1]), 0)
        scale[scale < TINY] = 0
        step = scale.view(torch.float32)
        outer = (size >= step + step).to(torch.int32)
        negative = (values.view(torch.int32) >> 31) & 1
        return torch.cat([put16(scale), pack((outer ^ negative) | (negative ^ 1) << 1, 2)], 1)

    def decode_blocks(self, records: Tensor, numel: int) -> Tensor:
        scale = self.scale_of(records, least=0)
        if ((scale > 0) & (scale.view(torch.int32) < TINY)).any():
            raise self.bad("a scale is out of range")
        return (unpack(records[:, 2:], 2, numel).to(torch.float32) * 2 - 3) * scale


class Fp16(_Scaled):
    """IEEE half precision times a power of two per block, so that nothing overflows and little underflows. 16 bits a
    value and 8 a block: 16.03125 bits.

    Record: the exponent of the scale plus 102, then a half per value, rounded to nearest even. The block's largest
    magnitude comes to lie between 2^14 and 2^15. Error: at most 2^-11 of the value, or 2^-39 of the largest magnitude
    of the block, or 2^-127, whichever is most.
    """

    id, name, kernel = 3, "fp16", Kernel("fp16")
    lowest: ClassVar[int] = -102
    """Exponent of the smallest scale: the smallest half times it is 2^-126."""

    def record(self, numel: int) -> int:
        return 1 + 2 * numel

    def encode_blocks(self, values: Tensor) -> Tensor:
        exponent = ((largest(values) >> 23) - (127 + 14)).clamp(min=self.lowest)
        halves = (values * ((127 - exponent) << 23).view(torch.float32)).to(torch.float16)
        return torch.cat([(exponent - self.lowest).to(torch.uint8), halves.view(torch.uint8)], 1)

    def decode_blocks(self, records: Tensor, numel: int) -> Tensor:
        exponent = records[:, :1].to(torch.int32) + self.lowest
        if not (exponent < 118 - 14).all():
            raise self.bad("a scale is out of range")
        halves = viewed(records[:, 1:], torch.float16)
        if not halves.isfinite().all():
            raise self.bad("a value is not finite")
        return halves.to(torch.float32) * ((127 + exponent) << 23).view(torch.float32)
