"""`diloco island` and `diloco status`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from diloco.errors import ConfigError
from island.operate import linked, reach

if TYPE_CHECKING:
    from diloco.tls import TLS


@click.command()
@click.argument("island_file", metavar="ISLAND.TOML")
@click.option("--coordinator", metavar="HOST:PORT", default="", help="Where the coordinator listens.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting of the island.")
def island(island_file: str, coordinator: str, overrides: tuple[str, ...]) -> int:
    """Run one island: its ranks, its inner loop, its part in the run.

    It may start before the coordinator. SIGTERM, SIGUSR1 and Ctrl-C leave the run at the next step edge.
    """
    from diloco.cli import read_text
    from island.config import load_island

    extra = (*overrides, f"island.coordinator={json.dumps(coordinator)}") if coordinator else overrides
    config = load_island(read_text(island_file), island_file, extra).value
    if not config.island.coordinator:
        raise ConfigError("no coordinator: give --coordinator HOST:PORT or set island.coordinator")
    from island.daemon import run
    from island.data.sources import check

    check(config.data)  # a missing file is told here, before any rank starts
    return run(config)


@click.command()
@click.argument("name")
@click.option("--end", default="", metavar="TOKEN", help="Between two documents; default: a usual one that it has.")
def tokenizer(name: str, end: str) -> None:
    """Print the run settings of a tokenizer: NAME is a tokenizer.json, its folder, or a name known to transformers."""
    from diloco.config_tokenizer import TokenizerConfig
    from diloco.settings import to_toml
    from island.data import HuggingFace

    found = HuggingFace(name, end)
    config = TokenizerConfig(kind="hf", name=name, digest=found.digest, end=found.end)
    click.echo(f"[tokenizer]\n{to_toml(config)}\n[model]\nvocab_size = {found.vocabulary}")


@click.command()
@click.argument("address", metavar="[HOST:PORT]", required=False)
@click.option("--coordinator", metavar="HOST:PORT", help="Where the coordinator listens.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@reach
def status(
    address: str | None, coordinator: str | None, as_json: bool, watch: bool, timeout_s: float, tls: TLS | None
) -> None:
    """Show how a run stands: its islands, fragments and bytes."""
    from island import show

    if bool(address) == bool(coordinator) or (as_json and watch):
        raise click.UsageError("give HOST:PORT or --coordinator HOST:PORT, and --json or --watch, one of each")
    with linked(address or coordinator or "", timeout_s, tls) as link:
        if as_json:
            click.echo(json.dumps(show.as_dict(link.status()), indent=2))
        elif watch:
            show.watch(link.status, time.sleep)
        else:
            show.console().print(show.page(link.status()))
