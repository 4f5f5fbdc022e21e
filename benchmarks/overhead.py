"""What taking part in a run costs an island between two syncs: the same loop in two processes, joined and bare.

They take turns, so that what else the machine does meets both alike; no sync is due while they are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.processes import Worker, coordinator, together
from benchmarks.record import Record

TURNS = 8
"""The first two warm up."""
WARM = 2
STEPS = 10
ANCHOR_BYTES = 4
"""Of host memory for each parameter, as docs/architecture.md says."""
RUN = """
[run]
id = "bench"
steps = 1000000
[sync]
every_steps = 1000000
[rounds]
start_islands = 1
lease_s = 60.0
"""


def measure(
    dim: int = 256, *, ranks: int = 1, threads: int = 0, say: Callable[[str], None] = lambda _: None
) -> Iterator[Record]:
    """Yields the duration of a step and the memory of an island that has joined, beside one that has not.

    Args:
        dim: width of the model, a decoder of 4 layers.
        ranks: of each island; 2 or more are FSDP.
        threads: of each rank; 0 for one.
        say: takes a line on what is being done.

    Raises:
        EnvironmentFault: a process did not start or failed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco-overhead-")))
        host = stack.enter_context(coordinator(folder, RUN, threads=1))
        islands: dict[str, list[Worker]] = {}
        for name, address in (("bare", ""), ("joined", host.address)):
            islands[name] = []
            for rank in range(ranks):
                options = {
                    "address": address,
                    "dim": dim,
                    "threads": threads or 1,
                    "rank": rank,
                    "ranks": ranks,
                    "store": str(folder / f"store-{name}"),
                }
                islands[name].append(Worker("benchmarks.loop", options, folder / f"{name}-{rank}.log"))
                stack.callback(islands[name][-1].close)
        say("two islands begin")
        for workers in islands.values():
            for worker in workers:
                worker.answer()
        seconds: dict[str, list[float]] = {name: [] for name in islands}
        for turn in range(TURNS):
            say(f"turn {turn + 1} of {TURNS}")
            for name in sorted(islands, reverse=turn % 2 == 1):
                seconds[name].append(max(together(islands[name], "train", STEPS)))
        bare, joined = (statistics.median(seconds[name][WARM:]) for name in ("bare", "joined"))
        shape = f"{'' if ranks == 1 else f'{ranks} ranks, '}width {dim}"
        yield Record(name=f"a step without a sync, {shape}, beside the bare loop's", value=joined, unit="s", limit=bare)
        edge = max(together(islands["joined"], "edge"))
        yield Record(name=f"the edge after it alone, {shape}, beside a bare step", value=edge, unit="s", limit=bare)
        host_bytes, device_bytes, held = zip(*(workers[0].ask("memory") for workers in islands.values()), strict=True)
        yield Record(
            name=f"host memory, {shape}, beside the bare loop's and anchors of 4 bytes a parameter",
            value=host_bytes[1] / 2**20,
            unit="MiB",
            limit=(host_bytes[0] + ANCHOR_BYTES * held[0]) / 2**20,
        )
        if device_bytes[0]:
            yield Record(
                name=f"peak device memory, {shape}, beside the bare loop's",
                value=device_bytes[1] / 2**20,
                unit="MiB",
                limit=device_bytes[0] / 2**20,
            )
