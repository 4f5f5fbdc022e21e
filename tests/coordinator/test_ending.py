"""How a coordinator ends: nobody new comes in, what is under way finishes, a second signal ends it at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.gate import Gate
from coordinator.snapshots import load_snapshot
from diloco.errors import ExitCode, Overload
from diloco.fragments import Fragment, partition
from diloco.framing import SERVICE, chunks
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link
from island.operate import stop
from tests.processes import Hand, Process, command_here, diloco_here, wait_until
from tests.support import BOUND_S, MODEL, Rig, Visitor, configure, draw, part, visit

RUN = """
[sync]
strategy = "strided"
fragments = 2
every_steps = 4
buffers = "average"
[rounds]
start_islands = {islands}
quorum = {islands}
lease_s = 300.0
[snapshot]
every_rounds = 1000000
"""
FRAGMENTS = partition(MODEL, configure().sync)


def start(visitors: list[Visitor]) -> None:
    for visitor in visitors:
        visitor.join()
    for fragment in FRAGMENTS:
        visitors[0].push(fragment, draw(fragment, 0), seed=True)
    assert [visitor.beat(ready=True).phase for visitor in visitors][-1] == "running"


class Upload:
    """A push that sends its header and first chunk, and the rest when it is told to."""

    def __init__(self, visitor: Visitor, fragment: Fragment, stack: ExitStack) -> None:
        self._rest = threading.Event()
        self._channel = stack.enter_context(grpc.insecure_channel(visitor.link.address))
        sent = part(fragment, draw(fragment, 1))
        payload = sent.payload.contiguous()
        first, *others = chunks([payload], 16, ended=True)

        def messages() -> Iterator[bytes]:
            yield visitor.header(fragment.index, sent.pieces).SerializeToString()
            yield first
            assert self._rest.wait(BOUND_S)
            yield from others

        call: Any = self._channel.stream_stream(f"/{SERVICE}/Push", None, pb.PushReply.FromString)

        def receipt() -> pb.Receipt:
            *_, last = call(messages(), timeout=BOUND_S)
            return last.receipt  # type: ignore[no-any-return]

        self.receipt: Future[pb.Receipt] = stack.enter_context(ThreadPoolExecutor(1)).submit(receipt)
        stack.callback(self.go_on)

    def go_on(self) -> None:
        self._rest.set()


def refused(address: str) -> str:
    """What a newcomer is told that does not try again."""
    link = Link(address, patience_s=0.0, say=lambda _: None)
    try:
        newcomer = Visitor(link=link, layout=MODEL, identity=pb.HeartbeatRequest(island_id="late"))
        with pytest.raises(Overload) as told:
            newcomer.join()
        return told.value.message
    finally:
        link.close()


# -- in this process ------------------------------------------------------------------------------------------------


def test_a_closed_gate_lets_nobody_in_and_those_inside_out() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def play() -> tuple[bool, int, bool]:
        gate = Gate()

        async def method(request: bytes, context: Any) -> bytes:
            entered.set()
            await leave.wait()
            return request

        [handler] = gate.guard({"Push": grpc.stream_stream_rpc_method_handler(method)}).values()
        call = asyncio.create_task(handler.stream_stream(b"x", None))
        await entered.wait()
        early = await gate.quiet(0.0)
        inside = gate.under_way
        leave.set()
        assert await call == b"x"
        return early, inside, await gate.quiet(BOUND_S)

    assert asyncio.run(play()) == (False, 1, True)


def test_methods_of_operators_and_heartbeats_pass_a_closed_gate(at: Rig) -> None:
    a, _ = at.started("a", "b")
    at.served.ask(lambda _: at.served.gate.close())
    assert a.beat().phase == "running"
    assert a.link.status().run_id == "test"
    assert refused(at.address) == "the coordinator is shutting down; it will be back"


def test_a_fetch_that_waits_for_a_round_is_answered_when_the_coordinator_ends(at: Rig) -> None:
    a, _ = at.started("a", "b")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(a.fetch, FRAGMENTS[0], wait_s=2 * BOUND_S)
        wait_until(lambda: at.served.ask(lambda _: at.served.gate.under_way), "the fetch has come in", BOUND_S)
        at.served.call(at.run.hurry())
        assert answer.result(BOUND_S)[0].outcome == "open"
    assert at.served.call(at.served.gate.quiet(BOUND_S))


# -- processes ------------------------------------------------------------------------------------------------------


def held(folder: Path, stack: ExitStack, *options: str) -> tuple[Hand, Process, Upload]:
    """A coordinator whose only island is in the middle of an upload."""
    hand = Hand(folder, stack, steps=12, run=RUN.format(islands=1))
    coordinator = hand.coordinator("127.0.0.1:0", *options)
    a = stack.enter_context(visit(hand.address, "a"))
    start([a])
    inbox = folder / "state" / "inbox"
    before = set(inbox.iterdir())
    upload = Upload(a, FRAGMENTS[0], stack)
    wait_until(lambda: set(inbox.iterdir()) - before, "the upload has begun", BOUND_S)
    return hand, coordinator, upload


def test_an_upload_under_way_is_acknowledged_and_folded_before_sigterm_ends_the_coordinator(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hand, coordinator, upload = held(tmp_path, stack, "--grace", "100")
        coordinator.signal(signal.SIGTERM)
        wait_until(lambda: "stopping: SIGTERM" in coordinator.output, "the signal is taken", BOUND_S)
        wait_until(lambda: "not ready: shutdown" in coordinator.output, "its health says so", BOUND_S)
        assert refused(hand.address) == "the coordinator is shutting down; it will be back"
        upload.go_on()
        assert upload.receipt.result(BOUND_S) == pb.Receipt()
        assert coordinator.wait() == ExitCode.OK, coordinator.output
        snapshot = load_snapshot(tmp_path / "state")
        assert snapshot is not None
        assert [outer.version for outer in snapshot.outers] == [1, 0, 0]
        assert "Traceback" not in coordinator.output


def test_a_second_signal_ends_the_coordinator_at_once_and_leaves_a_good_ledger(tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, coordinator, upload = held(tmp_path, stack, "--grace", "100000")
        coordinator.signal(signal.SIGINT)
        wait_until(lambda: "stopping: SIGINT" in coordinator.output, "the signal is taken", BOUND_S)
        coordinator.signal(signal.SIGINT)
        assert coordinator.wait(BOUND_S) == ExitCode.INTERRUPTED
        assert coordinator.output.endswith("stopping at once: SIGINT again\n")
        assert isinstance(upload.receipt.exception(BOUND_S), grpc.RpcError)
        assert diloco_here("ledger", "verify", str(tmp_path / "state")).code == ExitCode.OK


def leave_when_told(visitor: Visitor) -> str:
    """Plays an island that obeys; returns why it was told to leave."""
    told = wait_until(lambda: (s := visitor.beat()).directive == "leave" and s, f"{visitor.identity} is told to leave")
    visitor.leave("asked to leave")
    return told.directive_reason  # type: ignore[union-attr]


def test_a_run_that_is_told_to_stop_ends_once_its_islands_have_left(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=12, run=RUN.format(islands=2))
        coordinator = hand.coordinator()
        visitors = [stack.enter_context(visit(hand.address, name)) for name in "ab"]
        start(visitors)
        for visitor in visitors:
            visitor.push(FRAGMENTS[0], draw(FRAGMENTS[0], 1))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        leaving = [pool.submit(leave_when_told, visitor) for visitor in visitors]
        told = command_here(stop, hand.address, "--yes", "--wait", "--timeout", "1", "--reason", "enough")
        assert [island.result(BOUND_S) for island in leaving] == ["stopped by an operator at 127.0.0.1: enough"] * 2
        assert told.code == ExitCode.OK, told
        assert told.out.startswith("the coordinator ends once these have left: a, b\n")
        assert told.out.endswith("the coordinator has ended\n")
        assert coordinator.wait() == ExitCode.OK, coordinator.output
        assert "stopping: every island has left" in coordinator.output
        snapshot = load_snapshot(tmp_path / "state")
        assert snapshot is not None
        assert [outer.version for outer in snapshot.outers] == [1, 0, 0]
