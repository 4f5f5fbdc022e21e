"""Values looked at while they come: all of them, whatever the pieces of the stream, or none of it counts."""

from __future__ import annotations

import math

import pytest
import torch

from coordinator.scan import AT_ONCE, Scan
from diloco.codec import CODECS
from diloco.errors import DivergedError
from diloco.layout import Box, Piece

NUMELS = (AT_ONCE + 700, 3, 0, 5000)
PIECES = [Piece(i, Box.whole((n,))) for i, n in enumerate(NUMELS)]


def payload(codec: str, bad: dict[int, float] | None = None) -> bytes:
    """All pieces, one after the other; `bad` are values by their place."""
    values = torch.ones(sum(NUMELS))
    for place, value in (bad or {}).items():
        values[place] = value
    return b"".join(CODECS[codec].pack(x).numpy().tobytes() for x in values.split(list(NUMELS)))


def scanned(data: bytes, codec: str, step: int) -> Scan:
    scan = Scan(PIECES, [CODECS[codec]] * len(PIECES))
    for offset in range(0, len(data), step):
        scan.feed(offset, memoryview(data)[offset : offset + step])
    return scan


@pytest.mark.parametrize("step", [1000, 4096 + 1, 2**20])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_all_values_are_seen_in_pieces_of_any_size(codec: str, step: int) -> None:
    assert scanned(payload(codec), codec, step).result()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e19])
@pytest.mark.parametrize(("place", "tensor"), [(0, 0), (AT_ONCE, 0), (AT_ONCE + 701, 1), (sum(NUMELS) - 1, 3)])
def test_one_bad_value_is_found(place: int, tensor: int, value: float) -> None:
    with pytest.raises(DivergedError, match=f"tensor {tensor} of the contribution"):
        scanned(payload("fp32", {place: value}), "fp32", 3000).result()


def test_a_part_that_is_not_whole_is_not_taken_for_good() -> None:
    assert not scanned(payload("fp32")[:-4], "fp32", 5000).result()


@pytest.mark.parametrize("first", [4, 0])
def test_bytes_that_do_not_go_on_leave_the_looking_to_others(first: int) -> None:
    data = payload("fp32")
    scan = Scan(PIECES, [CODECS["fp32"]] * len(PIECES))
    if not first:
        scan.feed(0, memoryview(data)[:8000])
    scan.feed(4000, memoryview(data)[4000:8000])
    scan.feed(8000, memoryview(data)[8000:])
    assert not scan.result()


def test_nothing_is_seen_of_nothing() -> None:
    assert Scan([], []).result()
