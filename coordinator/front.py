"""The port of a coordinator: whoever begins a lane gets one, everybody else speaks with the gRPC server behind it.

gRPC listens on a port of its own on this host's loopback, under the same credentials; bytes pass between the two as
they come. Which it is, the first bytes say: a lane begins with `HELLO`, or names its protocol in its ClientHello.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl

import grpc

from coordinator.lanes import Lanes
from diloco.lane import ALPN, HELLO, KEEPALIVE, Encryption

log = logging.getLogger("diloco.coordinator")
HELLO_S = 10.0
"""How long a connection may say nothing."""
LAST_S = 10.0
"""How long the other side may take to end a connection that one side has ended."""
PAUSE_S = 1.0
"""How long nobody is let in after a connection that could not be taken."""
PASS_BYTES = 2**16
"""Bytes that pass at a time."""
BACKLOG = 256
_RECORD_BYTES = 5
"""The header of a TLS record: its type, a version, and in two bytes its length."""
_HANDSHAKE = 0x16


class Front:
    """A coordinator's port, from `begin` until `stop`.

    Args:
        context: TLS of the server's side; none where nothing is encrypted.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._origins: dict[int, str] = {}
        self._later: asyncio.TimerHandle | None = None

    async def begin(self, listen: str, server: grpc.aio.Server, behind: int, lanes: Lanes) -> int:
        """Listens on HOST:PORT, and returns the port.

        Args:
            listen: HOST:PORT; port 0 takes a free one.
            server: the gRPC server; it ends with this.
            behind: its port on the loopback.
            lanes: what serves lanes.

        Raises:
            OSError: the address cannot be had.
        """
        host, _, port = listen.rpartition(":")
        self._listener = _listen(host.strip("[]"), int(port))
        self._server, self._behind, self._lanes = server, behind, lanes
        await server.start()
        self._let_in()
        return int(self._listener.getsockname()[1])

    async def stop(self, grace: float | None) -> None:
        """Lets nobody in any more, ends the gRPC server within `grace` seconds, then closes all connections."""
        if self._later:
            self._later.cancel()
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        await self._server.stop(grace)
        await self._lanes.quiet(grace)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_S)

    def origin(self, peer: str) -> str:
        """The host where a gRPC call comes from, whose other end gRPC sees here: "ipv4:127.0.0.1:PORT"."""
        return self._origins.get(int(peer.rpartition(":")[2]), peer)

    def _let_in(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Takes a connection that waits."""
        loop = asyncio.get_running_loop()
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        except OSError as error:
            log.warning("a connection could not be taken: %s", error)  # as where descriptors have run out
            loop.remove_reader(self._listener)
            self._later = loop.call_later(PAUSE_S, self._let_in)
            return
        task = loop.create_task(self._meet(sock, str(address[0]).removeprefix("::ffff:")))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: sock.close())  # one that is cancelled before it begins does not

    async def _meet(self, sock: socket.socket, host: str) -> None:
        try:
            sock.setblocking(False)
            settle(sock)
            async with asyncio.timeout(HELLO_S):
                lane = await self._wants_lane(sock)
            if lane:
                await self._lanes.serve(sock, Encryption(self._context, None) if self._context else None)
            else:
                await self._pass(sock, host)
        except (OSError, TimeoutError) as error:
            log.debug("a connection from %s ended with %r", host, error)

    async def _wants_lane(self, sock: socket.socket) -> bool:
        """Whether the other end begins a lane."""
        head = await _peek(sock, _RECORD_BYTES)
        if self._context is None:
            return head == HELLO[:_RECORD_BYTES]
        if len(head) < _RECORD_BYTES or head[0] != _HANDSHAKE:
            return False
        hello = await _peek(sock, _RECORD_BYTES + int.from_bytes(head[3:], "big"))
        return bytes([len(ALPN)]) + ALPN.encode() in hello

    async def _pass(self, sock: socket.socket, host: str) -> None:
        """Brings a connection together with the gRPC server until one of them ends it."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as behind:
            behind.setblocking(False)
            settle(behind)
            await loop.sock_connect(behind, ("127.0.0.1", self._behind))
            port = behind.getsockname()[1]
            self._origins[port] = host
            ways = [loop.create_task(_pump(sock, behind)), loop.create_task(_pump(behind, sock))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait(ways, timeout=LAST_S)  # what one side has said at its end is to arrive
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.wait(ways)
                del self._origins[port]


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Passes bytes on until there are no more, or nobody takes them; then the sink hears of the end."""
    loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(PASS_BYTES))
    with contextlib.suppress(OSError):
        while count := await loop.sock_recv_into(source, buffer):
            await loop.sock_sendall(sink, buffer[:count])
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


async def _peek(sock: socket.socket, count: int) -> bytes:
    """The next bytes, which stay where they are: so many, or fewer where no more come."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
        return sock.recv(count, socket.MSG_PEEK)
    finally:
        loop.remove_reader(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def settle(sock: socket.socket) -> None:
    """Has small messages leave at once, and a dead line found."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; of both families where the address is any."""
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        sock = socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    else:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock
