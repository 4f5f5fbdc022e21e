"""A whole sync of two islands through a coordinator, all processes of their own, beside its slowest stage.

The stages are encode, send, fold, receive and decode. Each is measured alone, for the same bytes: both islands do it at
once, and nobody does anything else. In the sync they may overlap, so that at best it takes as long as the slowest; or,
where the three processes share a few cores, as long as these cores need for all that is done.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.certificates import HERE, Authority
from benchmarks.processes import Worker, coordinator, together
from benchmarks.record import Record
from benchmarks.shaped import Line, lines
from benchmarks.site import WIDTH
from diloco.codec.policy import choice
from diloco.errors import DeadlineExceeded
from diloco.layout import TensorSpec

ISLANDS = ("a", "b")
LAYERS = 16
TURNS, WARM = 5, 2
"""The first turns warm up: files are written over once two snapshots are kept."""
FOLD_S = 120.0
TICK_S = 0.01
"""What the work of a process is counted in."""
PACKET = 1514 / 1448
"""Bytes of a packet over those that a socket sees of it, as the line counts them: Ethernet, IP and TCP with times."""
RUN = """
[run]
id = "bench"
steps = 1000000
[sync]
strategy = "sequential"
fragments = {fragments}
every_steps = {every}
overlap_steps = {fragments}
offsets_steps = {offsets}
[wire]
up = "{codec}"
down = "{codec}"
[rounds]
start_islands = 2
quorum = 2
grace_s = 600.0
deadline_s = 600.0
lease_s = 600.0
[snapshot]
every_rounds = 1000000
"""
STAGES = ("encode", "send", "fold", "receive", "decode")
HELD = ("held_to_send", "held_to_apply")
DIRECTION = {"encode": "up", "send": "up", "receive": "down", "decode": "down"}


def measure(
    elements: int = 64 * 2**20,
    *,
    codec: str = "int8",
    fragments: int = 1,
    threads: int = 0,
    encrypted: bool = False,
    state: Path | None = None,
    link_mbps: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Record]:
    """Yields what a sync and its stages take.

    Args:
        elements: fp32 parameters of the model, in 16 matrices.
        codec: of contributions and of updates, as `wire.up` names it.
        fragments: parts of the model, all of them in flight at once.
        threads: of each process; 0 for the cores of this machine, shared among the islands.
        encrypted: over mutual TLS, with certificates for this once.
        state: where the coordinator's state folder is made; a temporary folder where none is named.
        link_mbps: megabits per second, each way, of a line from each island to the coordinator, in network namespaces;
            then only the whole sync is measured, beside the time that its bytes take. 0: over loopback.
        say: takes a line on what is being done.

    Raises:
        ConfigError: there is no such codec.
        EnvironmentFault: a process did not start or failed, or no line can be shaped here.
    """
    rows = max(1, elements // LAYERS // WIDTH)
    cores = os.cpu_count() or 1
    bits = choice(codec).of(TensorSpec("layers.0.weight", (rows, WIDTH))).size(rows * WIDTH) * 8 / (rows * WIDTH)
    steps = range(fragments + 1, 2 * fragments + 1)
    run = RUN.format(codec=codec, fragments=fragments, every=2 * fragments, offsets=[*steps])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco-sync-", dir=state)))
        far = stack.enter_context(lines(len(ISLANDS))) if link_mbps else []
        names = [*HERE, *(line.hub for line in far)]
        tls = Authority(folder).issue("bench", names=names) if encrypted else None
        listen = "0.0.0.0:0" if far else "127.0.0.1:0"
        hub = far[0].hub_prefix if far else ()
        host = stack.enter_context(
            coordinator(folder, run, listen=listen, threads=threads or cores, tls=tls, prefix=hub)
        )
        port = host.address.rpartition(":")[2]
        sites = []
        for number, island in enumerate(ISLANDS):
            arguments = {
                "address": f"{far[number].hub if far else '127.0.0.1'}:{port}",
                "island": island,
                "layers": LAYERS,
                "rows": rows,
                "threads": threads or max(1, cores // len(ISLANDS)),
                "tls": asdict(tls) if tls else None,
            }
            prefix = far[number].prefix if far else ()
            sites.append(Worker("benchmarks.site", arguments, folder / f"{island}.log", prefix))
            stack.callback(sites[-1].close)
        say("two islands join")
        for site in sites:
            site.answer()
        name = f"sync {codec}" + (f", {fragments} fragments" if fragments > 1 else "") + (", TLS" if encrypted else "")
        if far:
            yield from _on_line(name, sites, far, link_mbps, fragments, say)
        else:
            processes = [psutil.Process(pid) for pid in (host.pid, *(site.pid for site in sites))]
            yield from _on_loopback(name, codec, bits, sites, processes, host.state / "events.jsonl", fragments, say)


def _on_loopback(
    name: str,
    codec: str,
    bits: float,
    sites: Sequence[Worker],
    processes: Sequence[psutil.Process],
    events: Path,
    fragments: int,
    say: Callable[[str], None],
) -> Iterator[Record]:
    """The stages, the whole, and how long training is held, in turns."""
    columns: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for what in ("copy", *STAGES, "whole", *HELD):
            say(f"{name}: {what.replace('_', ' ')}, turn {turn + 1} of {TURNS}")
            if what in ("encode", "whole", "held_to_send"):
                together(sites, "train")
            if what == "fold":
                seconds = _fold_seconds(events, fragments * (1 + 3 * turn), fragments)
            elif what == "whole":
                worked = _worked(processes)
                seconds = _whole(sites)
                columns.setdefault("work", []).append((_worked(processes) - worked) / (os.cpu_count() or 1))
            else:
                seconds = max(together(sites, what))
            columns.setdefault(what, []).append(seconds)
            if what in ("fold", "whole", "held_to_apply"):
                sites[0].ask("snapshot")
    found = {what: statistics.median(column[WARM:]) for what, column in columns.items()}
    slowest = max(found[stage] for stage in STAGES)
    work = max(TICK_S, statistics.mean(columns["work"][WARM:]))  # it comes in ticks
    for stage in STAGES:
        way = DIRECTION.get(stage, "")
        yield Record(
            name=f"{name}: {stage}, alone",
            value=found[stage],
            unit="s",
            limit=slowest,
            codec=codec,
            direction=way,
            bits_per_parameter=bits if way else None,
        )
    yield Record(name=f"{name}: whole, beside its slowest stage", value=found["whole"], unit="s", limit=slowest)
    yield Record(name=f"{name}: whole, beside the work of it", value=found["whole"], unit="s", limit=work)
    for what in HELD:
        how = what.replace("_", " ")
        yield Record(name=f"{name}: training {how}, beside one copy", value=found[what], unit="s", limit=found["copy"])


def _on_line(
    name: str,
    sites: Sequence[Worker],
    far: Sequence[Line],
    mbps: float,
    fragments: int,
    say: Callable[[str], None],
) -> Iterator[Record]:
    """The whole, beside the time that its bytes take."""
    for line in far:
        line.shape(mbps)
    durations, ups, downs = [], [], []
    for turn in range(TURNS):
        say(f"{name} over {mbps:g} Mbit/s, turn {turn + 1} of {TURNS}")
        together(sites, "train")
        before = together(sites, "traffic")
        durations.append(_whole(sites))
        sites[0].ask("snapshot")
        after = together(sites, "traffic")
        ups.append(max(b[0] - a[0] for a, b in zip(before, after, strict=True)))
        downs.append(max(b[1] - a[1] for a, b in zip(before, after, strict=True)))
    up, down, took = (statistics.median(column[WARM:]) for column in (ups, downs, durations))
    bound, path = max(
        (up + down / fragments, "all up, then the last update down"),
        (down + up / fragments, "the first contribution up, then all down"),
    )
    for what, factor in (("bytes", 1.0), ("packets", PACKET)):
        yield Record(
            name=f"{name} over {mbps:g} Mbit/s, beside its {what} ({path})",
            value=took,
            unit="s",
            limit=bound * factor * 8 / mbps / 1e6,
        )


def _whole(sites: Sequence[Worker]) -> float:
    """Seconds until both islands, which begin at once, have applied the update."""
    begin = time.perf_counter()
    together(sites, "sync")
    return time.perf_counter() - begin


def _worked(processes: Sequence[psutil.Process]) -> float:
    """Seconds that cores have worked for these processes."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _fold_seconds(events: Path, count: int, fragments: int) -> float:
    """Waits until so many folds are in the coordinator's events; returns the seconds that the last ones took."""
    deadline = time.monotonic() + FOLD_S
    while True:
        rows = [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
        folded = [row for row in rows if row["kind"] == "folded"]
        if len(folded) >= count:
            break
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{count} folds are not done after {FOLD_S:g} s: {len(folded)} are")
        time.sleep(0.01)
    decided = {(row["fragment"], row["round"]): row["at"] for row in rows if row["kind"] == "committed"}
    seconds, end = 0.0, 0.0
    for row in sorted(folded[-fragments:], key=lambda row: row["at"]):
        begin = max(decided[row["fragment"], row["round"]], end)
        seconds, end = seconds + row["at"] - begin, row["at"]
    return seconds
