"""Who may come in while a coordinator ends: nobody new, and transfers under way may finish."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from coordinator.answers import Context, answers
from diloco.errors import Overload

GUARDED = ("Join", "Push", "Resume", "Fetch", "Probe")
"""Methods that are refused once the gate is closed."""
RETRY_AFTER_S = 2.0
_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., Any]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By (request streams, response streams): the attribute of a handler with its method, and what makes such a handler."""


class Gate:
    """Counts the calls of guarded methods that are under way; once closed, it refuses new ones."""

    def __init__(self) -> None:
        self._closed = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.under_way = 0
        """Calls that have come in and not gone out."""

    def close(self) -> None:
        """Lets nobody in any more."""
        self._closed = True

    async def quiet(self, within_s: float) -> bool:
        """Waits until no call is under way; returns whether that came about in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    def guard(self, methods: dict[str, Any]) -> dict[str, Any]:
        """gRPC method handlers by name, those of guarded methods behind the gate."""
        return {name: self._behind(handler) if name in GUARDED else handler for name, handler in methods.items()}

    def _behind(self, handler: Any) -> Any:
        kind, make = _KINDS[handler.request_streaming, handler.response_streaming]
        method = getattr(handler, kind)

        @answers
        async def guarded(request: Any, context: Context) -> Any:
            with self._passing():
                answer = method(request, context)
                if inspect.isawaitable(answer):
                    return await answer
                async for message in answer:
                    await context.write(message)
                return None

        return make(guarded, handler.request_deserializer, handler.response_serializer)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        if self._closed:
            raise Overload("the coordinator is shutting down; it will be back", retry_after_s=RETRY_AFTER_S)
        self.under_way += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way:
                self._quiet.set()
