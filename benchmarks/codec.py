"""Codecs beside copying the same fp32 values, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.record import Record, seconds
from diloco.codec import CODECS, by_name

BLOCK = 256


def values_like_updates(elements: int) -> torch.Tensor:
    """Normal values of a size of their own per block, as pseudo-gradients have: fp32 [elements]."""
    sizes = torch.randn(-(-elements // BLOCK)).exp()
    return torch.randn(elements).mul_(sizes.repeat_interleave(BLOCK)[:elements])


def measure(elements: int, names: Sequence[str] = ()) -> Iterator[Record]:
    """Yields what encoding and decoding `elements` values bring, for each codec named, or all; outputs are warm.

    Raises:
        ConfigError: there is no codec of a name.
    """
    names = [by_name(name).name for name in names] or [*CODECS]
    values = values_like_updates(elements)
    warm, gigabytes = torch.empty(elements), elements * 4 / 1e9
    for name in names:
        codec = by_name(name)
        payload = codec.pack(values)
        copy, encode, decode = seconds(
            partial(warm.copy_, values),
            partial(codec.encode, values, payload),
            partial(codec.decode, payload, warm),
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
