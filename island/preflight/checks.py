"""All checks in turn, each as soon as what it needs is known."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from diloco.config import RunConfig
from diloco.errors import ExitCode
from diloco.v1 import coordinator_pb2 as pb
from island.config import IslandConfig
from island.link import Link
from island.preflight import agreement, machine, memory, network
from island.preflight.finding import Finding, bounded, fail, ok, warn

BOUND_S = 20.0
"""Longest that most checks take."""
LINE_S = 130.0
"""Longest of a look at bandwidth: eight probes of 15 s at most."""
PATIENCE_S = 3.0
"""How long a coordinator that does not answer is tried."""
UNKNOWN = "the run's settings are not known, as no coordinator answers"

log = logging.getLogger("diloco.island")


def examine(island: IslandConfig, own: RunConfig | None) -> Iterator[Finding]:
    """Yields what each check finds.

    Args:
        island: its settings.
        own: the run's, as far as they are at hand; the coordinator's count where it answers.
    """
    told: list[pb.StatusReply] = []
    address = island.island.coordinator
    if address:
        yield from _way(address, island, told)
    else:
        yield fail("name", "no coordinator is named", "set island.coordinator, or say --coordinator", ExitCode.USAGE)
    reply, run = told[0] if told else None, own
    if reply is not None:
        served: list[RunConfig] = []

        def agree() -> Finding:
            served.append(agreement.served(reply))
            return agreement.run(reply, served[0], island.island, own)

        yield bounded("run", BOUND_S, agree)
        run = served[0] if served else None
        if run is not None:
            yield from _others(run, island)
    yield from _model(island, run, reply)
    yield bounded("devices", BOUND_S, lambda: machine.devices(island))
    yield from _folders(island, run)
    yield bounded("data", BOUND_S, lambda: agreement.data(island.data, run, BOUND_S / 2))
    yield bounded("packages", BOUND_S, lambda: machine.packages(island, run))


def _way(address: str, island: IslandConfig, told: list[pb.StatusReply]) -> Iterator[Finding]:
    """The way to the coordinator; adds what it says of itself to `told`."""
    links: list[Link] = []
    tls = island.tls.files()

    def connect() -> Finding:
        links.append(Link(address, patience_s=PATIENCE_S, say=log.debug, tls=tls))
        return network.name(address)

    try:
        for check, look in (
            ("name", connect),
            ("port", lambda: network.port(address)),
            ("tls", lambda: network.handshake(address, tls, links[0])),
        ):
            finding = bounded(check, BOUND_S, look)
            yield finding
            if finding.verdict == "fail":
                return
        yield from _line(links[0], island, told)
    finally:
        for link in links:
            link.close()


def _line(link: Link, island: IslandConfig, told: list[pb.StatusReply]) -> Iterator[Finding]:
    """What the line can do, once it is there."""
    medians: list[float] = []

    def round_trip() -> Finding:
        finding, median = network.round_trip(lambda: link.health(""))
        medians.append(median)
        told.append(link.status())
        return finding

    def line() -> Finding:
        rates = network.bandwidth(link, medians[0])
        run = agreement.served(told[0])
        return network.line(rates, island.island.max_bandwidth_mbps, run, agreement.model_layout(run))

    finding = bounded("round trip", BOUND_S, round_trip)
    yield finding
    if finding.verdict == "fail":
        return
    yield bounded("clock", BOUND_S, lambda: network.clock(lambda: link.status().wall_s))
    finding = bounded("bandwidth", LINE_S, line)
    yield finding if finding.code != ExitCode.INTERNAL else warn("bandwidth", finding.found, finding.advice)


def _others(run: RunConfig, island: IslandConfig) -> Iterator[Finding]:
    """The other coordinators of a run that has several."""
    tls, own = island.tls.files(), run.run.coordinator_index
    for number, address in enumerate(run.run.coordinators):
        if run.run.coordinator_count == 1 or number == own:
            continue

        def look(number: int = number, address: str = address) -> Finding:
            for finding in (network.name(address), network.port(address)):
                if finding.verdict == "fail":
                    return fail(f"coordinator {number}", finding.found, finding.advice, finding.code)
            link = Link(address, patience_s=PATIENCE_S, say=log.debug, tls=tls)
            try:
                found, _ = network.round_trip(lambda: link.health(""))
                return ok(f"coordinator {number}", f"{address}: {found.found}")
            finally:
                link.close()

        yield bounded(f"coordinator {number}", BOUND_S, look)


def _model(island: IslandConfig, run: RunConfig | None, reply: pb.StatusReply | None) -> Iterator[Finding]:
    if run is None:
        yield warn("model", UNKNOWN, "say --run RUN.TOML to look at the model and its memory without one")
        return
    yield bounded("model", BOUND_S, lambda: agreement.layout(agreement.model_layout(run), run, reply))
    yield bounded(
        "memory",
        BOUND_S,
        lambda: memory.memory(run, island, agreement.model_layout(run), memory.free_gpus(island)),
    )


def _folders(island: IslandConfig, run: RunConfig | None) -> Iterator[Finding]:
    """The folders that the settings name; anchors and what the up codec drops are kept in `island.spool_dir`."""

    def spool() -> Finding:
        kept = 8 * agreement.model_layout(run).numel if run is not None else 0
        return machine.folder("island.spool_dir", island.island.spool_dir, kept)

    yield bounded("island.spool_dir", BOUND_S, spool)
    for setting, path in (("island.log_dir", island.island.log_dir), ("metrics.dir", island.metrics.dir)):
        if path:
            yield bounded(setting, BOUND_S, partial(machine.folder, setting, path, machine.LOG_BYTES))
