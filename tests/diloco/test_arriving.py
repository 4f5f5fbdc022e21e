"""Updates worked out beside the anchors: the bits of decode and subtract, with their digest, in homes used again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.arriving import Arriving, Homes, views
from diloco.codec import CODECS, native
from diloco.config import SyncConfig
from diloco.crossing import Crossing
from diloco.errors import CodecError
from diloco.fragments import partition
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.replica import Held, Replica
from tests.diloco import policy

LAYOUT = Layout([TensorSpec("matrix", (6, 2048)), TensorSpec("odd", (777,)), TensorSpec("rows", (4, 2048))])
FRAGMENTS = partition(LAYOUT, SyncConfig(strategy="whole", fragments=1))
CODEC_NAMES = ["fp32", "bf16", "fp16", "int8", "int4", "e3m0", "int2", "topk", "topk-int8", "topk-coded"]


pytestmark = pytest.mark.usefixtures("both_policies")


def replica(codec: str, box: Box | None = None) -> Replica:
    """Holds all of a fragment, or of its last tensor a box alone."""
    generator = torch.Generator().manual_seed(0)
    held = []
    for number, (spec, start) in enumerate(zip(LAYOUT.tensors, FRAGMENTS[0].starts, strict=True)):
        where = box if box and spec.name == "rows" else Box.whole(spec.shape)
        local = torch.randn(spec.shape, generator=generator)[where.slices].clone()
        held.append(
            Held(
                piece=Piece(number, where), spec=spec, start=start, local=local, owners=(0,), on_device=policy.on_device
            )
        )
    return Replica(rank=0, fragments=FRAGMENTS, held=held, up=CODECS["fp32"], down=CODECS[codec], alpha=0.0)


def update(of: Replica, codec: str) -> tuple[Tensor, list[Tensor]]:
    """A payload for what a replica holds, and its values."""
    generator = torch.Generator().manual_seed(1)
    coder, parts, values = CODECS[codec], [], []
    for h in of.held(0):
        whole = coder.pack(torch.randn(h.spec.shape, generator=generator))
        parts.append(coder.select(whole, h.spec.shape, h.box))
        values.append(coder.unpack(whole, h.spec.shape)[h.box.slices])
    return torch.cat(parts), values


@pytest.mark.parametrize("native_too", [True, False])
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("box", [None, Box((1, 0), (2, 2048))])
def test_anchors_move_by_what_an_update_decodes_to(
    monkeypatch: pytest.MonkeyPatch, codec: str, box: Box | None, native_too: bool
) -> None:
    mine = replica(codec, box)
    payload, values = update(mine, codec)
    expected = [h.anchor - step for h, step in zip(mine.held(0), values, strict=True)]
    monkeypatch.setattr(native, "ENABLED", native.ENABLED and native_too)
    arriving = mine.arriving(mine.owned(0))
    for have in range(0, payload.numel(), 1000):
        arriving.take(payload, have)
    arriving.apply(payload)
    for h, e in zip(mine.held(0), expected, strict=True):
        assert torch.equal(h.anchor.view(torch.int32), e.view(torch.int32))
        assert h.known == h.digest()
    assert mine.digest_parts(0, known=True) == mine.digest_parts(0)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_anchors_that_move_meanwhile_are_what_counts(codec: str) -> None:
    mine, other = replica(codec), replica(codec)
    payload, _ = update(mine, codec)
    arriving = mine.arriving(mine.owned(0))
    arriving.take(payload, payload.numel())
    mine.swap()
    mine.held(0)[0].local.add_(1.0)
    mine.swap()
    other.held(0)[0].anchor.add_(1.0)
    assert mine.held(0)[0].known is None
    arriving.apply(payload)
    other.decode(other.owned(0), payload)
    for h, o in zip(mine.held(0), other.held(0), strict=True):
        assert torch.equal(h.anchor, o.anchor)
        assert h.known == h.digest() == o.digest()


def test_what_is_known_of_a_digest_ends_with_the_anchor() -> None:
    mine = replica("int8")
    payload, _ = update(mine, "int8")
    mine.decode(mine.owned(0), payload)
    assert all(h.known is not None for h in mine.held(0))
    values = torch.cat([h.anchor.flatten() for h in mine.held(0)])
    mine.load(mine.held(0), values.view(torch.uint8), CODECS["fp32"])
    assert all(h.known is None for h in mine.held(0))


def test_a_damaged_update_moves_nothing() -> None:
    mine = replica("int8")
    payload, _ = update(mine, "int8")
    before = [h.anchor.clone() for h in mine.held(0)]
    payload[0:2] = 255
    with pytest.raises(CodecError, match="damaged"):
        mine.decode(mine.owned(0), payload)
    assert all(torch.equal(h.anchor, b) for h, b in zip(mine.held(0), before, strict=True))


def test_anchors_move_between_two_homes_and_on_a_device_stay_where_they_are() -> None:
    mine = replica("int8")
    payload, _ = update(mine, "int8")
    places = []
    for _ in range(5):
        mine.decode(mine.owned(0), payload)
        places.append(mine.held(0)[0].anchor.data_ptr())
    if policy.on_device:
        assert len(set(places)) == 1
    else:
        assert len(set(places)) == 2
        assert places[0] == places[2] == places[4]


def test_a_home_in_which_a_piece_is_left_is_not_used_again() -> None:
    mine = replica("fp32")
    first, *rest = mine.owned(0)
    home = first.anchor.data_ptr()
    mine.decode([first], torch.zeros(4 * first.box.numel, dtype=torch.uint8))
    assert (first.anchor.data_ptr() == home) is policy.on_device
    kept = [h.anchor.clone() for h in rest]
    mine.decode(rest, torch.zeros(4 * sum(h.box.numel for h in rest), dtype=torch.uint8))
    assert all(torch.equal(h.anchor, k) for h, k in zip(rest, kept, strict=True))


def test_transfers_of_anchors_on_a_device_use_two_homes_again() -> None:
    mine = replica("int8")
    payload, _ = update(mine, "int8")
    places = set()
    for _ in range(5):
        arriving = mine.arriving(mine.owned(0))
        arriving.take(payload, payload.numel())
        places |= {home.buffer.data_ptr() for home in (arriving._home, arriving._before) if home}
        arriving.apply(payload)
    assert len(places) == 2


def test_homes_are_not_much_larger_than_they_need_to_be() -> None:
    mine, homes = replica("fp32"), Homes(Crossing(torch.device("cpu")))
    held = mine.held(0)[0]
    large, small = homes.take(held.box.numel * 2), homes.take(held.box.numel)
    for home in (large, small, large):
        homes.move(held, home, views(home.buffer, [held])[0], None)
    assert homes.take(held.box.numel) is small
    assert homes.take(held.box.numel).buffer.numel() == held.box.numel


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("numel", [1, 8, 4099, 70_000])
@pytest.mark.parametrize("native_too", [True, False])
def test_what_is_staged_is_copied_and_looked_at(
    monkeypatch: pytest.MonkeyPatch, numel: int, bad: float, native_too: bool
) -> None:
    monkeypatch.setattr(native, "ENABLED", native.ENABLED and native_too)
    layout = Layout([TensorSpec("x", (numel,))])
    local = torch.randn(numel + 1)[1:]  # begins off an alignment
    whole = Piece(0, Box.whole((numel,)))
    held = Held(piece=whole, spec=layout.tensors[0], start=0, local=local, owners=(0,), on_device=policy.on_device)
    fragments = partition(layout, SyncConfig(strategy="whole", fragments=1))
    mine = Replica(rank=0, fragments=fragments, held=[held], up=CODECS["fp32"], down=CODECS["fp32"], alpha=0.0)
    staged = mine.stage(0)
    assert staged.finite
    assert torch.equal(staged.copies[0], local - local if policy.on_device else local)
    local[numel // 2] = bad
    assert not mine.stage(0).finite
    mine.mix(0)
    assert torch.equal(local, held.anchor)


def test_an_update_for_nothing_is_nothing() -> None:
    Arriving([], CODECS["int8"], Homes(Crossing(torch.device("cpu")))).apply(torch.empty(0, dtype=torch.uint8))
