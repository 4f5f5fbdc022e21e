"""The pace of streams: what comes is taken and its sender told, and what is sent waits until it is heard of."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from google.protobuf.message import DecodeError

from coordinator.calls import IDLE_S
from coordinator.upload import Upload
from diloco.errors import DeadlineExceeded, Malformed
from diloco.framing import Bytes, Placed
from diloco.v1 import coordinator_pb2 as pb
from diloco.window import TELL_BYTES, Window

log = logging.getLogger("diloco.coordinator")


class Flow:
    """Takes what a stream brings as it comes, and says how far its payload has come.

    Args:
        upload: what it brings.
        window_bytes: says what its sender may have under way.
    """

    def __init__(self, upload: Upload, window_bytes: Callable[[], int]) -> None:
        self._upload, self._window_bytes = upload, window_bytes
        self._loop = asyncio.get_running_loop()
        self._told = upload.have
        self._stopped = False
        self.came = asyncio.Event()
        """Something has come."""

    def take(self, message: Bytes | Placed, more: Callable[[], bool]) -> bytes | None:
        """Takes a message, on any thread; raises what `Upload.add` does. After `stop` it takes nothing.

        Args:
            message: a chunk, or the end.
            more: whether the next one comes at once, so that its sender need not be told yet.

        Returns:
            What its sender is to be told, if anything (`PushReply`).
        """
        with self._upload.lock:
            if self._stopped:
                return None
            new, have = self._upload.add(message), self._upload.have
        if not new or (have - self._told < TELL_BYTES and more()):
            return None
        if not self.came.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self._loop.call_soon_threadsafe(self.came.set)
        self._told = have
        return pb.PushReply(have_bytes=have, window_bytes=self._window_bytes()).SerializeToString()

    def stop(self) -> None:
        """Nothing is taken any more."""
        self._stopped = True


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
