"""A run's status for a terminal, and as JSON-able values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco.config import load_run
from diloco.v1 import coordinator_pb2 as pb

WATCH_S = 2.0
"""Seconds between two looks."""
PIPE_COLUMNS = 140
_STYLES = {"ACTIVE": "green", "SUSPECT": "yellow", "DRAINING": "yellow", "LOST": "red", "LEFT": "dim"}


def as_dict(reply: pb.StatusReply) -> dict[str, Any]:
    """A status as JSON-able values; what is not known, such as a loss that is not there, is null."""
    return {
        "run_id": reply.run_id,
        "phase": reply.state.phase,
        "reason": reply.state.reason,
        "paused": reply.state.paused,
        "steps": reply.steps,
        "rounds": reply.rounds_committed,
        "rounds_skipped": reply.rounds_skipped,
        "rounds_aborted": reply.rounds_aborted,
        "participation": _known(reply.participation),
        "layout_digest": reply.layout_digest,
        "parameters": reply.parameters,
        **_spread(reply),
        "bytes_up": sum(i.progress.bytes_up for i in reply.islands),
        "bytes_down": sum(i.progress.bytes_down for i in reply.islands),
        "islands": [_island(i) for i in reply.islands],
        "fragments": [_fragment(f) for f in reply.state.fragments],
    }


def _spread(reply: pb.StatusReply) -> dict[str, Any]:
    """Where the coordinators of the run are, and which of them this is."""
    run = load_run(reply.config_toml, "the coordinator").value.run
    return {"coordinators": list(run.coordinators), "coordinator_index": run.coordinator_index}


def _island(i: pb.IslandStatus) -> dict[str, Any]:
    return {
        "id": i.id,
        "state": i.state,
        "reason": i.reason,
        "epoch": i.epoch,
        "ranks": i.ranks,
        "step": i.progress.step,
        "tokens": i.progress.tokens,
        "tokens_per_second": i.progress.tokens_per_second,
        "mfu": i.progress.mfu,
        "loss": _known(i.progress.loss),
        "outer_loss": _known(i.progress.outer_loss),
        "bytes_up": i.progress.bytes_up,
        "bytes_down": i.progress.bytes_down,
        "contributions": i.contributions,
        "dropped": i.dropped,
    }


def _fragment(f: pb.FragmentState) -> dict[str, Any]:
    return {
        "fragment": f.fragment,
        "version": f.version,
        "round": f.round,
        "digest": f"{f.digest:016x}" if f.seeded else "",
        "waiting_for": f.waiting_for,
        "contributed": list(f.contributed),
        "missing": list(f.missing),
        "open_s": f.open_s,
        "soft_s": _known(f.soft_s),
        "hard_s": _known(f.hard_s),
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


# -- for a terminal -------------------------------------------------------------------------------------------------


def console() -> Console:
    """Where a status is printed: as wide as the terminal, or a pipe's width."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, markup=False, emoji=False, highlight=False)


def page(reply: pb.StatusReply) -> Group:
    """A status as a line on the run and tables of its fragments and islands."""
    data = as_dict(reply)
    parts: list[Any] = [_headline(data)]
    if data["paused"] or "being stopped" in data["reason"]:
        parts.append(Text(f"the run is {data['reason']}", style="bold yellow"))
    if data["coordinators"]:
        parts.append(Text(_map(data)))
    return Group(*parts, Text(), _islands(data), Text(), _fragments(data))


def _map(data: dict[str, Any]) -> str:
    """Which coordinator this is, what it keeps, and where the others are."""
    mine, addresses = data["coordinator_index"], data["coordinators"]
    kept = ", ".join(str(f["fragment"]) for f in data["fragments"]) or "none yet"
    others = ", ".join(f"{i} at {address}" for i, address in enumerate(addresses) if i != mine)
    return f"coordinator {mine} of {len(addresses)} keeps fragments {kept}" + (f"; {others}" if others else "")


def watch(look: Callable[[], pb.StatusReply], pause: Callable[[float], object]) -> None:
    """Shows a status again and again, until Ctrl-C.

    Args:
        look: asks for the status.
        pause: waits so many seconds.
    """
    try:
        with Live(page(look()), console=console(), auto_refresh=False, screen=False) as live:
            while True:
                pause(WATCH_S)
                live.update(page(look()), refresh=True)
    except KeyboardInterrupt:
        return


def _headline(data: dict[str, Any]) -> Text:
    gathering = data["phase"] == "gathering" and not data["paused"]
    line = f"run {data['run_id']} is {data['phase']}" + (f": {data['reason']}" if gathering and data["reason"] else "")
    line += f"; {data['rounds']} rounds committed"
    for ended in ("skipped", "aborted"):
        if data[f"rounds_{ended}"]:
            line += f", {data[f'rounds_{ended}']} {ended}"
    if data["participation"] is not None:
        line += f"; participation {data['participation']:.0%}"
    return Text(line)


def _table(left: str, right: str) -> Table:
    """A table with columns that start at the left, wrapped where they must be, and numbers that end at the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in left.split():
        table.add_column(name, overflow="fold")
    for name in right.split():
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _islands(data: dict[str, Any]) -> Group:
    table = _table("island state", "epoch ranks step loss tokens/s MFU up down folded dropped")
    table.columns[1].no_wrap = True
    reasons = []
    for i in data["islands"]:
        loss = "" if i["loss"] is None else f"{i['loss']:.3f}"
        share = f"{100 * i['mfu']:.1f}%" if i["mfu"] else ""
        style = _STYLES.get(i["state"], "")
        row = (i["epoch"], i["ranks"], f"{i['step']}/{data['steps']}", loss, f"{i['tokens_per_second']:,.0f}", share)
        size = (decimal(i["bytes_up"]), decimal(i["bytes_down"]))
        counts = (i["contributions"], i["dropped"])
        table.add_row(i["id"], Text(i["state"], style=style), *map(str, (*row, *size, *counts)))
        if i["reason"]:
            reasons.append(Text(f"{i['id']} is {i['state']}: {i['reason']}", style=style))
    return Group(table, *reasons)


def _fragments(data: dict[str, Any]) -> Table:
    table = _table("", "fragment version digest round")
    for name in ("contributed", "missing"):
        table.add_column(name, overflow="fold")
    table.add_column("since", justify="right", no_wrap=True)
    table.add_column("ends", overflow="fold")
    for f in data["fragments"]:
        names = (" ".join(f["contributed"]), " ".join(f["missing"]))
        row = (str(f["fragment"]), str(f["version"]), f["digest"], str(f["round"]), *names)
        table.add_row(*row, "" if f["hard_s"] is None else f"{f['open_s']:.0f} s", _ends(f, bool(data["paused"])))
    return table


def _ends(fragment: dict[str, Any], paused: bool) -> str:
    """When an open round ends, as things stand."""
    soft, hard = fragment["soft_s"], fragment["hard_s"]
    if hard is None:
        return ""
    if paused:
        return "its clock stands still"
    if soft is None:
        return f"skipped in {max(0.0, hard):.0f} s"
    return f"in {max(0.0, soft):.0f} s, {max(0.0, hard):.0f} s at most"
