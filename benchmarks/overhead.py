"""What taking part in a run costs an island between two syncs: the same loop in two processes, joined and bare.

They take turns, so that what else the machine does meets both alike; no sync is due while they are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.processes import Worker, coordinator, together
from benchmarks.record import Record
from island.config_mesh import AnchorPolicy

TURNS = 8
"""The first two warm up."""
WARM = 2
STEPS = 10
ANCHOR_BYTES = 4
"""For each parameter that a rank holds, where its anchors are; none elsewhere."""
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
    dim: int = 256,
    *,
    ranks: int = 1,
    threads: int = 0,
    anchors: AnchorPolicy = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Record]:
    """Yields the duration of a step and the memory of an island that has joined, beside one that has not.

    Args:
        dim: width of the model, a decoder of 4 layers.
        ranks: of each island; 2 or more are FSDP.
        threads: of each rank; 0 for one.
        anchors: where the island that has joined keeps them.
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
                    "anchors": anchors,
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
        bare_bytes, joined_bytes = (workers[0].ask("memory") for workers in islands.values())
        yield from memory(shape, bare_bytes, joined_bytes, anchors)
        bare_tensors, joined_tensors = (together(workers, "tensors")[0] for workers in islands.values())
        yield from tensors(shape, bare_tensors, joined_tensors, bare_bytes[2])


def memory(shape: str, bare: Sequence[int], joined: Sequence[int], anchors: AnchorPolicy) -> Iterator[Record]:
    """Yields the memory of a rank that has joined, beside that of one that has not and its anchors where they are.

    Args:
        shape: of the model and the island, for the names of records.
        bare, joined: bytes of the process in RAM, their peak on the device (0 without one), and parameters it holds.
        anchors: where they are: those on a device that is the CPU are in RAM.
    """
    on_device = anchors == "device" and bare[1] > 0
    for what, which, here in (("host memory", 0, not on_device), ("peak device memory", 1, on_device)):
        if bare[which]:
            and_anchors = f" and anchors of {ANCHOR_BYTES} bytes a parameter" if here else ""
            yield Record(
                name=f"{what}, {shape}, beside the bare loop's{and_anchors}",
                value=joined[which] / 2**20,
                unit="MiB",
                limit=(bare[which] + ANCHOR_BYTES * bare[2] * here) / 2**20,
            )


def tensors(shape: str, bare: Sequence[int], joined: Sequence[int], parameters: int) -> Iterator[Record]:
    """Yields what tensors a rank that has joined holds beyond one that has not, beside its anchors, wherever they are.

    Args:
        shape: of the model and the island, for the names of records.
        bare, joined: bytes of all tensors between two steps, and at the peak of a step.
        parameters: that the rank holds.
    """
    for when, before, after in zip(("between steps", "at the peak of a step"), bare, joined, strict=True):
        yield Record(
            name=f"tensors beyond the bare loop's {when}, {shape}, beside anchors of {ANCHOR_BYTES} bytes a parameter",
            value=(after - before) / 2**20,
            unit="MiB",
            limit=ANCHOR_BYTES * parameters / 2**20,
        )
