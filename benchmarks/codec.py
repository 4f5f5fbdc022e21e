"""Codecs beside copying the same fp32 values, in turns.

python -m benchmarks.codec [--json FILE] [--elements N] [--threads N] [--codec NAME ...] [--eager]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.record import Record, report, seconds
from diloco.codec import CODECS, native

BLOCK = 256


def values_like_updates(elements: int) -> torch.Tensor:
    """Normal values of a size of their own per block, as pseudo-gradients have: fp32 [elements]."""
    sizes = torch.randn(-(-elements // BLOCK)).exp()
    return torch.randn(elements).mul_(sizes.repeat_interleave(BLOCK)[:elements])


def measure(elements: int, names: Sequence[str] = ()) -> Iterator[Record]:
    """Yields what encoding and decoding `elements` values take, for each codec named, or all; outputs are warm."""
    values = values_like_updates(elements)
    warm, gigabytes = torch.empty(elements), elements * 4 / 1e9
    for name in names or CODECS:
        codec = CODECS[name]
        payload = codec.pack(values)
        copy, encode, decode = seconds(
            lambda: warm.copy_(values),
            lambda c=codec, p=payload: c.encode(values, p),
            lambda c=codec, p=payload: c.decode(p, warm),
        )
        for direction, duration in (("encode", encode), ("decode", decode)):
            yield Record(
                name=f"codec {name} {direction}",
                value=gigabytes / duration,
                unit="GB/s of fp32",
                limit=gigabytes / copy,
                codec=name,
                direction=direction,
                bits_per_parameter=codec.size(elements) * 8 / elements,
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--elements", type=int, default=64 * 2**20, help="fp32 values (64 Mi by default)")
    parser.add_argument("--threads", type=int, help="threads to compute with")
    parser.add_argument("--codec", nargs="*", choices=CODECS, default=[], help="these alone")
    parser.add_argument("--eager", action="store_true", help="without the compiled kernels")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    native.ENABLED = native.ENABLED and not arguments.eager
    report([*measure(arguments.elements, arguments.codec)], arguments.json)


if __name__ == "__main__":
    main()
