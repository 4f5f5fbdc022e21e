"""Bulk streams: what goes in comes out, and nothing damaged, short, long or foreign is taken."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco import framing
from diloco.errors import CodecError, LayoutError
from diloco.framing import (
    FRAME_BYTES,
    Assembly,
    Collector,
    chunks,
    digest_of,
    piece_to_proto,
    pieces_from_proto,
    unchunk,
)
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from tests.diloco.test_layout import shaped_boxes

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)
payloads = st.lists(st.binary(max_size=40), max_size=6)


def tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def chunk(payload: bytes, offset: int, before: bytes = b"") -> bytes:
    """A message of a payload that begins with `before`."""
    return framing.chunk(memoryview(payload), offset, xxhash.xxh3_128(before))


def collect(messages: list[bytes], total: int) -> bytes:
    collector = Collector(total)
    for message in messages:
        collector.add(message)
    return collector.finish().numpy().tobytes()


@given(payloads, st.integers(1, 50))
@PROPERTY
def test_payloads_of_any_sizes_come_back(parts: list[bytes], chunk_bytes: int) -> None:
    messages = list(chunks(map(tensor, parts), chunk_bytes))
    assert collect(messages, sum(map(len, parts))) == b"".join(parts)


@given(payloads, st.integers(1, 50), st.data())
@PROPERTY
def test_any_range_of_a_payload_comes_alone(parts: list[bytes], chunk_bytes: int, data: st.DataObject) -> None:
    whole = b"".join(parts)
    first = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.none() | st.integers(first, len(whole)))
    offset = first
    for message in chunks(map(tensor, parts), chunk_bytes, first, end):
        at, check, payload = unchunk(message)
        assert at == offset
        assert check == xxhash.xxh3_128_intdigest(whole[: at + len(payload)]) % 2**64
        assert payload == whole[at : at + len(payload)]
        assert len(payload) == min(chunk_bytes, (len(whole) if end is None else end) - at)
        offset += len(payload)
    assert offset == (len(whole) if end is None else end)


@given(payloads, st.integers(1, 50))
@PROPERTY
def test_chunks_are_filled_up_to_the_bound(parts: list[bytes], chunk_bytes: int) -> None:
    sizes = [len(message) - FRAME_BYTES for message in chunks(map(tensor, parts), chunk_bytes)]
    full, rest = divmod(sum(map(len, parts)), chunk_bytes)
    assert sizes == [chunk_bytes] * full + [rest] * (rest > 0)


def test_a_chunk_leaves_as_soon_as_it_is_full() -> None:
    asked = []

    def parts() -> Iterator[Tensor]:
        for data in (b"abc", b"def", b"gh"):
            asked.append(data)
            yield tensor(data)

    stream = chunks(parts(), 4)
    assert unchunk(next(stream))[::2] == (0, b"abcd")
    assert asked == [b"abc", b"def"]
    assert [unchunk(message)[::2] for message in stream] == [(4, b"efgh")]


def test_each_chunk_may_have_a_size_of_its_own() -> None:
    sizes = iter([3, 1, 4])
    assert [unchunk(m)[2] for m in chunks([tensor(b"abcdef")], lambda: next(sizes))] == [b"abc", b"d", b"ef"]


def test_the_bytes_of_a_stream_never_change() -> None:
    first, second, end = chunks([tensor(b"diloco")], 4, ended=True)
    assert first == bytes.fromhex("0000000000000000 c24999b39cf82b7a 64696c6f")
    assert second == bytes.fromhex("0400000000000000 aacb40b98a67c60d 636f")
    assert end == bytes.fromhex("4475d306b75691ac0dc6678ab940cbaa") == xxhash.xxh3_128_digest(b"diloco")
    check = xxhash.xxh3_128_intdigest(b"diloco") % 2**64
    assert second == struct.pack("<QQ", 4, check) + b"co"
    assert list(chunks([tensor(b"diloco")], 4, 4, ended=True)) == [second, end]
    assert list(chunks([], 4, ended=True)) == [xxhash.xxh3_128_digest(b"")]


@given(st.binary(min_size=1, max_size=40), st.data())
@PROPERTY
def test_one_flipped_bit_is_refused_and_nothing_taken(payload: bytes, data: st.DataObject) -> None:
    message = bytearray(chunk(payload, 0))
    message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    collector = Collector(len(payload))
    with pytest.raises(CodecError, match=f"a chunk of {len(message)} bytes is damaged|a chunk begins at byte"):
        collector.add(bytes(message))
    collector.add(chunk(payload, 0))
    assert collector.finish().numpy().tobytes() == payload


@given(st.binary(min_size=1, max_size=20), st.data())
@PROPERTY
def test_a_torn_chunk_is_refused(payload: bytes, data: st.DataObject) -> None:
    message = chunk(payload, 0)
    torn = message[: data.draw(st.integers(0, len(message) - 1))]
    with pytest.raises(CodecError, match=f"a chunk of {len(torn)} bytes is damaged"):
        Collector(len(payload)).add(torn)


def test_the_end_of_a_push_is_of_what_has_come() -> None:
    first, second, end = chunks([tensor(b"diloco")], 4, ended=True)
    assembly = Assembly(6)
    for message in (first, second):
        with pytest.raises(CodecError, match=f"and {end.hex()} was announced"):
            assembly.end(end)
        assembly.fresh(message)
        assembly.took()
    assembly.end(end)
    assert assembly.ended
    assert assembly.digest == end.hex() == digest_of([tensor(b"dil"), tensor(b"oco!")], 6)
    with pytest.raises(CodecError, match="a push ends with 16 bytes, not 15"):
        assembly.end(end[:15])


def test_more_bytes_than_announced_are_refused_and_not_written() -> None:
    collector = Collector(5)
    collector.add(chunk(b"abc", 0))
    with pytest.raises(CodecError, match="more than the 5 bytes that the header announced"):
        collector.add(chunk(b"xyz", 3, b"abc"))
    collector.add(chunk(b"de", 3, b"abc"))
    assert collector.finish().numpy().tobytes() == b"abcde"
    with pytest.raises(CodecError, match="more than the 5 bytes"):
        collector.add(chunk(b"f", 5, b"abcde"))


def test_a_collector_goes_on_where_it_stands_and_nowhere_else() -> None:
    collector = Collector(8)
    collector.add(chunk(b"abcd", 0))
    assert collector.have == 4
    for first in (1, 5):
        with pytest.raises(CodecError, match=f"begins at byte {first}, and 4 bytes have come"):
            collector.add(chunk(b"fg", first))
    collector.add(chunk(b"efgh", 4, b"abcd"))
    assert collector.finish().numpy().tobytes() == b"abcdefgh"


def test_a_chunk_is_good_after_its_own_beginning_only() -> None:
    collector = Collector(8)
    collector.add(chunk(b"abcd", 0))
    with pytest.raises(CodecError, match="damaged"):
        collector.add(chunk(b"efgh", 4, b"abce"))
    assert collector.have == 4


@pytest.mark.parametrize(("messages", "got"), [([], 0), ([b"abc"], 3)])
def test_fewer_bytes_than_announced_are_refused(messages: list[bytes], got: int) -> None:
    with pytest.raises(CodecError, match=f"ended after {got} of 5 bytes"):
        collect([chunk(m, 0) for m in messages], 5)


def test_an_empty_stream_is_an_empty_payload() -> None:
    assert list(chunks([], 4)) == list(chunks([tensor(b"")], 4)) == []
    assert collect([], 0) == b""


# -- pieces ---------------------------------------------------------------------------------------------------------


@given(shaped_boxes(count=3))
@PROPERTY
def test_pieces_travel(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    layout = Layout([TensorSpec("a", (1,)), TensorSpec("b", shape)])
    pieces = [Piece(1, box) for box in boxes]
    sent = [pb.Piece.FromString(piece_to_proto(piece).SerializeToString()) for piece in pieces]
    assert pieces_from_proto(sent, layout) == pieces


@pytest.mark.parametrize(
    ("tensor", "offset", "size"),
    [
        (2, (0,), (1,)),
        (2**32 - 1, (), ()),
        (1, (0, 0), (3, 5)),
        (1, (1, 0), (3, 4)),
        (1, (-1, 0), (2, 4)),
        (1, (1, 0), (-1, 4)),
        (1, (0,), (12,)),
        (1, (), ()),
        (1, (0, 0), (3,)),
        (1, (0, 0, 0), (3, 4, 1)),
        (1, (2**62, 0), (2**62, 4)),
    ],
)
def test_what_is_no_piece_of_the_model_is_refused(tensor: int, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
    layout = Layout([TensorSpec("a", (1,)), TensorSpec("b", (3, 4))])
    good = pb.Piece(tensor=1, offset=(0, 0), size=(3, 4))
    with pytest.raises(LayoutError, match=f"no piece of the model: tensor {tensor}, Box"):
        pieces_from_proto([good, pb.Piece(tensor=tensor, offset=offset, size=size)], layout)


def test_what_is_large_is_sent_from_where_it_lies_and_what_is_small_together() -> None:
    large, small = torch.arange(3 * framing.SMALL_BYTES).to(torch.uint8), torch.arange(5).to(torch.uint8)
    parts = [small, small, large, small, large, large, small]
    [(head, *sent)] = framing.split(parts, 2**20)
    assert [len(part) for part in sent] == [10, len(large), 5, len(large), len(large), 5]
    assert [torch.frombuffer(sent[i], dtype=torch.uint8).data_ptr() for i in (1, 3, 4)] == [large.data_ptr()] * 3
    assert b"".join((head, *sent)) == framing.chunk(memoryview(torch.cat(parts).numpy().data), 0, xxhash.xxh3_128())
