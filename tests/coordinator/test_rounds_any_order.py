"""Rounds under any events in any order: rounds end in time, versions count commits, and refusals change nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.facts import Accepted, Carried, Committed, Ended, Entry, Fact
from coordinator.rounds import (
    Beat,
    Contributed,
    Drain,
    Event,
    Joined,
    Kick,
    Leaving,
    Pause,
    Progressed,
    Resume,
    Seeded,
    Spoiled,
    Stop,
    Tick,
)
from coordinator.state import State
from diloco.errors import Dismissed, Malformed, Refused, StaleEpoch
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
KINDS = (
    *("join", "beat", "beat", "leave", "seeded", "spoil", "tick", "tick", "progress", "drain", "kick", "pause"),
    *("resume", "resume", *["give"] * 10),
)
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
        "progress": Progressed(fragment=fragment, round=round_, island=island),
        "drain": Drain(island=island, reason="maintenance"),
        "kick": Kick(island=island, reason="it misbehaves"),
        "pause": Pause(reason="lunch"),
        "resume": Resume(reason="after lunch"),
        "stop": Stop(reason="enough"),
        "seeded": Seeded(),
        "tick": Tick(),
    }
    return events[kind]


def check_step(before: State, after: State, decisions: Sequence[Fact], now: float) -> None:
    """What holds between a state, the next one and the decisions between them, whatever the event was."""
    for fragment, (old, new) in enumerate(zip(before.rounds, after.rounds, strict=True)):
        ends = [d for d in decisions if isinstance(d, Ended) and d.fragment == fragment]
        folds = [d for d in ends if isinstance(d, Committed)]
        assert new.round == old.round + len(ends)
        assert new.version == old.version + len(folds)
        assert len(ends) <= 1
        assert new.round <= after.schedule.rounds(fragment)
        assert all(end.round == old.round for end in ends)
        for fold in folds:
            assert fold.version == new.version
            on_time = {name for name in fold.shares if "@" not in name}
            assert len(on_time) >= after.config.quorum
            assert list(fold.shares) == sorted(fold.shares)
            assert set(old.entries) <= on_time <= set(ISLANDS)
            assert set(fold.shares) - on_time == set(old.carried)
            assert sum(fold.shares.values()) == pytest.approx(1.0)
        assert new.opened_at is None or after.paused or now < new.opened_at + after.config.deadline_s
        assert new.opened_at is None or new.opened_at <= now
        for name, late in new.carried.items():
            assert name == f"{late.entry.island}@{late.round}"
            assert new.round - after.config.late_rounds <= late.round < new.round
    assert after.last_epoch >= before.last_epoch
    assert len({m.epoch for m in after.members.values()}) == len(after.members)


@hypothesis.settings(steady, max_examples=300)
@given(
    moves=st.lists(MOVES, max_size=80),
    quorum=st.integers(1, 3),
    late=st.sampled_from(["drop", "discount", "hold"]),
    stop_at=st.one_of(st.none(), st.integers(0, 60)),
)
def test_whatever_comes_rounds_end_in_time_and_versions_count_commits(
    moves: list[Any], quorum: int, late: str, stop_at: int | None
) -> None:
    play = Play(
        f"rounds.quorum={quorum}", "rounds.lease_s=300.0", "run.steps=40", f'rounds.late="{late}"', islands="abc"
    )
    counted: set[tuple[int, int, str]] = set()
    for number, move in enumerate(moves):
        play.clock.now += move[-1]
        before, copied = play.state, copy.deepcopy(play.state)
        try:
            decisions = play.take(Stop(reason="enough") if number == stop_at else event_of(before, move))
        except Refused as error:
            assert type(error) in (StaleEpoch, Dismissed, Malformed) or (before.stopping and move[0] == "join")
            assert play.state is before
            decisions = []
            assert move[0] not in ("seeded", "tick", "pause", "resume", "progress")
        else:
            check_step(before, play.state, decisions, play.clock())
            for fact in play.facts:
                if isinstance(fact, Accepted | Carried):
                    key = (fact.fragment, fact.round, fact.entry.island)
                    assert key not in counted
                    counted.add(key)
        assert before == copied
    if play.state.paused:
        play.take(Resume(reason="the end"))
    play.tick(DEADLINE_S)
    assert all(r.opened_at is None for r in play.state.rounds)
