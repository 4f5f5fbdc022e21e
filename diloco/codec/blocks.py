"""Codecs that code values block by block, and how a box is cut out of them.

A payload is one *record* per block of consecutive values of the flattened tensor, in order; the last block may be
shorter, and so is its record. A part is the whole records of every block that the box touches, each once, in order.
So cutting out never looks into a record, and a part decodes to the payload's bits whatever the box. It carries up to
two blocks more than each contiguous run of the box: nothing to speak of for rows (FSDP), at most all records of the
tensor for narrow columns.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.codec import native
from diloco.codec.base import AT_ONCE, Codec
from diloco.layout import Box

LIMIT_BITS = (127 + 118) << 23
"""Bit pattern of 2^118: values this large are refused. Below it no sum over a block and no scaled code overflows."""


class Blocked(Codec):
    """A codec of records, one for each block. What a record is says the eager definition, which runs on any device."""

    @abstractmethod
    def record(self, numel: int) -> int:
        """Bytes of the record of a block of 1 to `block` values."""

    @abstractmethod
    def encode_blocks(self, values: Tensor) -> Tensor:
        """Records (uint8 [blocks, record(n)]) of blocks (fp32 [blocks, n]) whose values are below 2^118."""

    @abstractmethod
    def decode_blocks(self, records: Tensor, numel: int) -> Tensor:
        """Blocks (fp32 [blocks, n]) of records (uint8 [blocks, record(n)]). Raises `CodecError` for bad ones."""

    def size(self, numel: int) -> int:
        blocks, rest = divmod(numel, self.block)
        return blocks * self.record(self.block) + (self.record(rest) if rest else 0)

    def encode(self, values: Tensor, out: Tensor) -> None:
        self.check(out, values.numel())
        blocks, rest = divmod(values.numel(), self.block)
        done = self._native(values, out, blocks, encode=True)
        for begin, end, width in self._spans(done, blocks, rest):
            x = values[begin * self.block : begin * self.block + (end - begin) * width].view(end - begin, width)
            if not (x.view(torch.int32) & 0x7FFFFFFF < LIMIT_BITS).all():  # NaN and Inf are above it
                raise self.no_codes()
            start = begin * self.record(self.block)
            records = self.encode_blocks(x)
            out[start : start + records.numel()].view(records.shape).copy_(records)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self.check(payload, out.numel())
        blocks, rest = divmod(out.numel(), self.block)
        done = self._native(out, payload, blocks, encode=False)
        for begin, end, width in self._spans(done, blocks, rest):
            start, record = begin * self.record(self.block), self.record(width)
            records = payload[start : start + (end - begin) * record].view(end - begin, record)
            x = out[begin * self.block : begin * self.block + (end - begin) * width].view(end - begin, width)
            x.copy_(self.decode_blocks(records, width))

    def _native(self, values: Tensor, records: Tensor, blocks: int, *, encode: bool) -> int:
        """Has the kernel do the whole blocks, if there is one; returns how many blocks are done."""
        if self.kernel is None or not blocks or not native.usable(values, records):
            return 0
        if not (self.kernel.encode if encode else self.kernel.decode)(values, records, blocks):
            raise self.no_codes() if encode else self.bad("a scale or an index is out of range")
        return blocks

    def _spans(self, done: int, blocks: int, rest: int) -> list[tuple[int, int, int]]:
        """(first block, end, values of each) of what is left to do."""
        step = max(1, AT_ONCE // self.block)
        spans = [(b, min(b + step, blocks), self.block) for b in range(done, blocks, step)]
        return [*spans, (blocks, blocks + 1, rest)] if rest else spans

    # -- boxes ------------------------------------------------------------------------------------------------------

    def part_size(self, shape: Sequence[int], box: Box) -> int:
        return self.size(self._values(touched(shape, box, self.block), math.prod(shape)))

    def _values(self, blocks: Tensor, numel: int) -> int:
        """Values of some blocks, of which only the tensor's last may be short."""
        if not len(blocks):
            return 0
        short = (int(blocks[-1]) + 1) * self.block - numel
        return len(blocks) * self.block - max(0, short)

    def select(self, payload: Tensor, shape: Sequence[int], box: Box) -> Tensor:
        self.check(payload, math.prod(shape))
        blocks, record = touched(shape, box, self.block), self.record(self.block)
        if not len(blocks):
            return payload[:0]
        first, last = int(blocks[0]), int(blocks[-1])
        if last - first + 1 == len(blocks):
            return payload[first * record : (last + 1) * record]
        whole = math.prod(shape) // self.block
        records = payload[: whole * record].view(whole, record)[blocks[blocks < whole].to(payload.device)]
        return torch.cat([records.view(-1), payload[whole * record :] if last == whole else payload[:0]])

    def decode_part(self, part: Tensor, shape: Sequence[int], box: Box, out: Tensor) -> None:
        blocks = touched(shape, box, self.block)
        held = self._values(blocks, math.prod(shape))
        if held == box.numel:
            self.decode(part, out)
            return
        self.check(part, held)
        values = torch.empty(held, dtype=torch.float32, device=part.device)
        self.decode(part, values)
        starts, length = box.runs(shape)
        starts = torch.searchsorted(blocks, starts // self.block) * self.block + starts % self.block
        if len(starts) == 1:
            out.copy_(values[starts[0] : starts[0] + length])
            return
        rows, each = out.view(-1, length), max(1, AT_ONCE // length)
        for begin in range(0, len(starts), each):
            index = starts[begin : begin + each, None] + torch.arange(length)
            rows[begin : begin + each] = values[index.to(values.device)]


def touched(shape: Sequence[int], box: Box, block: int) -> Tensor:
    """Numbers (int64, ascending) of the blocks of the flattened tensor that have an element of the box."""
    starts, length = box.runs(shape)
    if not length:
        return starts
    if len(starts) == 1:
        return torch.arange(int(starts) // block, (int(starts) + length - 1) // block + 1)
    first, last = starts // block, (starts + (length - 1)) // block
    counts = last - first + 1
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)
    every = first.repeat_interleave(counts) + torch.arange(len(before)) - before
    return every[torch.cat([torch.ones(1, dtype=torch.bool), every[1:] != every[:-1]])]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Puts codes (integers [blocks, n] below 2^bits) into bytes (uint8 [blocks, ceil(n * bits / 8)]).

    Byte j of q has the codes j, q + j, 2q + j, ... from its low bits up: so no kernel has to take lanes apart.
    """
    each = 8 // bits
    bytes_ = -(-codes.shape[1] // each)
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, bytes_ * each - codes.shape[1]))
    parts = padded.view(-1, each, bytes_)
    packed = parts[:, 0].clone()
    for i in range(1, each):
        packed |= parts[:, i] << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The `numel` codes (uint8 [blocks, numel]) of every row of packed bytes."""
    parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)]
    return torch.cat(parts, 1)[:, :numel]


def tree_sum(x: Tensor) -> Tensor:
    """The sum over each row (fp32 [rows, n] -> [rows, 1]) in one stated order: zeros are added up to a power of two,
    then the second half to the first until one is left. So that it has the same bits everywhere."""
    width = 1 << (x.shape[1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x


def short_float(x: Tensor, least: int) -> Tensor:
    """The bits (int32) of values >= 0 rounded up to 8 significant bits; `least` is the bits of the smallest result."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).clamp(min=least)


def put16(bits: Tensor) -> Tensor:
    """The upper halves of int32 [rows, n] as bytes (uint8 [rows, 2n])."""
    return (bits >> 16).to(torch.int16).contiguous().view(torch.uint8)


def take16(bytes_: Tensor) -> Tensor:
    """What `put16` has put: int32 [rows, n] with the lower half 0. Negative where the top bit is set."""
    return viewed(bytes_, torch.int16).to(torch.int32) << 16


def viewed(bytes_: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes as elements of a wider type; copied, because records begin at any address."""
    return bytes_.clone(memory_format=torch.contiguous_format).view(dtype)
