"""Late contributions through a real coordinator: folded once, into the right round, with the right weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from diloco.errors import Malformed
from diloco.outer import nesterov
from tests.support import Rig, Visitor, configure, draw, floats, whole

CONFIG = configure(
    "rounds.start_islands=2",
    "rounds.quorum=1",
    "rounds.grace_s=5.0",
    "rounds.lease_s=1000.0",
    'rounds.late="discount"',
    "run.steps=40",
    "snapshot.keep=1",
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def missed(at: Rig) -> tuple[Visitor, Visitor]:
    """Islands a and b; b's contribution to round 0 of fragment 0 is still to come, and the round has ended."""
    a, b = at.started("a", "b")
    a.push(at.run.fragments[0], draw(at.run.fragments[0], 1), tokens=100)
    at.tick(5.0)
    assert a.fetch(at.run.fragments[0])[0].outcome == "committed"
    return a, b


def test_a_late_contribution_moves_the_anchor_with_half_its_weight(tmp_path: Path, stack: ExitStack) -> None:
    at = Rig(CONFIG, tmp_path, stack)
    a, b = missed(at)
    fragment = at.run.fragments[0]
    receipt = b.push(fragment, draw(fragment, 2), tokens=100)
    assert (receipt.dropped, receipt.late) == ("", "folded into round 1 with its weight times 0.5")
    again = b.push(fragment, draw(fragment, 2), tokens=100)
    assert again.duplicate
    before = at.run.outers[0].copy()
    for visitor, seed in ((a, 3), (b, 4)):
        visitor.push(fragment, draw(fragment, seed), round=1, base_version=1, tokens=100)
    header, update = a.fetch(fragment, whole(fragment), round=1)
    assert (header.outcome, header.version) == ("committed", 2)
    mean = torch.zeros(fragment.numel)
    for seed, share in ((3, 0.4), (4, 0.4), (2, 0.2)):
        mean.add_(draw(fragment, seed), alpha=share)
    momentum = before.momentum.clone()
    expected = torch.empty_like(mean)
    for spec, start in zip(fragment.specs, fragment.starts, strict=True):
        span = slice(start, start + spec.numel)
        moving = spec.kind == "parameter"
        lr, mu = (CONFIG.outer.lr, CONFIG.outer.momentum) if moving else (1.0, 0.0)
        expected[span] = nesterov(mean[span], momentum[span], lr=lr, mu=mu)
    assert torch.equal(floats(update), expected)
    assert at.run.state.members["b"].contributions == 2


def test_a_late_contribution_in_parts_outlives_a_restart_and_counts_once(tmp_path: Path) -> None:
    with ExitStack() as first:
        at = Rig(CONFIG, tmp_path, first, killed=True)
        _, b = missed(at)
        fragment, epoch = at.run.fragments[0], b.identity.epoch
        left, right = whole(fragment)[:1], whole(fragment)[1:]
        receipt = b.push(fragment, draw(fragment, 2), left, rank=0, tokens=100)
        assert (receipt.dropped, receipt.late) == ("", "")
    with ExitStack() as second:
        at = Rig(CONFIG, tmp_path, second, killed=True)
        b = at.known("b", epoch)
        receipt = b.push(fragment, draw(fragment, 2), right, rank=1, tokens=100)
        assert receipt.late == "folded into round 1 with its weight times 0.5"
    with ExitStack() as third:
        at = Rig(CONFIG, tmp_path, third)
        b = at.known("b", epoch)
        assert b.push(fragment, draw(fragment, 2), right, rank=1, tokens=100).duplicate
        b.push(fragment, draw(fragment, 4), round=1, base_version=1, tokens=100)
        at.tick(5.0)
        header, _ = b.fetch(fragment, whole(fragment), round=1)
        assert (header.outcome, header.version) == ("committed", 2)
        commits = [row.body for row in at.run.store.ledger.read() if row.kind == "committed"]
        assert list(commits[-1]["shares"]) == ["b", "b@0"]
        assert at.run.state.members["b"].contributions == 2


def test_a_late_contribution_names_the_version_its_round_had(tmp_path: Path, stack: ExitStack) -> None:
    at = Rig(CONFIG, tmp_path, stack)
    _, b = missed(at)
    fragment = at.run.fragments[0]
    with pytest.raises(Malformed, match="based on version 1 of fragment 0, and round 0 continues from version 0"):
        b.push(fragment, draw(fragment, 2), base_version=1)


def test_an_island_that_joins_hears_which_of_its_contributions_count(tmp_path: Path, stack: ExitStack) -> None:
    at = Rig(CONFIG, tmp_path, stack)
    a, b = missed(at)
    fragment = at.run.fragments[0]

    def heard(visitor: Visitor) -> tuple[int, int, list[int]]:
        known = visitor.join().contributed[fragment.index]
        return known.oldest_round, known.open_round, list(known.rounds)

    assert heard(b) == (0, 1, [])
    b.beat(ready=True)
    assert b.push(fragment, draw(fragment, 2), tokens=100).late
    a.push(fragment, draw(fragment, 3), round=1, base_version=1, tokens=100)
    assert heard(a) == (0, 1, [0, 1])
    assert heard(b) == (0, 2, [0])  # a has begun a new epoch, so nobody is waited for


def test_a_contribution_to_a_round_that_was_skipped_does_not_count(tmp_path: Path, stack: ExitStack) -> None:
    at = Rig(
        configure("rounds.start_islands=2", "rounds.quorum=2", "rounds.deadline_s=50.0", "rounds.lease_s=1000.0"),
        tmp_path,
        stack,
    )
    a, _ = at.started("a", "b")
    fragment = at.run.fragments[0]
    a.push(fragment, draw(fragment, 1), tokens=100)
    at.tick(51.0)
    assert a.fetch(fragment)[0].outcome == "skipped"
    known = a.join().contributed[0]
    assert (known.oldest_round, known.open_round, list(known.rounds)) == (0, 1, [])
