"""Benchmarks: what each stage does beside what this machine can do, measured in the same run.

    python -m benchmarks.run [--json FILE] [--elements N]

Every record has `name`, `value`, `unit`, `limit` (the machine's, in the same unit) and `ratio` (value over limit).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import islands, transport
from coordinator.fold import Outer, Part, fold
from diloco.codec import CODECS
from diloco.config import OuterConfig
from diloco.digest import digest
from diloco.fragments import Fragment
from diloco.layout import Box, Piece, TensorSpec

REPEATS = 5
CONTRIBUTIONS = 4


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


def seconds(work: Callable[[], object]) -> float:
    """Median duration of `work` over `REPEATS` runs, after one to warm up."""
    work()
    durations = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


def measure(elements: int) -> list[Record]:
    """Runs every benchmark on `elements` fp32 values."""
    values, warm = torch.randn(elements), torch.empty(elements)
    gigabytes = elements * 4 / 1e9
    copy = gigabytes / seconds(lambda: warm.copy_(values))
    read = gigabytes / seconds(lambda: values.sum())
    records = []
    for name, codec in CODECS.items():
        payload = torch.empty(codec.size(elements), dtype=torch.uint8)
        bits = codec.size(elements) * 8 / elements
        for direction, work in (
            ("encode", lambda c=codec, p=payload: c.encode(values, p)),
            ("decode", lambda c=codec, p=payload: c.decode(p, warm)),
        ):
            records.append(
                Record(
                    name=f"codec {name} {direction}",
                    value=gigabytes / seconds(work),
                    unit="GB/s of fp32",
                    limit=copy,
                    codec=name,
                    direction=direction,
                    bits_per_parameter=bits,
                )
            )
    box = Box.whole((elements,))
    records.append(
        Record(
            name="digest",
            value=gigabytes / seconds(lambda: digest(values, 0, (elements,), box)),
            unit="GB/s of fp32",
            limit=read,
        )
    )
    records.append(outer_step(values, copy))
    records += [Record(**row) for row in transport.measure(elements)]
    records += [Record(**row) for row in islands.records()]
    return records


def outer_step(values: torch.Tensor, copy: float) -> Record:
    """Folds 4 bf16 contributions; the limit is the time that the necessary memory traffic takes at copy speed.

    Read: contributions, anchor, momentum, residual. Written: anchor, momentum, residual, update.
    """
    elements, codec = values.numel(), CODECS["bf16"]
    fragment = Fragment(0, (0,), (TensorSpec("w", (elements,)),))
    payload = torch.empty(codec.size(elements), dtype=torch.uint8)
    codec.encode(values, payload)
    part = Part(pieces=[Piece(0, Box.whole((elements,)))], codec=codec, payload=payload)
    islands = {f"island-{i}": [part] for i in range(CONTRIBUTIONS)}
    share = dict.fromkeys(islands, 1 / CONTRIBUTIONS)
    outer, config = Outer.first(fragment, values.clone()), OuterConfig()
    duration = seconds(lambda: fold(fragment, outer, islands, share, config, codec))
    traffic = elements * (2 * CONTRIBUTIONS + 4 * 3 + 4 * 3 + 2)
    return Record(
        name=f"outer step of {CONTRIBUTIONS} bf16 contributions, digest included",
        value=traffic / 1e9 / duration,
        unit="GB/s of traffic",
        limit=2 * copy,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--elements", type=int, default=16 * 2**20, help="fp32 values (16 Mi by default)")
    arguments = parser.parse_args()
    records = measure(arguments.elements)
    table = Table("what", "value", "limit", "ratio", "unit", box=None)
    for record in records:
        table.add_row(record.name, f"{record.value:.2f}", f"{record.limit:.2f}", f"{record.ratio:.2f}", record.unit)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if arguments.json:
        rows = [{**asdict(record), "ratio": record.ratio} for record in records]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
