"""Calls over lanes: one after another, refused by name, cut off at any byte, and never in each other's way."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.certificates import Authority
from coordinator import lanes
from coordinator.upload import Upload
from diloco.framing import CONTROL_LIMIT_BYTES, PROBE_BYTES, Collector, piece_to_proto
from diloco.lane import Kind, Lane
from diloco.v1 import coordinator_pb2 as pb
from island.lanes import LaneError
from tests.lanes import (
    answers,
    called,
    framed,
    held,
    lane_to,
    pushed,
    receipt,
    say,
    wait_held,
)
from tests.processes import wait_until
from tests.support import BOUND_S, MODEL, Serving, Visitor, configure, draw, floats, serving, visit, wait_quiet, whole

HAVE_NOTHING = pb.FetchProgress(have_bytes=0, window_bytes=1).SerializeToString()


class Site:
    """A coordinator, an island that has joined, and lanes by hand."""

    def __init__(self, folder: Path, stack: ExitStack, authority: Authority | None) -> None:
        self.tls = authority.issue("tokyo") if authority else None
        tls = authority.issue("coordinator") if authority else None
        self._stack = stack
        self._life = stack.enter_context(ExitStack())
        self.served: Serving = self._life.enter_context(serving(configure(), folder / "state", tls=tls))
        self.island: Visitor = stack.enter_context(visit(self.served.address, "tokyo", MODEL, tls=self.tls))
        self.island.join()
        self.fragments = self.served.run.fragments

    def end(self) -> None:
        """The coordinator ends at once."""
        self._life.close()

    def lane(self) -> Lane:
        return self._stack.enter_context(lane_to(self.served.address, self.tls))

    def seed(self, fragment: int = 0, **fields: Any) -> list[bytes]:
        """The messages of a push of first parameters."""
        return pushed(self.island, self.fragments[fragment], draw(self.fragments[fragment], 0), seed=True, **fields)

    def start(self) -> None:
        """Has the run begin."""
        for fragment in self.fragments:
            self.island.push(fragment, draw(fragment, 0), seed=True)
        assert self.island.beat(ready=True).phase == "running"

    def fetch(self, fragment: int = 0) -> bytes:
        """The request for the anchor of a fragment."""
        pieces = [piece_to_proto(piece) for piece in whole(self.fragments[fragment])]
        request = pb.FetchRequest(**self.island.key(), fragment=fragment, anchor=True, pieces=pieces)
        return request.SerializeToString()

    def streams(self) -> int:
        return self.served.ask(lambda run: run.admission.streams)

    def wait_streams(self, count: int) -> None:
        wait_until(lambda: self.streams() == count, f"{count} streams are under way", BOUND_S)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["plain", "tls"])
def site(request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack) -> Site:
    return Site(tmp_path, stack, Authority(tmp_path) if request.param == "tls" else None)


def probe(up: bytes = b"", down_bytes: int = 0) -> bytes:
    """A whole probe."""
    return called("Probe", pb.ProbeRequest(down_bytes=down_bytes).SerializeToString(), up)


def probed(got: list[bytes]) -> tuple[int, int]:
    """(bytes up, bytes down) of an answer to a probe."""
    return pb.ProbeReply.FromString(got[0]).up_bytes, sum(map(len, got[1:]))


def anchor(got: list[bytes]) -> Tensor:
    """The anchor (fp32, flat) in an answer to a fetch."""
    header = pb.FetchHeader.FromString(got[0])
    assert header.outcome == "anchor"
    collector = Collector(header.total_bytes)
    for message in got[1:]:
        collector.add(message)
    return floats(collector.finish())


def refusal(lane: Lane) -> tuple[str, str]:
    """(name of the error, its words) with which a call fails."""
    with pytest.raises(LaneError) as caught:
        answers(lane)
    return dict(caught.value.trailing_metadata()).get("diloco-error", caught.value.code().name), caught.value.details()


def goes_on(site: Site) -> None:
    """Nothing is left of what was, and a push and a fetch pass."""
    wait_quiet(site.served)
    with lane_to(site.served.address, site.tls) as lane:
        say(lane, called("Push", *site.seed(1)))
        receipt(answers(lane))
        say(lane, probe(b"abc", 5))
        assert probed(answers(lane)) == (3, 5)


# -- one after another --------------------------------------------------------------------------------------------


def test_calls_of_every_kind_follow_each_other(site: Site) -> None:
    lane = site.lane()
    for number in range(len(site.fragments)):
        say(lane, called("Push", *site.seed(number)))
        assert not receipt(answers(lane)).duplicate
        say(lane, probe(b"abc", 2**20))
        assert probed(answers(lane)) == (3, 2**20)
    for number, fragment in enumerate(site.fragments):
        say(lane, called("Fetch", site.fetch(number)))
        assert anchor(answers(lane)).equal(draw(fragment, 0))
    wait_quiet(site.served)


def test_calls_that_come_all_at_once_are_answered_in_their_order(site: Site) -> None:
    """Their frames share records of TLS: what is left of one waits in memory while nothing comes at the socket."""
    lane = site.lane()
    say(lane, b"".join([called("Push", *site.seed()), probe(b"a"), called("Push", *site.seed(1)), probe(b"abc", 7)]))
    assert not receipt(answers(lane)).duplicate
    assert probed(answers(lane)) == (1, 0)
    assert not receipt(answers(lane)).duplicate
    assert probed(answers(lane)) == (3, 7)


@pytest.mark.parametrize("cut", [1, 4, 5, 7, 30])
def test_a_call_may_begin_in_the_record_in_which_another_ends(site: Site, cut: int) -> None:
    lane, second = site.lane(), called("Push", *site.seed(1))
    say(lane, called("Push", *site.seed()) + second[:cut])
    assert not receipt(answers(lane)).duplicate
    say(lane, second[cut:])
    assert not receipt(answers(lane)).duplicate


def test_calls_on_many_lanes_do_not_meet(site: Site, stack: ExitStack) -> None:
    pool = stack.enter_context(ThreadPoolExecutor(4))
    site.start()
    made = [site.lane() for _ in range(4)]

    def ask(lane: Lane, number: int) -> bool:
        for _ in range(5):
            say(lane, called("Fetch", site.fetch(number)))
            assert anchor(answers(lane)).equal(draw(site.fragments[number], 0))
        return True

    tasks = [pool.submit(ask, lane, number % len(site.fragments)) for number, lane in enumerate(made)]
    assert all(task.result(BOUND_S) for task in tasks)
    wait_quiet(site.served)


def test_a_lane_that_nobody_uses_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    monkeypatch.setattr(lanes, "KEEP_S", 0.05)
    lane = site.lane()
    say(lane, probe(b"a"))
    answers(lane)
    assert lane.receive() is None
    lane.close()
    wait_held(before)


# -- refusals -----------------------------------------------------------------------------------------------------


def test_an_unknown_method_is_refused_by_that_name(site: Site) -> None:
    for name in ("Pull", "Status", "", "x" * 1000, "\xff"):
        lane = site.lane()
        say(lane, called(name, b"abc"))
        kind, words = refusal(lane)
        assert kind == "UNIMPLEMENTED"
        assert f"there is no method {name[:64]!r}" in words
        assert lane.receive() is None
    goes_on(site)


@pytest.mark.parametrize("kind", [Kind.MESSAGE, Kind.END, Kind.ERROR, 0, 9])
def test_a_call_begins_with_its_name(site: Site, kind: int) -> None:
    lane = site.lane()
    say(lane, framed(kind))
    assert lane.receive() is None
    goes_on(site)


def head(length: int, kind: int) -> bytes:
    return length.to_bytes(4, "little") + bytes([kind])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (framed(9), "no frame (kind 9, 0 bytes)"),
        (head(CONTROL_LIMIT_BYTES + 1, Kind.MESSAGE), f"no frame (kind 2, {CONTROL_LIMIT_BYTES + 1} bytes)"),
        (framed(Kind.CALL, b"Push"), "CALL came within one"),
        (framed(Kind.ERROR, b""), "ERROR came within one"),
    ],
    ids=["kind", "length", "call", "error"],
)
def test_what_is_no_message_within_a_call_is_malformed(site: Site, data: bytes, words: str) -> None:
    lane, messages = site.lane(), site.seed()
    begun = called("Push", *messages[:2])[: -len(framed(Kind.END))]
    say(lane, begun + data + bytes(2**20))
    kind, said = refusal(lane)
    assert kind == "Malformed"
    assert words in said
    goes_on(site)
    resumed = site.island.push(site.fragments[0], draw(site.fragments[0], 0), seed=True)
    assert not resumed.duplicate


def test_a_fetch_whose_caller_says_what_is_no_message_is_whole(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """It has no say in its pace any more, and nothing is left to complain of it."""
    site.start()
    caplog.set_level(logging.ERROR)
    lane = site.lane()
    say(lane, framed(Kind.CALL, b"Fetch") + framed(Kind.MESSAGE, site.fetch()) + framed(9))
    assert anchor(answers(lane)).equal(draw(site.fragments[0], 0))
    lane.close()
    wait_quiet(site.served)
    gc.collect()
    site.served.ask(lambda run: None)
    assert not caplog.records


@pytest.mark.parametrize("method", ["Push", "Fetch", "Probe"])
@pytest.mark.parametrize("messages", [(), (b"\xff\xff\xff",)], ids=["none", "garbage"])
def test_a_call_begins_with_its_header(site: Site, method: str, messages: tuple[bytes, ...]) -> None:
    lane = site.lane()
    say(lane, called(method, *messages))
    kind, words = refusal(lane)
    assert kind == "Malformed"
    assert f"a {method.lower()} starts with a" in words
    goes_on(site)


def test_a_refusal_comes_to_who_is_still_sending(site: Site) -> None:
    """It is there once the caller listens, whatever was sent after it: the line is not reset."""
    messages, block = site.seed(total_bytes=1), bytes(2**20)
    lane = site.lane()
    say(lane, called("Push", messages[0])[: -len(framed(Kind.END))])
    for _ in range(24):
        lane.send(Kind.MESSAGE, block)
    kind, words = refusal(lane)
    assert kind == "Malformed"
    assert "1 bytes announced" in words
    for _ in range(4):
        lane.send(Kind.MESSAGE, block)
    lane.send(Kind.END)
    assert lane.receive() is None
    goes_on(site)


def test_a_probe_that_is_too_long_is_refused_while_it_is_sent(site: Site) -> None:
    lane, block = site.lane(), bytes(2**20)
    say(lane, framed(Kind.CALL, b"Probe") + framed(Kind.MESSAGE, pb.ProbeRequest(down_bytes=1).SerializeToString()))
    for _ in range(PROBE_BYTES // len(block) + 8):
        lane.send(Kind.MESSAGE, block)
    assert refusal(lane)[0] == "Malformed"
    goes_on(site)


def test_who_does_not_end_a_refused_call_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LAST_S", 0.1)
    before, lane = held(), site.lane()
    say(lane, framed(Kind.CALL, b"Nothing"))
    assert refusal(lane)[0] == "UNIMPLEMENTED"
    assert lane.receive() is None
    lane.close()
    wait_held(before)


def test_what_nobody_foresaw_is_told_and_logged(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(site.served.run.uploads, "begin", broken)
    lane = site.lane()
    say(lane, called("Push", *site.seed()))
    assert refusal(lane) == ("UNKNOWN", "Push failed; the coordinator's log says more")
    assert "by design" in caplog.text
    monkeypatch.undo()
    goes_on(site)


# -- who goes away, or comes again --------------------------------------------------------------------------------


def test_a_call_whose_caller_goes_away_gives_everything_back(site: Site) -> None:
    before, messages = held(), site.seed()
    lines = b"".join([framed(Kind.CALL, b"Push"), *(framed(Kind.MESSAGE, message) for message in messages[:3])])
    for torn in (b"", framed(Kind.MESSAGE, messages[3])[:-2], head(CONTROL_LIMIT_BYTES, Kind.MESSAGE) + b"x"):
        lane = site.lane()
        say(lane, lines + torn)
        site.wait_streams(1)
        lane.close()
        wait_quiet(site.served)
        wait_held(before)
    assert site.served.ask(lambda run: [upload.have for upload in run.uploads._uploads.values()]) == [32]
    goes_on(site)


def test_a_caller_who_goes_away_while_nobody_reads_is_found_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages wait for room, and the thread that receives them with them."""
    writing, go_on, add = threading.Event(), threading.Event(), Upload.add

    def slow(upload: Upload, message: bytes) -> bool:
        writing.set()
        assert go_on.wait(BOUND_S)
        return add(upload, message)

    before = held()
    monkeypatch.setattr(Upload, "add", slow)
    lane, messages = site.lane(), site.seed(chunk_bytes=4)
    say(lane, called("Push", *messages))
    assert writing.wait(BOUND_S)
    lane.close()
    go_on.set()
    wait_quiet(site.served)
    wait_held(before)
    monkeypatch.undo()
    goes_on(site)


def test_a_caller_who_takes_nothing_and_goes_away_is_found_out(site: Site) -> None:
    """What is sent to it is half sent."""
    before, lane = held(), site.lane()
    say(lane, probe(b"a", PROBE_BYTES))
    site.wait_streams(1)
    assert lane.receive() is not None
    lane.close()
    wait_quiet(site.served)
    wait_held(before)
    goes_on(site)


def test_a_fetch_that_waits_ends_with_its_caller(site: Site) -> None:
    site.start()
    before = held()
    pieces = [piece_to_proto(piece) for piece in whole(site.fragments[0])]
    request = pb.FetchRequest(**site.island.key(), fragment=0, pieces=pieces, wait_s=BOUND_S)
    lane = site.lane()
    say(lane, framed(Kind.CALL, b"Fetch") + framed(Kind.MESSAGE, request.SerializeToString()))
    wait_until(lambda: site.served.ask(lambda _: site.served.gate.under_way), "the fetch is here", BOUND_S)
    lane.close()
    wait_quiet(site.served)
    wait_held(before)


def test_the_newer_of_two_pushes_takes_over_and_the_older_is_refused(site: Site) -> None:
    messages = site.seed()
    old, new = site.lane(), site.lane()
    say(old, called("Push", *messages[:3])[: -len(framed(Kind.END))])
    wait_until(
        lambda: site.served.ask(lambda run: [upload.have for upload in run.uploads._uploads.values()]) == [32],
        "two chunks are here",
        BOUND_S,
    )
    say(new, called("Push", site.seed(first_byte=32)[0], *messages[3:]))
    assert not receipt(answers(new)).duplicate
    kind, words = refusal(old)
    assert kind == "Overload"
    assert "a newer stream of the same part has taken over" in words
    say(old, framed(Kind.MESSAGE, messages[3]) + framed(Kind.END))
    assert old.receive() is None
    wait_quiet(site.served)
    say(new, called("Push", *messages))
    assert receipt(answers(new)).duplicate


def test_a_receipt_that_comes_early_ends_the_call_and_not_the_lane(site: Site) -> None:
    """What its caller still had to send is passed over, and the next call follows."""
    messages = site.seed()
    lane = site.lane()
    say(lane, called("Push", *messages))
    receipt(answers(lane))
    total = pb.PushHeader.FromString(messages[0]).total_bytes
    known = [site.seed(first_byte=total)[0], messages[-1]]
    begun = called("Push", *known)[: -len(framed(Kind.END))]
    say(lane, begun)
    assert receipt(answers(lane)).duplicate
    for _ in range(8):
        lane.send(Kind.MESSAGE, bytes(2**20))
    say(lane, framed(Kind.END) + probe(b"abc"))
    assert probed(answers(lane)) == (3, 0)


# -- the end ------------------------------------------------------------------------------------------------------


def test_lanes_end_with_their_coordinator(site: Site) -> None:
    idle, busy = site.lane(), site.lane()
    say(idle, probe(b"a"))
    answers(idle)
    say(busy, called("Push", *site.seed()[:2])[: -len(framed(Kind.END))])
    site.wait_streams(1)
    names, _ = held()
    assert names
    site.end()
    assert idle.receive() is None
    with pytest.raises((LaneError, AssertionError, OSError)):
        answers(busy)
    assert site.served.run.admission.streams == 0
    site.island.link.close()
    wait_until(lambda: not held()[0], "the threads of lanes have ended", BOUND_S)


def test_a_call_under_way_may_end_within_the_grace(site: Site, stack: ExitStack) -> None:
    pool = stack.enter_context(ThreadPoolExecutor(1))
    messages, lane = site.seed(), site.lane()
    say(lane, called("Push", *messages[:2])[: -len(framed(Kind.END))])
    site.wait_streams(1)
    ending = pool.submit(site.served.call, site.served.front.stop(BOUND_S))
    host, _, port = site.served.address.rpartition(":")

    def closed() -> bool:
        try:
            socket.create_connection((host, int(port)), BOUND_S).close()
        except ConnectionError:
            return True
        return False

    wait_until(closed, "nobody new is let in", BOUND_S)
    say(lane, b"".join([*(framed(Kind.MESSAGE, m) for m in messages[2:]), framed(Kind.END)]))
    assert not receipt(answers(lane)).duplicate
    ending.result(BOUND_S)
    assert lane.receive() is None


def test_a_call_that_does_not_end_within_the_grace_is_cut(site: Site) -> None:
    lane = site.lane()
    say(lane, called("Push", *site.seed()[:2])[: -len(framed(Kind.END))])
    site.wait_streams(1)
    site.served.call(site.served.front.stop(0.05))
    with pytest.raises((LaneError, AssertionError, OSError)):
        answers(lane)
    wait_quiet(site.served)
