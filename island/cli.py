"""`diloco island` and `diloco status`."""

from __future__ import annotations

import json
import logging
import math
import sys
from typing import TYPE_CHECKING, Any

import click

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.v1 import coordinator_pb2 as pb


@click.command()
@click.argument("island_file", metavar="ISLAND.TOML")
@click.option("--coordinator", metavar="HOST:PORT", default="", help="Where the coordinator listens.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting of the island.")
def island(island_file: str, coordinator: str, overrides: tuple[str, ...]) -> int:
    """Run one island: its ranks, its inner loop, its part in the run.

    It may start before the coordinator. SIGTERM and Ctrl-C leave the run at the next step edge.
    """
    from diloco.cli import read_text
    from island.config import load_island

    extra = (*overrides, f"island.coordinator={json.dumps(coordinator)}") if coordinator else overrides
    config = load_island(read_text(island_file), island_file, extra).value
    if not config.island.coordinator:
        raise ConfigError("no coordinator: give --coordinator HOST:PORT or set island.coordinator")
    from island.daemon import run
    from island.data import corpus

    corpus(config.data.text)  # a missing file is told here, before any rank starts
    return run(config)


@click.command()
@click.option("--coordinator", metavar="HOST:PORT", required=True, help="Where the coordinator listens.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--timeout", "timeout_s", default=5.0, show_default=True, help="Seconds to look for the coordinator.")
def status(coordinator: str, as_json: bool, timeout_s: float) -> None:
    """Show how a run stands: its islands, fragments and bytes."""
    from island.link import Link

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    link = Link(coordinator, patience_s=timeout_s, say=lambda line: click.echo(line, err=True))
    try:
        reply = link.status()
    finally:
        link.close()
    if as_json:
        click.echo(json.dumps(as_dict(reply), indent=2))
    else:
        _print(reply)


def as_dict(reply: pb.StatusReply) -> dict[str, Any]:
    """A status as JSON-able values; a loss that is not there is null."""
    return {
        "run_id": reply.run_id,
        "phase": reply.state.phase,
        "reason": reply.state.reason,
        "steps": reply.steps,
        "rounds": reply.rounds_committed,
        "rounds_skipped": reply.rounds_skipped,
        "layout_digest": reply.layout_digest,
        "parameters": reply.parameters,
        "bytes_up": sum(i.progress.bytes_up for i in reply.islands),
        "bytes_down": sum(i.progress.bytes_down for i in reply.islands),
        "islands": [
            {
                "id": i.id,
                "state": i.state,
                "reason": i.reason,
                "epoch": i.epoch,
                "ranks": i.ranks,
                "step": i.progress.step,
                "tokens": i.progress.tokens,
                "tokens_per_second": i.progress.tokens_per_second,
                "loss": _known(i.progress.loss),
                "outer_loss": _known(i.progress.outer_loss),
                "bytes_up": i.progress.bytes_up,
                "bytes_down": i.progress.bytes_down,
                "contributions": i.contributions,
                "dropped": i.dropped,
            }
            for i in reply.islands
        ],
        "fragments": [
            {
                "fragment": f.fragment,
                "version": f.version,
                "round": f.round,
                "digest": f"{f.digest:016x}" if f.seeded else "",
                "waiting_for": f.waiting_for,
            }
            for f in reply.state.fragments
        ],
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _print(reply: pb.StatusReply) -> None:
    from rich.console import Console
    from rich.table import Table

    data = as_dict(reply)
    console = Console(width=None if sys.stdout.isatty() else 140)
    reason = f": {data['reason']}" if data["reason"] else ""
    console.print(
        f"run {data['run_id']} is {data['phase']}{reason}; {data['rounds']} rounds committed", highlight=False
    )
    islands = Table("island", "state", "epoch", "ranks", "step", "loss", "tokens/s", "up", "down", "folded", box=None)
    for i in data["islands"]:
        loss = "" if i["loss"] is None else f"{i['loss']:.3f}"
        row = (i["id"], i["state"], i["epoch"], i["ranks"], f"{i['step']}/{data['steps']}", loss)
        rate = f"{i['tokens_per_second']:,.0f}"
        islands.add_row(*map(str, row), rate, f"{i['bytes_up']:,}", f"{i['bytes_down']:,}", str(i["contributions"]))
    console.print(islands)
    fragments = Table("fragment", "version", "digest", "waiting for", box=None)
    for f in data["fragments"]:
        fragments.add_row(str(f["fragment"]), str(f["version"]), f["digest"], f["waiting_for"])
    console.print(fragments)
