"""Bulk streams of islands, each a process, through a coordinator process, beside a bare gRPC stream of the same bytes.

Every push is a contribution to a round, and every fetch takes its update once that is published, so the state folder
is as it is after some rounds of a run. A push ends with its receipt, so its bytes are on the disk of that folder; with
a folder in memory, as /dev/shm, what is left is the transport. Each figure is held against a bare stream between two
processes as any program is, and against one whose processes keep freed memory as this system's do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.bare import Bare
from benchmarks.certificates import Authority
from benchmarks.processes import Worker, coordinator, together
from benchmarks.record import Record

ISLANDS, TURNS, WARM = 8, 8, 3
"""The first turns warm up: contributions are written over those of rounds that two snapshots hold."""
SHARE = 2
"""With all islands together each sends one over so much of what one alone does."""
RUN = """
[run]
id = "bench"
steps = 1000000
[sync]
strategy = "strided"
fragments = 2
every_steps = 2
[rounds]
start_islands = 8
lease_s = 600.0
[snapshot]
every_rounds = 1000000
"""


def measure(mebibytes: int = 64, *, state: Path | None = None, encrypted: bool = False) -> Iterator[Record]:
    """Yields what push and fetch bring, alone and with 8 islands together.

    Args:
        mebibytes: payload of one stream.
        state: where the coordinator's state folder is made; a temporary folder where none is named.
        encrypted: over mutual TLS, the bare streams too, with certificates for this once.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-transport-", dir=state)))
        tls = Authority(folder).issue("bench") if encrypted else None
        bares = [stack.enter_context(Bare(tls, keep=keep)) for keep in (False, True)]
        address = stack.enter_context(coordinator(folder, RUN, tls=tls)).address
        bytes_, part = mebibytes * 2**20, mebibytes * 2**20 // SHARE
        islands = []
        for number in range(ISLANDS):
            options = {
                "address": address,
                "island": f"island-{number}",
                "sizes": [bytes_, part],
                "tls": asdict(tls) if tls else None,
            }
            islands.append(Worker("benchmarks.client", options, folder / f"island-{number}.log"))
            stack.callback(islands[-1].close)
            islands[-1].answer()  # the first to join has the first parameters
        first, *others = islands
        first.ask("seed")
        together(islands, "ready")
        columns: dict[str, list[float]] = {}

        def clock(name: str, count: int, work: Callable[[], object]) -> None:
            columns.setdefault(name, []).append(count / 1e9 / _seconds(work))

        for turn in range(TURNS):
            together(others, "decline", 0, turn)
            clock("push", bytes_, lambda: first.ask("contribute", 0, turn))  # noqa: B023
            first.ask("fetch", 0, turn)  # waits for the round
            clock("fetch", bytes_, lambda: first.ask("fetch", 0, turn))  # noqa: B023
            clock("push of 8", ISLANDS * part, lambda: together(islands, "contribute", 1, turn))  # noqa: B023
            first.ask("fetch", 1, turn)
            clock("fetch of 8", ISLANDS * part, lambda: together(islands, "fetch", 1, turn))  # noqa: B023
            first.ask("snapshot")
            for bare, keeps in zip(bares, ("bare", "bare, memory kept"), strict=True):
                for way, stream in (("push", bare.up), ("fetch", bare.down)):
                    columns.setdefault(f"{way}: {keeps}", []).append(bytes_ / 1e9 / stream(mebibytes))
                    together_s = stream(mebibytes // SHARE, ISLANDS)
                    columns.setdefault(f"{way} of 8: {keeps}", []).append(ISLANDS * part / 1e9 / together_s)
    found = {name: statistics.median(column[WARM:]) for name, column in columns.items()}
    secure = ", TLS" if encrypted else ""
    for way in ("push", "fetch"):
        for keeps, words in (("bare", "a bare stream"), ("bare, memory kept", "a bare stream that keeps freed memory")):
            yield _record(f"{way}{secure}, beside {words}", found[way], found[f"{way}: {keeps}"])
        yield _record(f"{way}{secure}, 8 islands together, beside one", found[f"{way} of 8"], found[way])
        yield _record(
            f"{way}{secure}, 8 islands together, beside 8 bare streams",
            found[f"{way} of 8"],
            found[f"{way} of 8: bare"],
        )


def _record(name: str, value: float, limit: float) -> Record:
    return Record(name=name, value=value, unit="GB/s", limit=limit)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
