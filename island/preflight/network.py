"""The way to the coordinator (name, port, handshake, what the line can do), and where an island's nodes meet."""

from __future__ import annotations

import errno
import socket
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from diloco.codec.policy import down_choice, up_choice
from diloco.config import RunConfig
from diloco.errors import ExitCode
from diloco.fragments import partition
from diloco.framing import PROBE_BYTES
from diloco.layout import Layout
from diloco.tls import TLS, load
from island.link import Link
from island.preflight.finding import Finding, fail, ok, warn

CONNECT_S = 5.0
ROUND_TRIPS = 10
LONG_ROUND_TRIP_S = 1.0
CLOCK_S = 2.0
"""Difference of clocks that is told."""
SOON_DAYS = 14
"""A certificate that ends within so many days is told."""
PROBE_S = 1.0
"""A probe of the line is long enough when it takes so long; until then it grows."""
PROBE_TIMEOUT_S = 15.0
FIRST_PROBE_BYTES = 2**18


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; the host without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def name(address: str) -> Finding:
    """Whether the coordinator's name has an address."""
    host, _ = split(address)
    try:
        return ok("name", f"{host}: {', '.join(addresses(address))}")
    except OSError as error:
        return fail(
            "name",
            f"{host} has no address here ({error})",
            "correct island.coordinator, or the DNS of this machine",
            ExitCode.UNREACHABLE,
        )


def addresses(address: str) -> list[str]:
    """The IP addresses of HOST:PORT. Raises `OSError` where there are none."""
    found = socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in found))


def port(address: str) -> Finding:
    """Whether somebody listens at the coordinator's port."""
    begin = time.monotonic()
    try:
        with socket.create_connection(split(address), timeout=CONNECT_S):
            return ok("port", f"{address} takes connections, after {1e3 * (time.monotonic() - begin):.1f} ms")
    except TimeoutError:
        found, advice = f"no answer within {CONNECT_S:g} s", "let this port through every firewall between the two"
    except OSError as error:
        found, advice = str(error), "start the coordinator, or correct its port"
    return fail("port", f"{address}: {found}", advice, ExitCode.UNREACHABLE)


def rendezvous(address: str) -> Finding:
    """Whether the daemons of an island can meet at `nodes.rendezvous`: one listens there, or this machine could."""
    host, port = split(address)
    try:
        found = addresses(address)
    except OSError as error:
        return fail("nodes", f"{host} has no address here ({error})", "correct nodes.rendezvous", ExitCode.UNREACHABLE)
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ok("nodes", f"the daemons' meeting at {address} takes connections")
    except TimeoutError:
        reason = f"no answer within {CONNECT_S:g} s"
    except ConnectionRefusedError:
        reason = ""
    except OSError as error:
        reason = str(error)
    here = _can_listen(found[0], port)
    if here is None:
        return ok("nodes", f"nobody listens at {address} yet; the daemon on this machine will")
    if here.errno != errno.EADDRNOTAVAIL:
        advice = "choose another port in nodes.rendezvous, or end what uses it"
        return fail("nodes", f"this machine cannot listen at {address} ({here.strerror})", advice, ExitCode.ENVIRONMENT)
    if reason:
        advice = "start that machine, and let this port through every firewall between the island's nodes"
        return fail("nodes", f"{address}: {reason}", advice, ExitCode.UNREACHABLE)
    return warn("nodes", f"nobody listens at {address} yet", f"start the daemon on {host}; the others wait for it")


def _can_listen(address: str, port: int) -> OSError | None:
    """Why this machine cannot listen at an IP address and port; None where it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind((address, port))
        except OSError as error:
            return error
    return None


def handshake(address: str, tls: TLS | None, link: Link, now: datetime | None = None) -> Finding:
    """Whether both ends speak TLS and accept each other, or neither does."""
    link.health("")
    if tls is None:
        if all(ip_address(found).is_loopback for found in addresses(address)):
            return ok("tls", "none, and the coordinator is on this machine")
        return warn("tls", "nothing is encrypted, and nobody is authenticated", "give both ends certificates: [tls]")
    until = load(tls, lambda path: Path(path).read_bytes(), datetime.now(UTC)).until
    days = (until - (now or datetime.now(UTC))).days
    found = f"both ends accept each other; {tls.cert} is valid until {until:%Y-%m-%d}"
    if days < SOON_DAYS:
        return warn("tls", f"{found}, {days} days from now", "make a new certificate in time")
    return ok("tls", found)


def round_trip(ask: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> tuple[Finding, float]:
    """How long a small call takes; the finding, and the median in seconds."""
    ask()
    times = []
    for _ in range(ROUND_TRIPS):
        begin = clock()
        ask()
        times.append(clock() - begin)
    median, worst = statistics.median(times), max(times)
    found = f"median {1e3 * median:.2f} ms, at most {1e3 * worst:.2f} ms, of {ROUND_TRIPS} calls"
    if median > LONG_ROUND_TRIP_S:
        return warn("round trip", found, "look for a queue on the way, or have a coordinator nearer"), median
    return ok("round trip", found), median


def clock(ask: Callable[[], float], wall: Callable[[], float] = time.time) -> Finding:
    """How far this machine's wall clock is from the coordinator's, give or take half a round trip.

    Args:
        ask: the coordinator's wall clock in seconds, 0 where it does not tell.
    """
    best: tuple[float, float] | None = None
    for _ in range(5):
        begin = wall()
        theirs = ask()
        end = wall()
        if not theirs:
            return warn("clock", "the coordinator does not tell its time", "install the same version on both sides")
        half = abs(end - begin) / 2
        best = min(best or (half, theirs - (begin + end) / 2), (half, theirs - (begin + end) / 2))
    assert best is not None
    half, offset = best
    found = f"the coordinator's is {offset:+.3f} s from this one, give or take {half:.3f} s"
    if abs(offset) - half > CLOCK_S:
        advice = "set the clock (NTP): certificates and logs go by it; rounds and leases do not"
        return warn("clock", found, advice)
    return ok("clock", found)


def bandwidth(link: Link, round_trip_s: float) -> tuple[float, float]:
    """Bytes per second up and down of one stream, by probes that grow until one takes a second, 16 MiB at most each."""
    rates = []
    for up in (True, False):
        count = FIRST_PROBE_BYTES
        while True:
            took = link.probe(count if up else 0, 0 if up else count, PROBE_TIMEOUT_S)
            if took >= PROBE_S or count >= PROBE_BYTES:
                break
            count = min(PROBE_BYTES, 4 * count)
        rates.append(count / max(took - round_trip_s, took / 10))
    return rates[0], rates[1]


def line(rates: tuple[float, float], cap_mbps: float, run: RunConfig | None, layout: Layout | None) -> Finding:
    """What the line brings, and how long the largest fragment of the run takes on it both ways.

    Args:
        rates: bytes per second up and down of one stream.
        cap_mbps: `island.max_bandwidth_mbps`.
    """
    found = f"{rates[0] * 8e-6:.1f} Mbit/s up, {rates[1] * 8e-6:.1f} down, of one stream"
    if run is None or layout is None:
        return ok("bandwidth", found)
    cap = cap_mbps / 8e-6 if cap_mbps else float("inf")
    up, down = up_choice(run.wire), down_choice(run.wire)
    sizes = [
        [sum(way.of(spec).size(spec.numel) for spec in fragment.specs) for way in (up, down)]
        for fragment in partition(layout, run.sync)
    ]
    sent, got = max(sizes, key=sum)
    seconds = sent / min(cap, rates[0]) + got / min(cap, rates[1])
    found += f"; a sync of the largest fragment moves {sent / 1e6:.2f} MB up, {got / 1e6:.2f} down: {seconds:.1f} s"
    if seconds > run.rounds.deadline_s:
        return warn(
            "bandwidth",
            f"{found}, longer than rounds.deadline_s ({run.rounds.deadline_s:g})",
            "have more fragments, fewer bits (wire.up, wire.down), or a longer rounds.deadline_s",
        )
    return ok("bandwidth", found)
