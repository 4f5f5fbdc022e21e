"""The outer step and the digest, beside what the machine's memory lets through."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.record import Record, seconds
from coordinator.fold import Outer, Part, fold
from diloco.codec import CODECS
from diloco.config import OuterConfig
from diloco.digest import digest
from diloco.fragments import Fragment
from diloco.layout import Box, Piece, TensorSpec

CONTRIBUTIONS = 4


def measure(elements: int) -> Iterator[Record]:
    """Yields what a digest and an outer step over `elements` fp32 values bring."""
    values, warm = torch.randn(elements), torch.empty(elements)
    gigabytes, box = elements * 4 / 1e9, Box.whole((elements,))
    copy, read, summed = seconds(
        lambda: warm.copy_(values), lambda: values.sum(), lambda: digest(values, 0, (elements,), box)
    )
    yield Record(name="digest", value=gigabytes / summed, unit="GB/s of fp32", limit=gigabytes / read)
    yield outer_step(values, gigabytes / copy)


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
