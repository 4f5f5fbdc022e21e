"""What a method with streams both ways has of its caller, who came over a lane or over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import wraps
from typing import Any, Protocol

import grpc

from coordinator.answers import Context
from coordinator.lanes import LaneCall, Take
from diloco.errors import DeadlineExceeded
from diloco.framing import FRAME_BYTES, Bytes

IDLE_S = 120.0
"""A stream that moves no byte for so long is ended: its line is dead."""


class Call(Protocol):
    """One call, as its method sees it. It sends one thing at a time."""

    def messages(self) -> AsyncIterator[Bytes]:
        """What the caller sends, until its end. Raises `Malformed` where that is no message."""

    async def pour(self, take: Take) -> None:
        """Has `take` take every message that still comes, on a thread, and sends what it returns, until the caller's
        end. Raises what it raises, and then calls it no more. Nothing else may be sent meanwhile."""

    async def write(self, message: bytes) -> None:
        """Sends a message."""

    async def feed(self, messages: Iterator[tuple[Bytes, ...]], admits: Callable[[int], bool]) -> int:
        """Sends chunks as long as their payloads are admitted; returns the size of one that is not, and waits for the
        next `feed`, or 0 once all are sent."""

    async def conclude(self, message: bytes) -> None:
        """Sends a message, and ends the call: nothing may be sent afterwards."""

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...], /) -> None:
        """What goes with an error."""

    async def abort(self, code: grpc.StatusCode, details: str, /) -> None:
        """Ends the call with an error."""


def streams(method: Callable[[Call], Awaitable[None]]) -> Any:
    """The gRPC method handler of a method of calls; over a lane it may be called as well."""

    @wraps(method)
    async def called(messages: AsyncIterator[bytes], context: Context | LaneCall) -> None:
        await method(context if isinstance(context, LaneCall) else GrpcCall(messages, context))

    return grpc.stream_stream_rpc_method_handler(called)


class GrpcCall:
    """One call over gRPC. A message is taken while the next one comes, and made while the one before it goes."""

    def __init__(self, messages: AsyncIterator[bytes], context: Context) -> None:
        self._coming, self._context = aiter(messages), context
        self._making: asyncio.Future[bytes] | None = None
        self.set_trailing_metadata, self.abort = context.set_trailing_metadata, context.abort

    async def messages(self) -> AsyncIterator[Bytes]:
        """As `Call` says. Raises `DeadlineExceeded` where nothing comes any more."""
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    message = await anext(self._coming, None)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the stream brought nothing for {IDLE_S:g} s: ask Resume, and go on there"
                ) from None
            if message is None:
                return
            yield message

    async def pour(self, take: Take) -> None:
        """As `Call` says."""
        taking: asyncio.Future[bytes | None] | None = None
        async for message in self.messages():
            await self._taken(taking)
            taking = _on_thread(take, message, lambda: False)
        await self._taken(taking)

    async def _taken(self, taking: asyncio.Future[bytes | None] | None) -> None:
        reply = await taking if taking else None
        if reply:
            await self.write(reply)

    async def write(self, message: bytes) -> None:
        """As `Call` says. Raises `DeadlineExceeded` where nothing is taken any more."""
        try:
            async with asyncio.timeout(IDLE_S):
                await self._context.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"the stream took nothing for {IDLE_S:g} s: ask for the rest") from None

    async def feed(self, messages: Iterator[tuple[Bytes, ...]], admits: Callable[[int], bool]) -> int:
        """As `Call` says."""

        def make() -> asyncio.Future[bytes]:
            return _on_thread(lambda: b"".join(next(messages, ())))

        self._making = self._making or make()
        while message := await self._making:
            if not admits(len(message) - FRAME_BYTES):
                return len(message) - FRAME_BYTES
            self._making = make()
            await self.write(message)
        return 0

    async def conclude(self, message: bytes) -> None:
        """As `Call` says."""
        await self.write(message)


def _on_thread(work: Callable[..., Any], *args: object) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().run_in_executor(None, work, *args)
