"""The island's lanes: kept from call to call, let go once they are of no use, and gRPC where there are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest
from torch import Tensor

import coordinator.lanes
import island.lanes
from benchmarks.certificates import Authority
from diloco.errors import DilocoError, Malformed
from diloco.fragments import Fragment
from diloco.lane import Lane
from diloco.v1 import coordinator_pb2 as pb
from island.lanes import LaneCall, LaneError, Lanes
from tests.lanes import held, pushed, receipt, wait_held
from tests.processes import wait_until
from tests.proxy import OnlyGrpc, Proxy, proxied
from tests.support import BOUND_S, MODEL, Clock, Visitor, configure, draw, floats, part, serving, visit, wait_quiet


class Site:
    """A coordinator, a line to it, and an island that has joined over that line."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        authority: Authority | None,
        kind: type[Proxy] = Proxy,
        patience_s: float = 0.0,
    ) -> None:
        server = authority.issue("coordinator") if authority else None
        self.tls = authority.issue("tokyo") if authority else None
        self.served = stack.enter_context(serving(configure(), folder / "state", tls=server))
        self.line = stack.enter_context(proxied(self.served.address, kind))
        self.island: Visitor = stack.enter_context(visit(self.line.address, "tokyo", MODEL, tls=self.tls))
        self.island.join()
        self.island.link.persist(patience_s)
        self.fragments = self.served.run.fragments
        self.line.connections = 0  # all that follow are for bulk

    def seed(self, number: int = 0) -> pb.Receipt:
        fragment = self.fragments[number]
        return self.island.push(fragment, draw(fragment, 0), seed=True)

    def idle(self) -> list[Lane]:
        """Lanes that nobody uses."""
        return [lane for lane, _ in self.island.link._lanes._idle]


Make = Callable[..., Site]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["plain", "tls"])
def make(request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack) -> Make:
    authority = Authority(tmp_path) if request.param == "tls" else None
    return lambda kind=Proxy, patience_s=0.0: Site(tmp_path, stack, authority, kind, patience_s)


@pytest.fixture
def site(make: Make) -> Site:
    return make()


def whole_run(site: Site) -> tuple[pb.Receipt, pb.FetchHeader, Tensor]:
    """First parameters, their anchors, and a round: the receipt of its contribution, and its update."""
    link = site.island.link
    assert [site.seed(number) for number in range(len(site.fragments))] == [pb.Receipt()] * len(site.fragments)
    for fragment in site.fragments:
        assert floats(site.island.fetch(fragment, anchor=True)[1]).equal(draw(fragment, 0))
    assert site.island.beat(ready=True).phase == "running"
    assert link.probe(2**18 + 1, 2**18 + 2, BOUND_S) > 0
    fragment = site.fragments[0]
    taken = site.island.push(fragment, draw(fragment, 1), tokens=7, steps=4)
    header, update = site.island.fetch(fragment)
    assert header.outcome == "committed"
    return taken, header, update


# -- kept ---------------------------------------------------------------------------------------------------------


def test_calls_that_follow_each_other_use_one_connection(site: Site) -> None:
    whole_run(site)
    assert site.line.connections == 1
    assert len(site.idle()) == 1


def test_there_are_as_many_lanes_as_calls_at_a_time(site: Site, stack: ExitStack) -> None:
    pool, go_on = stack.enter_context(ThreadPoolExecutor(3)), threading.Event()

    def push(fragment: Fragment) -> pb.Receipt:
        sent = part(fragment, draw(fragment, 0))

        def parts() -> Iterator[Tensor]:
            assert go_on.wait(BOUND_S)
            yield sent.payload

        return site.island.link.push(site.island.header(fragment.index, sent.pieces, seed=True), parts, 16)

    tasks = [pool.submit(push, fragment) for fragment in site.fragments]
    streams = len(tasks)
    wait_until(lambda: site.served.ask(lambda run: run.admission.streams) == streams, "all are under way", BOUND_S)
    go_on.set()
    assert [task.result(BOUND_S) for task in tasks] == [pb.Receipt()] * streams
    assert site.line.connections == len(site.idle()) == streams
    for number in range(streams):
        assert site.seed(number).duplicate
    assert site.line.connections == streams


def test_a_lane_that_was_idle_for_long_is_not_used_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.seed()
    before = held()
    monkeypatch.setattr(island.lanes, "KEEP_S", 0.0)
    for _ in range(3):
        assert site.seed().duplicate
    assert site.line.connections == 4
    assert len(site.idle()) == 1
    site.island.link.close()
    assert site.idle() == []
    wait_held((before[0][:0], before[1]))


def test_lanes_that_are_too_many_go_though_one_is_always_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1000.0)
    monkeypatch.setattr("island.lanes.time.monotonic", clock)
    host, _, port = site.line.address.rpartition(":")
    lanes = Lanes(host, int(port), site.tls, BOUND_S)
    made = [lane for _ in range(3) if (lane := lanes.open())]
    for lane in made:
        lanes.give_back(lane)
    for _ in range(3):
        clock.now += island.lanes.KEEP_S / 2
        assert lanes.open() is made[-1]
        lanes.give_back(made[-1])
    assert [lane for lane, _ in lanes._idle] == made[-1:]
    lanes.close()
    assert [lane.fileno() for lane in made] == [-1] * 3


def test_lanes_that_are_given_back_after_the_end_are_closed(site: Site) -> None:
    host, _, port = site.line.address.rpartition(":")
    lanes = Lanes(host, int(port), site.tls, BOUND_S)
    lane = lanes.open()
    assert lane is not None
    lanes.close()
    lanes.give_back(lane)
    assert lane.fileno() < 0


# -- closed by the other side -------------------------------------------------------------------------------------


def gone(site: Site) -> bool:
    return all(lane.stirs() for lane in site.idle())


def test_a_lane_that_the_coordinator_has_closed_is_not_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to try again for it, not even a probe, which nobody tries again."""
    monkeypatch.setattr(coordinator.lanes, "KEEP_S", 0.02)
    site.seed()
    wait_until(lambda: gone(site), "the coordinator closes the lane", BOUND_S)
    monkeypatch.undo()
    assert site.seed().duplicate
    assert site.line.connections == 2
    site.line.cut()
    wait_until(lambda: gone(site), "the line is cut", BOUND_S)
    assert site.island.link.probe(5, 5, BOUND_S) > 0
    assert site.line.connections == 3


def test_a_lane_that_is_closed_just_then_is_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    site = make(patience_s=BOUND_S)
    monkeypatch.setattr(Lane, "stirs", lambda lane, within_s=0.0: False)
    for number in range(len(site.fragments)):
        assert site.seed(number) == pb.Receipt()
        site.line.cut()
        fragment = site.fragments[number]
        if number:
            assert site.seed(number - 1).duplicate
            site.line.cut()
    for fragment in site.fragments:
        assert floats(site.island.fetch(fragment, anchor=True)[1]).equal(draw(fragment, 0))
        site.line.cut()


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_line_that_is_cut_within_a_frame_is_taken_up_again(make: Make, way: str) -> None:
    site = make(patience_s=BOUND_S)
    assert site.seed(1) == pb.Receipt()
    for count in (1, 4, 6, 11):
        site.line.hold_after(way, count)  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as pool:
            task = pool.submit(site.seed)
            site.line.wait_held()
            site.line.cut()
            task.result(BOUND_S)
    for fragment in site.fragments[:2]:
        site.island.push(fragment, draw(fragment, 0), seed=True)
    wait_quiet(site.served)


# -- gRPC ---------------------------------------------------------------------------------------------------------


def test_where_only_grpc_passes_bulk_goes_over_grpc(make: Make) -> None:
    site = make(kind=OnlyGrpc)
    assert isinstance(site.line, OnlyGrpc)
    whole_run(site)
    assert site.line.refused > 0
    assert site.line.connections == 1
    assert site.idle() == []


def test_both_ways_leave_the_same(tmp_path: Path, stack: ExitStack) -> None:
    outcomes = []
    for kind in (Proxy, OnlyGrpc):
        (tmp_path / kind.__name__).mkdir()
        site = Site(tmp_path / kind.__name__, stack, None, kind)
        taken, header, update = whole_run(site)
        stands = [(fragment.version, fragment.digest) for fragment in site.island.beat().fragments]
        assert stands[0][0] == 1
        outcomes.append((taken, header, update.tolist(), stands))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kind", [Proxy, OnlyGrpc])
def test_what_cannot_be_made_ends_a_push_with_its_error(make: Make, kind: type[Proxy]) -> None:
    site = make(kind=kind, patience_s=BOUND_S)
    fragment = site.fragments[0]
    sent = part(fragment, draw(fragment, 0))
    header = site.island.header(fragment.index, sent.pieces, seed=True)

    def parts(error: Exception) -> Iterator[Tensor]:
        yield sent.payload[:20]
        raise error

    for error, expected in ((Malformed("x"), Malformed), (ValueError("x"), DilocoError), (OSError("x"), DilocoError)):
        with pytest.raises(DilocoError) as caught:
            site.island.link.push(header, partial(parts, error), 16)
        assert type(caught.value) is expected
    wait_quiet(site.served)
    assert site.seed() == pb.Receipt()


def test_a_refusal_has_the_same_words_both_ways(tmp_path: Path, stack: ExitStack) -> None:
    said = []
    for kind in (Proxy, OnlyGrpc):
        (tmp_path / kind.__name__).mkdir()
        site = Site(tmp_path / kind.__name__, stack, None, kind)
        with pytest.raises(Malformed) as caught:
            site.island.push(site.fragments[0], draw(site.fragments[0], 0), seed=True, total_bytes=5)
        said.append(caught.value.message)
    assert said[0] == said[1]


# -- one call -----------------------------------------------------------------------------------------------------


class Calls:
    """Calls by hand, over the lanes of an island."""

    def __init__(self, site: Site) -> None:
        host, _, port = site.served.address.rpartition(":")
        self.site, self.lanes = site, Lanes(host, int(port), site.tls, BOUND_S)

    def call(self, name: str, messages: Iterator[bytes] | list[bytes]) -> LaneCall:
        lane = self.lanes.open()
        assert lane is not None
        return LaneCall(self.lanes, lane, name, messages)

    def push(self, number: int = 0) -> LaneCall:
        fragment = self.site.fragments[number]
        return self.call("Push", pushed(self.site.island, fragment, draw(fragment, 0), seed=True))


@pytest.fixture
def calls(site: Site) -> Iterator[Calls]:
    made = Calls(site)
    yield made
    made.lanes.close()


def test_a_cancel_that_comes_late_ends_nobody_elses_call(calls: Calls) -> None:
    first = calls.push()
    assert not receipt(map(bytes, first)).duplicate
    first.close()
    second = calls.push(1)
    first.cancel()
    assert second._lane is first._lane
    assert not receipt(map(bytes, second)).duplicate
    second.close()


def test_a_call_that_was_cancelled_at_its_end_keeps_no_lane(calls: Calls) -> None:
    first = calls.push()
    list(first)
    first.cancel()
    first.close()
    assert calls.lanes._idle == []


def test_a_cancel_ends_who_waits_for_answers(calls: Calls, stack: ExitStack) -> None:
    pool, over = stack.enter_context(ThreadPoolExecutor(1)), threading.Event()

    def messages() -> Iterator[bytes]:
        yield pb.ProbeRequest().SerializeToString()
        assert over.wait(BOUND_S)

    call = calls.call("Probe", messages())
    waiting = pool.submit(next, call)
    wait_until(lambda: calls.site.served.ask(lambda run: run.admission.streams), "the probe is here", BOUND_S)
    call.cancel()
    error = waiting.exception(BOUND_S)
    assert isinstance(error, LaneError)
    assert error.code() is grpc.StatusCode.CANCELLED
    over.set()
    call.close()
    wait_quiet(calls.site.served)
    assert calls.lanes._idle == []


def test_a_refused_call_keeps_no_lane(calls: Calls) -> None:
    call = calls.call("Nothing", [b"x"])
    with pytest.raises(LaneError, match="there is no method") as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    call.close()
    assert calls.lanes._idle == []


def test_threads_and_descriptors_of_calls_come_back(calls: Calls) -> None:
    before = held()
    for _ in range(4):
        call = calls.call("Probe", [pb.ProbeRequest(down_bytes=2**22).SerializeToString()])
        next(call)
        call.cancel()
        call.close()
    wait_quiet(calls.site.served)
    calls.lanes.close()
    wait_held(before)
