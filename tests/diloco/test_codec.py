"""Codecs: one contract that every codec keeps, and what each promises on top of it."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.codec import CODECS, Codec, by_id, by_name, native
from diloco.codec.subsets import number_bytes, put_numbers, take_numbers
from diloco.codec.topk import TopK
from diloco.errors import CodecError, ConfigError
from diloco.layout import Box
from tests.diloco.codecs import BLOCKED, GOLDEN, SIZES, STATED, decoded, golden_values, hard_values, same_bits
from tests.diloco.test_layout import shaped_boxes

PROPERTY = settings(derandomize=True, deadline=None, max_examples=20)

WIRE = {
    "fp32": (1, 1),
    "bf16": (2, 1),
    "fp16": (3, 1),
    "int8": (4, 1),
    "int4": (5, 1),
    "e3m0": (6, 1),
    "int2": (7, 1),
    "topk": (16, 1),
    "topk-128": (17, 1),
    "topk-int8": (18, 1),
    "topk-coded": (2**16 + 63 * 16 + 1, 1),
}
FEEDBACK = {"int4", "e3m0", "int2", "topk", "topk-128", "topk-int8", "topk-coded"}


@st.composite
def shaped_values(draw: st.DrawFn) -> tuple[Tensor, Box]:
    """A tensor of any shape, of up to a few thousand values, and a box in it."""
    shape, [box] = draw(shaped_boxes())
    grown = tuple(draw(st.sampled_from([1, 7, 20])) for _ in shape[:2])
    shape = (*(n * g for n, g in zip(shape, grown, strict=False)), *shape[2:])
    offset = tuple(o * g for o, g in zip(box.offset, (*grown, 1, 1), strict=False))
    size = tuple(s * g for s, g in zip(box.size, (*grown, 1, 1), strict=False))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randn(shape, generator=generator), Box(offset, size)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
class TestEveryCodec:
    """The contract of the seam. A new codec enters it by its rows in `tests/diloco/codecs.py`."""

    def test_is_known_by_id_version_and_name(self, codec: Codec) -> None:
        assert (codec.id, codec.version) == WIRE[codec.name]
        assert by_id(codec.id, codec.version) is codec
        assert CODECS[codec.name] is codec
        assert codec.feedback == (codec.name in FEEDBACK)

    @given(numel=st.integers(0, 10**12))
    @PROPERTY
    def test_takes_the_bytes_it_says(self, codec: Codec, numel: int) -> None:
        assert codec.size(numel) == SIZES[codec.name](numel)
        assert codec.size(numel % 10000) == SIZES[codec.name](numel % 10000)

    @given(x=hard_values())
    @PROPERTY
    def test_keeps_the_error_it_states(self, codec: Codec, x: Tensor) -> None:
        assert STATED[codec.name](codec, x.double(), decoded(codec, x).double())

    @given(x=hard_values())
    @PROPERTY
    def test_no_value_that_comes_back_is_subnormal(self, codec: Codec, x: Tensor) -> None:
        if codec.name in BLOCKED:
            size = decoded(codec, x).abs()
            assert bool(((size == 0) | (size >= 2.0**-126)).all())

    @given(case=shaped_values(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    @PROPERTY
    def test_takes_any_shape_strides_and_type(self, codec: Codec, case: tuple[Tensor, Box], dtype: torch.dtype) -> None:
        x = case[0].to(dtype)
        for given_ in (x, x.mT if x.ndim > 1 else x, torch.stack([x, x], -1)[..., 0]):
            flat = given_.to(torch.float32).reshape(-1).clone()
            payload = codec.pack(given_)
            assert torch.equal(payload, codec.pack(flat))
            assert same_bits(codec.unpack(payload, given_.shape), decoded(codec, flat).view(given_.shape))

    @given(case=shaped_values())
    @PROPERTY
    def test_a_part_is_as_the_whole_is(self, codec: Codec, case: tuple[Tensor, Box]) -> None:
        x, box = case
        payload = codec.pack(x)
        part = codec.select(payload, x.shape, box)
        assert part.dtype == torch.uint8
        assert part.numel() == codec.part_size(x.shape, box) <= max(len(payload), codec.size(box.numel))
        out = torch.full((box.numel,), torch.nan)
        codec.decode_part(part, x.shape, box, out)
        assert same_bits(out, codec.unpack(payload, x.shape)[box.slices].reshape(-1))

    def test_the_whole_is_a_part(self, codec: Codec) -> None:
        x = golden_values()
        whole = Box.whole(x.shape)
        assert codec.part_size(x.shape, whole) == codec.size(x.numel())
        assert torch.equal(codec.select(codec.pack(x), x.shape, whole), codec.pack(x))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2.0**118, -3e38])
    @pytest.mark.parametrize("where", [0, 100, 255, 256, 4095, 5000])
    def test_values_that_are_not_finite_are_never_made_finite(self, codec: Codec, value: float, where: int) -> None:
        x = torch.ones(5001)
        x[where] = value
        if codec.name in BLOCKED:
            with pytest.raises(CodecError, match=f"{codec.name}: values that are not finite or not below 2"):
                codec.pack(x)
        else:
            assert decoded(codec, x).isfinite().tolist() == x.isfinite().tolist()

    def test_the_bytes_of_a_version_never_change(self, codec: Codec) -> None:
        x = golden_values()
        payload = torch.frombuffer(bytearray((GOLDEN / codec.name).read_bytes()), dtype=torch.uint8)
        assert torch.equal(codec.pack(x), payload)
        known = json.loads((GOLDEN / "decoded.json").read_text())
        assert hashlib.sha256(codec.unpack(payload, x.shape).numpy().tobytes()).hexdigest() == known[codec.name]

    @pytest.mark.parametrize("before", [1, 2, 3])
    def test_a_payload_may_begin_at_any_byte(self, codec: Codec, before: int) -> None:
        x = golden_values()
        room = torch.zeros(before + codec.size(x.numel()), dtype=torch.uint8)
        codec.encode(x, room[before:])
        assert torch.equal(room[before:], codec.pack(x))
        assert same_bits(codec.unpack(room[before:], x.shape), decoded(codec, x))

    @given(numels=st.lists(st.integers(0, 600), max_size=5))
    @PROPERTY
    def test_payloads_lie_one_after_the_other(self, codec: Codec, numels: list[int]) -> None:
        parts = [torch.full((n,), float(i + 1)) for i, n in enumerate(numels)]
        payload = torch.cat([torch.empty(0, dtype=torch.uint8), *(codec.pack(part) for part in parts)])
        start = 0
        for part in parts:
            size = codec.size(len(part))
            assert same_bits(codec.unpack(payload[start : start + size], part.shape), decoded(codec, part))
            start += size
        assert start == len(payload)

    @pytest.mark.parametrize("off", [-1, 1])
    def test_a_payload_of_another_size_is_refused_and_writes_nothing(self, codec: Codec, off: int) -> None:
        size = codec.size(3) + off
        said = f"{codec.name}: {size} bytes cannot be 3 values, which take {codec.size(3)}"
        values, payload = torch.full((3,), 7.0), torch.full((size,), 9, dtype=torch.uint8)
        box = Box.whole((3,))
        for work in (
            lambda: codec.decode(payload, values),
            lambda: codec.encode(values, payload),
            lambda: codec.check(payload, 3),
            lambda: codec.unpack(payload, (3,)),
            lambda: codec.decode_part(payload, (3,), box, values),
        ):
            with pytest.raises(CodecError, match=said):
                work()
        assert values.tolist() == [7.0] * 3
        assert payload.tolist() == [9] * size

    def test_a_payload_of_the_right_size_is_taken(self, codec: Codec) -> None:
        codec.check(torch.empty(codec.size(3), dtype=torch.uint8), 3)

    @given(bytes_=st.binary(max_size=40), numel=st.integers(0, 10**15))
    @PROPERTY
    def test_what_is_announced_too_large_is_refused_before_it_is_made(
        self, codec: Codec, bytes_: bytes, numel: int
    ) -> None:
        payload = torch.frombuffer(bytearray(bytes_ or b"0"), dtype=torch.uint8)
        if codec.size(numel) != len(payload):
            with pytest.raises(CodecError):
                codec.unpack(payload, (numel,))

    @given(x=hard_values(), flips=st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 255)), max_size=3))
    @PROPERTY
    def test_a_damaged_payload_is_refused_or_decodes_to_something_bounded(
        self, codec: Codec, x: Tensor, flips: list[tuple[int, int]]
    ) -> None:
        """Both ways agree on which it is. Finding all damage is what the checksums of a transfer are for."""
        payload = codec.pack(x)
        for where, flip in flips if len(payload) else []:
            payload[where % len(payload)] ^= flip
        try:
            y = codec.unpack(payload, x.shape)
        except CodecError as error:
            assert "the payload is damaged" in str(error)
            return
        if codec.name in BLOCKED:
            assert bool((y.abs() <= 2.0**126).all())


def test_every_codec_has_its_promise_and_its_setting() -> None:
    assert set(CODECS) == set(WIRE) == set(STATED) == set(SIZES)
    assert len({(codec.id, codec.version) for codec in CODECS.values()}) == len(CODECS)


@pytest.mark.parametrize(("codec_id", "version"), [(0, 1), (99, 1), (1, 0), (1, 2)])
def test_an_unknown_codec_is_refused_with_the_known_ones(codec_id: int, version: int) -> None:
    with pytest.raises(CodecError) as caught:
        by_id(codec_id, version)
    told = f"unknown codec id {codec_id} version {version}; known here: fp32 (id 1, version 1), bf16 (id 2, version 1)"
    assert str(caught.value).startswith(told)
    assert "topk (id 16, version 1)" in str(caught.value)


# -- what single codecs promise --------------------------------------------------------------------------------------

EXACT = {
    "fp32": (0.1, 16_777_215.0, 2.0**-149, 3.4028234663852886e38),
    "bf16": (255.0, -256.0, 0.15625, 1.0078125, 2.0**-133, 2.0**127, 3.3895313892515355e38),
    "fp16": (2047.0, 0.5, 1.0, -3.140625, 0.0),
    "int8": (127.0, 1.0, -64.0, 0.0),
    "int4": (7.0, -1.0, 0.0, 3.0),
    "e3m0": (2.0, 1.0, 0.0, 0.03125, -0.0625),
}


@pytest.mark.parametrize("name", EXACT)
def test_representable_values_are_exact(name: str) -> None:
    x = torch.tensor([sign * value for value in EXACT[name] for sign in (1, -1) if value or sign > 0])
    assert torch.equal(decoded(CODECS[name], x), x)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "e3m0"])
@given(x=hard_values(most=2000))
@settings(PROPERTY, max_examples=20)
def test_what_was_decoded_is_exact(name: str, x: Tensor) -> None:
    once = decoded(CODECS[name], x)
    assert torch.equal(decoded(CODECS[name], once), once)


def test_e3m0_rounds_to_the_nearest_level() -> None:
    x = torch.tensor([1.0, 0.76, 0.75, 0.74, 0.0234, 0.0235, 0.0157, 2.0**-7, 2.0**-7 - 1e-6, -0.3])
    y = [1.0, 1.0, 1.0, 0.5, 2.0**-6, 2.0**-5, 2.0**-6, 2.0**-6, 0.0, -0.25]
    assert decoded(CODECS["e3m0"], x).tolist() == y


def test_int2_takes_its_step_from_the_mean_magnitude() -> None:
    x = torch.tensor([1.0, -1.0, 3.0, -3.0])  # mean 2, step 1.25
    assert decoded(CODECS["int2"], x).tolist() == [1.25, -1.25, 3.75, -3.75]
    outlier = torch.ones(256)
    outlier[7] = 1000.0
    assert (decoded(CODECS["int2"], outlier) - outlier).norm() < outlier.norm()


@pytest.mark.parametrize("bits", [2, 8, 32])
def test_topk_keeps_the_largest_and_the_first_of_equal_ones(bits: int) -> None:
    codec = TopK("x", 0, keep=64, value_bits=bits)
    x = torch.zeros(2 * 4096)
    x[:4096] = torch.arange(4096.0).flip(0)
    x[4096 + 100 : 4096 + 300] = -2.0  # 200 ties, of which the first 61 are kept
    x[4096 + torch.tensor([50, 1000, 4095])] = 3.0
    y = decoded(codec, x)
    assert y[:4096].nonzero().flatten().tolist() == list(range(64))
    assert y[4096:].nonzero().flatten().tolist() == [50, *range(100, 161), 1000, 4095]
    if bits == 2:  # two levels are enough here
        assert torch.equal(y[4096:].unique(), torch.tensor([-2.0, 0.0, 3.0]))
    if bits == 32:
        assert torch.equal(y[4096:].nonzero(), (y[4096:] == x[4096:]).logical_and(y[4096:] != 0).nonzero())


@given(x=hard_values())
@PROPERTY
def test_topk_with_values_as_they_are_leaves_the_stated_share(x: Tensor) -> None:
    codec = TopK("x", 0, keep=64, value_bits=32)
    for a, b in zip(x.double().split(4096), decoded(codec, x).double().split(4096), strict=True):
        left = ((a - b) ** 2).sum()
        assert left <= (1 - codec.kept(max(1, len(a))) / max(1, len(a))) * (a**2).sum() * (1 + 1e-12)
        assert torch.equal(b[b != 0], a[b != 0])


def test_topk_of_a_short_chunk_keeps_the_same_share() -> None:
    codec = CODECS["topk"]
    assert isinstance(codec, TopK)
    assert [codec.kept(n) for n in (1, 64, 65, 4095, 4096)] == [1, 1, 2, 64, 64]
    assert decoded(codec, torch.tensor([-0.5])).tolist() == [-0.5]
    assert decoded(codec, torch.arange(130.0)).nonzero().flatten().tolist() == [127, 128, 129]


def test_the_entropy_of_topk_is_as_stated() -> None:
    codec = CODECS["topk"]
    assert isinstance(codec, TopK)
    indices = (codec.entropy_bytes(4096) - 4 - 16) * 8 / 64
    assert indices == pytest.approx(7.36, abs=0.01)
    assert codec.entropy_bytes(4096 + 10) < codec.size(4096 + 10)
    assert codec.size(4096) * 8 / 4096 == pytest.approx(0.2266, abs=1e-4)


@pytest.mark.parametrize("name", ["topk-coded", "topk-128-coded", "topk-7-int8-coded", "topk-1-fp32-coded"])
@pytest.mark.parametrize("numel", [0, 1, 63, 65, 1000, 4096, 3 * 4096 + 17])
def test_coded_indices_take_their_entropy_and_give_the_same_values(name: str, numel: int) -> None:
    coded, plain = by_name(name), by_name(name.removesuffix("-coded"))
    assert isinstance(coded, TopK)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert same_bits(decoded(coded, x), decoded(plain, x))
    records = -(-numel // 4096)
    assert 0 <= coded.size(numel) - coded.entropy_bytes(numel) <= 2 * records  # less than a byte for each of two fields


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data(), numel=st.integers(1, 4096))
def test_every_set_of_indices_has_its_own_number(data: st.DataObject, numel: int) -> None:
    kept = data.draw(st.integers(1, min(numel, 128)))
    index = sorted(data.draw(st.sets(st.integers(0, numel - 1), min_size=kept, max_size=kept)))
    number = put_numbers(torch.tensor([index]), numel)
    assert int.from_bytes(bytes(number[0].tolist()), "little") == sum(math.comb(i, j) for j, i in enumerate(index, 1))
    found = take_numbers(number, numel, kept)
    assert found is not None
    assert found.tolist() == [index]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("numel", [4096, 8, 1])
def test_a_number_without_indices_is_refused(numel: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ENABLED", native.ENABLED and compiled)
    codec = CODECS["topk-coded"]
    assert isinstance(codec, TopK)
    payload, kept = codec.pack(torch.linspace(0, 1, numel)), codec.kept(numel)
    size = number_bytes(numel, kept)
    payload[4 : 4 + size] = torch.tensor(list(math.comb(numel, kept).to_bytes(max(size, 1), "little")[:size]))
    if size:
        with pytest.raises(CodecError, match="topk-coded: the payload is damaged"):
            codec.unpack(payload, (numel,))
    else:
        assert codec.unpack(payload, (numel,)).numel() == numel  # there is one choice, and nothing to say about it


@pytest.mark.parametrize(
    ("name", "id_", "bits"),
    [
        ("topk", 16, 0.2266),
        ("topk-64", 16, 0.2266),
        ("topk-32", 2**16 + 31 * 16, 0.1172),
        ("topk-256-int8", 2**16 + 255 * 16 + 2, 1.2539),
        ("topk-int8", 18, 0.3164),
        ("topk-128-fp32", 2**16 + 127 * 16 + 4, 1.375),
        ("topk-coded", 2**16 + 63 * 16 + 1, 0.1543),
        ("topk-128-int8-coded", 2**16 + 127 * 16 + 3, 0.4551),
    ],
)
def test_how_many_values_and_bits_is_in_the_name_and_the_id(name: str, id_: int, bits: float) -> None:
    codec = by_name(name)
    assert codec.id == id_
    assert codec.size(4096) * 8 / 4096 == pytest.approx(bits, abs=1e-4)
    same = by_id(id_, 1)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(same.pack(x), codec.pack(x))


@pytest.mark.parametrize("name", ["topk-0", "topk-4097", "topk-129-coded", "topk-int4", "topk-", "int3", "auto"])
def test_a_name_of_no_codec_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown codec '{name}'; known: fp32, .* and topk-K"):
        by_name(name)


@pytest.mark.parametrize("id_", [2**16 - 1, 2**16 + 6, 2**16 + 128 * 16 + 1, 2**16 + 4096 * 16, 2**16 + 63 * 16])
def test_an_id_of_no_topk_is_refused(id_: int) -> None:
    with pytest.raises(CodecError, match=f"unknown codec id {id_} version 1"):
        by_id(id_, 1)


@pytest.mark.parametrize(("keep", "bits", "chunk"), [(0, 2, 64), (65, 2, 64), (1, 3, 64), (64, 2, 8192)])
def test_topk_of_impossible_parameters_is_refused(keep: int, bits: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="topk of"):
        TopK("x", 0, keep=keep, value_bits=bits, chunk=chunk)


# -- damage -----------------------------------------------------------------------------------------------------------

DAMAGE = [
    ("int8", 0, (0, 0)),  # a scale of 0
    ("int8", 0, (0x7F, 0x00)),  # subnormal
    ("int8", 0, (0x80, 0x7F)),  # Inf
    ("int8", 0, (0xC0, 0x7F)),  # NaN
    ("int8", 0, (0x80, 0xBF)),  # negative
    ("int4", 0, (0x81, 0x7A)),  # above 2^118
    ("e3m0", 0, (7,)),
    ("e3m0", 0, (246,)),
    ("int2", 0, (0x01, 0x00)),
    ("int2", 0, (0x80, 0x7F)),
    ("fp16", 0, (206,)),
    ("fp16", 2, (0x7C,)),  # Inf
    ("fp16", 2, (0xFE,)),  # NaN
    ("topk", 0, (0x80, 0x7F)),
    ("topk", 2, (0x00, 0x80)),
    ("topk", 4, (0, 0, 0)),  # index 0 twice
    ("topk-int8", 0, (0x80, 0x7F)),
    ("topk-coded", 0, (0x80, 0x7F)),
]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("numel", [100, 4096 * 2 + 100])
@pytest.mark.parametrize(("name", "at", "bytes_"), DAMAGE)
def test_damage_is_refused(
    name: str, at: int, bytes_: tuple[int, ...], numel: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "ENABLED", native.ENABLED and compiled)
    codec = CODECS[name]
    for start in {0, numel // 4096 * codec.size(4096)}:
        payload = codec.pack(torch.linspace(-1, 1, numel))
        payload[start + at : start + at + len(bytes_)] = torch.tensor(bytes_, dtype=torch.uint8)
        with pytest.raises(CodecError, match=f"{name}: the payload is damaged"):
            codec.unpack(payload, (numel,))


@pytest.mark.parametrize("numel", [100, 1000, 4095])
def test_an_index_beyond_a_short_chunk_is_refused(numel: int) -> None:
    codec = CODECS["topk"]
    assert isinstance(codec, TopK)
    payload = codec.pack(torch.linspace(0, 1, numel))
    end = 4 + math.ceil(codec.kept(numel) * 1.5)
    payload[end - 2 : end] = 255
    with pytest.raises(CodecError, match="damaged"):
        codec.unpack(payload, (numel,))
