"""Codecs: fp32 tensors to bytes and back, behind one seam.

A payload is the codes of its boxes or tensors, one after the other, little-endian, with nothing between. A codec is
known on the wire by `id` and `version`; the bytes of a version never change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from diloco.errors import CodecError
from diloco.layout import Box


class Codec(ABC):
    """Turns fp32 values into bytes and back. Stateless, and safe to use from several threads."""

    id: ClassVar[int]
    name: ClassVar[str]
    version: ClassVar[int] = 1

    @abstractmethod
    def size(self, numel: int) -> int:
        """Bytes that `numel` values of one tensor or box take."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Writes the codes of `values` (fp32 [n], contiguous) to `out` (uint8 [size(n)], contiguous)."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Writes the values of `payload` (uint8 [size(n)], contiguous) to `out` (fp32 [n], contiguous)."""

    @abstractmethod
    def select(self, payload: Tensor, shape: Sequence[int], box: Box) -> Tensor:
        """The part of a whole tensor's payload that decodes to `box` (uint8 [size(box.numel)])."""

    def check(self, payload: Tensor, numel: int) -> None:
        """Raises `CodecError` unless `payload` has the bytes of `numel` values."""
        if payload.numel() != self.size(numel):
            raise CodecError(
                f"{self.name}: {payload.numel()} bytes cannot be {numel} values, which take {self.size(numel)}"
            )


class Cast(Codec):
    """Every value as one element of a narrower (or the same) floating-point type, rounded to nearest even."""

    dtype: ClassVar[torch.dtype]

    def size(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        self.check(out, values.numel())
        out.view(self.dtype).copy_(values)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self.check(payload, out.numel())
        out.copy_(payload.view(self.dtype))

    def select(self, payload: Tensor, shape: Sequence[int], box: Box) -> Tensor:
        items = payload.view(*shape, self.dtype.itemsize)
        return items[box.slices].reshape(-1)


class Fp32(Cast):
    """The values themselves. 32 bits a value; no error."""

    id, name, dtype = 1, "fp32", torch.float32


class Bf16(Cast):
    """bfloat16. 16 bits a value; relative error below 2^-8 for normal values."""

    id, name, dtype = 2, "bf16", torch.bfloat16


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Bf16())}
_BY_ID = {(codec.id, codec.version): codec for codec in CODECS.values()}


def by_id(codec_id: int, version: int) -> Codec:
    """The codec of an id and version on the wire. Raises `CodecError` for one that is not known here."""
    try:
        return _BY_ID[codec_id, version]
    except KeyError:
        known = ", ".join(f"{c.name} (id {c.id}, version {c.version})" for c in CODECS.values())
        raise CodecError(f"unknown codec id {codec_id} version {version}; known here: {known}") from None
