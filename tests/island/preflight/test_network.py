"""The checks of the way to the coordinator, each where all is well and where it is not."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.certificates import Authority
from diloco.config import RunConfig
from diloco.errors import ExitCode, Untrusted
from diloco.framing import PROBE_BYTES
from diloco.layout import Layout, TensorSpec
from island.link import Link
from island.preflight import network
from tests.processes import free_port
from tests.support import MODEL, configure, serving


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Link]:
    """A connection to a coordinator."""
    with serving(configure(), tmp_path / "state") as host:
        link = Link(host.address, patience_s=0.0, say=print)
        yield link
        link.close()


def test_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.name("127.0.0.1:7000").found == "127.0.0.1: 127.0.0.1"
    assert network.name("[::1]:7000").found == "::1: ::1"

    def nobody(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    finding = network.name("coordinator.example:7000")
    assert (finding.verdict, finding.code) == ("fail", ExitCode.UNREACHABLE)
    assert finding.found.startswith("coordinator.example has no address here") and "DNS" in finding.advice


def test_a_port_is_tried(linked: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.port(linked.address).verdict == "ok"
    finding = network.port(f"127.0.0.1:{free_port()}")
    assert (finding.verdict, finding.code) == ("fail", ExitCode.UNREACHABLE)
    assert "refused" in finding.found and "start the coordinator" in finding.advice

    def silent(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    finding = network.port(linked.address)
    assert "no answer within 5 s" in finding.found and "firewall" in finding.advice


def test_without_tls_it_says_so_unless_all_is_on_one_machine(linked: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.handshake(linked.address, None, linked).verdict == "ok"
    monkeypatch.setattr(network, "addresses", lambda address: ["127.0.0.1", "10.0.0.5"])
    finding = network.handshake(linked.address, None, linked)
    assert finding.verdict == "warn" and "nothing is encrypted" in finding.found


def test_tls_is_tried_and_a_certificate_that_ends_soon_is_told(tmp_path: Path, linked: Link) -> None:
    authority = Authority(tmp_path)
    with serving(configure(), tmp_path / "other", tls=authority.issue("coordinator")) as host:
        tls = authority.issue("tokyo", valid=(-timedelta(days=1), timedelta(days=100)))
        link = Link(host.address, patience_s=0.0, say=print, tls=tls)
        assert network.handshake(host.address, tls, link).verdict == "ok"
        finding = network.handshake(host.address, tls, link, datetime.now(UTC) + timedelta(days=95))
        assert finding.verdict == "warn" and "4 days from now" in finding.found
        link.close()
        plain = Link(host.address, patience_s=0.0, say=print)
        with pytest.raises(Untrusted, match="speaks TLS"):
            network.handshake(host.address, None, plain)
        plain.close()
    wrong = Link(linked.address, patience_s=0.0, say=print, tls=tls)
    with pytest.raises(Untrusted, match="does not speak TLS"):
        network.handshake(linked.address, tls, wrong)
    wrong.close()


def test_the_nodes_of_an_island_can_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        address = f"127.0.0.1:{meeting.getsockname()[1]}"
        assert "takes connections" in network.rendezvous(address).found
    assert "the daemon on this machine will" in network.rendezvous(address).found
    none = network.rendezvous("no-such-host.invalid:1")
    assert (none.verdict, none.code) == ("fail", ExitCode.UNREACHABLE) and "nodes.rendezvous" in none.advice
    for error, refused, verdict, code, found in (
        (ConnectionRefusedError(), OSError(errno.EADDRNOTAVAIL, ""), "warn", ExitCode.OK, "nobody listens"),
        (TimeoutError(), OSError(errno.EADDRNOTAVAIL, ""), "fail", ExitCode.UNREACHABLE, "no answer within 5 s"),
        (OSError("no route"), OSError(errno.EADDRNOTAVAIL, ""), "fail", ExitCode.UNREACHABLE, "no route"),
        (ConnectionRefusedError(), OSError(errno.EACCES, "denied"), "fail", ExitCode.ENVIRONMENT, "(denied)"),
    ):

        def connect(*_: object, error: OSError = error, **__: object) -> None:
            raise error

        def listen(*_: object, refused: OSError = refused) -> OSError:
            return refused

        monkeypatch.setattr(socket, "create_connection", connect)
        monkeypatch.setattr(network, "_can_listen", listen)
        finding = network.rendezvous(address)
        assert (finding.verdict, finding.code) == (verdict, code) and found in finding.found


def test_a_round_trip_is_the_median_without_the_first_call() -> None:
    times = iter([0.0, 0.010, 1.0, 1.030, *(t for i in range(2, 10) for t in (i, i + 0.020))])
    asked: list[int] = []
    finding, median = network.round_trip(lambda: asked.append(1), lambda: next(times))
    assert (finding.verdict, median, len(asked)) == ("ok", pytest.approx(0.020), 11)
    assert finding.found == "median 20.00 ms, at most 30.00 ms, of 10 calls"
    slow = iter(range(20))
    finding, _ = network.round_trip(lambda: None, lambda: float(next(slow) * 2))
    assert finding.verdict == "warn" and "median 2000.00 ms" in finding.found


@pytest.mark.parametrize(
    ("ahead", "trips", "verdict", "found"),
    [
        (0.0, [0.2] * 5, "ok", "+0.000 s from this one, give or take 0.100 s"),
        (-30.0, [0.2] * 5, "warn", "-30.000 s"),
        (2.05, [0.2] * 5, "ok", "+2.050 s from this one, give or take 0.100 s"),
        (3.0, [4.0, 4.0, 0.2, 4.0, 4.0], "warn", "+3.000 s from this one, give or take 0.100 s"),
        (3.0, [4.0] * 5, "ok", "give or take 2.000 s"),
    ],
)
def test_clocks_are_compared_as_well_as_a_round_trip_allows(
    ahead: float, trips: list[float], verdict: str, found: str
) -> None:
    now, left = 1000.0, iter(trips)

    def ask() -> float:
        nonlocal now
        half = next(left) / 2
        now += half
        theirs = now + ahead
        now += half
        return theirs

    finding = network.clock(ask, lambda: now)
    assert finding.verdict == verdict and found in finding.found


def test_a_coordinator_that_does_not_tell_its_time_is_not_judged(linked: Link) -> None:
    assert network.clock(lambda: 0.0).verdict == "warn"
    assert network.clock(lambda: linked.status().wall_s).verdict == "ok"


class Line:
    """A line of so many bytes per second each way."""

    def __init__(self, up: float, down: float) -> None:
        self.rates, self.moved = (up, down), [0, 0]

    def probe(self, up_bytes: int, down_bytes: int, timeout_s: float) -> float:
        for way, count in enumerate((up_bytes, down_bytes)):
            self.moved[way] += count
        return 0.1 + up_bytes / self.rates[0] + down_bytes / self.rates[1]


@pytest.mark.parametrize("rates", [(1e5, 1e6), (1e6, 1e9), (1e8, 1e4)])
def test_bandwidth_is_measured_in_few_bytes_and_seconds(rates: tuple[float, float]) -> None:
    line = Line(*rates)
    assert network.bandwidth(cast(Any, line), 0.1) == pytest.approx(rates)
    assert max(line.moved) <= 4 / 3 * PROBE_BYTES
    assert all(
        moved <= max(network.FIRST_PROBE_BYTES, 16 / 3 * rate) for moved, rate in zip(line.moved, rates, strict=True)
    )


def test_bandwidth_of_a_real_line(linked: Link) -> None:
    assert min(network.bandwidth(linked, 0.0)) > 0


def settings(*overrides: str) -> RunConfig:
    return configure("wire.up=bf16", "wire.down=fp32", "rounds.deadline_s=10", "rounds.grace_s=1", *overrides)


def test_the_time_of_a_sync_follows_from_the_line() -> None:
    layout = Layout([TensorSpec("layers.0.w", (1000, 100)), TensorSpec("layers.1.w", (1000, 50))])
    finding = network.line((1e5, 1e5), 0.0, settings(), layout)
    assert finding.verdict == "ok"
    assert finding.found.endswith("moves 0.20 MB up, 0.40 down: 6.0 s")
    assert finding.found.startswith("0.8 Mbit/s up, 0.8 down")
    slow = network.line((1e5, 1e5), 0.4, settings(), layout)
    assert slow.verdict == "warn" and "12.0 s, longer than rounds.deadline_s (10)" in slow.found
    assert network.line((1e5, 1e5), 0.0, None, MODEL).found == "0.8 Mbit/s up, 0.8 down, of one stream"
