"""The island's half of the algorithm: signs, values, storage, and the same bits whatever way an island is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.codec import CODECS
from diloco.config import SyncConfig
from diloco.digest import combine
from diloco.errors import CodecError, DivergedError, LayoutError
from diloco.fragments import Fragment, partition
from diloco.layout import Box, Kind, Layout, Piece, TensorSpec
from diloco.replica import Held, Position, Replica
from tests.diloco import policy
from tests.diloco.test_digest import tilings

pytestmark = pytest.mark.usefixtures("both_policies")
PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)

SHAPES = {"embed": (5, 3), "h.0.w": (4, 6), "h.1.w": (4,), "scale": ()}
KINDS: dict[str, Kind] = {"scale": "static"}
LAYOUT = Layout(TensorSpec(name, shape, KINDS.get(name, "parameter")) for name, shape in SHAPES.items())
FRAGMENTS = partition(LAYOUT, SyncConfig(strategy="strided", fragments=2, every_steps=2))
"""[embed, h.0.w], [h.1.w], and the static [scale]."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Owners = dict[Piece, tuple[int, ...]]
WHOLE: Owners = {Piece(i, Box.whole(spec.shape)): (0,) for i, spec in enumerate(LAYOUT.tensors)}


def model(seed: int = 0) -> dict[str, Tensor]:
    """First parameters of all tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in LAYOUT.tensors}


def replica(
    values: Mapping[str, Tensor],
    *,
    rank: int = 0,
    owners: Owners = WHOLE,
    up: str = "fp32",
    down: str = "fp32",
    alpha: float = 0.0,
) -> Replica:
    """One rank's replica of a model, whose pieces are views of `values`; they are handed over in reverse."""
    starts = {t: s for f in FRAGMENTS for t, s in zip(f.tensors, f.starts, strict=True)}
    held = [
        Held(
            piece=piece,
            spec=(spec := LAYOUT.tensors[piece.tensor]),
            start=starts[piece.tensor],
            local=values[spec.name][piece.box.slices],
            owners=ranks,
            on_device=policy.on_device,
        )
        for piece, ranks in reversed(owners.items())
        if rank in ranks
    ]
    return Replica(rank=rank, fragments=FRAGMENTS, held=held, up=CODECS[up], down=CODECS[down], alpha=alpha)


def flat(values: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
    """A fragment of a model in its flat order."""
    return torch.cat([values[spec.name].flatten() for spec in fragment.specs])


def coded(values: Tensor, codec: str = "fp32") -> Tensor:
    payload = torch.empty(CODECS[codec].size(values.numel()), dtype=torch.uint8)
    CODECS[codec].encode(values.contiguous().view(-1), payload)
    return payload


def anchors(of: Replica) -> list[Tensor]:
    """Copies of all anchors."""
    return [h.anchor.clone() for f in range(len(FRAGMENTS)) for h in of.held(f)]


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


def names(held: Sequence[Held]) -> list[str]:
    return [h.spec.name for h in held]


# -- what a rank holds ----------------------------------------------------------------------------------------------


def test_pieces_lie_in_their_fragment_in_order_of_tensors_and_offsets() -> None:
    halves: Owners = {Piece(0, Box((row, 0), (1, 3))): (0,) for row in (4, 0, 2, 3, 1)} | {
        p: o for p, o in WHOLE.items() if p.tensor
    }
    mine = replica(model(), owners=halves)
    assert names(mine.held(0)) == ["embed"] * 5 + ["h.0.w"]
    assert [h.box.offset for h in mine.held(0)[:5]] == [(row, 0) for row in range(5)]
    assert [names(mine.held(f)) for f in (1, 2)] == [["h.1.w"], ["scale"]]
    assert mine.position == [Position(0, 0)] * 3


def test_the_first_owner_sends_for_the_others() -> None:
    owners = {p: ((1, 0), (0, 1), (0,), (1,))[p.tensor] for p in WHOLE}
    assert names(replica(model(), rank=0, owners=owners).owned(0)) == ["h.0.w"]
    assert names(replica(model(), rank=1, owners=owners).owned(0)) == ["embed"]
    assert names(replica(model(), rank=0, owners=owners).held(0)) == ["embed", "h.0.w"]
    assert names(replica(model(), rank=1, owners=owners).held(1)) == []


def test_anchors_are_copies_that_share_no_storage() -> None:
    values = model()
    mine = replica(values)
    for fragment in range(3):
        staged = mine.stage(fragment)
        for held, copy in zip(mine.held(fragment), staged.copies, strict=True):
            assert held.local.data_ptr() == values[held.spec.name].data_ptr()
            assert len({held.local.data_ptr(), held.anchor.data_ptr(), copy.data_ptr()}) == 3
            assert torch.equal(held.anchor, held.local)
    values["embed"].zero_()
    assert mine.held(0)[0].anchor.abs().sum() > 0
    assert all(held.anchor.dtype == torch.float32 for held in mine.held(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_refused_with_advice(dtype: torch.dtype) -> None:
    values = model() | {"h.1.w": torch.zeros(4, dtype=dtype)}
    with pytest.raises(LayoutError, match=rf"'h.1.w' is {dtype}: .* MixedPrecisionPolicy\(param_dtype"):
        replica(values)


# -- up -------------------------------------------------------------------------------------------------------------


def test_a_pseudo_gradient_is_anchor_minus_local() -> None:
    values = model()
    before = {name: value.clone() for name, value in values.items()}
    mine = replica(values)
    for value in values.values():
        value.sub_(0.5)
    for fragment in FRAGMENTS:
        payload = torch.cat(list(mine.encode(fragment.index, mine.stage(fragment.index))))
        expected = flat(before, fragment) - flat(values, fragment)
        assert torch.equal(payload.view(torch.float32), expected)
        torch.testing.assert_close(expected, torch.full_like(expected, 0.5))
        assert len(payload) == mine.contribution_size(fragment.index)
    assert same_bits(anchors(mine), [before[s.name] for f in FRAGMENTS for s in f.specs])


def test_it_is_computed_in_fp32_before_the_codec_narrows_it() -> None:
    values = model() | {"h.1.w": torch.full((4,), 1.0)}
    mine = replica(values, up="bf16")
    values["h.1.w"].sub_(2.0**-20)
    [payload] = mine.encode(1, mine.stage(1))
    assert payload.view(torch.bfloat16).tolist() == [2.0**-20] * 4
    assert mine.contribution_size(1) == 8


def test_what_was_staged_is_what_is_sent() -> None:
    values = model()
    mine = replica(values)
    values["h.1.w"].sub_(1.0)
    staged = mine.stage(1)
    values["h.1.w"].fill_(float("nan"))
    [payload] = mine.encode(1, staged)
    torch.testing.assert_close(payload.view(torch.float32), torch.ones(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_pseudo_gradient_that_is_not_finite_is_never_sent(bad: float) -> None:
    values = model()
    mine = replica(values)
    before = anchors(mine)
    values["h.0.w"][2, 3] = bad
    stream = mine.encode(0, mine.stage(0))
    assert len(next(stream)) == 4 * 15
    with pytest.raises(DivergedError, match=r"the pseudo-gradient of 'h.0.w' is not finite") as caught:
        next(stream)
    assert caught.value.ids == {"tensor": "h.0.w"}
    assert same_bits(anchors(mine), before)


# -- down -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("down", ["fp32", "bf16"])
def test_an_update_is_subtracted_from_the_anchor_and_leaves_the_model_alone(down: str) -> None:
    values = model()
    mine = replica(values, down=down)
    steps = {name: torch.linspace(-1.0, 1.0, value.numel()).view(value.shape) for name, value in values.items()}
    for fragment in FRAGMENTS:
        held = mine.held(fragment.index)
        payload = coded(flat(steps, fragment), down)
        assert len(payload) == mine.update_size(held)
        mine.decode(held, payload)
        for h in held:
            assert torch.equal(h.anchor, values[h.spec.name] - steps[h.spec.name].to(DTYPES[down]).float())
    assert same_bits(list(model().values()), list(values.values()))


def test_some_pieces_may_be_updated_alone() -> None:
    values = model()
    mine = replica(values)
    [embed, matrix] = mine.held(0)
    mine.decode([matrix], coded(torch.ones(24)))
    assert torch.equal(matrix.anchor, values["h.0.w"] - 1.0)
    assert torch.equal(embed.anchor, values["embed"])


@pytest.mark.parametrize("off", [-1, 1, -4, 4])
def test_a_payload_of_another_size_moves_nothing(off: int) -> None:
    mine = replica(model())
    before = anchors(mine)
    held = mine.held(0)
    payload = torch.full((mine.update_size(held) + off,), 63, dtype=torch.uint8)
    with pytest.raises(CodecError, match="cannot be 39 values"):
        mine.decode(held, payload)
    with pytest.raises(CodecError, match="cannot be 39 values"):
        mine.load(held, payload, CODECS["fp32"])
    assert same_bits(anchors(mine), before)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_load_replaces_anchors_by_whole_values(codec: str) -> None:
    values = model()
    mine = replica(values)
    fresh = {name: value.to(torch.bfloat16).float() for name, value in model(seed=1).items()}
    for fragment in FRAGMENTS:
        mine.load(mine.held(fragment.index), coded(flat(fresh, fragment), codec), CODECS[codec])
    assert same_bits(anchors(mine), [fresh[s.name] for f in FRAGMENTS for s in f.specs])
    assert same_bits(list(model().values()), list(values.values()))


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 8.0), (0.25, 6.5), (0.5, 5.0), (1.0, 2.0)])
@pytest.mark.parametrize("given_now", [False, True])
def test_mixing_keeps_alpha_of_the_local_parameters(alpha: float, expected: float, given_now: bool) -> None:
    values = {name: torch.full(shape, 8.0) for name, shape in SHAPES.items()}
    mine = replica(values, alpha=0.75 if given_now else alpha)
    for value in values.values():
        value.fill_(2.0)
    before = anchors(mine)
    mine.mix(0, alpha if given_now else None)
    assert values["embed"].unique().tolist() == values["h.0.w"].unique().tolist() == [expected]
    assert values["h.1.w"].unique().tolist() == [2.0]
    assert same_bits(anchors(mine), before)


def test_without_alpha_the_model_becomes_the_anchor_even_where_it_had_diverged() -> None:
    values = model()
    mine = replica(values)
    values["h.1.w"].fill_(float("nan"))
    mine.mix(1)
    assert torch.equal(values["h.1.w"], model()["h.1.w"])


def test_mixing_reaches_parameters_that_are_being_trained() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    mine = replica(model() | {"h.1.w": parameter.detach()})
    mine.decode(mine.held(1), coded(torch.full((4,), 3.0)))
    mine.mix(1)
    assert parameter.tolist() == [-2.0] * 4


def test_swapping_twice_is_the_identity_bit_for_bit() -> None:
    values = model()
    mine = replica(values)
    values["embed"][0] = torch.tensor([float("nan"), -0.0, 1e-45])
    values["scale"].fill_(7.0)
    before, outer = {name: value.clone() for name, value in values.items()}, anchors(mine)
    mine.swap()
    order = [s.name for f in FRAGMENTS for s in f.specs]
    assert same_bits([values[name] for name in order], outer)
    assert same_bits(anchors(mine), [before[name] for name in order])
    mine.swap()
    assert same_bits([values[name] for name in order], [before[name] for name in order])
    assert same_bits(anchors(mine), outer)


# -- islands of several ranks ---------------------------------------------------------------------------------------


@st.composite
def islands(draw: st.DrawFn) -> tuple[int, Owners]:
    """A number of ranks, and a tiling of every tensor whose pieces are held by one or more of them."""
    size = draw(st.integers(1, 4))
    some = st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(tuple)
    owners = {}
    for i, spec in enumerate(LAYOUT.tensors):
        for box in draw(tilings(spec.shape)):
            if box.numel:
                owners[Piece(i, box)] = draw(some)
    return size, owners


def sums(ranks: Sequence[Replica], fragment: int) -> tuple[int, int]:
    """Both digests of a fragment, summed over an island."""
    parts = [rank.digest_parts(fragment) for rank in ranks]
    return combine(*(owned for owned, _ in parts)), combine(*(check for _, check in parts))


@given(islands())
@PROPERTY
def test_the_digest_is_the_same_however_an_island_is_cut(island: tuple[int, Owners]) -> None:
    size, owners = island
    single = replica(model())
    ranks = [replica(model(), rank=r, owners=owners) for r in range(size)]
    for fragment in range(3):
        whole, _ = single.digest_parts(fragment)
        assert sums(ranks, fragment) == (whole, 0)


@given(islands())
@PROPERTY
def test_a_round_is_the_same_however_an_island_is_cut(island: tuple[int, Owners]) -> None:
    size, owners = island
    start, end = model(), model(seed=1)
    values = [{name: value.clone() for name, value in start.items()} for _ in range(size)]
    ranks = [replica(v, rank=r, owners=owners, down="bf16") for r, v in enumerate(values)]
    single = replica({name: value.clone() for name, value in start.items()}, down="bf16")
    for mine in values:
        for name, value in mine.items():
            value.copy_(end[name])
    for fragment in FRAGMENTS:
        sent = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
        for rank in ranks:
            payloads = rank.encode(fragment.index, rank.stage(fragment.index))
            for held, payload in zip(rank.owned(fragment.index), payloads, strict=True):
                sent[held.spec.name][held.box.slices] = payload.view(torch.float32).view(held.box.size)
        for spec in fragment.specs:
            assert torch.equal(sent[spec.name], start[spec.name] - end[spec.name])
            update = coded(sent[spec.name], "bf16")
            for rank in [*ranks, single]:
                for held in rank.held(fragment.index):
                    if held.spec == spec:
                        rank.decode([held], CODECS["bf16"].select(update, spec.shape, held.box))
        whole, _ = single.digest_parts(fragment.index)
        assert sums(ranks, fragment.index) == (whole, 0)
        assert whole != replica(model()).digest_parts(fragment.index)[0]


@given(islands(), st.data())
@PROPERTY
def test_replicas_that_differ_show(island: tuple[int, Owners], data: st.DataObject) -> None:
    size, owners = island
    ranks = [replica(model(), rank=r, owners=owners) for r in range(size)]
    piece = data.draw(st.sampled_from(list(owners)))
    fragment = next(f.index for f in FRAGMENTS if piece.tensor in f.place)
    before, _ = sums(ranks, fragment)
    rank = data.draw(st.sampled_from(owners[piece]))
    [held] = [h for h in ranks[rank].held(fragment) if h.piece == piece]
    held.anchor.view(torch.int32).view(-1)[0] ^= 1
    after, check = sums(ranks, fragment)
    assert (check != 0) is (len(owners[piece]) > 1)
    assert (after != before) is (rank == owners[piece][0])
