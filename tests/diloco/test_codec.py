"""Codecs: one contract that every codec keeps, and what each promises on top of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.codec import CODECS, Codec, by_id
from diloco.config import CodecName
from diloco.errors import CodecError
from diloco.layout import Box
from tests.diloco.test_layout import shaped_boxes

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)

GOLDEN = [0.0, -0.0, 1.0, -2.5, 3.14159274, 1e-45, 1.00390625, float("inf")]
"""Values whose codes are frozen: zeros, exact ones, one to round, a subnormal, a tie, an infinity."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a codec states about itself."""

    wire: tuple[int, int]
    """Id and version."""
    bytes_per_value: int
    relative_error: float
    """Bound for values from 2^-126 to 2^127 in size."""
    exact: tuple[float, ...]
    """Values that come back as they are."""
    golden: bytes
    """The payload of `GOLDEN`."""


PROMISES: dict[str, Promise] = {
    "fp32": Promise(
        wire=(1, 1),
        bytes_per_value=4,
        relative_error=0.0,
        exact=(0.1, 16_777_215.0, 2.0**-149, 3.4028234663852886e38),
        golden=struct.pack("<8f", *GOLDEN),
    ),
    "bf16": Promise(
        wire=(2, 1),
        bytes_per_value=2,
        relative_error=2.0**-8,
        exact=(255.0, -256.0, 0.15625, 1.0078125, 2.0**-133, 2.0**127, 3.3895313892515355e38),
        golden=bytes.fromhex("0000 0080 803f 20c0 4940 0000 803f 807f"),
    ),
}

normals = st.one_of(*(st.floats(2.0**-126, 2.0**127, width=32).map(lambda x, s=sign: s * x) for sign in (1, -1)))


def encoded(codec: Codec, values: Tensor) -> Tensor:
    """The payload of values of any shape."""
    payload = torch.empty(codec.size(values.numel()), dtype=torch.uint8)
    codec.encode(values.contiguous().view(-1), payload)
    return payload


def decoded(codec: Codec, payload: Tensor, numel: int) -> Tensor:
    out = torch.empty(numel, dtype=torch.float32)
    codec.decode(payload, out)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
class TestEveryCodec:
    """The contract of the seam. A new codec enters it by its row in `PROMISES`."""

    def test_is_known_by_id_version_and_name(self, codec: Codec) -> None:
        assert (codec.id, codec.version) == PROMISES[codec.name].wire
        assert by_id(codec.id, codec.version) is codec
        assert CODECS[codec.name] is codec

    @given(numel=st.integers(0, 10**12))
    @PROPERTY
    def test_takes_the_bytes_it_says(self, codec: Codec, numel: int) -> None:
        assert codec.size(numel) == numel * PROMISES[codec.name].bytes_per_value

    @given(values=st.lists(normals, max_size=20))
    @PROPERTY
    def test_round_trip_error_is_bounded(self, codec: Codec, values: list[float]) -> None:
        x = torch.tensor(values, dtype=torch.float32)
        y = decoded(codec, encoded(codec, x), len(values))
        error = (y.double() - x.double()).abs()
        assert torch.all(error <= PROMISES[codec.name].relative_error * x.double().abs())

    def test_representable_values_are_exact(self, codec: Codec) -> None:
        x = torch.tensor([sign * value for value in PROMISES[codec.name].exact for sign in (1, -1)])
        assert same_bits(decoded(codec, encoded(codec, x), len(x)), x)

    @given(values=st.lists(st.floats(width=32, allow_nan=False), max_size=20))
    @PROPERTY
    def test_what_was_decoded_is_exact(self, codec: Codec, values: list[float]) -> None:
        once = decoded(codec, encoded(codec, torch.tensor(values, dtype=torch.float32)), len(values))
        assert same_bits(decoded(codec, encoded(codec, once), len(values)), once)

    @given(values=st.lists(st.floats(width=32, allow_nan=False), max_size=20))
    @PROPERTY
    def test_signs_survive(self, codec: Codec, values: list[float]) -> None:
        x = torch.tensor(values, dtype=torch.float32)
        assert torch.equal(torch.signbit(decoded(codec, encoded(codec, x), len(values))), torch.signbit(x))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_values_that_are_not_finite_stay_so(self, codec: Codec, value: float) -> None:
        x = torch.tensor([1.0, value, 2.0])
        assert torch.isfinite(decoded(codec, encoded(codec, x), 3)).tolist() == [True, False, True]

    def test_the_bytes_of_a_version_never_change(self, codec: Codec) -> None:
        assert encoded(codec, torch.tensor(GOLDEN)).numpy().tobytes() == PROMISES[codec.name].golden

    @given(case=shaped_boxes())
    @PROPERTY
    def test_a_part_of_the_whole_is_the_code_of_the_part(
        self, codec: Codec, case: tuple[tuple[int, ...], list[Box]]
    ) -> None:
        shape, [box] = case
        values = torch.linspace(-3.0, 5.0, torch.Size(shape).numel()).view(shape)
        part = codec.select(encoded(codec, values), shape, box)
        assert part.dtype == torch.uint8
        assert torch.equal(part, encoded(codec, values[box.slices]))

    @given(numels=st.lists(st.integers(0, 5), max_size=5))
    @PROPERTY
    def test_payloads_lie_one_after_the_other(self, codec: Codec, numels: list[int]) -> None:
        parts = [torch.full((n,), float(i + 1)) for i, n in enumerate(numels)]
        payload = torch.cat([torch.empty(0, dtype=torch.uint8), *(encoded(codec, part) for part in parts)])
        start = 0
        for part in parts:
            size = codec.size(len(part))
            assert torch.equal(decoded(codec, payload[start : start + size], len(part)), part)
            start += size
        assert start == len(payload)

    @pytest.mark.parametrize("off", [-1, 1])
    def test_a_payload_of_another_size_is_refused_and_writes_nothing(self, codec: Codec, off: int) -> None:
        size = codec.size(3) + off
        said = f"{codec.name}: {size} bytes cannot be 3 values, which take {codec.size(3)}"
        values, payload = torch.full((3,), 7.0), torch.full((size,), 9, dtype=torch.uint8)
        with pytest.raises(CodecError, match=said):
            codec.decode(payload, values)
        with pytest.raises(CodecError, match=said):
            codec.encode(values, payload)
        with pytest.raises(CodecError, match=said):
            codec.check(payload, 3)
        assert values.tolist() == [7.0] * 3
        assert payload.tolist() == [9] * size

    def test_a_payload_of_the_right_size_is_taken(self, codec: Codec) -> None:
        codec.check(torch.empty(codec.size(3), dtype=torch.uint8), 3)


def test_every_codec_has_its_promise_and_its_setting() -> None:
    assert set(CODECS) == set(PROMISES) == set(get_args(CodecName))
    assert len({(codec.id, codec.version) for codec in CODECS.values()}) == len(CODECS)


@pytest.mark.parametrize(("codec_id", "version"), [(0, 1), (99, 1), (1, 0), (1, 2)])
def test_an_unknown_codec_is_refused_with_the_known_ones(codec_id: int, version: int) -> None:
    with pytest.raises(CodecError) as caught:
        by_id(codec_id, version)
    assert str(caught.value) == (
        f"unknown codec id {codec_id} version {version}; known here: fp32 (id 1, version 1), bf16 (id 2, version 1)"
    )
