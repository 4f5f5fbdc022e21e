"""The pace of streams: messages on their way to the thread that writes them, and what is sent before it is heard of."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from types import TracebackType

from google.protobuf.message import DecodeError

from coordinator.upload import Upload, Uploads
from diloco.errors import DeadlineExceeded, Malformed
from diloco.framing import Bytes
from diloco.v1 import coordinator_pb2 as pb
from diloco.window import Window

log = logging.getLogger("diloco.coordinator")
IDLE_S = 120.0
"""A stream that moves no byte for so long is ended: its line is dead."""
BEHIND = 4
"""Messages of a stream that wait while earlier ones are written."""
TELL_BYTES = 4 * 2**20
"""A sender hears how far its payload has come after so much at the latest, and whenever all that came is written."""


class Flow:
    """Hands messages over in batches: one is written at a time, and what comes meanwhile is the next.

    Used on one loop, as a context: what still waits at its end is written before anything else of the same slot.
    """

    def __init__(self, uploads: Uploads, upload: Upload) -> None:
        self._uploads, self._upload = uploads, upload
        self._waiting: list[Bytes] = []
        self._writing: asyncio.Future[None] | None = None
        self._failed: BaseException | None = None
        self._done, self._moved = asyncio.Event(), asyncio.Event()
        self._told = upload.have
        self._over = False

    def __enter__(self) -> Flow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rest, self._waiting = self._waiting, []
        if rest:
            self._uploads.run(self._upload.slot, self._upload.add_all, rest).add_done_callback(_seen)

    async def add(self, message: Bytes) -> None:
        """Hands a message over; waits while too many do. Raises what writing earlier ones has raised."""
        self._waiting.append(message)
        self._start()
        while self._writing and len(self._waiting) > BEHIND:
            await self._next()
        self._check()

    async def finish(self) -> None:
        """Returns once all is written. Raises what writing has raised."""
        while self._writing:
            await self._next()
        self._check()

    async def moved(self) -> int | None:
        """Bytes that the upload has, once those are more than at the last call, and the sender may wait for that; None
        once nobody is to be told any more."""
        while self._upload.have == self._told and not self._over:
            await self._moved.wait()
            self._moved.clear()
        self._told = self._upload.have
        return None if self._over else self._told

    def hush(self) -> None:
        """Nobody is to be told any more."""
        self._over = True
        self._moved.set()

    async def _next(self) -> None:
        """Returns once a batch is written."""
        self._done.clear()
        await self._done.wait()

    def _check(self) -> None:
        if self._failed:
            raise self._failed

    def _start(self) -> None:
        if self._writing is None and self._waiting and not self._failed:
            batch, self._waiting = self._waiting, []
            self._writing = self._uploads.run(self._upload.slot, self._upload.add_all, batch)
            self._writing.add_done_callback(self._written)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing, self._failed = None, _seen(writing)
        self._start()
        self._done.set()
        if not self._writing or self._upload.have - self._told >= TELL_BYTES:
            self._moved.set()


class Heard:
    """How far a payload has come that is being sent, as its receiver says; one that says nothing takes what comes.

    Args:
        window: of what may be under way.
        messages: what follows a FetchRequest.
    """

    def __init__(self, window: Window, messages: AsyncIterator[Bytes]) -> None:
        self._window, self._messages = window, messages
        self._moved = asyncio.Event()
        self._silent = False
        self._lock = threading.Lock()

    async def __aenter__(self) -> Heard:
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.cancel()
        await asyncio.wait([self._listening], timeout=IDLE_S)

    def admits(self, count: int) -> bool:
        """Whether so many bytes may be sent now; if so, they count as sent. On any thread."""
        with self._lock:
            admitted = self._silent or self._window.admits(count)
            if admitted:
                self._window.sent(count, time.monotonic())
            return admitted

    async def room(self, count: int) -> None:
        """Returns once `admits` may say yes. Raises `DeadlineExceeded` where nothing comes through any more."""
        while not self._silent:
            self._moved.clear()
            with self._lock:
                if self._window.admits(count):
                    return
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._moved.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"nothing came through for {IDLE_S:g} s: ask for the rest") from None

    async def _listen(self) -> None:
        try:
            async for message in self._messages:
                progress = pb.FetchProgress.FromString(bytes(message))
                with self._lock:
                    self._window.heard(progress.have_bytes, progress.window_bytes, time.monotonic())
                self._moved.set()
        except (DecodeError, Malformed) as error:
            log.debug("what follows a FetchRequest is no progress: %s", error)
        finally:
            self._silent = True
            self._moved.set()


def _seen(writing: asyncio.Future[None]) -> BaseException | None:
    """What writing has raised. Of a stream that is over nobody asks: the next one finds how far it came."""
    return None if writing.cancelled() else writing.exception()
