"""Benchmarks: what each stage does beside what this machine can do, measured in the same run.

    python -m benchmarks.run [--json FILE] [--elements N]

Every record has `name`, `value`, `unit`, `limit` (the machine's, in the same unit) and `ratio` (value over limit).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import codec, islands, transport
from benchmarks.record import Record, report, seconds
from coordinator.fold import Outer, Part, fold
from diloco.codec import CODECS
from diloco.config import OuterConfig
from diloco.digest import digest
from diloco.fragments import Fragment
from diloco.layout import Box, Piece, TensorSpec

CONTRIBUTIONS = 4


def measure(elements: int) -> list[Record]:
    """Runs every benchmark on `elements` fp32 values."""
    values, warm = torch.randn(elements), torch.empty(elements)
    gigabytes = elements * 4 / 1e9
    copy, read = (gigabytes / s for s in seconds(lambda: warm.copy_(values), lambda: values.sum()))
    records = [*codec.measure(elements)]
    box = Box.whole((elements,))
    records.append(
        Record(
            name="digest",
            value=gigabytes / seconds(lambda: digest(values, 0, (elements,), box))[0],
            unit="GB/s of fp32",
            limit=read,
        )
    )
    records.append(outer_step(values, copy))
    records += transport.measure()
    records += [Record(**row) for row in islands.records()]
    return records


def outer_step(values: torch.Tensor, copy: float) -> Record:
    """Folds 4 bf16 contributions; the limit is the time that the necessary memory traffic takes at copy speed.

    Read: contributions, anchor, momentum, residual. Written: anchor, momentum, residual, update.
    """
    elements, bf16 = values.numel(), CODECS["bf16"]
    fragment = Fragment(0, (0,), (TensorSpec("w", (elements,)),))
    payload = bf16.pack(values)
    part = Part(pieces=[Piece(0, Box.whole((elements,)))], codecs=[bf16], payload=payload)
    islands = {f"island-{i}": [part] for i in range(CONTRIBUTIONS)}
    share = dict.fromkeys(islands, 1 / CONTRIBUTIONS)
    outer, config = Outer.first(fragment, values.clone()), OuterConfig()
    [duration] = seconds(lambda: fold(fragment, outer, islands, share, config, bf16))
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
    report(measure(arguments.elements), arguments.json)


if __name__ == "__main__":
    main()
