"""Lanes over a method of the test's own: who is done before whom, and what is left when both are."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.certificates import Authority
from coordinator import lanes
from coordinator.flow import Heard
from coordinator.tls import server
from diloco.errors import Malformed
from diloco.lane import HELLO, Encryption, Lane
from diloco.window import Window
from island.lanes import _context
from tests.lanes import answers, called, held, say
from tests.processes import wait_until
from tests.support import BOUND_S


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Alone:
    """Lanes over one method, without a run, and a caller on one of them.

    Args:
        encryptions: the caller's, and the other; none for a plain lane.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        stack: ExitStack,
        encryptions: tuple[Encryption | None, Encryption | None] = (None, None),
    ) -> None:
        self._here, self.there = socket.socketpair()
        self._here.settimeout(BOUND_S)
        self._near, self._far = encryptions
        self.caller = Lane(self._here, self._near)
        stack.callback(self.caller.close)
        self.lanes = lanes.Lanes({"Ask": grpc.stream_stream_rpc_method_handler(method)})

    def serve(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.lanes.serve(self.there, self._far))

    def ask(self, *messages: bytes) -> None:
        """Calls in the same write in which it greets."""
        if self._near:
            self._near.shake_hands(self._here)
        say(self.caller, HELLO + called("Ask", *messages))
        assert self.caller.greeted()

    def hear(self) -> list[bytes]:
        """The answers to a call, after which the caller goes."""
        got = answers(self.caller)
        self.caller.close()
        return got


def test_a_lane_that_is_ended_twice_leaves_no_thread(stack: ExitStack) -> None:
    """As where a coordinator ends while a call that was cut off still clears up."""
    before, cut, clear = held(), threading.Event(), asyncio.Event()

    async def method(messages: object, context: lanes.LaneCall) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()
            await clear.wait()

    async def end_twice() -> None:
        alone = Alone(method, stack)
        task = alone.serve()
        await asyncio.to_thread(alone.ask, *[b"x"] * 16)
        await asyncio.to_thread(wait_until, lambda: alone.lanes._calls, "the call has come", BOUND_S)
        for _ in range(2):
            task.cancel()
            await asyncio.to_thread(cut.wait, BOUND_S)
        await asyncio.wait((task,), timeout=BOUND_S)
        assert alone.lanes._calls
        clear.set()
        await alone.lanes.quiet(BOUND_S)
        assert not alone.lanes._calls

    asyncio.run(end_twice())
    wait_until(lambda: held()[0] == before[0], "no thread is left", BOUND_S)


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_first_call_may_be_as_slow_as_any(stack: ExitStack, tmp_path: Path, encrypted: bool) -> None:
    """Though it comes together with the greeting: how long a caller may take to greet is another matter."""
    waited = list[float | None]()

    async def method(messages: AsyncIterator[bytes], context: lanes.LaneCall) -> None:
        waited.append(alone.there.gettimeout())
        assert [bytes(message) async for message in messages] == [b"x"]

    async def ask() -> None:
        task = alone.serve()
        await asyncio.to_thread(alone.ask, b"x")
        assert await asyncio.to_thread(alone.hear) == []
        await asyncio.wait_for(task, BOUND_S)

    if encrypted:
        authority = Authority(tmp_path)
        secured = server(authority.issue("coordinator"))
        assert secured is not None
        client = Encryption(_context(authority.issue("tokyo")), "127.0.0.1")
        alone = Alone(method, stack, (client, Encryption(secured.lanes, None)))
    else:
        alone = Alone(method, stack)
    asyncio.run(ask())
    assert waited == [lanes.IDLE_S]


def test_a_call_that_has_ended_on_its_callers_side_is_answered(stack: ExitStack) -> None:
    """All that its caller says is there before the method asks for anything."""
    go_on = threading.Event()

    async def method(messages: AsyncIterator[bytes], context: lanes.LaneCall) -> None:
        await asyncio.to_thread(go_on.wait, BOUND_S)
        async for message in messages:
            await context.write(bytes(message) * 2)
        await context.conclude(b"last")

    async def ask() -> list[bytes]:
        alone = Alone(method, stack)
        task = alone.serve()
        await asyncio.to_thread(alone.ask, b"a", b"b", b"c", b"d")
        go_on.set()
        got = await asyncio.to_thread(alone.hear)
        await asyncio.wait_for(task, BOUND_S)
        return got

    assert asyncio.run(ask()) == [b"aa", b"bb", b"cc", b"dd", b"last"]


def test_what_is_to_be_said_of_a_message_after_the_end_is_not_said(stack: ExitStack) -> None:
    """The caller would take it for an answer to its next call."""
    entered, go_on, left = threading.Event(), threading.Event(), threading.Event()
    calls = iter((b"last", b"again"))

    def take(message: object, more: object) -> bytes:
        entered.set()
        assert go_on.wait(BOUND_S)
        left.set()
        return b"late"

    async def method(messages: object, context: lanes.LaneCall) -> None:
        answer = next(calls)
        if answer == b"last":
            pouring = asyncio.ensure_future(context.pour(take))
            await asyncio.to_thread(entered.wait, BOUND_S)
            pouring.cancel()
            await asyncio.wait((pouring,))
        await context.conclude(answer)
        go_on.set()

    async def ask() -> list[list[bytes]]:
        alone = Alone(method, stack)
        task = alone.serve()
        await asyncio.to_thread(alone.ask, b"x", b"y")
        first = await asyncio.to_thread(answers, alone.caller)
        await asyncio.to_thread(left.wait, BOUND_S)
        say(alone.caller, called("Ask", b"x"))
        second = await asyncio.to_thread(alone.hear)
        await asyncio.wait_for(task, BOUND_S)
        return [first, second]

    assert asyncio.run(ask()) == [[b"last"], [b"again"]]


def test_who_hears_no_more_of_a_receiver_lets_what_comes_pass(caplog: pytest.LogCaptureFixture) -> None:
    async def messages() -> AsyncIterator[bytes]:
        raise Malformed("no frame")
        yield b""

    async def feed() -> None:
        window = Window(1)
        window.begin(0)
        async with Heard(window, messages()) as heard:
            await heard.room(2**40)
            assert heard.admits(2**40)

    asyncio.run(feed())
    gc.collect()
    assert not caplog.records
