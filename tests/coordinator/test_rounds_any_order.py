"""Rounds under any events in any order: rounds end in time, versions count commits, and refusals change nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.facts import Committed, Entry, Fact, Skipped
from coordinator.rounds import Beat, Contributed, Event, Joined, Leaving, Seeded, Spoiled, Tick
from coordinator.state import State
from diloco.errors import Malformed, Refused, StaleEpoch
from tests.support import DEADLINE_S, Play

steady = hypothesis.settings(deadline=None, derandomize=True)


@steady
@given(
    tokens=st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 2**40), min_size=2),
    data=st.data(),
)
def test_the_order_of_arrival_does_not_matter(tokens: dict[str, int], data: st.DataObject) -> None:
    def verdict(order: Sequence[str]) -> Committed:
        play = Play(f"rounds.quorum={len(order)}", islands=sorted(order))
        decisions = [decision for island in order for decision in play.give(island, tokens[island])]
        assert [type(d) for d in decisions] == [Committed]
        [last] = decisions
        assert isinstance(last, Committed)
        return last

    straight = verdict(sorted(tokens))
    shuffled = verdict(data.draw(st.permutations(sorted(tokens))))
    assert list(shuffled.shares.items()) == list(straight.shares.items())
    assert list(straight.shares) == sorted(tokens)
    assert shuffled == straight


ISLANDS = ("a", "b", "c", "d")
KINDS = ("join", "beat", "beat", "leave", "seeded", "spoil", "tick", "tick", *["give"] * 8)
MOVES = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(ISLANDS),
    st.integers(0, 1),  # fragment
    st.sampled_from((0, 0, 0, 0, 0, 0, -1, 1)),  # rounds off the open one
    st.sampled_from((0, 0, 0, 0, 0, 0, -1, 1)),  # epochs off the island's own
    st.sampled_from((0.0, 0.0, 0.5, 3.0, 10.0, 40.0)),  # seconds before
)


def event_of(state: State, move: tuple[Any, ...]) -> Event:
    """What a drawn move means in a state."""
    kind, island, fragment, round_off, epoch_off, _ = move
    epoch = (state.members[island].epoch if island in state.members else 1) + epoch_off
    round_ = state.rounds[fragment].round + round_off
    events: dict[str, Event] = {
        "join": Joined(island=island),
        "beat": Beat(island=island, epoch=epoch, ready=True),
        "leave": Leaving(island=island, epoch=epoch, reason="done here"),
        "give": Contributed(
            fragment=fragment, round=round_, entry=Entry(island=island, epoch=epoch, tokens=10 * epoch)
        ),
        "spoil": Spoiled(fragment=fragment, round=round_, island=island, epoch=epoch, reason="not finite"),
        "seeded": Seeded(),
        "tick": Tick(),
    }
    return events[kind]


def check_step(before: State, after: State, decisions: Sequence[Fact], now: float) -> None:
    """What holds between a state, the next one and the decisions between them, whatever the event was."""
    for fragment, (old, new) in enumerate(zip(before.rounds, after.rounds, strict=True)):
        ends = [d for d in decisions if isinstance(d, Committed | Skipped) and d.fragment == fragment]
        folds = [d for d in ends if isinstance(d, Committed)]
        assert new.round == old.round + len(ends)
        assert new.version == old.version + len(folds)
        assert len(ends) <= 1
        assert new.round <= after.schedule.rounds(fragment)
        assert all(end.round == old.round for end in ends)
        for fold in folds:
            assert fold.version == new.version
            assert len(fold.shares) >= after.config.quorum
            assert list(fold.shares) == sorted(fold.shares)
            assert set(old.entries) <= set(fold.shares) <= set(ISLANDS)
            assert sum(fold.shares.values()) == pytest.approx(1.0)
        assert new.opened_at is None or now < new.opened_at + after.config.deadline_s
    assert after.last_epoch >= before.last_epoch
    assert len({m.epoch for m in after.members.values()}) == len(after.members)


@hypothesis.settings(steady, max_examples=300)
@given(moves=st.lists(MOVES, max_size=80), quorum=st.integers(1, 3))
def test_whatever_comes_rounds_end_in_time_and_versions_count_commits(moves: list[Any], quorum: int) -> None:
    play = Play(f"rounds.quorum={quorum}", "rounds.lease_s=300.0", "run.steps=40", islands="abc")
    for move in moves:
        play.clock.now += move[-1]
        before, copied = play.state, copy.deepcopy(play.state)
        try:
            decisions = play.take(event_of(before, move))
        except Refused as error:
            assert type(error) in (StaleEpoch, Malformed)
            assert play.state is before
            decisions = []
            assert move[0] not in ("join", "seeded", "tick")
        else:
            check_step(before, play.state, decisions, play.clock())
        assert before == copied
    play.tick(DEADLINE_S)
    assert all(r.opened_at is None for r in play.state.rounds)
