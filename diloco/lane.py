"""Lanes: connections that carry bulk calls and nothing else, over the port of the coordinator, beside its gRPC.

A call is what a gRPC call with streams both ways is: a name, messages each way, and an end or an error. A lane carries
one call after another. What it saves is the work of HTTP/2 and of gRPC's Python: no copy of a payload on the way out,
one on the way in. A side that cannot have one speaks gRPC.

A frame is 4 bytes length (little-endian), 1 byte kind, and so many bytes. A lane begins with `HELLO` each way; over
TLS, whose handshake names the protocol `ALPN`, as well.
"""

from __future__ import annotations

import contextlib
import select
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy

from diloco.errors import Malformed
from diloco.framing import CONTROL_LIMIT_BYTES, FRAME_BYTES, Bytes, Placed

HELLO = b"diloco lane 1\n"
ALPN = "diloco-lane-1"
READ_BYTES = 2**18
"""Encrypted bytes that are read at a time."""
WRITE_BYTES = 2**16
"""Bytes that are encrypted at a time: they stay in the cache."""
PARTS = 512
"""Most that are sent at a time; systems take 1024."""
SMALL_BYTES = 2**12
"""What a socket that may be written to has room for."""
_HEAD = struct.Struct("<IB")
HEAD_BYTES = _HEAD.size
"""Bytes of a frame before its content."""
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Options of the sockets of both sides, by name, where there are such: a dead line is found in 50 s."""


class Kind(IntEnum):
    """What a frame is."""

    CALL = 1
    """The name of the method that is called."""
    MESSAGE = 2
    END = 3
    """This side has no more messages in this call."""
    ERROR = 4
    """The call has failed (`CallError`)."""


class Socket(Protocol):
    """What a lane needs of a connected TCP socket, whose timeout is set."""

    def sendmsg(self, buffers: Sequence[Bytes], /) -> int:
        """Sends from the first on; returns how many bytes it took."""

    def sendall(self, data: Bytes, /) -> None:
        """Sends all."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receives; returns how many bytes came, none at the end."""

    def shutdown(self, how: int, /) -> None:
        """Ends both ways, for threads that wait in it too."""

    def close(self) -> None:
        """Closes it."""

    def fileno(self) -> int:
        """Its descriptor."""


class Encryption:
    """TLS between memory and memory: OpenSSL sees whole blocks, and no socket.

    Args:
        context: of this side.
        name: of the other side, whose certificate is to be for it; none on the server's side.
    """

    def __init__(self, context: ssl.SSLContext, name: str | None) -> None:
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._coming, self._going, server_side=name is None, server_hostname=name)
        self._lock = threading.Lock()
        """OpenSSL takes one call at a time."""
        self._buffer = memoryview(bytearray(READ_BYTES))

    def shake_hands(self, sock: Socket) -> None:
        """Raises `ssl.SSLError` where the other side is not trusted or does not trust this one."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                sock.sendall(self._going.read())
                self._feed(sock)
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # the other side may be gone
                    sock.sendall(self._going.read())  # tells it
                raise
            else:
                break
        sock.sendall(self._going.read())

    @property
    def protocol(self) -> str | None:
        """What both sides have agreed to speak."""
        return self._tls.selected_alpn_protocol()

    @property
    def pending(self) -> bool:
        """Whether bytes have come that nobody has received."""
        with self._lock:
            return bool(self._coming.pending or self._tls.pending())

    def send(self, sock: Socket, parts: Sequence[Bytes]) -> None:
        """Sends all of them; one caller at a time."""
        for part in parts:
            view = memoryview(part)
            for begin in range(0, len(view), WRITE_BYTES):
                block = view[begin : begin + WRITE_BYTES]
                with self._lock:
                    while block:
                        block = block[self._tls.write(block) :]
                    encrypted = self._going.read() if self._going.pending >= WRITE_BYTES else b""
                sock.sendall(encrypted)
        with self._lock:
            encrypted = self._going.read()
        sock.sendall(encrypted)

    def receive(self, sock: Socket, view: memoryview) -> int:
        """Receives; returns how many bytes came, none at the end. One at a time."""
        while True:
            count = self._read(view)
            if count or not self._feed(sock):
                return count

    def _read(self, view: memoryview) -> int:
        """Decrypts what has come, as far as there is room for it: OpenSSL gives a record at a time."""
        read: Any = self._tls.read  # returns a count where it is given a buffer
        have = 0
        with self._lock, contextlib.suppress(ssl.SSLWantReadError, ssl.SSLEOFError):
            while have < len(view) and (count := read(len(view) - have, view[have:])):
                have += count
        return have

    def _feed(self, sock: Socket) -> int:
        count = sock.recv_into(self._buffer)
        with self._lock:
            if count:
                self._coming.write(self._buffer[:count])
            else:
                self._coming.write_eof()
        return count


class Lane:
    """One connection. One thread may send while another receives.

    Args:
        sock: it belongs to the lane from now on.
        encryption: after its handshake; none for a plain lane.
    """

    def __init__(self, sock: Socket, encryption: Encryption | None = None) -> None:
        self._sock, self._encryption = sock, encryption
        self._sending = threading.Lock()

    def greet(self) -> None:
        """Sends `HELLO`, by itself: no frame."""
        self._write([HELLO])

    def greeted(self) -> bool:
        """Whether the other side sends `HELLO` and so speaks this protocol."""
        hello = bytearray(len(HELLO))
        return self._fill(memoryview(hello)) and bytes(hello) == HELLO

    def send(self, kind: Kind, *parts: Bytes) -> None:
        """Sends one frame with these parts, one after the other. Raises `OSError` where it does not get through."""
        self._write([_HEAD.pack(sum(len(part) for part in parts), kind), *parts])

    def takes_at_once(self, count: int) -> bool:
        """Whether so many bytes may be sent now without waiting, by whoever alone sends."""
        return count <= SMALL_BYTES and not self._sending.locked() and self._ready(select.POLLOUT, 0.0)

    def receive(
        self, room: Callable[[int], memoryview | None] = lambda count: None
    ) -> tuple[Kind, memoryview | Placed] | None:
        """The next frame; none where the other side has closed the lane.

        Args:
            room: where to put the payload of a chunk, a message of so many bytes; none for memory of its own.

        Raises:
            Malformed: it is no frame, or too large.
            OSError: nothing comes any more, or the lane ends within a frame.
        """
        head = bytearray(HEAD_BYTES)
        if not self._fill(memoryview(head)):
            return None
        length, kind = _HEAD.unpack(head)
        if length > CONTROL_LIMIT_BYTES or not Kind.CALL <= kind <= Kind.ERROR:
            raise Malformed(f"what came over a lane is no frame (kind {kind}, {length} bytes)")
        place = room(length) if kind == Kind.MESSAGE else None
        if place is not None:
            frame = bytearray(FRAME_BYTES)
            if self._fill(memoryview(frame)) and self._fill(place):
                return Kind.MESSAGE, Placed(frame, place)
            raise ConnectionResetError("the lane ended within a frame")
        content = numpy.empty(length, numpy.uint8).data
        if not self._fill(content):
            raise ConnectionResetError("the lane ended within a frame")
        return Kind(kind), content

    def drain(self) -> None:
        """Receives whatever comes until the other side closes the lane, or sends nothing for too long: closed with
        bytes that nobody has read, a connection takes back what it has sent."""
        rest = memoryview(bytearray(READ_BYTES))
        with contextlib.suppress(OSError):
            while self._sock.recv_into(rest):
                pass

    def fileno(self) -> int:
        """The descriptor of its socket, to wait for."""
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether bytes have left the socket that no frame has had."""
        return self._encryption is not None and self._encryption.pending

    def stirs(self, within_s: float = 0.0) -> bool:
        """Whether something comes within so many seconds that no frame has had, be it the lane's end."""
        return self.pending or self._ready(select.POLLIN, within_s)

    def _ready(self, event: int, within_s: float) -> bool:
        """Whether the socket is, within so many seconds. One that is closed is: whoever uses it finds that out."""
        waiting = select.poll()
        try:
            waiting.register(self._sock, event)
        except (OSError, ValueError):
            return True
        return bool(waiting.poll(within_s * 1000))

    def close(self) -> None:
        """Closes the lane; threads that wait in it fail."""
        with contextlib.suppress(OSError):  # it is closed already, by the other side too
            self._sock.shutdown(2)
        self._sock.close()

    def _write(self, parts: list[Bytes]) -> None:
        with self._sending:
            if self._encryption:
                self._encryption.send(self._sock, parts)
                return
            left: list[Any] = parts
            while left:
                sent = self._sock.sendmsg(left[:PARTS])
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = memoryview(left[0])[sent:]

    def _fill(self, view: memoryview) -> bool:
        """Fills all of it; returns False where the lane ends before."""
        have = 0
        while have < len(view):
            count = (
                self._encryption.receive(self._sock, view[have:])
                if self._encryption
                else self._sock.recv_into(view[have:])
            )
            if not count:
                if have:
                    raise ConnectionResetError("the lane ended within a frame")
                return False
            have += count
        return True
