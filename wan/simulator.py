"""Plays many runs of the real cores under a virtual clock and a seeded adversary, and checks what must hold in each.

    python -m wan.simulator --seeds 1000 --first 0
    python -m wan.simulator --seeds 1 --first SEED -v          # everything that happened in one of them

The coordinator's `rounds`, `facts`, `recovery`, `compaction`, `Inbox`, `Intake`, `Admission`, `Anchors` and `fold`, the
island's `Replica` and `Schedule`, and the framing of streams are those that serve. Only clocks, disks and the network
are simulated (`sim_world`, `sim_disk`, `sim_network`, `sim_wire`), and the shells around them have synchronous twins:
`sim_coordinator`, `sim_service` and `sim_stream`, `sim_island` and `sim_link`. `sim_checker` and `sim_bounds` say what
must hold, `sim_plants` what is to be found, and `sim_run` plays the adversary.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import click
import torch

from wan.sim_plants import PLANTS
from wan.sim_run import Result, Simulation

CHUNK = 25
"""Seeds that a worker process plays at a time."""
WORKERS = 2
SHOWN = 5
"""Violations of one seed that are printed."""


def play(seeds: range, plant: str = "") -> list[Result]:
    """The results of some seeds, in order."""
    torch.set_num_threads(1)
    return [Simulation(seed, plant).run() for seed in seeds]


def play_all(seeds: range, plant: str = "") -> Iterator[Result]:
    """The results of all seeds, in order; many are shared out to processes, which changes none of them."""
    if len(seeds) <= 2 * CHUNK:
        for seed in seeds:
            yield from play(range(seed, seed + 1), plant)
        return
    parts = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        for results in pool.map(play, parts, [plant] * len(parts)):
            yield from results


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), default=1000, show_default=True, help="Runs to play.")
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option("--plant", type=click.Choice(list(PLANTS)), help="A fault to plant, which the checker is to find.")
@click.option("-v", "--verbose", is_flag=True, help="Print everything that happens.")
def main(seeds: int, first: int, plant: str | None, verbose: bool) -> None:
    """Plays simulated runs; exit code 1 where something is violated."""
    begin, violations = time.perf_counter(), 0
    wanted = range(first, first + seeds)
    results = (
        (Simulation(s, plant or "", click.echo).run() for s in wanted) if verbose else play_all(wanted, plant or "")
    )
    for result in results:
        violations += len(result.violations)
        for violation in result.violations[:SHOWN]:
            click.echo(f"seed {result.seed} at {violation.at:.3f} s: {violation.invariant}: {violation.words}")
        if result.violations:
            more = len(result.violations) - SHOWN
            option = f" --plant {plant}" if plant else ""
            click.echo(
                (f"  and {more} more; " if more > 0 else "  ")
                + f"replay: python -m wan.simulator --seeds 1 --first {result.seed}{option} -v"
            )
    rate = seeds / (time.perf_counter() - begin)
    click.echo(f"{seeds} schedules, {violations} violations, {rate:.1f} schedules/s")
    raise SystemExit(1 if violations else 0)


if __name__ == "__main__":
    main()
