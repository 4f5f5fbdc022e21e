"""The fold: against plain references, and bit for bit where bits are promised."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coordinator.fold import LARGEST, Outer, Part, chart, digest_of, fold
from diloco.codec import CODECS
from diloco.config import OuterConfig
from diloco.errors import CodecError, DivergedError
from diloco.fragments import partition
from diloco.layout import Box, Piece
from diloco.merge import Addend, Runs, weighted_sum
from diloco.outer import nesterov
from tests.support import MODEL, configure, deal, folded, part

steady = hypothesis.settings(deadline=None, derandomize=True)
FRAGMENT, OTHER, _ = partition(MODEL, configure().sync)
"""`FRAGMENT` has parameters and a buffer, `OTHER` a scalar among its parameters."""
[BUFFER] = (slice(a, a + s.numel) for a, s in zip(FRAGMENT.starts, FRAGMENT.specs, strict=True) if s.kind == "buffer")
FP32, BF16, INT8 = CODECS["fp32"], CODECS["bf16"], CODECS["int8"]
OUTER = OuterConfig(lr=0.7, momentum=0.9)
HALVES = {"a": 0.5, "b": 0.5}


def values(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def gradients(seed: int, islands: Sequence[str] = "ab") -> dict[str, Tensor]:
    return {island: values(FRAGMENT.numel, 100 * seed + i) for i, island in enumerate(islands)}


def parts_of(flat: Mapping[str, Tensor], codec: str = "fp32") -> dict[str, list[Part]]:
    return {island: [part(FRAGMENT, gradient, codec=CODECS[codec])] for island, gradient in flat.items()}


def started() -> Outer:
    return Outer.first(FRAGMENT, values(FRAGMENT.numel, 1))


def decoded(update: Tensor, codec: str) -> Tensor:
    """An update as one flat tensor: a cast codec codes every value by itself."""
    out = torch.empty(FRAGMENT.numel)
    CODECS[codec].decode(update, out)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# -- against references ---------------------------------------------------------------------------------------------


def test_one_islands_rounds_are_torch_sgd_with_nesterov_momentum() -> None:
    outer = started()
    parameter = torch.nn.Parameter(outer.anchor.clone())
    sgd = torch.optim.SGD([parameter], lr=OUTER.lr, momentum=OUTER.momentum, nesterov=True)
    learned = torch.ones(FRAGMENT.numel, dtype=torch.bool)
    learned[BUFFER] = False
    for round_ in range(6):
        gradient = values(FRAGMENT.numel, round_)
        parameter.grad = gradient.clone()
        sgd.step()
        outer, _ = folded(FRAGMENT, outer, parts_of({"a": gradient}), {"a": 1.0}, OUTER, FP32)
        assert outer.version == round_ + 1
        torch.testing.assert_close(outer.anchor[learned], parameter.detach()[learned], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("up", ["fp32", "bf16"])
def test_rounds_of_several_islands_follow_the_float64_reference(up: str) -> None:
    shares = {"a": 0.125, "b": 0.625, "c": 0.25}
    outer = started()
    theta, momentum = outer.anchor.double(), torch.zeros(FRAGMENT.numel, dtype=torch.float64)
    lr = torch.full_like(theta, OUTER.lr)
    mu = torch.full_like(theta, OUTER.momentum)
    lr[BUFFER], mu[BUFFER] = 1.0, 0.0
    for round_ in range(6):
        flat = gradients(round_, "abc")
        if up == "bf16":
            flat = {island: gradient.bfloat16().float() for island, gradient in flat.items()}
        mean = sum((share * flat[i].double() for i, share in shares.items()), torch.zeros_like(theta))
        momentum = mu * momentum + mean
        theta = theta - lr * (mean + mu * momentum)
        outer, update = folded(FRAGMENT, outer, parts_of(flat, up), shares, OUTER, FP32)
        torch.testing.assert_close(outer.anchor.double(), theta, rtol=1e-5, atol=1e-5)
    assert update.numel() == FP32.size(FRAGMENT.numel)


def test_without_momentum_at_rate_one_the_anchor_becomes_the_mean_of_the_islands() -> None:
    outer = started()
    local = gradients(1)
    flat = {island: outer.anchor - theirs for island, theirs in local.items()}
    new, _ = folded(FRAGMENT, outer, parts_of(flat), HALVES, OuterConfig(lr=1.0, momentum=0.0), FP32)
    torch.testing.assert_close(new.anchor, (local["a"] + local["b"]) / 2, rtol=1e-6, atol=1e-6)


def test_buffers_take_the_plain_mean_whatever_the_outer_optimizer_is() -> None:
    outer = started()
    for round_ in range(4):
        local = gradients(round_)
        flat = {island: outer.anchor - theirs for island, theirs in local.items()}
        outer, _ = folded(FRAGMENT, outer, parts_of(flat), HALVES, OUTER, FP32)
        mean = (local["a"] + local["b"])[BUFFER] / 2
        torch.testing.assert_close(outer.anchor[BUFFER], mean, rtol=1e-5, atol=1e-6)


def test_a_scalar_folds_like_any_other_tensor() -> None:
    outer = Outer.first(OTHER, torch.zeros(OTHER.numel))
    contributions = {"a": [part(OTHER, torch.ones(OTHER.numel))]}
    new, _ = folded(OTHER, outer, contributions, {"a": 1.0}, OuterConfig(lr=0.5, momentum=0.0), FP32)
    assert torch.equal(new.anchor, torch.full((OTHER.numel,), -0.5))


# -- bits -----------------------------------------------------------------------------------------------------------


@steady
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), up=st.sampled_from(["fp32", "bf16"]))
def test_how_an_islands_ranks_cut_the_tensors_leaves_no_trace(seed: int, ranks: int, up: str) -> None:
    flat = gradients(3)
    chance = random.Random(seed)
    cut = {
        island: [part(FRAGMENT, gradient, pieces, CODECS[up]) for pieces in deal(FRAGMENT, ranks, chance)]
        for island, gradient in flat.items()
    }
    shares = {"a": 1 / 3, "b": 2 / 3}
    first, update = folded(FRAGMENT, started(), parts_of(flat, up), shares, OUTER, BF16)
    second, other = folded(FRAGMENT, started(), cut, shares, OUTER, BF16)
    assert torch.equal(update, other)
    assert all(same_bits(getattr(first, n), getattr(second, n)) for n in ("anchor", "momentum", "residual"))
    assert first.digest == second.digest


def test_the_order_of_shares_fixes_the_bits_and_the_order_of_contributions_does_not() -> None:
    # 1e8 + 1 is 1e8 in fp32: whether the small value survives depends on when it is added
    flat = {i: torch.full((FRAGMENT.numel,), x) for i, x in {"a": 1e8, "b": -1e8, "c": 1.0}.items()}
    third = 1 / 3

    def anchor(order: str, arrival: str) -> Tensor:
        shares = dict.fromkeys(order, third)
        contributions = {island: parts_of(flat)[island] for island in arrival}
        return folded(FRAGMENT, started(), contributions, shares, OUTER, FP32)[0].anchor

    assert same_bits(anchor("abc", "abc"), anchor("abc", "cba"))
    assert not same_bits(anchor("abc", "abc"), anchor("acb", "abc"))


def test_contributions_without_a_share_are_not_folded() -> None:
    flat = gradients(1, "abc")
    with_c, _ = folded(FRAGMENT, started(), parts_of(flat), HALVES, OUTER, FP32)
    without, _ = folded(FRAGMENT, started(), parts_of({i: flat[i] for i in "ab"}), HALVES, OUTER, FP32)
    assert same_bits(with_c.anchor, without.anchor)


@pytest.mark.parametrize("down", ["fp32", "bf16"])
def test_the_anchor_moves_by_what_the_update_decodes_to_and_the_residual_keeps_the_rest(down: str) -> None:
    outer = started()
    for round_ in range(4):
        contributions = parts_of(gradients(round_))
        new, update = folded(FRAGMENT, outer, contributions, HALVES, OUTER, CODECS[down])
        applied, wanted = decoded(update, down), steps(outer, contributions, HALVES) + outer.residual
        assert same_bits(new.anchor, outer.anchor - applied)
        assert same_bits(new.residual, wanted - applied)
        assert bool(new.residual.any()) == (down == "bf16")
        outer = new


def test_what_is_applied_and_what_is_left_add_up_to_what_was_wanted() -> None:
    outer = started()
    wanted, applied = (torch.zeros(FRAGMENT.numel, dtype=torch.float64) for _ in range(2))
    for round_ in range(50):
        contributions = parts_of(gradients(round_))
        wanted += steps(outer, contributions, HALVES)
        outer, update = folded(FRAGMENT, outer, contributions, HALVES, OUTER, BF16)
        applied += decoded(update, "bf16")
        torch.testing.assert_close(applied + outer.residual, wanted, rtol=1e-6, atol=1e-5)
        assert (outer.residual.abs() <= 2**-8 * decoded(update, "bf16").abs()).all()  # of one update, not of all


def steps(outer: Outer, contributions: Mapping[str, Sequence[Part]], shares: Mapping[str, float]) -> Tensor:
    """What the outer optimizer would subtract, before any residual and codec: flat, with the fold's own rounding."""
    pieces = chart(contributions, shares)
    out = []
    for tensor, spec, start in zip(FRAGMENT.tensors, FRAGMENT.specs, FRAGMENT.starts, strict=True):
        momentum = outer.momentum[start : start + spec.numel].clone()
        mean = weighted_sum([(a, Runs.of(a.box, spec.shape)) for a in pieces[tensor]], 0, spec.numel)
        lr, mu = (1.0, 0.0) if spec.kind == "buffer" else (OUTER.lr, OUTER.momentum)
        out.append(nesterov(mean, momentum, lr=lr, mu=mu))
    return torch.cat(out)


def test_the_outer_state_is_moved_where_it_lies() -> None:
    outer = folded(FRAGMENT, started(), parts_of(gradients(1)), HALVES, OUTER, BF16)[0]
    apart, expected = folded(FRAGMENT, outer, parts_of(gradients(2)), HALVES, OUTER, BF16)
    new, update = fold(FRAGMENT, outer, parts_of(gradients(2)), HALVES, OUTER, BF16)
    assert torch.equal(update, expected)
    for name in ("anchor", "momentum", "residual"):
        assert getattr(new, name) is getattr(outer, name)
        assert same_bits(getattr(new, name), getattr(apart, name))
    assert (outer.version, new.version, new.digest) == (1, 2, apart.digest)


@pytest.mark.parametrize("more", [-1, 0, 9])
def test_the_update_is_put_where_there_is_room(more: int) -> None:
    expected, update = folded(FRAGMENT, started(), parts_of(gradients(1)), HALVES, OUTER, BF16)
    room = torch.empty(update.numel() + more, dtype=torch.uint8)
    new, found = folded(FRAGMENT, started(), parts_of(gradients(1)), HALVES, OUTER, BF16, room)
    assert torch.equal(found, update)
    assert (found.data_ptr() == room.data_ptr()) == (more >= 0)
    assert new.digest == expected.digest


@pytest.mark.parametrize("spoil", ["cut", "scale"])
def test_a_damaged_contribution_changes_nothing(spoil: str) -> None:
    outer = started()
    before, sent = outer.copy(), parts_of(gradients(1), "int8")
    payload = sent["b"][0].payload
    if spoil == "cut":
        sent["b"] = [replace(sent["b"][0], payload=payload[:-1])]
    else:
        payload[-INT8.size(FRAGMENT.specs[-1].numel) :][:2] = 255
    with pytest.raises(CodecError, match="int8"):
        fold(FRAGMENT, outer, sent, HALVES, OUTER, BF16)
    assert all(same_bits(getattr(outer, n), getattr(before, n)) for n in ("anchor", "momentum", "residual"))


def test_the_digest_is_that_of_the_anchor() -> None:
    first = started()
    new, _ = folded(FRAGMENT, first, parts_of(gradients(1)), HALVES, OUTER, BF16)
    assert first.digest == digest_of(FRAGMENT, first.anchor)
    assert new.digest == digest_of(FRAGMENT, new.anchor) != first.digest
    swapped = new.anchor.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert digest_of(FRAGMENT, swapped) != new.digest


def test_the_first_state_has_version_0_and_nothing_left_over() -> None:
    first = started()
    assert first.version == 0
    assert not first.momentum.any()
    assert not first.residual.any()


# -- parts ----------------------------------------------------------------------------------------------------------


def test_the_mean_adds_each_box_where_it_lies() -> None:
    rows = (FP32, Box((0, 0), (1, 3)), torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8))
    columns = (FP32, Box((0, 1), (2, 2)), torch.tensor([10.0, 20.0, 30.0, 40.0]).view(torch.uint8))
    addends = [(Addend(s, *piece), Runs.of(piece[1], (2, 3))) for s, piece in ((1.0, rows), (0.5, columns))]
    assert weighted_sum(addends, 0, 6).tolist() == [1.0, 7.0, 13.0, 0.0, 15.0, 20.0]
    assert weighted_sum(addends, 1, 5).tolist() == [7.0, 13.0, 0.0, 15.0]


def test_a_part_splits_into_its_pieces_in_order() -> None:
    pieces = [Piece(0, Box((2, 0), (1, 4))), Piece(2, Box((5, 0), (0, 3))), Piece(0, Box((0, 3), (2, 1)))]
    flat = torch.arange(FRAGMENT.numel, dtype=torch.float32)
    found = [
        (piece, payload.view(torch.bfloat16).tolist())
        for piece, _, payload in part(FRAGMENT, flat, pieces, BF16).split()
    ]
    assert found == [(pieces[0], [8.0, 9.0, 10.0, 11.0]), (pieces[1], []), (pieces[2], [3.0, 7.0])]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_a_value_that_is_not_finite_or_would_overflow_is_found_and_its_tensor_named(bad: float, codec: str) -> None:
    flat = values(FRAGMENT.numel, 1)
    part(FRAGMENT, flat, codec=CODECS[codec]).check_finite()
    flat[FRAGMENT.starts[1]] = bad
    with pytest.raises(DivergedError, match=f"tensor {FRAGMENT.tensors[1]} of the contribution has values"):
        part(FRAGMENT, flat, codec=CODECS[codec]).check_finite()


@pytest.mark.parametrize("down", ["fp32", "bf16"])
def test_the_largest_values_that_are_taken_keep_the_outer_state_finite(down: str) -> None:
    largest = part(FRAGMENT, torch.full((FRAGMENT.numel,), LARGEST))
    largest.check_finite()
    outer = started()
    for _ in range(50):
        outer, _ = folded(FRAGMENT, outer, {"a": [largest]}, {"a": 1.0}, OuterConfig(momentum=0.99), CODECS[down])
    assert all(torch.isfinite(x).all() for x in (outer.anchor, outer.momentum, outer.residual))
