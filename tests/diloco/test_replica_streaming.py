"""Contributions that leave while they are encoded, and updates decoded while they come: the same bytes and bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.codec import CODECS
from diloco.config import SyncConfig
from diloco.errors import CodecError
from diloco.feedback import AT_ONCE, Ending
from diloco.fragments import partition
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.replica import Held, Replica
from tests.diloco import policy

pytestmark = pytest.mark.usefixtures("both_policies")
ROWS, WIDTH = 5, AT_ONCE // 2
LAYOUT = Layout([TensorSpec("big", (ROWS, WIDTH)), TensorSpec("small", (7,))])
FRAGMENTS = partition(LAYOUT, SyncConfig(strategy="whole", fragments=1))


def replica(codec: str) -> Replica:
    """All of a fragment whose first tensor is encoded in three pieces."""
    generator = torch.Generator().manual_seed(0)
    held = [
        Held(
            piece=Piece(number, Box.whole(spec.shape)),
            spec=spec,
            start=start,
            local=torch.randn(spec.shape, generator=generator),
            owners=(0,),
            on_device=policy.on_device,
        )
        for number, (spec, start) in enumerate(zip(LAYOUT.tensors, FRAGMENTS[0].starts, strict=True))
    ]
    made = Replica(rank=0, fragments=FRAGMENTS, held=held, up=CODECS[codec], down=CODECS[codec], alpha=0.0)
    for h in held:
        h.local.add_(torch.randn(h.local.shape, generator=generator))
    return made


def moved(mine: Replica) -> list[Tensor]:
    return [(h.anchor - h.local).view(-1) for h in mine.owned(0)]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
def test_a_contribution_leaves_in_pieces_and_is_what_it_is_as_a_whole(codec: str) -> None:
    mine = replica(codec)
    expected = torch.cat([CODECS[codec].pack(x) for x in moved(mine)])
    payload = torch.full((mine.contribution_size(0),), 7, dtype=torch.uint8)
    encoding = mine.encode(0, mine.stage(0), 0, payload)
    first = next(encoding)
    assert first.numel() == CODECS[codec].size(AT_ONCE)
    assert payload[first.numel() :].eq(7).all()
    pieces = [first, *encoding]
    assert [p.numel() for p in pieces[1:]] == [CODECS[codec].size(n) for n in (AT_ONCE, AT_ONCE // 2, 7)]
    assert torch.equal(torch.cat(pieces), expected)
    assert torch.equal(payload, expected)


@pytest.mark.parametrize("codec", ["fp32", "topk"])
def test_staged_parameters_are_kept_in_the_same_memory_every_time(codec: str) -> None:
    mine = replica(codec)
    places = set()
    for round_ in range(3):
        staged = mine.stage(0)
        places.add(staged.buffer.data_ptr())
        list(mine.encode(0, staged, round_))
        mine.end(0, Ending.COMMITTED)
    assert len(places) == 1


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk"])
def test_an_update_is_decoded_as_it_comes_and_applied_as_a_whole(codec: str) -> None:
    mine, other = replica(codec), replica(codec)
    payload = torch.cat([CODECS[codec].pack(x) for x in moved(mine)])
    held = mine.owned(0)
    before = [h.anchor.clone() for h in held]
    arriving = mine.arriving(held)
    coming = torch.full_like(payload, 255)
    for have in range(0, payload.numel(), 100_000):
        coming[:have] = payload[:have]
        arriving.take(coming, have)
    coming.copy_(payload)
    assert all(torch.equal(h.anchor, b) for h, b in zip(held, before, strict=True))
    arriving.apply(coming)
    other.decode(other.owned(0), payload)
    assert all(torch.equal(a.anchor, b.anchor) for a, b in zip(held, other.owned(0), strict=True))
    assert not torch.equal(held[0].anchor, before[0])


def test_another_payload_may_begin_half_way() -> None:
    mine, other = replica("int8"), replica("int8")
    right = torch.cat([CODECS["int8"].pack(x) for x in moved(mine)])
    wrong = torch.cat([CODECS["int8"].pack(-x) for x in moved(mine)])
    arriving = mine.arriving(mine.owned(0))
    arriving.take(wrong, wrong.numel() // 2)
    arriving.take(right, right.numel() * 3 // 4)
    arriving.apply(right)
    other.decode(other.owned(0), right)
    assert all(torch.equal(a.anchor, b.anchor) for a, b in zip(mine.owned(0), other.owned(0), strict=True))


def test_a_damaged_update_moves_nothing_and_is_said_at_the_end() -> None:
    mine = replica("int8")
    payload = torch.cat([CODECS["int8"].pack(x) for x in moved(mine)])
    payload[1] = 0xFF  # the first scale is negative
    before = [h.anchor.clone() for h in mine.owned(0)]
    arriving = mine.arriving(mine.owned(0))
    arriving.take(payload, payload.numel())
    with pytest.raises(CodecError, match="a scale"):
        arriving.apply(payload)
    assert all(torch.equal(h.anchor, b) for h, b in zip(mine.owned(0), before, strict=True))
