"""Bulk calls over lanes (`diloco/lane.py`): the same methods as over gRPC, called with the same two arguments."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import numpy

from diloco.errors import Malformed
from diloco.framing import FRAME_BYTES, Bytes, Placed
from diloco.lane import Encryption, Kind, Lane
from diloco.v1 import coordinator_pb2 as pb
from diloco.window import PAUSE_S

log = logging.getLogger("diloco.coordinator")
IDLE_S = 120.0
"""A lane that moves no byte for so long within a call is dead."""
KEEP_S = 60.0
"""How long a lane stays open between two calls."""
LAST_S = 10.0
"""How long a caller may take to end a call that is over, or to shake hands."""


Take = Callable[[Bytes | Placed, Callable[[], bool]], bytes | None]
"""Takes a message, whose memory is used again afterwards; may ask whether another comes at once, and returns what is to
be sent."""


class Ended(Exception):
    """The call is over, by an error that its caller is told."""


class LaneCall:
    """One call: what a method takes for gRPC's context, and the messages that come (`coordinator/calls.py`).

    A thread receives, one message before it is asked for: so who goes away is found out. What is sent, a thread sends.
    """

    def __init__(self, lane: Lane, sender: ThreadPoolExecutor) -> None:
        self._lane, self._sender = lane, sender
        self._loop = asyncio.get_running_loop()
        self._coming: asyncio.Queue[Bytes | Placed | Exception | None] = asyncio.Queue()
        self._asked = threading.Semaphore(0)
        self._take: Take | None = None
        self._replying = threading.Lock()
        self._room: numpy.ndarray[Any, Any] = numpy.empty(0, numpy.uint8)
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._over = False
        self._held: tuple[Bytes, ...] | None = None
        self._ended = False
        self.broken = asyncio.Event()
        """The lane is of no more use: it was closed, or what came is no frame."""
        self.heard = asyncio.Event()
        """Nothing more will come in this call."""
        threading.Thread(target=self._receive, name="lane", daemon=True).start()

    def _receive(self) -> None:
        broken = True
        try:
            while frame := self._lane.receive(self._place):
                kind, content = frame
                if kind is Kind.END:
                    broken = False
                    break
                if kind is not Kind.MESSAGE:
                    raise Malformed(f"a call is messages and an end, and {kind.name} came within one")
                self._hand_over(content)
        except OSError as error:
            log.debug("a lane ended with %r", error)
        except Malformed as error:
            self._on_loop(self._coming.put_nowait, error)
            self._lane.drain()
        self._on_loop(self._done, broken)

    def _place(self, count: int) -> memoryview | None:
        """Where the payload of a message of `count` bytes is put that is taken at once."""
        size = count - FRAME_BYTES
        if not self._take or size <= 0:
            return None
        if self._room.size < size:
            self._room = numpy.empty(size, numpy.uint8)
        return self._room[:size].data

    def _hand_over(self, message: Bytes | Placed) -> None:
        """Has a message taken, or waits until it is asked for; once nobody wants any more, it is passed over."""
        if not (self._over or self._take):
            self._asked.acquire()
        take = self._take
        if self._over:
            return
        if not take:
            self._on_loop(self._coming.put_nowait, message)
            return
        try:
            reply = take(message, partial(self._lane.stirs, PAUSE_S))
            with self._replying:
                if reply and not self._over and self._lane.takes_at_once(len(reply)):
                    self._lane.send(Kind.MESSAGE, reply)
        except Exception as error:  # noqa: BLE001 - whoever has it poured raises it
            self._over = True
            self._on_loop(self._coming.put_nowait, error)

    def _on_loop(self, work: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(work, *args)

    def _done(self, broken: bool) -> None:
        self.heard.set()
        if broken:
            self.broken.set()
        else:
            self._coming.put_nowait(None)

    async def messages(self) -> AsyncIterator[Any]:
        """What the caller sends, until its end. Raises `Malformed` where that is no message."""
        while (message := await self._next()) is not None:
            yield message

    async def _next(self) -> Bytes | Placed | None:
        self._asked.release()
        message = await self._coming.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def pour(self, take: Take) -> None:
        """Has `take` take every message that still comes, on the thread that receives it, and sends what it returns,
        unless the caller lets that pile up, until the caller's end. Raises what it raises, and then calls it no more.
        What comes once this has ended is passed over."""
        self._take = take
        try:
            await self._next()
        finally:
            with self._replying:  # what is sent from now on is the method's
                self._over = True

    def finish(self) -> None:
        """Whatever still comes is passed over."""
        self._over = True
        self._asked.release()

    async def write(self, message: Any) -> None:
        """Sends a message (bytes or protobuf)."""
        await self._send(Kind.MESSAGE, message if isinstance(message, bytes) else message.SerializeToString())

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """What goes with an error."""
        self._metadata = metadata

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call with an error."""
        error = pb.CallError(status=code.name, details=details, metadata=dict(self._metadata))
        await self._send(Kind.ERROR, error.SerializeToString())
        raise Ended

    async def feed(self, messages: Iterator[tuple[Bytes, ...]], admits: Callable[[int], bool]) -> int:
        """Sends chunks as long as their payloads are admitted; returns the size of one that is not, and waits for the
        next `feed`, or 0 once all are sent."""
        count: int = await self._on_sender(self._feed, messages, admits)
        return count

    def _feed(self, messages: Iterator[tuple[Bytes, ...]], admits: Callable[[int], bool]) -> int:
        while message := self._held or next(messages, None):
            self._held = message
            count = sum(map(len, message)) - FRAME_BYTES
            if not admits(count):
                return count
            self._lane.send(Kind.MESSAGE, *message)
            self._held = None
        return 0

    async def conclude(self, message: bytes) -> None:
        """Sends a message, and ends the call."""
        await self.write(message)
        await self.end()

    async def end(self) -> None:
        """Ends the call in good order, if it has not ended."""
        if not self._ended:
            self._ended = True
            await self._send(Kind.END)

    async def _send(self, kind: Kind, content: bytes = b"") -> None:
        await self._on_sender(self._lane.send, kind, content, at_once=self._lane.takes_at_once(len(content)))

    async def _on_sender(self, work: Callable[..., Any], *args: object, at_once: bool = False) -> Any:
        try:
            return work(*args) if at_once else await self._loop.run_in_executor(self._sender, work, *args)
        except OSError as error:
            log.debug("a lane took nothing: %r", error)
            raise Ended from error


class Lanes:
    """The lanes of one coordinator.

    Args:
        handlers: gRPC method handlers by name; those with streams both ways may be called.
    """

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        self._methods: dict[str, Any] = {name: h.stream_stream for name, h in handlers.items() if h.stream_stream}
        self._calls: set[LaneCall] = set()
        self._quiet = asyncio.Event()

    async def serve(self, sock: socket.socket, encryption: Encryption | None) -> None:
        """Serves the calls of a connection whose other end has named this protocol, until it is closed, or this is
        cancelled."""
        sock.settimeout(LAST_S)
        lane = Lane(sock, encryption)
        sender = ThreadPoolExecutor(1, "lane sender")
        try:
            if not await _on(sender, _greeted, sock, lane, encryption):
                return
            sock.settimeout(IDLE_S)
            while (lane.pending or await self._idle(sock)) and await self._call(lane, sender):
                pass
        except (OSError, Malformed) as error:
            log.debug("a lane ended with %r", error)
        finally:
            lane.close()
            sender.shutdown(wait=False)  # it may wait for what is still being made

    async def _idle(self, sock: socket.socket) -> bool:
        """Waits for the next call; returns whether one comes."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sock, ready.set)
        try:
            async with asyncio.timeout(KEEP_S):
                await ready.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(sock)
        return True

    async def _call(self, lane: Lane, sender: ThreadPoolExecutor) -> bool:
        """Serves one call; returns whether another may follow on this lane."""
        frame = await _on(sender, lane.receive)
        if frame is None:
            return False
        kind, name = frame[0], bytes(frame[1]).decode(errors="replace")
        if kind is not Kind.CALL:
            raise Malformed(f"a call begins with its name, not with {kind.name}")
        self._calls.add(call := LaneCall(lane, sender))
        task = asyncio.ensure_future(self._answer(name, call))
        task.add_done_callback(lambda _: self._ended(call))
        cut = asyncio.ensure_future(call.broken.wait())
        try:
            await asyncio.wait((task, cut), return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.finish()
            task.cancel()
            cut.cancel()
            await asyncio.wait((task,))
        if task.cancelled() or call.broken.is_set():
            return False
        whole = task.result()
        try:  # closed with bytes that nobody has read, a connection takes back what it has sent
            async with asyncio.timeout(LAST_S):
                await call.heard.wait()
        except TimeoutError:
            return False
        return whole and not call.broken.is_set()

    async def _answer(self, name: str, call: LaneCall) -> bool:
        """Has the method answer; returns whether the call has ended well."""
        try:
            method = self._methods.get(name)
            if method is None:
                await call.abort(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {name[:64]!r}")
            else:
                await method(call.messages(), call)
            await call.end()
        except Ended:
            return False
        except Exception:
            log.exception("%s failed", name)
            with contextlib.suppress(Ended):
                await call.abort(grpc.StatusCode.UNKNOWN, f"{name} failed; the coordinator's log says more")
            return False
        return True

    def _ended(self, call: LaneCall) -> None:
        self._calls.discard(call)
        if not self._calls:
            self._quiet.set()

    async def quiet(self, grace: float | None) -> None:
        """Returns once no call is under way, or after `grace` seconds."""
        self._quiet.clear()
        if self._calls and grace:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._quiet.wait()


def _greeted(sock: socket.socket, lane: Lane, encryption: Encryption | None) -> bool:
    """Shakes hands; returns whether the other side means it."""
    if encryption:
        encryption.shake_hands(sock)
    if not lane.greeted():
        return False
    lane.greet()
    return True


async def _on(pool: ThreadPoolExecutor, work: Callable[..., Any], *args: object) -> Any:
    """Runs work on a thread."""
    return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
