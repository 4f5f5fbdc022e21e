"""Syncs of two sites by this system, by torchft's DiLoCo and by hivemind's averager, in turns.

All are given the same parameters, on this machine, each site a process of its own. Over loopback they meet at
127.0.0.1; on shaped lines each site has a namespace of its own, and whatever is not a site is at the hub.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.processes import Worker, coordinator, together
from benchmarks.record import Record
from benchmarks.shaped import Line, lines
from benchmarks.site import WIDTH
from benchmarks.sync import ISLANDS, LAYERS, RUN
from diloco.errors import DigestMismatch, EnvironmentFault

TURNS, WARM = 6, 3
"""The first turns warm up."""
OURS, HIVEMIND = ("fp32", "int8", "int4", "topk"), ("fp32", "f16", "u8")
ALIKE = 0.05
"""How far apart the sites' parameters may be after a sync, relative to their size: 8-bit codecs leave them unequal."""
LOOPBACK = "127.0.0.1"


class Place:
    """Where sites are: on shaped lines, or on loopback."""

    def __init__(self, far: list[Line], folder: Path, rows: int) -> None:
        self._far, self.folder, self._rows = far, folder, rows
        self.hub_prefix = far[0].hub_prefix if far else ()

    def hub(self, site: int) -> str:
        """The hub's address as a site sees it."""
        return self._far[site].hub if self._far else LOOPBACK

    def worker(self, module: str, site: int, **options: Any) -> Worker:
        """A process at a site; it is told its own address, and the model's size."""
        line = self._far[site] if self._far else None
        given = {
            "host": line.address if line else LOOPBACK,
            "island": ISLANDS[site],
            "layers": LAYERS,
            "rows": self._rows,
            "threads": max(1, (os.cpu_count() or 1) // len(ISLANDS)),
            "tls": None,
            **options,
        }
        device = "eth0" if line else "lo"
        prefix = [*(line.prefix if line else ()), "env", f"GLOO_SOCKET_IFNAME={device}"]
        log = self.folder / f"{module}-{options.get('codec', '')}-{site}.log"
        return Worker(module, given, log, prefix)


def check() -> None:
    """Raises `EnvironmentFault` where the other systems are not installed."""
    missing = [name for name in ("torchft", "hivemind") if find_spec(name) is None]
    if missing:
        raise EnvironmentFault(f"{' and '.join(missing)} not installed: pip install 'diloco[peers]'")


def measure(elements: int, *, link_mbps: float = 0.0, say: Callable[[str], None] = lambda _: None) -> Iterator[Record]:
    """Yields what a sync of `elements` fp32 parameters takes each system; the limit is what the fastest takes.

    Args:
        elements: parameters, in 16 matrices.
        link_mbps: of a line to each site, each way; 0: over loopback.
        say: takes a line on what is being done.

    Raises:
        EnvironmentFault: the other systems are not installed, a process failed, or no line can be shaped here.
        DigestMismatch: a system left the two sites apart.
    """
    check()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco-peers-")))
        far = stack.enter_context(lines(len(ISLANDS))) if link_mbps else []
        place = Place(far, folder, max(1, elements // LAYERS // WIDTH))
        say("torchft, hivemind and this system begin")
        systems = {f"diloco {codec}": _ours(place, stack, codec) for codec in OURS}
        systems["torchft fp32"] = _torchft(place, stack)
        systems |= {f"hivemind {codec}": _hivemind(place, stack, codec) for codec in HIVEMIND}
        for line in far:
            line.shape(link_mbps)
        columns: dict[str, list[float]] = {}
        for turn in range(TURNS):
            for name, sites in systems.items():
                say(f"{name}, turn {turn + 1} of {TURNS}")
                together(sites, "train")
                columns.setdefault(name, []).append(max(together(sites, "sync")))
                _check_alike(name, sites)
                if name.startswith("diloco"):
                    sites[0].ask("snapshot")
    found = {name: statistics.median(column[WARM:]) for name, column in columns.items()}
    fastest = min(found.values())
    where = f"over {link_mbps:g} Mbit/s" if link_mbps else "over loopback"
    for name, seconds in found.items():
        codec = name.rpartition(" ")[2]
        yield Record(name=f"{name} {where}, beside the fastest", value=seconds, unit="s", limit=fastest, codec=codec)


def _ours(place: Place, stack: ExitStack, codec: str) -> list[Worker]:
    folder = place.folder / f"diloco-{codec}"
    folder.mkdir()
    run = RUN.format(codec=codec, fragments=1, every=2, offsets=[2])
    listen = "0.0.0.0:0" if place.hub_prefix else f"{LOOPBACK}:0"
    host = stack.enter_context(coordinator(folder, run, listen=listen, prefix=place.hub_prefix))
    port = host.address.rpartition(":")[2]
    sites = [
        place.worker("benchmarks.site", site, codec=codec, address=f"{place.hub(site)}:{port}")
        for site in range(len(ISLANDS))
    ]
    return _started(sites, stack)


def _torchft(place: Place, stack: ExitStack) -> list[Worker]:
    module = "benchmarks.peers.with_torchft"
    lighthouse = Worker(module, {}, place.folder / "lighthouse.log", place.hub_prefix)
    stack.callback(lighthouse.close)
    port = lighthouse.answer()
    sites = [place.worker(module, site, lighthouse=f"http://{place.hub(site)}:{port}") for site in range(len(ISLANDS))]
    return _started(sites, stack)


def _hivemind(place: Place, stack: ExitStack, codec: str) -> list[Worker]:
    module, peers = "benchmarks.peers.with_hivemind", list[str]()
    sites: list[Worker] = []
    for site in range(len(ISLANDS)):
        sites += _started([place.worker(module, site, codec=codec, peers=peers)], stack)
        peers = sites[0].ask("addresses")
    return sites


def _started(sites: list[Worker], stack: ExitStack) -> list[Worker]:
    for site in sites:
        stack.callback(site.close)
    for site in sites:
        site.answer()
    return sites


def _check_alike(name: str, sites: list[Worker]) -> None:
    """Some systems report success where sites keep what they had."""
    one, other = together(sites, "sample")
    size = max(map(abs, one))
    if max(abs(a - b) for a, b in zip(one, other, strict=True)) > ALIKE * size:
        raise DigestMismatch(f"{name} left the sites apart: {one} and {other}")
