"""What a codec is, and those that cast every value by itself."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from diloco.codec import native
from diloco.errors import CodecError
from diloco.layout import Box, TensorSpec

AT_ONCE = 2**18
"""Values that eager definitions work on at a time, so that what they make stays in the cache."""
_BITS, _FLOAT = struct.Struct("=i"), struct.Struct("=f")


class Choice(Protocol):
    """Which codec each tensor of a run takes, one way. A codec is the choice of itself for all."""

    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def feedback(self) -> bool:
        """Whether some tensor takes a codec with error feedback."""

    def of(self, spec: TensorSpec) -> Codec:
        """The codec of a tensor. Depends on its name, shape and kind alone, so that everybody chooses alike."""


class Codec(ABC):
    """Turns fp32 values into bytes and back. Stateless, and safe to use from several threads.

    The bytes of `n` values of one tensor or box are a *payload*. The bytes from it that one box of the tensor needs
    are a *part*: what the coordinator sends to the rank that holds the box. A part decodes to the same bits as the
    payload does there.
    """

    id: int
    name: str
    version: int = 1
    feedback: bool = False
    """Whether what it drops of a contribution is worth keeping for the next one."""
    block: int = 1
    """Values that are coded together: from one multiple of it to another, a payload is the payload of those values."""
    kernel: native.Kernel | None = None
    """What does whole blocks on the CPU to the same bits, where it is built."""

    def slices(self, numel: int, at_once: int = 2**18) -> Iterator[tuple[slice, slice]]:
        """Cuts `numel` values and their payload into pieces: (values, bytes) of about `at_once` values each."""
        step = max(1, at_once // self.block) * self.block
        for begin in range(0, numel, step):
            end, start = min(begin + step, numel), self.size(begin)
            yield slice(begin, end), slice(start, start + self.size(end - begin))

    def of(self, spec: TensorSpec) -> Codec:
        """Itself: as a `Choice` it is the codec of every tensor."""
        return self

    @abstractmethod
    def size(self, numel: int) -> int:
        """Bytes of a payload of `numel` values."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Writes the payload of `values` (fp32 [n], contiguous) to `out` (uint8 [size(n)], contiguous).

        Raises:
            CodecError: `out` has another size; or values that the codec has no codes for.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Writes the values of `payload` (uint8 [size(n)], contiguous) to `out` (fp32 [n], contiguous).

        Raises:
            CodecError: the payload has another size; or it is none of this codec's, and `out` holds anything.
        """

    @abstractmethod
    def part_size(self, shape: Sequence[int], box: Box) -> int:
        """Bytes of the part for a box of a tensor; `size(numel)` for the whole tensor."""

    @abstractmethod
    def select(self, payload: Tensor, shape: Sequence[int], box: Box) -> Tensor:
        """The part for a box (uint8 [part_size(shape, box)]) of the payload of a tensor. May share its storage."""

    @abstractmethod
    def decode_part(self, part: Tensor, shape: Sequence[int], box: Box, out: Tensor) -> None:
        """Writes the values of a part to `out` (fp32 [box.numel], contiguous). Raises as `decode` does."""

    def check(self, payload: Tensor, numel: int) -> None:
        """Raises `CodecError` unless `payload` has the bytes of `numel` values."""
        if payload.numel() != self.size(numel):
            raise CodecError(
                f"{self.name}: {payload.numel()} bytes cannot be {numel} values, which take {self.size(numel)}"
            )

    @property
    def at_once(self) -> int:
        """Values to work on at a time: whole blocks that fit into the cache."""
        return max(1, AT_ONCE // self.block) * self.block

    def window(self, payload: Tensor, numel: int, begin: int, end: int) -> Tensor:
        """The values from `begin` to `end` (fp32) of a payload of `numel`. Raises as `decode` does."""
        first, last = begin // self.block * self.block, min(-(-end // self.block) * self.block, numel)
        out = torch.empty(last - first, dtype=torch.float32, device=payload.device)
        self.decode(payload[self.size(first) : self.size(last)], out)
        return out[begin - first : end - first]

    def verify(self, payload: Tensor, numel: int) -> None:
        """Raises `CodecError` where `payload` does not decode to `numel` values."""
        self.check(payload, numel)
        if self.block == 1:
            return
        done = 0
        if self.kernel and native.usable(payload):
            done = numel // self.block * self.block
            if not self.kernel.sound(payload, numel // self.block):
                raise self.bad("a scale or an index is out of range")
        for begin in range(done, numel, self.at_once):
            self.window(payload, numel, begin, min(begin + self.at_once, numel))

    def largest(self, payload: Tensor, numel: int, threads: int = 0) -> float:
        """The largest magnitude of the values of a payload; infinite or NaN where one is. Raises as `decode` does.

        On `threads` threads; 0 for as many as torch computes with.
        """
        self.check(payload, numel)
        done = most = 0
        if self.kernel and native.usable(payload):
            done = numel // self.block * self.block
            most = self.kernel.largest(payload, numel // self.block, threads)
            if most < 0:
                raise self.bad("a scale or an index is out of range")
        for begin in range(done, numel, self.at_once):
            values = self.window(payload, numel, begin, min(begin + self.at_once, numel))
            most = max(most, int((values.view(torch.int32) & 0x7FFFFFFF).max()))
        return float(_FLOAT.unpack(_BITS.pack(most))[0])

    def bad(self, what: str) -> CodecError:
        """The error of a payload that no encoder of this codec writes."""
        return CodecError(f"{self.name}: the payload is damaged: {what}")

    def no_codes(self) -> CodecError:
        """The error of values that cannot be coded."""
        return CodecError(f"{self.name}: values that are not finite or not below 2^118 have no codes")

    def pack(self, values: Tensor) -> Tensor:
        """The payload (uint8) of a tensor of any shape, strides and floating-point type, on its device."""
        flat = values.detach().to(torch.float32).contiguous().view(-1)
        payload = torch.empty(self.size(flat.numel()), dtype=torch.uint8, device=flat.device)
        self.encode(flat, payload)
        return payload

    def unpack(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor (fp32 of `shape`) of a payload, on its device. Raises as `decode` does, before it allocates."""
        numel = math.prod(shape)
        self.check(payload, numel)
        out = torch.empty(numel, dtype=torch.float32, device=payload.device)
        self.decode(payload, out)
        return out.view(tuple(shape))


class Cast(Codec):
    """Every value as one element of a narrower (or the same) floating-point type, rounded to nearest even."""

    dtype: ClassVar[torch.dtype]

    def size(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        self.check(out, values.numel())
        if self._aligned(out):
            out.view(self.dtype).copy_(values)
        else:
            out.copy_(values.to(self.dtype).view(torch.uint8))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self.check(payload, out.numel())
        out.copy_((payload if self._aligned(payload) else payload.clone()).view(self.dtype))

    def _aligned(self, payload: Tensor) -> bool:
        """Whether a payload can be seen as elements where it lies; behind other codecs' it begins anywhere."""
        return payload.storage_offset() % self.dtype.itemsize == 0 and payload.data_ptr() % self.dtype.itemsize == 0

    def part_size(self, shape: Sequence[int], box: Box) -> int:
        return self.size(box.numel)

    def select(self, payload: Tensor, shape: Sequence[int], box: Box) -> Tensor:
        items = payload.view(*shape, self.dtype.itemsize)
        return items[box.slices].reshape(-1)

    def decode_part(self, part: Tensor, shape: Sequence[int], box: Box, out: Tensor) -> None:
        self.decode(part, out)


class Fp32(Cast):
    """The values themselves. 32 bits a value; no error."""

    id, name, dtype, kernel = 1, "fp32", torch.float32, native.Kernel("fp32")


class Bf16(Cast):
    """bfloat16. 16 bits a value; relative error below 2^-8 for normal values."""

    id, name, dtype, kernel = 2, "bf16", torch.bfloat16, native.Kernel("bf16")
