"""Islands come and go for ever: what is remembered of them has a bound, and nothing of a visit stays open."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest

from coordinator import facts, state
from coordinator.facts import Standing
from coordinator.rounds import Kick
from tests.support import Play, Rig, visit

CYCLES = 300
WARM = 20
"""Visits after which everything that is made once has been made."""
SLACK = 4
"""Descriptors and threads that gRPC may hold in one moment and not in another."""


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four members are remembered."""
    monkeypatch.setattr(state, "MEMBERS", 4)


def pass_by(play: Play, *islands: str) -> None:
    for island in islands:
        play.join(island)
        play.leave(island)


def test_those_that_left_longest_ago_are_forgotten(four: None) -> None:
    play = Play(islands=["a"])
    pass_by(play, "b", "c", "d", "e")
    assert set(play.state.members) == {"a", "c", "d", "e"}
    pass_by(play, "c", "f")
    assert set(play.state.members) == {"a", "c", "e", "f"}


def test_islands_that_hold_a_lease_are_all_remembered(four: None) -> None:
    names = list("abcdefg")
    play = Play(islands=names)
    assert list(play.state.members) == names
    pass_by(play, "h", "i")
    assert set(play.state.members) == {*names, "i"}


def test_islands_that_a_remembered_round_speaks_of_are_remembered(four: None) -> None:
    play = Play("rounds.quorum=1", islands=["a", "b", "c", "d"])
    play.give("b")
    play.spoil("c")
    for island in ("b", "c", "d"):
        play.leave(island)
    pass_by(play, "e", "f")
    assert set(play.state.members) == {"a", "b", "c", "f"}
    assert isinstance(play.give("a")[-1], facts.Committed)
    pass_by(play, "g")
    assert {"b", "c"} <= set(play.state.members)


def test_the_first_epoch_of_a_stranger_follows_those_of_islands_that_are_forgotten(four: None) -> None:
    play = Play(islands=["a"])
    pass_by(play, *"bcdefgh")
    epoch = play.state.last_epoch
    play.join("b")
    assert play.epoch("b") == epoch + 1


def test_replaying_the_facts_forgets_the_same(four: None) -> None:
    play = Play(islands=["a"])
    pass_by(play, *"bcdefg")
    play.join("h")
    play.take(Kick(island="h", reason="it is in the way"))
    pass_by(play, *"ij")
    again = state.begin(play.state.config, play.state.weights, play.state.schedule)
    for fact in play.history:
        again = state.apply(again, fact, play.clock())
    assert {n: replace(m, lease_until=0, ready=False) for n, m in again.members.items()} == {
        n: replace(m, lease_until=0, ready=False) for n, m in play.state.members.items()
    }
    assert any(m.standing is Standing.LEFT for m in again.members.values())


def test_visits_leave_nothing_behind(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MEMBERS", 16)
    at, this, seen = make(), psutil.Process(), []
    home = at.island("home")
    for i in range(CYCLES):
        with visit(at.address, f"guest-{i}") as guest:
            guest.join()
            guest.leave("seen enough")
        if i in (WARM, CYCLES - 1):
            gc.collect()
            members, progress = at.served.ask(lambda run: (set(run.state.members), set(run.progress)))
            assert members == progress
            assert len(members) == 16
            assert "home" in members
            seen.append((this.num_fds(), threading.active_count(), this.num_threads()))
    assert home.beat().phase == "gathering"
    for early, late in zip(*seen, strict=True):
        assert late <= early + SLACK, seen
