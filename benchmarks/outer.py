"""The outer step beside copying the memory that it must move, in turns.

The step decodes M contributions and adds them with their shares, takes the Nesterov step, adds the residual, encodes
the update, decodes it, keeps what was dropped, moves the anchor, and gives its digest. It must read the contributions,
the anchor, the momentum and the residual, and write the last three and the update. The limit is what the machine moves
when it copies warm fp32 values, bytes read and bytes written. Memory is warm, and contributions were checked as they
came, as in a coordinator that has run for a while.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.codec import values_like_updates
from benchmarks.record import Record, seconds
from coordinator.fold import Outer, Part, fold
from diloco.codec import by_name
from diloco.config import OuterConfig
from diloco.digest import digest
from diloco.fragments import Fragment
from diloco.layout import Box, Piece, TensorSpec

CONTRIBUTIONS = 8


def measure(
    elements: int, contributions: int = CONTRIBUTIONS, up: str = "int8", down: str = "int8"
) -> Iterator[Record]:
    """Yields what an outer step of `elements` values takes, and what digests alone take."""
    fragment = Fragment(0, (0,), (TensorSpec("w", (elements,)),))
    box, coding, decoding = Box.whole((elements,)), by_name(up), by_name(down)
    sent, shares = {}, {}
    for i in range(contributions):
        payload = coding.pack(values_like_updates(elements))
        sent[f"island-{i}"] = [Part(pieces=[Piece(0, box)], codecs=[coding], payload=payload, checked=True)]
        shares[f"island-{i}"] = 2 * (i + 1) / (contributions * (contributions + 1))
    outer, config = Outer.first(fragment, torch.randn(elements)), OuterConfig()
    room = torch.zeros(decoding.size(elements), dtype=torch.uint8)
    source, warm = torch.randn(elements), torch.empty(elements)
    copy, whole, alone = seconds(
        lambda: warm.copy_(source),
        lambda: fold(fragment, outer, sent, shares, config, decoding, room),
        lambda: digest(outer.anchor, 0, (elements,), box),
    )
    traffic = contributions * coding.size(elements) + 6 * 4 * elements + decoding.size(elements)
    for name, moved, duration in (
        (f"outer step of {contributions} {up} contributions, update in {down}", traffic, whole),
        ("digest of an anchor", 4 * elements, alone),
    ):
        yield Record(name=name, value=moved / duration / 1e9, unit="GB/s", limit=8 * elements / copy / 1e9, codec=up)
