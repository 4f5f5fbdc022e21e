"""What a bulk stream is made of: a serialized header, then chunks with a checksum each.

A chunk is 8 bytes of XXH3-64 of the payload (little-endian) and then the payload. The headers are in `proto/`.
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

PROTOCOL = 2
"""Version of the protocol that this code speaks."""
SERVICE = "diloco.v1.Coordinator"
CONTROL_LIMIT_BYTES = 16 * 2**20
"""Largest control message; a layout of 100,000 tensors takes about 8 MB."""

_CHECK = struct.Struct("<Q")


def chunk(payload: memoryview) -> bytes:
    """One message of a bulk stream."""
    return b"".join((_CHECK.pack(xxhash.xxh3_64_intdigest(payload)), payload))


def unchunk(message: bytes) -> memoryview:
    """The payload of one message. Raises `CodecError` where it is torn or damaged."""
    payload = memoryview(message)[_CHECK.size :]
    if len(message) < _CHECK.size or _CHECK.unpack_from(message)[0] != xxhash.xxh3_64_intdigest(payload):
        raise CodecError(f"a chunk of {len(message)} bytes is damaged: its checksum does not match")
    return payload


def chunks(parts: Iterable[Tensor], chunk_bytes: int) -> Iterator[bytes]:
    """Cuts payloads (uint8, contiguous) into messages of at most `chunk_bytes`, filled across their borders."""
    waiting: list[memoryview] = []
    room = chunk_bytes
    for part in parts:
        view = memoryview(part.numpy().data)
        while len(view):
            taken, view = view[:room], view[room:]
            waiting.append(taken)
            room -= len(taken)
            if not room:
                yield chunk(_joined(waiting))
                waiting, room = [], chunk_bytes
    if waiting:
        yield chunk(_joined(waiting))


def _joined(views: list[memoryview]) -> memoryview:
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


class Collector:
    """Puts the chunks of a stream back together in memory (uint8 `payload`), and refuses more than was announced."""

    def __init__(self, total_bytes: int) -> None:
        self.payload = torch.empty(total_bytes, dtype=torch.uint8)
        self._view = memoryview(self.payload.numpy().data)
        self._filled = 0

    def add(self, message: bytes) -> None:
        """Takes one message. Raises `CodecError` for a damaged chunk or one too many."""
        part = unchunk(message)
        end = self._filled + len(part)
        if end > len(self._view):
            raise CodecError(f"more than the {len(self._view)} bytes that the header announced")
        self._view[self._filled : end] = part
        self._filled = end

    def finish(self) -> Tensor:
        """The whole payload. Raises `CodecError` where bytes are missing."""
        if self._filled != len(self._view):
            raise CodecError(f"the stream ended after {self._filled} of {len(self._view)} bytes")
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
