"""Every codec through the fold: the update's bits are what the anchor moved by, and nothing that it drops is lost."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coordinator.fold import Outer, Part
from coordinator.inbox import codecs_of, part_size, select
from diloco.codec import CODECS, Codec
from diloco.codec.policy import choice
from diloco.config import OuterConfig
from diloco.fragments import Fragment
from diloco.layout import Box, Piece, TensorSpec
from tests.support import deal, folded, part, payload

FRAGMENT = Fragment(0, (3, 5, 9), (TensorSpec("w", (40, 130)), TensorSpec("b", (130,)), TensorSpec("s", ())))
PROPERTY = settings(derandomize=True, deadline=None, max_examples=15)
NOTHING = torch.empty(0, dtype=torch.uint8)
every = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def values(seed: int) -> Tensor:
    return torch.randn(FRAGMENT.numel, generator=torch.Generator().manual_seed(seed))


def unpacked(update: Tensor, codec: Codec) -> Tensor:
    """An update as one flat tensor."""
    sizes = [codec.size(spec.numel) for spec in FRAGMENT.specs]
    parts = zip(torch.split(update, sizes), FRAGMENT.specs, strict=True)
    return torch.cat([codec.unpack(payload, (spec.numel,)) for payload, spec in parts])


@every
def test_what_was_applied_and_the_residual_are_the_steps(codec: Codec) -> None:
    config = OuterConfig(lr=0.5, momentum=0.0)
    outer, applied = Outer.first(FRAGMENT, values(0)), torch.zeros(FRAGMENT.numel)
    steps = torch.zeros(FRAGMENT.numel)
    for round_ in range(1, 7):
        sent = {island: [part(FRAGMENT, values(10 * round_ + i))] for i, island in enumerate("ab")}
        new, update = folded(FRAGMENT, outer, sent, dict.fromkeys("ab", 0.5), config, codec)
        step = unpacked(update, codec)
        assert torch.equal(new.anchor, outer.anchor - step)
        outer, applied = new, applied + step
        steps += 0.5 * (values(10 * round_) + values(10 * round_ + 1)) / 2
        assert torch.allclose(applied + outer.residual, steps, atol=1e-5)
    if codec.name.startswith("topk"):
        assert outer.residual.count_nonzero() > 0.9 * FRAGMENT.numel
    if codec.feedback:
        assert outer.residual.norm() > 0


@every
@given(seed=st.integers(0, 2**31), ranks=st.integers(1, 3))
@PROPERTY
def test_every_rank_gets_the_same_bits_of_its_boxes(codec: Codec, seed: int, ranks: int) -> None:
    flat = values(seed % 1000)
    update = torch.cat([codec.pack(x) for x in torch.split(flat, [spec.numel for spec in FRAGMENT.specs])])
    whole = dict(zip(FRAGMENT.tensors, torch.split(unpacked(update, codec), [5200, 130, 1]), strict=True))
    for pieces in deal(FRAGMENT, ranks, random.Random(seed)):
        parts = list(select(FRAGMENT, update, pieces, codec))
        assert sum(p.numel() for p in parts) == part_size(FRAGMENT, pieces, codec)
        for piece, part_ in zip(pieces, parts, strict=True):
            spec = FRAGMENT.specs[FRAGMENT.place[piece.tensor]]
            out = torch.empty(piece.box.numel)
            codec.decode_part(part_, spec.shape, piece.box, out)
            expected = whole[piece.tensor].view(spec.shape)[piece.box.slices]
            assert torch.equal(out.view(torch.int32), expected.reshape(-1).contiguous().view(torch.int32))


@every
def test_contributions_of_every_codec_are_folded(codec: Codec) -> None:
    pieces = [
        [Piece(3, Box((0, 0), (40, 60))), Piece(9, Box.whole(()))],
        [Piece(3, Box((0, 60), (40, 70))), Piece(5, Box.whole((130,)))],
    ]
    sent = {"a": [part(FRAGMENT, values(1), rank, codec) for rank in pieces]}
    config = OuterConfig(lr=1.0, momentum=0.0)
    outer, _ = folded(
        FRAGMENT, Outer.first(FRAGMENT, torch.zeros(FRAGMENT.numel)), sent, {"a": 1.0}, config, CODECS["fp32"]
    )
    [w, b, s] = torch.split(-values(1), [5200, 130, 1])
    for got, box in (
        (w.view(40, 130)[:, :60], (slice(None), slice(0, 60))),
        (w.view(40, 130)[:, 60:], (slice(None), slice(60, 130))),
    ):
        expected = codec.unpack(codec.pack(-got), got.shape)
        assert torch.equal(-outer.anchor[:5200].view(40, 130)[box], expected)
    assert torch.equal(-outer.anchor[5200:5330], codec.unpack(codec.pack(-b), (130,)))
    assert torch.equal(-outer.anchor[5330:], codec.unpack(codec.pack(-s), (1,)))


@pytest.mark.parametrize("islands", [1, 4, 16])
def test_merged_sparse_contributions_are_sent_as_sparse_as_one(islands: int) -> None:
    """The union of what islands chose is cut down to the update's own choice, and the rest waits in the residual."""
    sparse, config = CODECS["topk-coded"], OuterConfig(lr=1.0, momentum=0.0)
    outer = Outer.first(FRAGMENT, torch.zeros(FRAGMENT.numel))
    sent, applied = torch.zeros(FRAGMENT.numel), torch.zeros(FRAGMENT.numel)
    size = sum(sparse.size(spec.numel) for spec in FRAGMENT.specs)
    for round_ in range(8):
        names = [f"i{i:02d}" for i in range(islands)]
        parts = {name: [part(FRAGMENT, values(100 * round_ + i), None, sparse)] for i, name in enumerate(names)}
        outer, update = folded(FRAGMENT, outer, parts, dict.fromkeys(names, 1 / islands), config, sparse)
        step = unpacked(update, sparse)
        assert update.numel() == size
        assert step.count_nonzero() <= 64 + 18 + 3 + 1
        applied += step
        for name in names:
            sent += unpacked(parts[name][0].payload, sparse) / islands
    assert torch.allclose(applied + outer.residual, sent, atol=1e-4)
    assert torch.allclose(outer.anchor, -applied, atol=1e-5)


@given(seed=st.integers(0, 2**31), ranks=st.integers(1, 3))
@PROPERTY
def test_tensors_take_codecs_of_their_own_both_ways(seed: int, ranks: int) -> None:
    up, down = choice("auto:int2", ("s=fp32",)), choice("auto:topk-coded", ("b=int8",))
    flat, config = values(seed % 1000), OuterConfig(lr=1.0, momentum=0.0)
    parts = []
    for pieces in deal(FRAGMENT, ranks, random.Random(seed)):
        codecs = codecs_of(FRAGMENT, pieces, up)
        payloads = [payload(FRAGMENT, flat, [p], c) for p, c in zip(pieces, codecs, strict=True)]
        parts.append(Part(pieces=pieces, codecs=codecs, payload=torch.cat([NOTHING, *payloads])))
    outer, update = folded(
        FRAGMENT, Outer.first(FRAGMENT, torch.zeros_like(flat)), {"a": parts}, {"a": 1.0}, config, down
    )
    assert update.numel() == CODECS["topk-coded"].size(5200) + CODECS["int8"].size(130) + CODECS["bf16"].size(1)
    assert -outer.anchor[5330] == flat[5330].bfloat16().float()
    names = {"w": "int2", "b": "bf16", "s": "fp32"}
    for piece, codec, _ in (x for part_ in parts for x in part_.split()):
        assert codec is CODECS[names[FRAGMENT.specs[FRAGMENT.place[piece.tensor]].name]]
    for pieces in deal(FRAGMENT, ranks, random.Random(seed + 1)):
        for piece, part_ in zip(pieces, select(FRAGMENT, update, pieces, down), strict=True):
            spec, start = (x[FRAGMENT.place[piece.tensor]] for x in (FRAGMENT.specs, FRAGMENT.starts))
            out = torch.empty(piece.box.numel)
            down.of(spec).decode_part(part_, spec.shape, piece.box, out)
            moved = -outer.anchor[start : start + spec.numel].view(spec.shape)[piece.box.slices]
            assert torch.equal(out, moved.reshape(-1))
        assert sum(p.numel() for p in select(FRAGMENT, update, pieces, down)) == part_size(FRAGMENT, pieces, down)
