"""What operators do to a run: pause, resume, drain, kick, stop."""

from __future__ import annotations

import pytest

from coordinator.facts import (
    Aborted,
    Admitted,
    Committed,
    Draining,
    Gone,
    Paused,
    Phase,
    Resumed,
    Skipped,
    Standing,
    Stopping,
)
from coordinator.rounds import Beat, Drain, Event, Joined, Kick, Pause, Resume, Stop, directive, missing_islands
from coordinator.state import revive
from coordinator.words import explain, phase_reason, waiting_for
from diloco.errors import Dismissed, Malformed, Refused
from tests.support import DEADLINE_S, GRACE_S, Play


def test_a_paused_run_ends_no_round_by_the_clock_and_goes_on_where_it_was() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a"), play.give("b")
    play.tick(4)
    assert play.take(Pause(reason="lunch")) == [Paused(reason="lunch")]
    assert play.take(Pause(reason="again")) == []
    assert phase_reason(play.state) == "paused: lunch"
    assert directive(play.state, "a") == ("pause", "lunch")
    assert waiting_for(play.state, 0, play.clock()) == "c; its clock stands still: lunch"
    assert "  Its clock stands still: lunch." in list(explain(play.state, play.clock()))
    assert play.tick(5 * DEADLINE_S) == []
    assert play.take(Resume(reason="after lunch")) == [Resumed(reason="after lunch")]
    assert play.take(Resume(reason="again")) == []
    assert directive(play.state, "a") == ("", "")
    assert play.tick(GRACE_S - 4.25) == []
    assert [type(f) for f in play.tick(0.25)] == [Committed]


def test_a_round_that_opens_in_a_pause_has_its_whole_time_after_it() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.take(Pause(reason="lunch"))
    play.tick(100)
    play.give("a")
    play.tick(50)
    play.take(Resume(reason="after lunch"))
    assert play.tick(DEADLINE_S - 0.25) == []
    assert [type(f) for f in play.tick(0.25)] == [Skipped]


def test_all_contributions_end_a_round_in_a_pause_too() -> None:
    play = Play("rounds.quorum=2", islands="ab")
    play.give("a")
    play.take(Pause(reason="lunch"))
    assert [type(f) for f in play.give("b")] == [Committed]


def test_a_pause_outlives_a_restart() -> None:
    play = Play("rounds.quorum=2", islands="ab")
    play.give("a")
    play.take(Pause(reason="lunch"))
    play.clock.now = 3.0
    play.state = revive(play.state, play.clock())
    assert play.tick(2 * DEADLINE_S) == []
    play.take(Resume(reason="after lunch"))
    assert play.tick(DEADLINE_S - 0.25) == []
    assert [type(f) for f in play.tick(0.25)] == [Skipped]


def test_a_draining_island_is_told_to_leave_and_is_not_waited_for_but_still_counts() -> None:
    play = Play("rounds.quorum=1", islands="abc")
    play.give("a")
    assert play.take(Drain(island="c", reason="maintenance")) == [Draining(island="c", reason="maintenance")]
    assert play.take(Drain(island="c", reason="again")) == []
    assert directive(play.state, "c") == ("leave", "maintenance")
    assert directive(play.state, "a") == ("", "")
    assert missing_islands(play.state, 0) == ["b"]
    play.give("c")
    [verdict] = play.give("b")
    assert isinstance(verdict, Committed)
    assert list(verdict.shares) == ["a", "b", "c"]
    assert play.state.members["c"].standing is Standing.DRAINING
    assert play.leave("c") == [Gone(island="c", standing=Standing.LEFT, reason="done here")]


def test_draining_the_last_island_that_is_missing_ends_the_round() -> None:
    play = Play("rounds.quorum=1", islands="ab")
    play.give("a")
    assert [type(f) for f in play.take(Drain(island="b", reason="maintenance"))] == [Draining, Committed]


def test_a_draining_island_is_not_asked_for_first_parameters_and_starts_no_run() -> None:
    play = Play("rounds.start_islands=1")
    play.join("a"), play.join("b")
    assert play.state.seeder == "a"
    play.take(Drain(island="a", reason="maintenance"))
    assert play.state.seeder == "b"


def test_a_kicked_island_is_told_so_and_may_join_when_it_is_started_again() -> None:
    play = Play("rounds.quorum=1", islands="ab")
    play.give("a")
    facts = play.take(Kick(island="b", reason="it misbehaves"))
    assert facts[0] == Gone(island="b", standing=Standing.LEFT, reason="it misbehaves", dismissed=True)
    assert [type(f) for f in facts[1:]] == [Committed]
    words = "an operator has ended the lease of island 'b': it misbehaves"
    play.refuses(Dismissed, Beat(island="b", epoch=play.epoch("b"), ready=True), words)
    assert play.join("b") == [Admitted(island="b", epoch=3, reason="came back")]
    assert play.beat("b") == []


@pytest.mark.parametrize("event", [Drain(island="z", reason=""), Kick(island="z", reason="")])
def test_only_islands_with_a_lease_are_drained_and_kicked(event: Event) -> None:
    play = Play(islands="ab")
    play.refuses(Malformed, event, "island 'z' holds no lease in this run; those that do: a, b")


def test_a_run_that_is_stopped_sends_all_away_and_aborts_what_is_open() -> None:
    play = Play("rounds.quorum=2", islands="ab")
    play.give("a")
    assert play.take(Stop(reason="enough")) == [Stopping(reason="enough")]
    assert play.take(Stop(reason="again")) == []
    assert directive(play.state, "a") == directive(play.state, "b") == ("leave", "enough")
    assert phase_reason(play.state) == "ending (enough), waiting for a, b to leave"
    play.refuses(Refused, Joined(island="c"), r"the run is being stopped \(enough\): join when")
    assert play.leave("a") == [Gone(island="a", standing=Standing.LEFT, reason="done here")]
    why = "all islands have left a run that is being stopped: enough"
    assert play.leave("b")[1:] == [Aborted(fragment=0, round=0, reason=why)]
    assert [(r.version, r.round) for r in play.state.rounds] == [(0, 1), (0, 0)]
    assert play.state.members["a"].dropped == 1
    assert play.state.phase is Phase.RUNNING


def test_contributions_that_make_a_quorum_are_committed_by_a_run_that_is_stopped() -> None:
    play = Play("rounds.quorum=1", islands="ab")
    play.give("a")
    play.take(Stop(reason="enough"))
    play.leave("a")
    assert [type(f) for f in play.leave("b")] == [Gone, Committed]


def test_a_run_that_was_stopped_goes_on_with_a_coordinator_that_is_started_again() -> None:
    play = Play("rounds.quorum=1", islands="a")
    play.take(Stop(reason="enough"))
    play.leave("a")
    play.state = revive(play.state, play.clock())
    assert [type(f) for f in play.join("a")] == [Admitted]
    assert directive(play.state, "a") == ("", "")
    assert [type(f) for f in play.give("a")] == [Committed]
