"""How long rounds wait, and what becomes of what comes after they have ended."""

from __future__ import annotations

import pytest

from coordinator.facts import Carried, Committed, Dropped, Entry, Skipped, Standing, Suspected, Trusted
from coordinator.rounds import Contributed, Joined, Progressed, counted, missing_islands, soft_deadline
from coordinator.state import revive
from coordinator.words import explain, waiting_for
from diloco.errors import Malformed
from tests.support import DEADLINE_S, GRACE_S, Play


def play_round(play: Play, lags: dict[str, float]) -> Committed:
    """A round to which every island contributes so many seconds after the first."""
    passed, verdicts = 0.0, []
    for island, lag in sorted(lags.items(), key=lambda item: item[1]):
        verdicts = play.tick(lag - passed)
        assert not verdicts, f"the round ended before {island} came"
        passed = lag
        verdicts = play.give(island)
    [verdict] = verdicts
    assert isinstance(verdict, Committed)
    return verdict


# -- the soft deadline ----------------------------------------------------------------------------------------------


def test_a_steady_slow_island_is_waited_for_once_it_is_known_to_be_slow() -> None:
    play = Play("rounds.quorum=2", "rounds.grace_s=1.0", "run.steps=100", islands="abc")
    for _ in range(3):  # while it is not known, its contribution comes late
        play.give("a"), play.give("b")
        [verdict] = play.tick(1.0)
        assert isinstance(verdict, Committed)
        play.clock.now += 19.0
        assert [type(f) for f in play.give("c", round_=verdict.round)] == [Dropped]
    for _ in range(5):
        assert list(play_round(play, {"a": 0, "b": 0, "c": 20.0}).shares) == ["a", "b", "c"]


def test_a_stall_of_a_steady_island_does_not_hold_the_others_to_the_hard_deadline() -> None:
    play = Play("rounds.quorum=2", "rounds.grace_s=1.0", "run.steps=100", islands="abc")
    for _ in range(6):
        play_round(play, {"a": 0, "b": 0, "c": 0.8})
    play.give("a"), play.give("b")
    [verdict] = play.tick(1.0)
    assert isinstance(verdict, Committed)
    assert list(verdict.shares) == ["a", "b"]


@pytest.mark.parametrize(("deviations", "waited"), [(6.0, 8 + 6 * 1.0), (4.0, 8 + 4 * 1.0), (0.0, GRACE_S)])
def test_the_soft_deadline_is_the_median_lag_plus_deviations(deviations: float, waited: float) -> None:
    play = Play("rounds.quorum=1", f"rounds.deviations={deviations}", "run.steps=100", islands="ab")
    for lag in (8.0, 9.0, 7.0, 9.5, 6.5):
        play_round(play, {"a": 0, "b": lag})
    play.give("a")
    soft = soft_deadline(play.state, 0)
    assert soft is not None
    assert soft - play.clock() == pytest.approx(waited)


def test_the_soft_deadline_keeps_within_the_hard_one() -> None:
    play = Play("rounds.quorum=1", "rounds.deviations=1000.0", "run.steps=100", islands="ab")
    for lag in (9.0, 5.0, 8.0):
        play_round(play, {"a": 0, "b": lag})
    play.give("a")
    assert not play.tick(DEADLINE_S - 0.25)
    assert [type(f) for f in play.tick(0.25)] == [Committed]


def test_what_was_observed_outlives_a_restart() -> None:
    play = Play("rounds.quorum=1", "rounds.grace_s=1.0", "run.steps=100", islands="ab")
    for lag in (0.9, 0.9, 0.9, 0.9):
        play_round(play, {"a": 0, "b": lag})
    play.state = revive(play.state, play.clock())
    play.give("a")
    soft = soft_deadline(play.state, 0)
    assert soft is not None
    assert soft - play.clock() == pytest.approx(0.9 * (1 + 4 * 0.05))


def progress(play: Play, island: str, round_: int = 0) -> None:
    assert play.take(Progressed(fragment=0, round=round_, island=island)) == []


def test_an_upload_that_makes_progress_extends_the_soft_deadline_but_not_the_hard_one() -> None:
    play = Play("rounds.quorum=1", "rounds.progress_s=5.0", islands="ab")
    play.give("a")
    for _ in range(14):
        assert not play.tick(4.0)
        progress(play, "b")
    assert "b, for at most 4 s more" in waiting_for(play.state, 0, play.clock())
    [verdict] = play.tick(4.0)
    assert isinstance(verdict, Committed)
    assert verdict.reason == "1 contributed within the deadline of 60 s"


def test_an_upload_that_stalls_extends_it_no_further() -> None:
    play = Play("rounds.quorum=1", "rounds.progress_s=5.0", islands="ab")
    play.give("a")
    play.tick(GRACE_S - 1)
    progress(play, "b")
    assert not play.tick(4.75)
    assert [type(f) for f in play.tick(0.25)] == [Committed]


def test_the_progress_of_another_round_or_fragment_extends_nothing() -> None:
    play = Play("rounds.quorum=1", islands="ab")
    play.give("a")
    before = play.state
    for fragment, round_ in ((0, 1), (7, 0)):
        play.take(Progressed(fragment=fragment, round=round_, island="b"))
        assert play.state == before


# -- suspects -------------------------------------------------------------------------------------------------------


def test_a_silent_island_is_suspected_then_heard_again_and_waited_for_all_along() -> None:
    play = Play("rounds.lease_s=30.0", "rounds.quorum=2", islands="ab")
    play.give("a")
    play.clock.now += 10
    play.beat("a")
    assert play.tick(5) == [Suspected(island="b", reason="no heartbeat for 15 s")]
    assert play.tick(1) == []
    assert missing_islands(play.state, 0) == ["b"]
    assert any("waits for b, SUSPECT, last heard 16 s ago" in line for line in explain(play.state, play.clock()))
    assert play.beat("b") == [Trusted(island="b")]
    assert play.state.members["b"].standing is Standing.ACTIVE
    assert play.state.members["b"].reason == ""


# -- late contributions ---------------------------------------------------------------------------------------------


def late_play(policy: str, *overrides: str) -> Play:
    """A run in which b's contribution to round 0 will come late."""
    play = Play("rounds.quorum=1", f'rounds.late="{policy}"', "run.steps=100", *overrides, islands="ab")
    play.give("a")
    assert [type(f) for f in play.tick(GRACE_S)] == [Committed]
    return play


@pytest.mark.parametrize(
    ("policy", "behind", "factor"), [("discount", 1, 0.5), ("discount", 2, 0.25), ("hold", 2, 1.0)]
)
def test_a_late_contribution_is_folded_into_the_open_round(policy: str, behind: int, factor: float) -> None:
    play = late_play(policy)
    for _ in range(behind - 1):
        play.give("a")
        play.tick(GRACE_S)
    [fact] = play.give("b", 100, round_=0)
    assert isinstance(fact, Carried)
    assert (fact.round, fact.into, fact.factor) == (0, behind, factor)
    assert fact.reason == f"round 0 had ended; it counts in round {behind} with its weight times {factor:g}"
    assert play.state.rounds[0].opened_at is None, "a late contribution starts no deadline"
    play.give("a", 100)
    [verdict] = play.give("b", 100)
    assert isinstance(verdict, Committed)
    total = 2 + factor
    assert verdict.shares == pytest.approx({"a": 1 / total, "b": 1 / total, "b@0": factor / total})
    assert list(verdict.shares) == ["a", "b", "b@0"]
    assert play.state.members["b"].contributions == 2


@pytest.mark.parametrize("policy", ["discount", "hold"])
def test_a_late_contribution_counts_once(policy: str) -> None:
    play = late_play(policy)
    play.give("b", round_=0)
    assert counted(play.state, 0, 0, "b") == play.epoch("b")
    [again] = play.give("b", round_=0)
    assert again == Dropped(
        fragment=0, round=0, island="b", reason="b has already contributed to round 0", lag_s=GRACE_S
    )
    play.give("a")
    [third] = play.give("a", round_=0)
    assert isinstance(third, Dropped)


def test_a_late_contribution_is_no_part_of_the_quorum() -> None:
    play = Play("rounds.quorum=2", 'rounds.late="hold"', "run.steps=100", islands="abc")
    play.give("a"), play.give("c")
    play.tick(GRACE_S)
    play.give("b", round_=0)
    play.give("a")
    verdicts = play.tick(DEADLINE_S)
    assert [type(f) for f in verdicts] == [Skipped]
    assert play.state.members["b"].dropped == 1


def test_a_contribution_that_is_too_late_is_dropped() -> None:
    play = late_play("hold", "rounds.late_rounds=1")
    play.give("a")
    play.tick(GRACE_S)
    [fact] = play.give("b", round_=0)
    assert isinstance(fact, Dropped)
    assert fact.reason == "late: round 0 has ended, round 2 is open: more than 1 rounds behind"


def test_after_a_fragments_last_round_nothing_is_carried() -> None:
    play = Play("rounds.quorum=1", 'rounds.late="hold"', islands="ab")
    for _ in range(3):
        play.give("a")
        play.tick(GRACE_S)
    [fact] = play.give("b", round_=2)
    assert isinstance(fact, Dropped)
    assert fact.reason == "late: round 2 has ended, round 3 is open, and no round of the fragment follows"


def test_what_came_for_a_skipped_round_is_behind_no_version() -> None:
    play = Play("rounds.quorum=2", 'rounds.late="discount"', "run.steps=100", islands="ab")
    play.give("a")
    assert [type(f) for f in play.tick(DEADLINE_S)] == [Skipped]
    [fact] = play.give("b", round_=0)
    assert isinstance(fact, Carried)
    assert fact.factor == 1.0


def test_an_island_that_came_back_counts_no_second_time_late() -> None:
    play = Play("rounds.quorum=1", 'rounds.late="hold"', "run.steps=100", islands="abc")
    play.give("b"), play.give("a")
    play.tick(GRACE_S)
    play.take(Joined(island="b"))
    [fact] = play.give("b", round_=0)
    assert isinstance(fact, Dropped)


def test_rounds_to_come_are_refused_whatever_the_policy() -> None:
    play = late_play("hold")
    with pytest.raises(Malformed, match="round 2 of fragment 0 is not open; round 1 is"):
        play.give("b", round_=2)


def test_a_newcomer_weighs_by_the_steps_it_took() -> None:
    play = Play('merge.weights="uniform"', "rounds.quorum=2", islands="ab")
    for island, steps in (("a", 4), ("b", 1)):
        entry = Entry(island=island, epoch=play.epoch(island), tokens=7, steps=steps)
        facts = play.take(Contributed(fragment=0, round=0, entry=entry))
    [verdict] = facts
    assert isinstance(verdict, Committed)
    assert verdict.shares == {"a": 0.8, "b": 0.2}


@pytest.mark.parametrize(
    ("resumes", "gone", "waited"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_an_island_that_comes_back_in_time_to_go_on_where_it_stood_is_waited_for_as_before(
    resumes: bool, gone: bool, waited: bool
) -> None:
    play = Play("rounds.quorum=1", islands="ab")
    play.give("a"), play.give("b")
    play.give("a")
    if gone:
        play.leave("b")
    play.take(Joined(island="b", resumes=resumes))
    assert play.state.rounds[0].round == (1 if waited else 2)
    assert play.state.members["b"].standing is (Standing.ACTIVE if waited else Standing.JOINING)


def test_a_newcomer_has_nothing_to_go_on_with() -> None:
    play = Play("rounds.quorum=1", islands="a")
    play.take(Joined(island="b", resumes=True))
    assert play.state.members["b"].standing is Standing.JOINING
