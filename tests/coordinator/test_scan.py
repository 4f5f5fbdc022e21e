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
    """What comes is there for one look: the next bytes come in the same memory."""
    scan, memory = Scan(PIECES, [CODECS[codec]] * len(PIECES)), torch.empty(step, dtype=torch.uint8)
    for offset in range(0, len(data), step):
        fresh = memory[: len(data[offset : offset + step])].copy_(data[offset : offset + step])
        scan.look(fresh.numpy().data, offset)
        memory.fill_(255)
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
    scan.look(data[:-1].numpy().data, 0)
    assert not scan.result()


def test_bytes_that_cannot_be_written_are_looked_at_as_well() -> None:
    scan, data = Scan(PIECES, [CODECS["fp32"]] * len(PIECES)), payload("fp32").numpy().tobytes()
    scan.look(memoryview(data)[:5000], 0)
    scan.look(memoryview(data)[5000:], 5000)
    assert scan.result()


@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize(("begin", "then"), [(0, 8), (8, 16), (0, 0)])
def test_where_not_all_was_seen_in_order_nothing_is_said(begin: int, then: int, bad: bool) -> None:
    """As of a payload whose first bytes came over another line, or which other bytes took the place of."""
    data = payload("fp32", {4: math.nan} if bad else {}).numpy().data
    scan = Scan(PIECES, [CODECS["fp32"]] * len(PIECES))
    scan.look(data[begin : begin + 64], begin)
    scan.look(data[then:], then)
    assert not scan.result()


def test_nothing_is_seen_of_nothing() -> None:
    assert Scan([], []).result()
