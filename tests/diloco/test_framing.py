"""Bulk streams: what goes in comes out, and nothing damaged, short, long or foreign is taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.errors import CodecError, LayoutError
from diloco.framing import Collector, chunk, chunks, piece_to_proto, pieces_from_proto, unchunk
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from tests.diloco.test_layout import shaped_boxes

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)
CHECK = 8
"""Bytes of a chunk before its payload."""

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


@given(payloads, st.integers(1, 50))
@PROPERTY
def test_chunks_are_filled_up_to_the_bound(parts: list[bytes], chunk_bytes: int) -> None:
    sizes = [len(message) - CHECK for message in chunks(map(tensor, parts), chunk_bytes)]
    full, rest = divmod(sum(map(len, parts)), chunk_bytes)
    assert sizes == [chunk_bytes] * full + [rest] * (rest > 0)


def test_a_chunk_leaves_as_soon_as_it_is_full() -> None:
    asked = []

    def parts() -> Iterator[Tensor]:
        for data in (b"abc", b"def", b"gh"):
            asked.append(data)
            yield tensor(data)

    stream = chunks(parts(), 4)
    assert unchunk(next(stream)) == b"abcd"
    assert asked == [b"abc", b"def"]
    assert [bytes(unchunk(message)) for message in stream] == [b"efgh"]


@pytest.mark.parametrize(
    ("payload", "message"),
    [(b"", "c294d338 0580062d"), (b"diloco", "40425af2befb2d1d 64696c6f636f")],
)
def test_the_bytes_of_a_chunk_never_change(payload: bytes, message: str) -> None:
    assert chunk(memoryview(payload)) == bytes.fromhex(message)
    assert chunk(memoryview(payload)) == xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") + payload


@given(st.binary(max_size=40), st.data())
@PROPERTY
def test_one_flipped_bit_is_refused_and_nothing_taken(payload: bytes, data: st.DataObject) -> None:
    message = bytearray(chunk(memoryview(payload)))
    message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    collector = Collector(len(payload))
    with pytest.raises(CodecError, match=f"a chunk of {len(message)} bytes is damaged"):
        collector.add(bytes(message))
    collector.add(chunk(memoryview(payload)))
    assert collector.finish().numpy().tobytes() == payload


@given(st.binary(min_size=1, max_size=20), st.data())
@PROPERTY
def test_a_torn_chunk_is_refused(payload: bytes, data: st.DataObject) -> None:
    message = chunk(memoryview(payload))
    torn = message[: data.draw(st.integers(0, len(message) - 1))]
    with pytest.raises(CodecError, match=f"a chunk of {len(torn)} bytes is damaged"):
        unchunk(torn)


def test_more_bytes_than_announced_are_refused_and_not_written() -> None:
    collector = Collector(5)
    collector.add(chunk(memoryview(b"abc")))
    with pytest.raises(CodecError, match="more than the 5 bytes that the header announced"):
        collector.add(chunk(memoryview(b"xyz")))
    collector.add(chunk(memoryview(b"de")))
    assert collector.finish().numpy().tobytes() == b"abcde"
    with pytest.raises(CodecError, match="more than the 5 bytes"):
        collector.add(chunk(memoryview(b"f")))


@pytest.mark.parametrize(("messages", "got"), [([], 0), ([b"abc"], 3)])
def test_fewer_bytes_than_announced_are_refused(messages: list[bytes], got: int) -> None:
    with pytest.raises(CodecError, match=f"ended after {got} of 5 bytes"):
        collect([chunk(memoryview(m)) for m in messages], 5)


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
