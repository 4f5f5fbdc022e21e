"""The largest values of every chunk, and where they are (SparseLoCo, arXiv 2508.15706). Only with error feedback."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from diloco.codec import subsets
from diloco.codec.blocks import Blocked, pack, put16, short_float, take16, tree_sum, unpack, viewed
from diloco.codec.native import Kernel
from diloco.codec.scaled import TINY, Int8

_VALUES = {2: 4, 8: 2, 32: 0}
"""Bytes in front of the values of a record, by their bits."""
_NAME = re.compile(r"topk(?:-([1-9][0-9]{0,3}))?(?:-(int8|fp32))?(-coded)?")
_BITS = {None: 2, "int8": 8, "fp32": 32}
_FAMILY, _KINDS = 2**16, (2, 8, 32)
"""Ids from 2^16 on: (kept - 1) * 16 + number of the value's bits * 2 + whether indices are coded."""
_EARLY = {(64, 2, False): 16, (128, 2, False): 17, (64, 8, False): 18}
"""Those with an id of their own."""


class TopK(Blocked):
    """Of every chunk of 4,096 consecutive values the `keep` largest in magnitude; the others become zero.

    Of equal magnitudes the lowest index wins. A last chunk of m values keeps ceil(keep * m / 4096).

    Record: what the values share, indices in ascending order, values. Indices have 12 bits (two in three bytes, the
    first in the low bits); or they are `coded` as one number of as few bits as there are choices (`subsets`). Values of
    2 bits are a sign and one of two levels per chunk (bf16 each, rounded up): the means of the magnitudes up to the
    mean and above it. Of 8 bits: int8 with one scale per chunk. Of 32 bits: themselves.
    With 64 of 4,096 and 2 bits: (32 + 64 * 14) / 4096 = 0.227 bits a value, coded (32 + 472 + 128) / 4096 = 0.154.

    Error: what is left of a chunk is never larger than the chunk, in |x|^2; with values of 32 bits at most
    1 - keep / 4096 of it.

    Args:
        keep: values kept of a full chunk; 1 to `chunk`.
        value_bits: 2, 8 or 32.
        chunk: values of a chunk; 4,096 at most.
        coded: whether indices are one number; for 128 kept values at most.
    """

    feedback = True

    def __init__(
        self, name: str, id_: int, *, keep: int, value_bits: int, chunk: int = 4096, coded: bool = False
    ) -> None:
        if not 1 <= keep <= chunk <= 4096 or value_bits not in _VALUES or (coded and keep > subsets.MOST):
            raise ValueError(f"topk of {keep} of {chunk} with values of {value_bits} bits{', coded' * coded}")
        self.name, self.id, self.keep, self.value_bits, self.block = name, id_, keep, value_bits, chunk
        self.coded = coded
        self._int8 = Int8()
        self._int8.name = name
        if value_bits < 32 and chunk == 4096 and keep % 4 == 0 and keep <= 256:
            self.kernel = Kernel(f"{'coded' if coded else 'topk'}-{value_bits}", keep)

    @classmethod
    def named(cls, name: str) -> TopK:
        """The codec of a name: `topk`, then how many it keeps (64), `int8` or `fp32` for values of 8 or 32 bits
        instead of 2, and `coded`. Raises `ValueError` where there is none."""
        match = _NAME.fullmatch(name)
        if not match:
            raise ValueError(f"'{name}' is no name of topk")
        keep, bits, coded = int(match[1] or 64), _BITS[match[2]], bool(match[3])
        number = _FAMILY + (keep - 1) * 16 + _KINDS.index(bits) * 2 + coded
        return cls(name, _EARLY.get((keep, bits, coded), number), keep=keep, value_bits=bits, coded=coded)

    @classmethod
    def numbered(cls, id_: int, version: int) -> TopK | None:
        """The codec of an id from 2^16 on, if there is one."""
        keep, rest = divmod(id_ - _FAMILY, 16)
        kind, coded = divmod(rest, 2)
        if version != 1 or not 0 <= keep < 4096 or kind >= len(_KINDS) or (coded and keep >= subsets.MOST):
            return None
        known = (keep + 1, _KINDS[kind], bool(coded))
        suffix = ("", "-int8", "-fp32")[kind] + "-coded" * coded
        return None if known in _EARLY else cls.named(f"topk-{keep + 1}{suffix}")

    def kept(self, numel: int) -> int:
        """Values kept of a chunk of `numel`."""
        return -(-self.keep * numel // self.block)

    def record(self, numel: int) -> int:
        kept = self.kept(numel)
        return _VALUES[self.value_bits] + self._index_bytes(numel) + (kept * self.value_bits + 7) // 8

    def _index_bytes(self, numel: int) -> int:
        kept = self.kept(numel)
        return subsets.number_bytes(numel, kept) if self.coded else (kept * 12 + 7) // 8

    def entropy_bytes(self, numel: int) -> float:
        """Bytes that `numel` values take where indices are coded at their entropy, log2 of the number of ways to choose
        them: 7.36 instead of 12 bits for 64 of 4,096. Values of 2 bits hardly compress."""
        blocks, rest = divmod(numel, self.block)
        return blocks * self._entropy(self.block) + (self._entropy(rest) if rest else 0.0)

    def _entropy(self, numel: int) -> float:
        kept = self.kept(numel)
        return _VALUES[self.value_bits] + (math.log2(math.comb(numel, kept)) + kept * self.value_bits) / 8

    def encode_blocks(self, values: Tensor) -> Tensor:
        numel, kept = values.shape[1], self.kept(values.shape[1])
        size = (values.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
        place = torch.arange(numel, device=values.device)
        unique = size * numel + (numel - 1 - place)  # no ties: the lower index is the larger
        index = unique.topk(kept, dim=1).indices.sort(1).values
        places = subsets.put_numbers(index, numel) if self.coded else put12(index)
        return torch.cat([*self._put_values(values.gather(1, index), places)], 1)

    def _put_values(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        if self.value_bits == 2:
            size = x.abs()
            above = size > tree_sum(size) * (1 / x.shape[1])
            levels = [short_float(_mean(size, of), 0) for of in (~above, above)]
            bits = torch.cat([torch.where(level < TINY, 0, level) for level in levels], 1)
            negative = (x.view(torch.int32) >> 31) & 1
            return put16(bits), index, pack(above.to(torch.int32) | negative << 1, 2)
        if self.value_bits == 8:
            coded = self._int8.encode_blocks(x)
            return coded[:, :2], index, coded[:, 2:]
        return index, x.contiguous().view(torch.uint8)

    def decode_blocks(self, records: Tensor, numel: int) -> Tensor:
        kept, shared = self.kept(numel), _VALUES[self.value_bits]
        end = shared + self._index_bytes(numel)
        places = records[:, shared:end]
        index = subsets.take_numbers(places, numel, kept) if self.coded else take12(places, kept)
        if index is None or not (index < numel).all() or not (index[:, 1:] > index[:, :-1]).all():
            raise self.bad("an index is out of range or out of order")
        out = torch.zeros(len(records), numel, dtype=torch.float32, device=records.device)
        return out.scatter_(1, index, self._take_values(records[:, :shared], records[:, end:], kept))

    def _take_values(self, shared: Tensor, codes: Tensor, kept: int) -> Tensor:
        if self.value_bits == 2:
            levels = take16(shared)
            if not ((levels == 0) | (levels >= TINY) & (levels <= (127 + 118) << 23)).all():
                raise self.bad("a level is out of range")
            code = unpack(codes, 2, kept).to(torch.int32)
            bits = torch.where(code & 1 > 0, levels[:, 1:], levels[:, :1]) | (code & 2) << 30
            return bits.view(torch.float32)
        if self.value_bits == 8:
            return self._int8.decode_blocks(torch.cat([shared, codes], 1), kept)
        return viewed(codes, torch.float32)


def _mean(size: Tensor, of: Tensor) -> Tensor:
    """Per row, the mean of what `of` marks; 0 where that is nothing."""
    return tree_sum(torch.where(of, size, 0.0)) / of.sum(1, keepdim=True).clamp(min=1).to(torch.float32)


def put12(index: Tensor) -> Tensor:
    """Indices (integers [rows, n] below 4096) as bytes (uint8 [rows, ceil(1.5 n)])."""
    rows, numel = index.shape
    first, second = torch.nn.functional.pad(index, (0, numel % 2)).view(rows, -1, 2).unbind(2)
    three = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2)
    return three.to(torch.uint8).view(rows, -1)[:, : (numel * 12 + 7) // 8]


def take12(bytes_: Tensor, numel: int) -> Tensor:
    """The indices (int64 [rows, numel]) that `put12` has put."""
    rows = len(bytes_)
    padded = torch.nn.functional.pad(bytes_, (0, -bytes_.shape[1] % 3)).view(rows, -1, 3).to(torch.int64)
    a, b, c = padded.unbind(2)
    return torch.stack([a | (b & 15) << 8, b >> 4 | c << 4], 2).view(rows, -1)[:, :numel]
