"""What a bulk stream is made of: a serialized header, then chunks with an offset and a checksum each.

A chunk is 8 bytes offset of its first byte in the whole payload, 8 bytes XXH3-64 of its payload with that offset as
seed (both little-endian), and then the payload. The headers are in `proto/`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from diloco.errors import CodecError, LayoutError
from diloco.layout import Box, Layout, Piece
from diloco.v1 import coordinator_pb2 as pb

PROTOCOL = 3
"""Version of the protocol that this code speaks."""
SERVICE = "diloco.v1.Coordinator"
CONTROL_LIMIT_BYTES = 16 * 2**20
"""Largest control message; a layout of 100,000 tensors takes about 8 MB."""
RETRY_AFTER = "diloco-retry-after-ms"
"""Trailing metadata of an `Overload`: milliseconds to wait before the next try."""

_FRAME = struct.Struct("<QQ")
FRAME_BYTES = _FRAME.size
"""Bytes of a chunk before its payload."""


def chunk(payload: memoryview, offset: int) -> bytes:
    """One message of a bulk stream: the bytes of the whole payload from `offset`."""
    return b"".join((_FRAME.pack(offset, xxhash.xxh3_64_intdigest(payload, seed=offset)), payload))


def unchunk(message: bytes) -> tuple[int, memoryview]:
    """(offset, payload) of one message. Raises `CodecError` where it is torn or damaged."""
    payload = memoryview(message)[FRAME_BYTES:]
    if len(message) >= FRAME_BYTES:
        offset, check = _FRAME.unpack_from(message)
        if check == xxhash.xxh3_64_intdigest(payload, seed=offset):
            return offset, payload
    raise CodecError(f"a chunk of {len(message)} bytes is damaged: its checksum does not match")


def chunks(
    parts: Iterable[Tensor], chunk_bytes: int, first_byte: int = 0, end_byte: int | None = None
) -> Iterator[bytes]:
    """Cuts payloads (uint8, contiguous) into messages of at most `chunk_bytes`, filled across their borders.

    Args:
        parts: the whole payload, in order.
        chunk_bytes: payload of one message.
        first_byte: where the first message begins; what is before it is left out.
        end_byte: where the last message ends; none for the end of the payload.
    """
    waiting: list[memoryview] = []
    room, skip, offset = chunk_bytes, first_byte, first_byte
    left = end_byte - first_byte if end_byte is not None else None
    for part in parts:
        view = memoryview(part.numpy().data)
        skipped = min(skip, len(view))
        skip, view = skip - skipped, view[skipped:]
        if left is not None:
            view = view[:left]
            left -= len(view)
        while len(view):
            taken, view = view[:room], view[room:]
            waiting.append(taken)
            room -= len(taken)
            if not room:
                yield chunk(_joined(waiting), offset)
                waiting, room, offset = [], chunk_bytes, offset + chunk_bytes
        if left == 0:
            break
    if waiting:
        yield chunk(_joined(waiting), offset)


def _joined(views: list[memoryview]) -> memoryview:
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


class Assembly:
    """Which chunks of a payload are taken: those that go on where it stands. It grows from its first byte, in order.

    Args:
        total_bytes: bytes of the whole payload.
        have: bytes of it, from its first, that are here already.
    """

    def __init__(self, total_bytes: int, have: int = 0) -> None:
        self.total_bytes, self.have = total_bytes, have

    def fresh(self, message: bytes) -> memoryview:
        """What a message adds at `have`: all of its payload, the end of it, or nothing where that is here already.

        The holder stores it, then moves `have` on.

        Raises:
            CodecError: the message is damaged, leaves a gap, or goes beyond the end.
        """
        offset, payload = unchunk(message)
        if offset + len(payload) > self.total_bytes:
            raise CodecError(f"more than the {self.total_bytes} bytes that the header announced")
        if offset > self.have:
            raise CodecError(f"a chunk begins at byte {offset}, and only {self.have} bytes have come: some are missing")
        return payload[self.have - offset :]

    def check_complete(self) -> None:
        """Raises `CodecError` where bytes are missing."""
        if self.have != self.total_bytes:
            raise CodecError(f"the stream ended after {self.have} of {self.total_bytes} bytes")


class Collector:
    """Puts chunks back together in `payload` (uint8 [total_bytes]), over as many streams as it takes."""

    def __init__(self, total_bytes: int, payload: Tensor | None = None) -> None:
        self.payload = torch.empty(total_bytes, dtype=torch.uint8) if payload is None else payload
        self._view = memoryview(self.payload.numpy().data)
        self._assembly = Assembly(total_bytes)

    @property
    def have(self) -> int:
        """Bytes that are here, from the first: where the next stream is to go on."""
        return self._assembly.have

    def add(self, message: bytes) -> None:
        """Takes one message; raises what `Assembly.fresh` does."""
        fresh, have = self._assembly.fresh(message), self.have
        self._view[have : have + len(fresh)] = fresh
        self._assembly.have += len(fresh)

    def finish(self) -> Tensor:
        """The whole payload. Raises `CodecError` where bytes are missing."""
        self._assembly.check_complete()
        return self.payload


def piece_to_proto(piece: Piece) -> pb.Piece:
    """A piece as it travels."""
    return pb.Piece(tensor=piece.tensor, offset=piece.box.offset, size=piece.box.size)


def pieces_from_proto(pieces: Iterable[pb.Piece], layout: Layout) -> list[Piece]:
    """Pieces as received. Raises `LayoutError` for one that is not a box of a tensor of the layout."""
    out = []
    for message in pieces:
        box = Box(tuple(message.offset), tuple(message.size))
        if message.tensor >= len(layout.tensors) or not box.within(layout.tensors[message.tensor].shape):
            raise LayoutError(f"no piece of the model: tensor {message.tensor}, {box}")
        out.append(Piece(message.tensor, box))
    return out
