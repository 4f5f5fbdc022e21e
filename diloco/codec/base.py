"""What a codec is, and those that cast every value by itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from diloco.errors import CodecError
from diloco.layout import Box, TensorSpec


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
    """Values that are coded together: a payload may be made and read in pieces that begin at multiples of it."""

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

    id, name, dtype = 1, "fp32", torch.float32


class Bf16(Cast):
    """bfloat16. 16 bits a value; relative error below 2^-8 for normal values."""

    id, name, dtype = 2, "bf16", torch.bfloat16
