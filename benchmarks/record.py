"""What a benchmark finds, and how it is shown."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of the table."""

    name: str
    value: float
    unit: str
    limit: float
    codec: str = ""
    direction: str = ""
    bits_per_parameter: float | None = None

    @property
    def ratio(self) -> float:
        return self.value / self.limit


def seconds(*works: Callable[[], object]) -> list[float]:
    """Median duration of each of `works` over `REPEATS` turns, after one to warm up.

    They take turns, so that what else the machine does meets all of them alike.
    """
    durations: list[list[float]] = []
    for _ in range(1 + REPEATS):
        turn = []
        for work in works:
            begin = time.perf_counter()
            work()
            turn.append(time.perf_counter() - begin)
        durations.append(turn)
    return [statistics.median(column) for column in zip(*durations[1:], strict=True)]


def report(records: Sequence[Record], path: Path | None) -> None:
    """Prints a table; writes the records to `path` as JSON."""
    table = Table("what", "value", "limit", "ratio", "unit", box=None)
    for record in records:
        table.add_row(record.name, f"{record.value:.3g}", f"{record.limit:.3g}", f"{record.ratio:.2f}", record.unit)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if path:
        path.write_text(json.dumps([{**asdict(record), "ratio": record.ratio} for record in records], indent=1))
