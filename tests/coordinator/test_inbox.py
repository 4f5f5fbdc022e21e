"""What has come: coverage of a fragment, parts of contributions, first parameters, and parts of an update."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.files import REAL
from coordinator.inbox import Coverage, Inbound, Inbox, SeedBed, Stored, select
from diloco.codec import CODECS
from diloco.errors import Conflict, DivergedError, Malformed
from diloco.fragments import partition
from diloco.layout import Box, Piece
from tests.support import MODEL, configure, deal, part, payload, tiles, whole

steady = hypothesis.settings(deadline=None, derandomize=True)
FRAGMENTS = partition(MODEL, configure().sync)
FRAGMENT, OTHER, STATIC = FRAGMENTS
EMBED, MEAN, WEIGHT = FRAGMENT.tensors
ROWS = [Piece(EMBED, Box((start, 0), (2, 4))) for start in (0, 2, 4)]
REST = [Piece(MEAN, Box((0,), (3,))), Piece(WEIGHT, Box((0, 0), (5, 3)))]


def ramp(fragment: int) -> torch.Tensor:
    return torch.arange(FRAGMENTS[fragment].numel, dtype=torch.float32) + 100 * fragment


# -- coverage -------------------------------------------------------------------------------------------------------


def test_a_fragment_is_whole_when_every_element_has_come() -> None:
    coverage = Coverage(FRAGMENT)
    for pieces in ([ROWS[2]], REST, [ROWS[0]]):
        coverage.add(pieces)
        assert not coverage.whole
    coverage.add([ROWS[1]])
    assert coverage.whole


@steady
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4))
def test_any_cut_of_a_fragment_makes_it_whole_with_the_last_element_and_not_before(seed: int, ranks: int) -> None:
    for fragment in FRAGMENTS:
        coverage, missing = Coverage(fragment), fragment.numel
        for pieces in deal(fragment, ranks, random.Random(seed)):
            coverage.add(pieces)
            missing -= sum(piece.box.numel for piece in pieces)
            assert coverage.whole == (not missing)
        assert coverage.whole
        with pytest.raises(Malformed, match="has come already"):
            coverage.add([whole(fragment)[0]])


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([ROWS[0]], id="the same again"),
        pytest.param([Piece(EMBED, Box((1, 3), (2, 1)))], id="a corner of it"),
        pytest.param([Piece(EMBED, Box((0, 0), (6, 4)))], id="all around it"),
        pytest.param([ROWS[1], ROWS[0]], id="a good one before it"),
        pytest.param([ROWS[1], ROWS[1]], id="itself"),
    ],
)
def test_an_overlap_is_refused_and_none_of_its_part_is_taken(pieces: list[Piece]) -> None:
    coverage = Coverage(FRAGMENT)
    coverage.add([ROWS[0]])
    with pytest.raises(Malformed, match=f"tensor {EMBED}: Box.* has come already, from another rank"):
        coverage.add(pieces)
    coverage.add([ROWS[1], ROWS[2], *REST])
    assert coverage.whole


def test_a_foreign_tensor_is_refused_and_none_of_its_part_is_taken() -> None:
    coverage = Coverage(FRAGMENT)
    foreign = OTHER.tensors[0]
    with pytest.raises(Malformed, match=f"tensor {foreign} is not part of fragment 0"):
        coverage.add([*ROWS, Piece(foreign, Box((0, 0, 0), (1, 1, 1)))])
    coverage.add([*ROWS, *REST])
    assert coverage.whole


def test_boxes_of_no_elements_are_in_nobodys_way() -> None:
    coverage = Coverage(FRAGMENT)
    empty = Piece(EMBED, Box((3, 0), (0, 4)))
    coverage.add([empty])
    coverage.add([*ROWS, *REST, empty])
    assert coverage.whole


# -- contributions --------------------------------------------------------------------------------------------------


def stored(folder: Path, pieces: list[Piece], digest: str) -> Stored:
    codec = CODECS["fp32"]
    path = folder / f"{digest}.bin"
    REAL.write(path, payload(FRAGMENT, ramp(0), pieces, codec).numpy())
    return Stored(pieces=tuple(pieces), codecs=(codec,) * len(pieces), path=path, digest=digest)


def test_a_contribution_is_whole_when_all_its_ranks_have_sent(tmp_path: Path) -> None:
    inbound = Inbound(epoch=1, coverage=Coverage(FRAGMENT))
    assert inbound.add(1, stored(tmp_path, ROWS, "one")) is False
    assert not inbound.coverage.whole
    assert inbound.add(0, stored(tmp_path, REST, "two")) is False
    assert inbound.coverage.whole


def test_the_same_part_again_is_known_and_other_bytes_are_a_conflict(tmp_path: Path) -> None:
    inbound = Inbound(epoch=1, coverage=Coverage(FRAGMENT))
    first = stored(tmp_path, ROWS, "one")
    inbound.add(0, first)
    assert inbound.add(0, replace(first)) is True
    with pytest.raises(Conflict, match="rank 0 has sent one before and sends two now"):
        inbound.add(0, stored(tmp_path, ROWS, "two"))
    with pytest.raises(Conflict):
        inbound.add(0, stored(tmp_path, REST, "one"))
    assert inbound.parts == {0: first}
    assert inbound.add(1, stored(tmp_path, REST, "three")) is False
    assert inbound.coverage.whole


def test_a_part_that_overlaps_another_ranks_is_not_kept(tmp_path: Path) -> None:
    inbound = Inbound(epoch=1, coverage=Coverage(FRAGMENT))
    inbound.add(0, stored(tmp_path, ROWS, "one"))
    with pytest.raises(Malformed):
        inbound.add(1, stored(tmp_path, [ROWS[0], *REST], "two"))
    assert list(inbound.parts) == [0]


def test_parts_are_read_back_from_their_files_and_go_with_them(tmp_path: Path) -> None:
    inbound = Inbound(epoch=1, coverage=Coverage(FRAGMENT))
    inbound.add(0, stored(tmp_path, ROWS, "one"))
    inbound.add(1, stored(tmp_path, REST, "two"))
    found = inbound.parts[1].part()
    assert list(found.pieces) == REST
    assert torch.equal(found.payload, payload(FRAGMENT, ramp(0), REST))
    assert inbound.holds(tmp_path / "one.bin")
    assert not inbound.holds(tmp_path / "three.bin")
    inbound.discard()
    assert not list(tmp_path.iterdir())
    inbound.discard()


# -- first parameters -----------------------------------------------------------------------------------------------


@steady
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 3), codec=st.sampled_from(["fp32", "bf16"]))
def test_first_parameters_come_together_from_any_ranks_in_any_order(seed: int, ranks: int, codec: str) -> None:
    chance = random.Random(seed)
    bed = SeedBed(1, FRAGMENTS)
    sent = [
        (fragment.index, rank, pieces)
        for fragment in FRAGMENTS
        for rank, pieces in enumerate(deal(fragment, ranks, chance))
        if sum(piece.box.numel for piece in pieces)
    ]
    chance.shuffle(sent)
    for fragment, rank, pieces in sent:
        assert bed.anchors == []
        seeds = part(FRAGMENTS[fragment], ramp(fragment), pieces, CODECS[codec])
        assert bed.add(fragment, rank, seeds, "digest") is False
    for fragment, anchor in enumerate(bed.anchors):
        expected = ramp(fragment) if codec == "fp32" else ramp(fragment).bfloat16().float()
        assert torch.equal(anchor, expected)
    bed.clear()
    assert bed.anchors == []
    assert bed.known(*sent[0][:2]) == "digest"


def test_first_parameters_that_come_twice_are_known_and_other_bytes_are_a_conflict() -> None:
    bed = SeedBed(1, FRAGMENTS)
    assert bed.known(0, 0) == ""
    bed.add(0, 0, part(FRAGMENT, ramp(0), ROWS), "one")
    assert bed.add(0, 0, part(FRAGMENT, ramp(0), ROWS), "one") is True
    with pytest.raises(Conflict, match="rank 0 has sent one before and sends two now"):
        bed.add(0, 0, part(FRAGMENT, -ramp(0), ROWS), "two")
    assert bed.known(0, 0) == "one"
    assert bed.known(0, 1) == bed.known(1, 0) == ""


def test_first_parameters_that_are_refused_are_not_placed() -> None:
    bed = SeedBed(1, FRAGMENTS)
    bed.add(0, 0, part(FRAGMENT, ramp(0), ROWS), "one")
    with pytest.raises(Malformed):
        bed.add(0, 1, part(FRAGMENT, -ramp(0), [*REST, ROWS[0]]), "two")
    bad = ramp(0)
    bad[-1] = torch.nan
    with pytest.raises(DivergedError):
        bed.add(0, 1, part(FRAGMENT, bad, REST), "three")
    bed.add(0, 1, part(FRAGMENT, ramp(0), REST), "four")
    for fragment in (OTHER, STATIC):
        bed.add(fragment.index, 0, part(fragment, ramp(fragment.index)), "five")
    assert torch.equal(bed.anchors[0], ramp(0))


# -- parts of an update ---------------------------------------------------------------------------------------------


@steady
@given(seed=st.integers(0, 2**32), codec=st.sampled_from(["fp32", "bf16"]))
def test_a_selected_box_is_the_box_encoded(seed: int, codec: str) -> None:
    chance, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    for fragment in FRAGMENTS:
        values = torch.randn(fragment.numel, generator=numbers)
        pieces = [
            Piece(tensor, box)
            for tensor, spec in zip(fragment.tensors, fragment.specs, strict=True)
            for box in tiles(spec.shape, chance)
        ]
        chance.shuffle(pieces)
        everything = payload(fragment, values, whole(fragment), CODECS[codec])
        selected = select(fragment, everything, pieces, CODECS[codec])
        encoded = [payload(fragment, values, [piece], CODECS[codec]) for piece in pieces]
        assert all(torch.equal(a, b) for a, b in zip(selected, encoded, strict=True))


def test_pieces_may_be_asked_for_in_any_order_and_again() -> None:
    everything = payload(FRAGMENT, ramp(0), whole(FRAGMENT))
    once, again = select(FRAGMENT, everything, [ROWS[1], ROWS[1]], CODECS["fp32"])
    assert once.view(torch.float32).tolist() == again.view(torch.float32).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


def test_a_foreign_tensor_is_no_part_of_an_update() -> None:
    everything = payload(FRAGMENT, ramp(0), whole(FRAGMENT))
    with pytest.raises(Malformed, match=f"tensor {STATIC.tensors[0]} is not part of fragment 0"):
        list(select(FRAGMENT, everything, whole(STATIC), CODECS["fp32"]))


def test_the_tilings_of_these_tests_are_odd() -> None:
    cuts = [tiles((6, 4), random.Random(seed)) for seed in range(20)]
    assert any(not box.numel for boxes in cuts for box in boxes)
    assert any(0 < box.size[1] < 4 and 0 < box.size[0] < 6 for boxes in cuts for box in boxes)
    assert all(sum(box.numel for box in boxes) == 24 for boxes in cuts)
    assert any(a != b for a, b in pairwise(cuts))


def test_a_whole_contribution_gives_way_to_a_new_epoch_unless_it_counts(tmp_path: Path) -> None:
    fragment = FRAGMENT
    sent = Stored(
        pieces=tuple(whole(fragment)),
        codecs=(CODECS["fp32"],) * len(whole(fragment)),
        path=tmp_path / "whole",
        digest="0123456789abcdef",
    )
    sent.path.write_bytes(b"")
    inbox = Inbox()
    first = inbox.inbound(fragment, 0, "a", 1, accepted=False)
    assert first is not None
    first.add(0, sent)
    assert inbox.inbound(fragment, 0, "a", 2, accepted=True) is None
    assert inbox.holds(sent.path)
    second = inbox.inbound(fragment, 0, "a", 2, accepted=False)
    assert second is not None
    assert not second.parts
    assert not sent.path.exists()
