"""The island's end of lanes (`diloco/lane.py`): kept between calls, and errors as gRPC's channels raise them."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import grpc

from diloco.errors import Malformed
from diloco.framing import Bytes, Placed
from diloco.lane import ALPN, KEEPALIVE, Encryption, Kind, Lane
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from diloco.window import PAUSE_S

log = logging.getLogger("diloco.island")
CONNECT_S = 10.0
"""How long a connection and its handshake may take."""
KEEP_S = 30.0
"""How long a lane is kept that nobody uses: routers on the way forget a silent one sooner or later."""
LAST_S = 10.0
"""How long the end of a call may take whose answers have all come."""
SPARE_S = 60.0
"""How much longer than `idle_s` a socket waits: who uses a lane looks after it, and knows what it waits for."""
AGAIN_S = 60.0
"""How long nothing is asked of what has refused a lane, or did not answer its greeting."""
Parts = bytes | tuple[Bytes, ...]
"""One message, or its parts one after the other."""
Room = Callable[[int], memoryview | None]


class Stream(Protocol):
    """A bulk call under way: its answers, which raise `grpc.RpcError` where it fails."""

    def __iter__(self) -> Iterator[Bytes | Placed]: ...

    def __next__(self) -> Bytes | Placed: ...

    room: Room
    """Where to put the payload of a chunk that is an answer of so many bytes; a stream may ask, and use it."""

    def more(self) -> bool:
        """Whether another answer comes at once; not where that cannot be known."""

    def cancel(self) -> None:
        """Ends it from any thread, for those who wait for its answers too."""

    def close(self) -> None:
        """Gives back what it took, once nobody wants more of it; its messages must have come to an end."""


class LaneError(grpc.RpcError):
    """A call over a lane has failed, as a call of gRPC would."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: dict[str, str] | None = None) -> None:
        super().__init__(details)
        self._code, self._details, self._metadata = code, details, metadata or {}

    def code(self) -> grpc.StatusCode:
        """Its status."""
        return self._code

    def details(self) -> str:
        """Words on it."""
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        """What goes with it."""
        return tuple(self._metadata.items())


class Lanes:
    """Lanes to one coordinator: as many as calls at a time.

    Args:
        host, port: where it listens.
        tls: files to speak mutual TLS with.
        idle_s: how long a lane may move no byte while it is waited for.
        closing: called before a lane is closed.
    """

    def __init__(
        self, host: str, port: int, tls: TLS | None, idle_s: float, closing: Callable[[], object] = lambda: None
    ) -> None:
        self._host, self._port, self._idle_s, self._closing = host.strip("[]"), port, idle_s, closing
        self._name = (tls.server_name if tls else "") or self._host
        self._context = _context(tls) if tls else None
        self._lock = threading.Lock()
        self._idle: list[tuple[Lane, float]] = []
        self._closed = self._told = False
        self._none_until = float("-inf")

    def open(self) -> Lane | None:
        """A lane to call over; none where the other side has none, or does not answer: gRPC says why."""
        with self._lock:
            while self._idle and time.monotonic() - self._idle[0][1] >= KEEP_S:
                self._end(self._idle.pop(0)[0])
            while self._idle:
                kept, _ = self._idle.pop()
                if not kept.stirs():
                    return kept
                self._end(kept)
            if time.monotonic() < self._none_until:
                return None
        try:
            made = self._connect()
        except (TimeoutError, ssl.SSLError) as error:
            made, why = None, repr(error)
        except OSError as error:
            log.debug("no lane to %s: %r", self._host, error)
            return None
        else:
            why = "it does not greet"
        if made is None:
            self._none_until = time.monotonic() + AGAIN_S
            if not self._told:
                self._told = True
                log.info("no lane to %s:%d (%s): bulk goes over gRPC too", self._host, self._port, why)
        return made

    def _connect(self) -> Lane | None:
        sock = socket.create_connection((self._host, self._port), timeout=CONNECT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in KEEPALIVE.keys() & vars(socket).keys():
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), KEEPALIVE[option])
            encryption = Encryption(self._context, self._name) if self._context else None
            if encryption:
                encryption.shake_hands(sock)
            lane = Lane(sock, encryption)
            if not encryption or encryption.protocol == ALPN:
                lane.greet()
                if lane.greeted():
                    sock.settimeout(self._idle_s + SPARE_S)
                    return lane
        except OSError:
            sock.close()
            raise
        sock.close()
        return None

    def give_back(self, lane: Lane) -> None:
        """Keeps a lane for the next call."""
        with self._lock:
            if self._closed:
                self._end(lane)
            else:
                self._idle.append((lane, time.monotonic()))

    def end(self, lane: Lane) -> None:
        """Closes a lane that is of no more use."""
        with self._lock:
            self._end(lane)

    def _end(self, lane: Lane) -> None:
        self._closing()
        lane.close()

    def close(self) -> None:
        """Closes the lanes that nobody uses, and others as they are given back."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
            for lane, _ in idle:
                self._end(lane)


class LaneCall:
    """One call over a lane; a thread sends its messages, and the answers come as they are asked for."""

    def __init__(self, lanes: Lanes, lane: Lane, name: str, messages: Iterable[Parts]) -> None:
        self._lanes, self._lane = lanes, lane
        self._whole = self._sent = self._over = False
        self._failed: Exception | None = None
        self._lock = threading.Lock()
        self.room: Room = _nowhere
        self._sender = threading.Thread(target=self._send, args=(name, messages), name="lane sender", daemon=True)
        self._sender.start()

    def _send(self, name: str, messages: Iterable[Parts]) -> None:
        try:
            self._lane.send(Kind.CALL, name.encode())
            for message in self._made(messages):
                self._lane.send(Kind.MESSAGE, *(message if isinstance(message, tuple) else (message,)))
            self._lane.send(Kind.END)
            self._sent = True
        except OSError as error:
            log.debug("a lane took nothing: %r", error)  # whoever waits for answers finds the same

    def _made(self, messages: Iterable[Parts]) -> Iterator[Parts]:
        """The messages. Where one cannot be made, whoever waits for answers is told so."""
        try:
            yield from messages
        except Exception as error:  # noqa: BLE001 - whoever waits for answers raises it
            self._failed = error
            self.cancel()

    def __iter__(self) -> Iterator[Bytes | Placed]:
        return self

    def __next__(self) -> Bytes | Placed:
        try:
            frame = self._lane.receive(self.room)
            if frame is None:
                raise ConnectionResetError("closed by the other side")
        except (OSError, Malformed) as error:
            if self._failed:
                raise LaneError(grpc.StatusCode.UNKNOWN, f"nothing to send: {self._failed!r}") from self._failed
            raise LaneError(grpc.StatusCode.CANCELLED, str(error) or "nothing came") from error
        kind, content = frame
        if kind is Kind.MESSAGE:
            return content
        if kind is Kind.ERROR:
            told = pb.CallError.FromString(bytes(content))
            code = getattr(grpc.StatusCode, told.status, grpc.StatusCode.UNKNOWN)
            raise LaneError(code, told.details, dict(told.metadata))
        self._whole = kind is Kind.END
        raise StopIteration

    def more(self) -> bool:
        """Whether something comes at once."""
        return self._lane.stirs(PAUSE_S)

    def cancel(self) -> None:
        """Ends it from any thread; of no effect after `close`, when the lane may be another call's."""
        with self._lock:
            if not self._over:
                self._over = True
                self._lanes.end(self._lane)

    def close(self) -> None:
        """Keeps the lane where the call has come to its end on both sides, and closes it otherwise."""
        if self._whole:
            self._sender.join(LAST_S)
        with self._lock:
            over, self._over = self._over, True
        if over or not (self._whole and self._sent):
            self._lanes.end(self._lane)
        else:
            self._lanes.give_back(self._lane)


class GrpcCall:
    """One call over gRPC, for a coordinator that is reached through something that speaks nothing else."""

    def __init__(self, method: Any, messages: Iterable[Parts]) -> None:
        self.room: Room = _nowhere
        self._call = method(m if isinstance(m, bytes) else b"".join(m) for m in messages)

    def __iter__(self) -> Iterator[Bytes | Placed]:
        return self

    def __next__(self) -> Bytes | Placed:
        return bytes(next(self._call))

    def more(self) -> bool:
        """It is not known."""
        return False

    def cancel(self) -> None:
        """Ends it from any thread."""
        self._call.cancel()

    def close(self) -> None:
        """gRPC keeps its connection by itself."""


def _nowhere(count: int) -> memoryview | None:
    """No room: answers come in memory of their own."""


def _context(tls: TLS) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols([ALPN])
    return context
