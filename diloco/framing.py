"""What a bulk stream is made of: a serialized header, then chunks, and at the end of a push the payload's digest.

A chunk is 8 bytes offset of its first byte in the whole payload, 8 bytes check, and then its bytes. The check is the
lower half of the XXH3-128 of the whole payload up to the end of the chunk: so it vouches for all that came before it
as well, and one pass over the bytes gives both it and the digest. The end of a push is the 16 bytes of that digest,
and so shorter than any chunk. A fetch of an update ends with the 8 bytes of the digest of the anchor that it leads to,
which is known once all of it is made: nothing of an update counts before its end. Integers are little-endian. The
headers are in `proto/`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy
import torch
import xxhash
from torch import Tensor

from diloco.errors import CodecError, LayoutError
from diloco.layout import Box, Layout, Piece
from diloco.v1 import coordinator_pb2 as pb

PROTOCOL = 5
"""Version of the protocol that this code speaks."""
SERVICE = "diloco.v1.Coordinator"
CONTROL_LIMIT_BYTES = 16 * 2**20
"""Largest control message; a layout of 100,000 tensors takes about 8 MB."""
RETRY_AFTER = "diloco-retry-after-ms"
"""Trailing metadata of an `Overload`: milliseconds to wait before the next try."""
PROBE_BYTES, PROBE_CHUNK_BYTES = 2**24, 2**18
"""Most that a probe of the line moves each way, and what one message of it has."""

Bytes = bytes | bytearray | memoryview

_FRAME = struct.Struct("<QQ")
FRAME_BYTES = _FRAME.size
"""Bytes of a chunk before its payload."""
SMALL_BYTES = 2**14
"""What is smaller costs more to send by itself than to copy."""
END_BYTES = 16
"""Bytes of the end of a push."""
UPDATE_END_BYTES = 8
"""Bytes of the end of a fetch of an update."""


def check_of(whole: xxhash.xxh3_128) -> int:
    """The check of the chunk that a digest has taken last."""
    return whole.intdigest() & (2**64 - 1)


def framed(payload: Sequence[memoryview], offset: int, whole: xxhash.xxh3_128) -> tuple[Bytes, ...]:
    """A chunk as its parts, the frame and then `payload`: the bytes of the whole payload from `offset`, of which
    `whole` has taken those before, and takes these."""
    for part in payload:
        whole.update(part)
    return _FRAME.pack(offset, check_of(whole)), *payload


def chunk(payload: memoryview, offset: int, whole: xxhash.xxh3_128) -> bytes:
    """One message of a bulk stream, as `framed` says."""
    return b"".join(framed([payload], offset, whole))


@dataclass(frozen=True, slots=True)
class Placed:
    """A chunk whose payload has been received where it belongs."""

    frame: Bytes
    payload: memoryview

    def __len__(self) -> int:
        return len(self.frame) + len(self.payload)

    def __bytes__(self) -> bytes:
        return b"".join((self.frame, self.payload))


def unchunk(message: Bytes | Placed) -> tuple[int, int, memoryview]:
    """(offset, check, payload) of one message. Raises `CodecError` where it is torn."""
    if isinstance(message, Placed):
        return (*_FRAME.unpack(message.frame), message.payload)
    if len(message) <= FRAME_BYTES:
        raise CodecError(f"a chunk of {len(message)} bytes is damaged: it has no payload")
    return (*_FRAME.unpack_from(message), memoryview(message)[FRAME_BYTES:])


def split(
    parts: Iterable[Tensor],
    chunk_bytes: int | Callable[[], int],
    first_byte: int = 0,
    end_byte: int | None = None,
    *,
    ended: bool = False,
) -> Iterator[tuple[Bytes, ...]]:
    """Cuts payloads (uint8, contiguous) into messages of at most `chunk_bytes`, filled across their borders. A message
    comes as its parts one after the other: what is of the payload is views of it, where it lies.

    Args:
        parts: the whole payload, in order.
        chunk_bytes: payload of one message; or what says so anew for each.
        first_byte: where the first message begins; what is before it is only hashed.
        end_byte: where the last message ends; none for the end of the payload.
        ended: whether the end of a push follows.
    """
    whole, size = xxhash.xxh3_128(), chunk_bytes if callable(chunk_bytes) else lambda: chunk_bytes
    waiting: list[memoryview] = []
    room, skip, offset = size(), first_byte, first_byte
    left = end_byte - first_byte if end_byte is not None else None
    for part in parts:
        view = memoryview(part.numpy().data)
        skipped, view = view[:skip], view[skip:]
        skip -= len(skipped)
        whole.update(skipped)
        if left is not None:
            view = view[:left]
            left -= len(view)
        while len(view):
            taken, view = view[:room], view[room:]
            waiting.append(taken)
            room -= len(taken)
            if not room:
                full, waiting = _gathered(waiting), []
                yield framed(full, offset, whole)
                room, offset = size(), offset + sum(map(len, full))
        if left == 0:
            break
    if waiting:
        yield framed(_gathered(waiting), offset, whole)
    if ended:
        yield (whole.digest(),)


def chunks(
    parts: Iterable[Tensor],
    chunk_bytes: int | Callable[[], int],
    first_byte: int = 0,
    end_byte: int | None = None,
    *,
    ended: bool = False,
) -> Iterator[bytes]:
    """The messages that `split` makes, each in one piece."""
    return map(b"".join, split(parts, chunk_bytes, first_byte, end_byte, ended=ended))


def _gathered(views: Sequence[memoryview]) -> list[memoryview]:
    """The same bytes in fewer parts: small ones that follow each other are copied into one."""
    groups = [(small, list(group)) for small, group in groupby(views, key=lambda view: len(view) < SMALL_BYTES)]
    return [part for small, group in groups for part in ([memoryview(b"".join(group))] if small else group)]


def digest_of(parts: Iterable[Tensor], length: int) -> str:
    """XXH3-128 (hex) of the first `length` bytes of a payload."""
    whole, left = xxhash.xxh3_128(), length
    for part in parts:
        whole.update(part.numpy().data[:left])
        left -= min(left, part.numel())
        if not left:
            break
    return whole.hexdigest()


def update_end(digest: int) -> bytes:
    """The end of a fetch of an update: the digest of the anchor that it leads to."""
    return (digest & (2**64 - 1)).to_bytes(UPDATE_END_BYTES, "little")


def read_update_end(message: Bytes) -> int:
    """The digest (unsigned) at the end of a fetch of an update. Raises `CodecError` for other messages."""
    if len(message) != UPDATE_END_BYTES:
        raise CodecError(f"an update ends with {UPDATE_END_BYTES} bytes, not {len(message)}")
    return int.from_bytes(message, "little")


def read_end(message: Bytes) -> str:
    """The digest (hex) at the end of a push. Raises `CodecError` for other messages."""
    if len(message) != END_BYTES:
        raise CodecError(f"a push ends with {END_BYTES} bytes, not {len(message)}")
    return message.hex()


class Assembly:
    """Which chunks of a payload are taken: those that go on where it stands. It grows from its first byte, in order.

    Args:
        total_bytes: bytes of the whole payload.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.have = 0
        """Bytes that are here, from the first."""
        self.ended = False
        """Whether the end of the push has come, and is right."""
        self._whole = self._next = xxhash.xxh3_128()
        self._ahead = 0

    @property
    def digest(self) -> str:
        """XXH3-128 (hex) of the bytes that are here."""
        return self._whole.hexdigest()

    def fresh(self, message: Bytes | Placed) -> memoryview:
        """What a message adds behind what is here. The holder stores it, then calls `took`.

        Raises:
            CodecError: the message is damaged, is of another place, or goes beyond the end.
        """
        offset, check, payload = unchunk(message)
        if offset != self.have:
            raise CodecError(f"a chunk begins at byte {offset}, and {self.have} bytes have come")
        if offset + len(payload) > self.total_bytes:
            raise CodecError(f"more than the {self.total_bytes} bytes that the header announced")
        if not self.fits(payload, check):
            raise CodecError(f"a chunk of {len(message)} bytes is damaged: its checksum does not match")
        return payload

    def fits(self, payload: memoryview, check: int) -> bool:
        """Whether bytes that go on where it stands have that check; then `took` counts them."""
        following = self._whole.copy()
        following.update(payload)
        if check_of(following) != check:
            return False
        self._next, self._ahead = following, self.have + len(payload)
        return True

    def took(self) -> None:
        """Counts what was found good last: it is stored."""
        self._whole, self.have = self._next, self._ahead

    def end(self, message: Bytes) -> None:
        """Takes the end of a push. Raises `CodecError` where it is not of the bytes that have come."""
        digest = read_end(message)
        if digest != self.digest:
            raise CodecError(f"the payload has digest {self.digest}, and {digest} was announced")
        self.ended = True

    def check_complete(self) -> None:
        """Raises `CodecError` where bytes are missing."""
        if self.have != self.total_bytes:
            raise CodecError(f"the stream ended after {self.have} of {self.total_bytes} bytes")


class Collector:
    """Puts chunks back together in `payload` (uint8 [total_bytes]), over as many streams as it takes."""

    def __init__(self, total_bytes: int, payload: Tensor | None = None) -> None:
        self.payload = torch.empty(total_bytes, dtype=torch.uint8) if payload is None else payload
        self._bytes = self.payload.numpy()
        self._assembly = Assembly(total_bytes)

    @property
    def have(self) -> int:
        """Bytes that are here, from the first: where the next stream is to go on."""
        return self._assembly.have

    def room(self, count: int) -> memoryview | None:
        """Where the payload of a message of `count` bytes belongs that goes on here; none where it cannot be one."""
        size = count - FRAME_BYTES
        return self._bytes[self.have :][:size].data if 0 < size <= self._bytes.size - self.have else None

    def add(self, message: Bytes | Placed) -> None:
        """Takes one message, which may have been received in its `room`; raises what `Assembly.fresh` does."""
        fresh, have = self._assembly.fresh(message), self.have
        if not isinstance(message, Placed):
            numpy.copyto(self._bytes[have:][: len(fresh)], numpy.frombuffer(fresh, numpy.uint8))  # others may run
        self._assembly.took()

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
