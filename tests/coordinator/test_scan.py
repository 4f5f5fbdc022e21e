"""Values looked at while they come: all of them, whatever the pieces of the stream, or none of it counts."""

from __future__ import annotations

import math

import pytest
import torch

from coordinator.scan import AT_ONCE, Scan
from diloco.codec import CODECS
from diloco.errors import CodecError, DivergedError
from diloco.layout import Box, Piece

NUMELS = (3 * AT_ONCE + 700, 3, 0, 5000)
PIECES = [Piece(i, Box.whole((n,))) for i, n in enumerate(NUMELS)]


def payload(codec: str, bad: dict[int, float] | None = None) -> torch.Tensor:
    """All pieces, one after the other; `bad` are values by their place."""
    values = torch.ones(sum(NUMELS))
    for place, value in (bad or {}).items():
        values[place] = value
    return torch.cat([CODECS[codec].pack(x) for x in values.split(list(NUMELS))])


def scanned(data: torch.Tensor, codec: str, step: int) -> Scan:
    """Whoever looks sees the bytes that have come, and others beyond them."""
    scan, here = Scan(PIECES, [CODECS[codec]] * len(PIECES)), torch.full_like(data, 255)
    for offset in range(0, len(data), step):
        here[offset : offset + step] = data[offset : offset + step]
        scan.look(here, min(offset + step, len(data)))
    return scan


@pytest.mark.parametrize("step", [1000, 4096 + 1, 2**20])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_all_values_are_seen_in_pieces_of_any_size(codec: str, step: int) -> None:
    assert scanned(payload(codec), codec, step).result()


@pytest.mark.parametrize("step", [3000, 2**20])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e19])
@pytest.mark.parametrize(("place", "tensor"), [(0, 0), (AT_ONCE, 0), (3 * AT_ONCE + 701, 1), (sum(NUMELS) - 1, 3)])
def test_one_bad_value_is_found(place: int, tensor: int, value: float, step: int) -> None:
    with pytest.raises(DivergedError, match=f"tensor {tensor} of the contribution"):
        scanned(payload("fp32", {place: value}), "fp32", step).result()


def test_a_payload_that_no_encoder_writes_is_found() -> None:
    data = payload("int8")
    data[:2] = 255
    with pytest.raises(CodecError, match="a scale or an index is out of range"):
        scanned(data, "int8", 3000).result()


def test_a_part_that_is_not_whole_is_not_taken_for_good() -> None:
    scan, data = Scan(PIECES, [CODECS["fp32"]] * len(PIECES)), payload("fp32")
    scan.look(data, len(data) - 1)
    assert not scan.result()


@pytest.mark.parametrize("bad", [True, False])
def test_what_goes_back_is_looked_at_again(bad: bool) -> None:
    first, then = payload("fp32", {0: math.nan}), payload("fp32")
    if bad:
        first, then = then, first
    scan = Scan(PIECES, [CODECS["fp32"]] * len(PIECES))
    scan.look(first, len(first))
    scan.look(then, 8)
    scan.look(then, len(then))
    if bad:
        with pytest.raises(DivergedError, match="tensor 0 "):
            scan.result()
    else:
        assert scan.result()


def test_nothing_is_seen_of_nothing() -> None:
    assert Scan([], []).result()
