"""What the tests of codecs share: values that are hard to code, and what each codec states about its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

from diloco.codec import CODECS, Codec, native
from diloco.codec.blocks import Blocked

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs"
BLOCKED = {name: codec for name, codec in CODECS.items() if isinstance(codec, Blocked)}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@contextmanager
def eager() -> Iterator[None]:
    """Within it, no kernel is used."""
    before, native.ENABLED = native.ENABLED, False
    try:
        yield
    finally:
        native.ENABLED = before


def golden_values() -> Tensor:
    """The values whose payloads are kept: fp32, more than a chunk, with all kinds of blocks."""
    return torch.frombuffer(bytearray((GOLDEN / "fp32").read_bytes()), dtype=torch.float32)


def decoded(codec: Codec, values: Tensor) -> Tensor:
    """Flat values after a round trip."""
    return codec.unpack(codec.pack(values), (values.numel(),))


@st.composite
def hard_values(draw: st.DrawFn, most: int = 9000) -> Tensor:
    """Flat fp32 values of any number: normal ones times a size per stretch, with stretches of ties, zeros, outliers."""
    numel = draw(st.one_of(st.integers(0, 600), st.integers(0, most)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(numel, generator=generator)
    for _ in range(draw(st.integers(0, 4))):
        begin, length = draw(st.integers(0, max(0, numel - 1))), draw(st.integers(1, 3000))
        part = x[begin : begin + length]
        match draw(st.sampled_from(["zero", "ties", "size", "outlier", "tiny"])):
            case "zero":
                part.zero_()
            case "ties":
                part.sign_().mul_(4.0)  # among the largest of a chunk
            case "size":
                part.mul_(2.0 ** draw(st.integers(-130, 110)))
            case "outlier":
                part[:1] = 1e6
            case "tiny":
                part.mul_(2.0**-126).mul_(2.0**-20)
    return x.clamp_(-(2.0**117), 2.0**117)


def worst_relative(share: float) -> Callable[[Codec, Tensor, Tensor], bool]:
    """Whether no error is more than a share of its value, down to the smallest normal one."""

    def holds(_: Codec, x: Tensor, y: Tensor) -> bool:
        return bool(((y - x).abs() <= share * x.abs().clamp(min=2.0**-126)).all())

    return holds


def per_block(bound: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Codec, Tensor, Tensor], bool]:
    """Whether no error is above what a value and the largest magnitude of its block allow."""

    def holds(codec: Codec, x: Tensor, y: Tensor) -> bool:
        assert isinstance(codec, Blocked)
        parts = zip(x.split(codec.block), y.split(codec.block), strict=True)
        return all(bool(((b - a).abs() <= bound(a.abs(), a.abs().max())).all()) for a, b in parts if len(a))

    return holds


def _int2(codec: Codec, x: Tensor, y: Tensor) -> bool:
    assert isinstance(codec, Blocked)
    for a, b in zip(x.split(codec.block), y.split(codec.block), strict=True):
        energy = (a**2).sum()
        tiny = len(a) * (4 * 2.0**-126) ** 2
        if not ((b - a) ** 2).sum() <= energy - 0.85 * a.abs().sum() ** 2 / max(1, len(a)) + 1e-6 * energy + tiny:
            return False
    return True


def _topk(codec: Codec, x: Tensor, y: Tensor) -> bool:
    assert isinstance(codec, Blocked)
    return all(
        bool(((b - a) ** 2).sum() <= (a**2).sum() * (1 + 1e-6) + 1e-70)
        for a, b in zip(x.split(codec.block), y.split(codec.block), strict=True)
    )


STATED: dict[str, Callable[[Codec, Tensor, Tensor], bool]] = {
    "fp32": worst_relative(0.0),
    "bf16": worst_relative(2.0**-8),
    "fp16": per_block(lambda size, top: torch.maximum(2.0**-11 * size, (2.0**-39 * top).clamp(min=2.0**-127))),
    "int8": per_block(lambda size, top: (0.504 * top / 127).clamp(min=2.0**-127)),
    "int4": per_block(lambda size, top: (0.504 * top / 7).clamp(min=2.0**-127)),
    "e3m0": per_block(lambda size, top: torch.maximum(size / 3, (2.0**-7 * top * 4 / 3).clamp(min=2.0**-126))),
    "int2": _int2,
    "topk": _topk,
    "topk-128": _topk,
    "topk-int8": _topk,
    "topk-coded": _topk,
}
"""Per codec: whether a round trip (codec, fp64 values, fp64 values that come back) keeps the error that it states."""

SIZES: dict[str, Callable[[int], int]] = {
    "fp32": lambda n: 4 * n,
    "bf16": lambda n: 2 * n,
    "fp16": lambda n: 2 * n + math.ceil(n / 256),
    "int8": lambda n: n + 2 * math.ceil(n / 256),
    "int4": lambda n: math.ceil(n / 2) + 2 * math.ceil(n / 256),
    "e3m0": lambda n: math.ceil(n / 2) + math.ceil(n / 256),
    "int2": lambda n: math.ceil(n / 4) + 2 * math.ceil(n / 256),
    "topk": lambda n: _sparse(n, 64, 4, 2),
    "topk-128": lambda n: _sparse(n, 128, 4, 2),
    "topk-int8": lambda n: _sparse(n, 64, 2, 8),
    "topk-coded": lambda n: _sparse(n, 64, 4, 2, coded=True),
}
"""Bytes of n values, as docs/codecs.md has it."""


def _sparse(numel: int, keep: int, shared: int, bits: int, *, coded: bool = False) -> int:
    chunks, rest = divmod(numel, 4096)

    def record(m: int) -> int:
        k = math.ceil(keep * m / 4096)
        index_bits = (math.comb(m, k) - 1).bit_length() if coded else 12 * k
        return shared + math.ceil(index_bits / 8) + math.ceil(bits * k / 8)

    return chunks * record(4096) + (record(rest) if rest else 0)
