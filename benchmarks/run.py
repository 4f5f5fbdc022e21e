"""Benchmarks: what each stage does beside what this machine can do, measured in the same run.

    python -m benchmarks.run [--json FILE] [--elements N]

Every record has `name`, `value`, `unit`, `limit` (the machine's, in the same unit) and `ratio` (value over limit).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import codec, islands, outer, transport
from benchmarks.record import Record, report


def measure(elements: int) -> list[Record]:
    """Runs every benchmark on `elements` fp32 values."""
    records = [*codec.measure(elements), *outer.measure(elements)]
    records += [Record(**row) for row in transport.measure(elements)]
    records += [Record(**row) for row in islands.records()]
    return records


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--elements", type=int, default=16 * 2**20, help="fp32 values (16 Mi by default)")
    arguments = parser.parse_args()
    report(measure(arguments.elements), arguments.json)


if __name__ == "__main__":
    main()
