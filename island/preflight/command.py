"""`diloco preflight`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco.errors import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from island.preflight.finding import Finding

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@click.argument("island_file", metavar="ISLAND.TOML")
@click.option("--coordinator", metavar="HOST:PORT", default="", help="Where the coordinator listens.")
@click.option("--run", "run_file", metavar="RUN.TOML", default="", help="The run, to compare with what is served.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting of the island.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def preflight(island_file: str, coordinator: str, run_file: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Look at everything an island needs, before it trains: the way to the coordinator, the run, this machine.

    Ends with 0 if nothing would stop the island, else with the exit code of the first thing that would.
    """
    from diloco.cli import read_text
    from diloco.config import load_run
    from island.config import load_island
    from island.preflight.checks import examine

    extra = (*overrides, f"island.coordinator={json.dumps(coordinator)}") if coordinator else overrides
    config = load_island(read_text(island_file), island_file, extra).value
    own = load_run(read_text(run_file), run_file).value if run_file else None
    if not sys.flags.safe_path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # ranks are run with `python -m`, and find modules in this folder too
    findings = []
    for finding in examine(config, own):
        findings.append(finding)
        if not as_json and sys.stderr.isatty():
            click.echo(f"{finding.verdict:4}  {finding.check}", err=True)
    code = next((finding.code for finding in findings if finding.verdict == "fail"), ExitCode.OK)
    if as_json:
        click.echo(json.dumps({"exit_code": code, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160, emoji=False).print(table(findings))
    return code


def table(findings: Sequence[Finding]) -> Table:
    """The findings, a row each."""
    from rich.table import Table
    from rich.text import Text

    rows = Table("check", "", "found", "what to do", box=None, pad_edge=False)
    for finding in findings:
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        rows.add_row(finding.check, verdict, Text(finding.found), Text(finding.advice))
    return rows
