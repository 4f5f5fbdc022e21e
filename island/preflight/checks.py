"""All checks in turn, each as soon as what it needs is known."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import partial

from diloco.config import RunConfig
from diloco.errors import ConfigError, ExitCode
from diloco.layout import Layout
from diloco.v1 import coordinator_pb2 as pb
from island.config import IslandConfig
from island.link import Link
from island.preflight import agreement, data, machine, memory, network
from island.preflight.finding import Finding, bounded, fail, ok, warn

BOUND_S = 20.0
"""Longest that most checks take."""
SLOW_S = 120.0
"""Longest for a model that is not ours, and for the data: both may come over a network."""
LINE_S = 130.0
"""Longest of a look at bandwidth: eight probes of 15 s at most."""
PATIENCE_S = 3.0
"""How long a coordinator that does not answer is tried."""
UNKNOWN = "the run's settings are not known, as no coordinator answers"

log = logging.getLogger("diloco.island")


def examine(island: IslandConfig, own: RunConfig | None) -> Iterator[Finding]:
    """Yields what each check finds.

    Code that the run names is imported only where `island.code` allows it.

    Args:
        island: its settings.
        own: the run's, as far as they are at hand; the coordinator's count where it answers.
    """
    allowed, layout = False, None
    with ExitStack() as stack:
        link = yield from _way(island, stack)
        reply, round_trip_s = (yield from _line(link)) if link is not None else (None, 0.0)
        run = own if reply is None else (yield from _run(island, own, reply))
        if run is not None:
            finding = bounded("code", BOUND_S, partial(agreement.code, run, island.island))
            yield finding
            allowed = finding.verdict == "ok"
        layout = yield from _model(run, reply, allowed=allowed)
        if link is not None and reply is not None:
            yield _bandwidth(link, island, round_trip_s, run, layout)
            if run is not None:
                yield from _others(run, island)
    fits = run is not None
    if run is not None:
        finding = bounded("mesh", BOUND_S, partial(agreement.mesh, island, run))
        yield finding
        fits = finding.verdict == "ok"
    if run is not None and layout is not None and fits:
        yield bounded("memory", BOUND_S, lambda: memory.memory(run, island, layout, memory.free_gpus(island)))
    yield bounded("devices", BOUND_S, lambda: machine.devices(island))
    if island.nodes.most > 1:
        yield bounded("nodes", BOUND_S, lambda: network.rendezvous(island.nodes.rendezvous))
    for setting, path, kept in folders(island, layout):
        yield bounded(setting, BOUND_S, partial(machine.folder, setting, path, kept))
    if run is not None:
        yield bounded("tokenizer", SLOW_S, lambda: data.tokenizer(island.data, run))
    yield bounded("data", SLOW_S, lambda: data.data(island, run, BOUND_S / 2))
    yield bounded("packages", BOUND_S, lambda: machine.packages(island, run, allowed=allowed))


def folders(island: IslandConfig, layout: Layout | None) -> Iterator[tuple[str, str, int]]:
    """Yields the folders that the settings name: the key, the path and the bytes that will be kept there.

    Args:
        layout: the model's; anchors and what the up codec drops are kept in `island.spool_dir`.
    """
    yield "island.spool_dir", island.island.spool_dir, 8 * layout.numel if layout is not None else 0
    for setting, path in (
        ("island.log_dir", island.island.log_dir),
        ("metrics.dir", island.metrics.dir),
        ("data.cache_dir", island.data.cache_dir),
    ):
        if path:
            yield setting, path, machine.LOG_BYTES
    kept, url = island.checkpoint, island.checkpoint.url
    if url and ("://" not in url or url.startswith("file://")):
        state = 16 * layout.numel if layout is not None else 0  # parameters, anchors and two moments
        yield "checkpoint.url", url.removeprefix("file://"), (kept.keep + 1) * state


def _way(island: IslandConfig, stack: ExitStack) -> Generator[Finding, None, Link | None]:
    """The way to the coordinator; returns the link where there is one, which `stack` closes."""
    address, tls = island.island.coordinator, island.tls.files()
    if not address:
        yield fail("name", "no coordinator is named", "set island.coordinator, or say --coordinator", ExitCode.USAGE)
        return None
    links: list[Link] = []

    def connect() -> Finding:
        links.append(Link(address, patience_s=PATIENCE_S, say=log.debug, tls=tls))
        stack.callback(links[0].close)
        return network.name(address)

    for check, look in (
        ("name", connect),
        ("port", lambda: network.port(address)),
        ("tls", lambda: network.handshake(address, tls, links[0])),
    ):
        finding = bounded(check, BOUND_S, look)
        yield finding
        if finding.verdict == "fail":
            return None
    return links[0]


def _line(link: Link) -> Generator[Finding, None, tuple[pb.StatusReply | None, float]]:
    """The round trip and the clock; returns what the coordinator says of itself, and the median in seconds."""
    told: list[tuple[pb.StatusReply, float]] = []

    def round_trip() -> Finding:
        finding, median = network.round_trip(lambda: link.health(""))
        told.append((link.status(), median))
        return finding

    finding = bounded("round trip", BOUND_S, round_trip)
    yield finding
    if finding.verdict == "fail":
        return None, 0.0
    yield bounded("clock", BOUND_S, lambda: network.clock(lambda: link.status().wall_s))
    return told[0]


def _run(
    island: IslandConfig, own: RunConfig | None, reply: pb.StatusReply
) -> Generator[Finding, None, RunConfig | None]:
    """Whether the run is the one that is meant; returns its settings, where this version knows them."""
    served: list[RunConfig] = []

    def agree() -> Finding:
        served.append(agreement.served(reply))
        return agreement.run(reply, served[0], island.island, own)

    yield bounded("run", BOUND_S, agree)
    return served[0] if served else None


def _model(
    run: RunConfig | None, reply: pb.StatusReply | None, *, allowed: bool
) -> Generator[Finding, None, Layout | None]:
    """Whether the model is the run's; returns its layout, where it can be made."""
    if run is None:
        yield warn("model", UNKNOWN, "say --run RUN.TOML to look at the model and its memory without one")
        return None
    if ":" in run.model.source and not allowed:
        yield warn("model", f"'{run.model.source}' was not called", "see what is said of 'code'")
        return None
    made: list[Layout] = []

    def make() -> Finding:
        made.append(agreement.model_layout(run))
        return agreement.layout(made[0], run, reply)

    yield bounded("model", BOUND_S if run.model.ours else SLOW_S, make)
    return made[0] if made else None


def _bandwidth(
    link: Link, island: IslandConfig, round_trip_s: float, run: RunConfig | None, layout: Layout | None
) -> Finding:
    """What the line can do. Where it cannot be probed, an island still works."""
    cap = island.island.max_bandwidth_mbps

    def look() -> Finding:
        rates = network.bandwidth(link, round_trip_s)
        try:
            return network.line(rates, cap, run, layout)
        except ConfigError:  # the fragments do not fit the model, as 'model' says
            return network.line(rates, cap, None, None)

    finding = bounded("bandwidth", LINE_S, look)
    return finding if finding.code != ExitCode.INTERNAL else warn("bandwidth", finding.found, finding.advice)


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
