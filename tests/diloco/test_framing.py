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

from diloco.errors import CodecError, LayoutError
from diloco.framing import FRAME_BYTES, Collector, chunk, chunks, piece_to_proto, pieces_from_proto, unchunk
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from tests.diloco.test_layout import shaped_boxes

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)
payloads = st.lists(st.binary(max_size=40), max_size=6)


def tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


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
        at, payload = unchunk(message)
        assert at == offset
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
    assert unchunk(next(stream)) == (0, b"abcd")
    assert asked == [b"abc", b"def"]
    assert [unchunk(message) for message in stream] == [(4, b"efgh")]


@pytest.mark.parametrize(
    ("payload", "offset", "message"),
    [
        (b"", 0, "0000000000000000 c294d338 0580062d"),
        (b"diloco", 0, "0000000000000000 40425af2befb2d1d 64696c6f636f"),
        (b"diloco", 2**40 + 3, "0300000000010000 1a91bffda3f1aa12 64696c6f636f"),
    ],
)
def test_the_bytes_of_a_chunk_never_change(payload: bytes, offset: int, message: str) -> None:
    assert chunk(memoryview(payload), offset) == bytes.fromhex(message)
    check = xxhash.xxh3_64_intdigest(payload, seed=offset)
    assert chunk(memoryview(payload), offset) == struct.pack("<QQ", offset, check) + payload


@given(st.binary(max_size=40), st.data())
@PROPERTY
def test_one_flipped_bit_is_refused_and_nothing_taken(payload: bytes, data: st.DataObject) -> None:
    message = bytearray(chunk(memoryview(payload), 0))
    message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    collector = Collector(len(payload))
    with pytest.raises(CodecError, match=f"a chunk of {len(message)} bytes is damaged"):
        collector.add(bytes(message))
    collector.add(chunk(memoryview(payload), 0))
    assert collector.finish().numpy().tobytes() == payload


@given(st.binary(min_size=1, max_size=20), st.data())
@PROPERTY
def test_a_torn_chunk_is_refused(payload: bytes, data: st.DataObject) -> None:
    message = chunk(memoryview(payload), 0)
    torn = message[: data.draw(st.integers(0, len(message) - 1))]
    with pytest.raises(CodecError, match=f"a chunk of {len(torn)} bytes is damaged"):
        unchunk(torn)


def test_more_bytes_than_announced_are_refused_and_not_written() -> None:
    collector = Collector(5)
    collector.add(chunk(memoryview(b"abc"), 0))
    with pytest.raises(CodecError, match="more than the 5 bytes that the header announced"):
        collector.add(chunk(memoryview(b"xyz"), 3))
    collector.add(chunk(memoryview(b"de"), 3))
    assert collector.finish().numpy().tobytes() == b"abcde"
    with pytest.raises(CodecError, match="more than the 5 bytes"):
        collector.add(chunk(memoryview(b"f"), 5))


def test_a_collector_goes_on_where_it_stands_and_refuses_a_gap() -> None:
    collector = Collector(8)
    collector.add(chunk(memoryview(b"abcd"), 0))
    assert collector.have == 4
    collector.add(chunk(memoryview(b"bc"), 1))  # here already
    assert collector.have == 4
    with pytest.raises(CodecError, match="begins at byte 5, and only 4 bytes have come"):
        collector.add(chunk(memoryview(b"fg"), 5))
    collector.add(chunk(memoryview(b"cdef"), 2))  # its end is new
    assert collector.have == 6
    collector.add(chunk(memoryview(b"gh"), 6))
    assert collector.finish().numpy().tobytes() == b"abcdefgh"


def test_a_chunk_is_good_at_its_own_place_only() -> None:
    message = bytearray(chunk(memoryview(b"abcd"), 4))
    message[:8] = (0).to_bytes(8, "little")
    with pytest.raises(CodecError, match="damaged"):
        Collector(8).add(bytes(message))


@pytest.mark.parametrize(("messages", "got"), [([], 0), ([b"abc"], 3)])
def test_fewer_bytes_than_announced_are_refused(messages: list[bytes], got: int) -> None:
    with pytest.raises(CodecError, match=f"ended after {got} of 5 bytes"):
        collect([chunk(memoryview(m), 0) for m in messages], 5)


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
