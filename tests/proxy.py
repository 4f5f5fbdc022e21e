"""A line to a coordinator that a test cuts, after as many bytes as it likes."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal, TypeVar

from tests.support import BOUND_S

Way = Literal["up", "down"]
P = TypeVar("P", bound="Proxy")


class Proxy:
    """Forwards connections to `target` (HOST:PORT) and counts them and their bytes."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.count: dict[Way, int] = {"up": 0, "down": 0}
        self.connections = 0
        """All that were let pass, open or closed."""
        self._left: dict[Way, int | None] = {"up": None, "down": None}
        self._changed = threading.Condition()
        self._open: list[socket.socket] = []
        self._made: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hold_after(self, way: Way, count: int) -> None:
        """Lets so many more bytes pass one way, then none until the line is cut."""
        with self._changed:
            self._left[way] = count

    def wait_held(self) -> None:
        """Returns once all bytes that were to pass have passed."""
        with self._changed:
            assert self._changed.wait_for(lambda: 0 in self._left.values(), BOUND_S), "the line was never full"

    def release(self) -> None:
        """Lets everything pass that was held, over the same connections."""
        with self._changed:
            self._left = {"up": None, "down": None}
            self._changed.notify_all()

    def cut(self) -> None:
        """Closes all connections; new ones are unhindered."""
        with self._changed:
            self._left = {"up": None, "down": None}
            closing, self._open = self._open, []
            for end in closing:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in self._threads:
            thread.join(BOUND_S)
        for end in self._made:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            try:
                if not self._passes(near):
                    raise ConnectionRefusedError
                far = socket.create_connection((host, int(port)), timeout=BOUND_S)
            except OSError:  # nobody is there at the moment
                near.close()
                continue
            far.settimeout(None)
            with self._changed:
                self.connections += 1
                self._open += [near, far]
                self._made += [near, far]
            for way, source, sink in (("up", near, far), ("down", far, near)):
                self._threads.append(threading.Thread(target=self._pump, args=(way, source, sink), daemon=True))
                self._threads[-1].start()

    def _passes(self, near: socket.socket) -> bool:
        """Whether a connection is let pass."""
        return True

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while data:
                    with self._changed:
                        self._changed.wait_for(lambda: self._left[way] != 0 or source not in self._open)
                        if source not in self._open:
                            break
                        left = self._left[way]
                        passing, data = (data, b"") if left is None else (data[:left], data[left:])
                        self.count[way] += len(passing)
                        if left is not None:
                            self._left[way] = left - len(passing)
                    sink.sendall(passing)
                    with self._changed:
                        self._changed.notify_all()
                if source not in self._open:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class OnlyGrpc(Proxy):
    """A line that lets nothing pass but HTTP/2, by its first bytes or the protocol that its ClientHello names."""

    refused = 0

    def _passes(self, near: socket.socket) -> bool:
        near.settimeout(BOUND_S)
        head = near.recv(5, socket.MSG_PEEK | socket.MSG_WAITALL)
        if head[:1] == b"\x16":
            count = len(head) + int.from_bytes(head[3:], "big")
            passes = b"\x02h2" in near.recv(count, socket.MSG_PEEK | socket.MSG_WAITALL)
        else:
            passes = head == b"PRI *"
        near.settimeout(None)
        self.refused += not passes
        return passes


class Bottleneck(Proxy):
    """A line of so many bytes a second each way, shared by all connections, behind a queue that takes everything: what
    one connection puts into it all others wait behind. So do home routers and cheap links. Behind it bytes take
    `delay_s` to arrive."""

    def __init__(self, target: str, bytes_per_s: float, delay_s: float = 0.0) -> None:
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._queues: dict[Way, queue.SimpleQueue[tuple[socket.socket, bytes] | None]]
        self._queues = {"up": queue.SimpleQueue(), "down": queue.SimpleQueue()}
        self._over = threading.Event()
        self._drains = [threading.Thread(target=self._drain, args=(way,), daemon=True) for way in self._queues]
        for drain in self._drains:
            drain.start()
        super().__init__(target)

    def close(self) -> None:
        self._over.set()
        for waiting in self._queues.values():
            waiting.put(None)
        super().close()
        for drain in self._drains:
            drain.join(BOUND_S)

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._queues[way].put((sink, data))
        self._queues[way].put((sink, b""))

    def _drain(self, way: Way) -> None:
        free_at, under_way = 0.0, deque[tuple[float, socket.socket, bytes]]()
        while not self._over.is_set():
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, sink, data = under_way.popleft()
                self.count[way] += len(data)
                with contextlib.suppress(OSError):
                    if data:
                        sink.sendall(data)
                    else:
                        sink.shutdown(socket.SHUT_WR)
            try:
                item = self._queues[way].get(timeout=max(0.0, under_way[0][0] - now) if under_way else None)
            except queue.Empty:
                continue
            if item is not None:
                free_at = max(free_at, time.monotonic()) + len(item[1]) / self._bytes_per_s
                under_way.append((free_at + self._delay_s, *item))


@contextlib.contextmanager
def proxied(target: str, kind: type[P] = Proxy) -> Iterator[P]:  # type: ignore[assignment]
    """A line to `target` until the end of the block."""
    proxy = kind(target)
    try:
        yield proxy
    finally:
        proxy.close()
