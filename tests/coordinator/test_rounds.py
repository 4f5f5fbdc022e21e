"""Rounds and membership: what ends a round, in which words, and what changes nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from coordinator import rounds
from coordinator.facts import (
    Accepted,
    Admitted,
    Committed,
    Dropped,
    Entry,
    Gone,
    Moved,
    Phase,
    Planted,
    Skipped,
    Standing,
    Suspected,
)
from coordinator.rounds import Beat, Contributed, Event, Leaving, Seeded, Spoiled
from coordinator.state import Round, begin, revive
from coordinator.words import phase_reason, waiting_for
from diloco.errors import Malformed, StaleEpoch
from tests.support import DEADLINE_S, GRACE_S, LEASE_S, Play


def committed(island_shares: dict[str, float], reason: str, round_: int = 0, fragment: int = 0) -> Committed:
    return Committed(fragment=fragment, round=round_, version=round_ + 1, shares=island_shares, reason=reason)


# -- the start of a run ---------------------------------------------------------------------------------------------


def test_a_run_starts_when_enough_islands_have_loaded_the_first_parameters() -> None:
    play = Play("rounds.start_islands=2")
    assert phase_reason(play.state) == "waiting for an island"
    assert play.join("b") == [Admitted(island="b", epoch=1, reason="new")]
    assert phase_reason(play.state) == "waiting for first parameters from b"
    play.join("a")
    assert play.state.seeder == "b"
    assert play.beat("b") == []
    assert play.take(Seeded()) == []
    assert play.facts == [Planted()]
    assert play.state.seeder == ""
    assert phase_reason(play.state) == "1 of 2 islands are ready"
    assert play.beat("a", ready=False) == []
    assert play.beat("a") == [Moved(phase=Phase.RUNNING, reason="2 islands are ready", active=("a", "b"))]
    assert phase_reason(play.state) == ""
    assert {m.standing for m in play.state.members.values()} == {Standing.ACTIVE}


def test_being_ready_lasts_through_beats_that_do_not_say_so() -> None:
    play = Play("rounds.start_islands=2")
    play.join("a")
    play.take(Seeded())
    play.beat("a")
    play.beat("a", ready=False)
    play.join("b")
    assert play.beat("b") == [Moved(phase=Phase.RUNNING, reason="2 islands are ready", active=("a", "b"))]


@pytest.mark.parametrize("way", ["leaves", "is lost", "comes back"])
def test_the_first_island_by_name_seeds_once_the_seeder_is_gone(way: str) -> None:
    play = Play("rounds.start_islands=2")
    for island in ("c", "d", "b"):
        play.join(island)
    assert play.state.seeder == "c"
    if way == "leaves":
        play.leave("c")
    elif way == "is lost":
        play.clock.now += LEASE_S / 2
        play.beat("b"), play.beat("d")
        play.tick(LEASE_S / 2)
    else:
        play.join("c")
    assert play.state.seeder == "b"


def test_an_island_that_is_gone_does_not_count_as_ready() -> None:
    play = Play("rounds.start_islands=2")
    play.join("a"), play.join("b")
    play.take(Seeded())
    play.beat("a")
    play.leave("a")
    assert not play.state.members["a"].ready
    assert play.beat("b") == []
    assert phase_reason(play.state) == "1 of 2 islands are ready"
    play.join("a")
    assert play.state.phase is Phase.GATHERING
    assert play.beat("a") == [Moved(phase=Phase.RUNNING, reason="2 islands are ready", active=("a", "b"))]


# -- how rounds end -------------------------------------------------------------------------------------------------


def test_a_round_ends_when_all_active_islands_have_contributed() -> None:
    play = Play("rounds.quorum=1", islands="abc")
    assert play.give("c", 300) == []
    assert play.facts == [Accepted(fragment=0, round=0, entry=Entry(island="c", epoch=3, tokens=300))]
    assert play.give("a", 100) == []
    assert play.give("b", 100) == [
        committed({"a": 0.2, "b": 0.2, "c": 0.6}, "all 3 active islands have contributed"),
    ]
    assert play.facts[0] == Accepted(fragment=0, round=0, entry=Entry(island="b", epoch=2, tokens=100))
    assert len(play.facts) == 2
    assert (play.state.rounds[0].version, play.state.rounds[0].round) == (1, 1)
    assert {m.contributions for m in play.state.members.values()} == {1}


def test_fragments_have_rounds_of_their_own() -> None:
    play = Play("rounds.quorum=2", islands="ab")
    play.give("a", fragment=0)
    play.give("b", fragment=1)
    [verdict] = play.give("a", fragment=1)
    assert isinstance(verdict, Committed)
    assert (verdict.fragment, verdict.version) == (1, 1)
    assert [(r.version, r.round, list(r.entries)) for r in play.state.rounds] == [(0, 0, ["a"]), (1, 1, [])]


def test_uniform_weights_ignore_the_tokens() -> None:
    play = Play('merge.weights="uniform"', islands="ab")
    play.give("a", 1)
    [verdict] = play.give("b", 99)
    assert isinstance(verdict, Committed)
    assert verdict.shares == {"a": 0.5, "b": 0.5}


def test_after_the_quorum_a_round_waits_for_the_grace_period_and_no_longer() -> None:
    play = Play("rounds.quorum=2", islands="abcd")
    play.give("a")
    assert play.tick(5.0) == []
    play.give("c")
    assert play.tick(GRACE_S - 0.25) == []
    assert play.tick(0.25) == [
        committed({"a": 0.5, "c": 0.5}, "2 contributed and b, d did not within 15 s of the first"),
    ]


def test_a_third_contribution_does_not_prolong_the_grace_period() -> None:
    play = Play("rounds.quorum=2", islands="abcd")
    play.give("a"), play.give("b")
    play.tick(GRACE_S - 1)
    play.give("c")
    [verdict] = play.tick(1.0)
    assert isinstance(verdict, Committed)
    assert verdict.reason == "3 contributed and d did not within 10 s of the first"


def test_the_deadline_ends_a_round_whose_quorum_came_late() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a")
    play.tick(DEADLINE_S - 5)
    play.give("b")
    assert play.tick(4.75) == []
    [verdict] = play.tick(0.25)
    assert isinstance(verdict, Committed)
    assert verdict.reason == "2 contributed within the deadline of 60 s"


def test_below_the_quorum_the_deadline_skips_the_round() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a")
    assert play.tick(DEADLINE_S - 0.25) == []
    why = "1 of the quorum of 2 contributed within the deadline of 60 s"
    assert play.tick(0.25) == [Skipped(fragment=0, round=0, reason=why)]
    assert (play.state.rounds[0].version, play.state.rounds[0].round) == (0, 1)
    assert (play.state.members["a"].contributions, play.state.members["a"].dropped) == (0, 1)


def test_a_round_without_a_contribution_waits_for_ever() -> None:
    play = Play(islands="ab")
    play.clock.now += 100 * DEADLINE_S
    play.beat("a"), play.beat("b")
    assert play.state.rounds[0] == Round()


def test_any_event_closes_a_round_that_is_overdue() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a")
    play.clock.now += DEADLINE_S
    assert [type(d) for d in play.beat("b")] == [Skipped]


# -- islands that go and come back ----------------------------------------------------------------------------------


def test_a_lease_is_lost_by_a_tick_at_exactly_its_end() -> None:
    play = Play("rounds.lease_s=30.0", islands="ab")
    play.clock.now += 10
    play.beat("a")
    assert [type(f) for f in play.tick(19.75)] == [Suspected, Suspected]
    assert play.tick(0.25) == [Gone(island="b", standing=Standing.LOST, reason="no heartbeat for 30 s")]
    assert play.tick(9.75) == []
    assert play.tick(0.25) == [Gone(island="a", standing=Standing.LOST, reason="no heartbeat for 30 s")]
    assert play.tick(1000) == []


def test_a_beat_after_the_bound_but_before_a_tick_keeps_the_lease() -> None:
    play = Play("rounds.lease_s=30.0", islands="a")
    play.clock.now += 31
    play.beat("a")
    assert play.tick(29) == [Suspected(island="a", reason="no heartbeat for 15 s")]


def test_a_lost_island_is_not_waited_for() -> None:
    play = Play("rounds.lease_s=30.0", "rounds.deadline_s=600.0", "rounds.quorum=2", islands="abc")
    play.clock.now += 20
    play.beat("a"), play.beat("b")
    play.give("a")
    assert play.give("b") == []
    assert play.tick(10)[1:] == [committed({"a": 0.5, "b": 0.5}, "all 2 active islands have contributed")]


def test_a_leaving_island_ends_the_round_that_waits_for_it_alone() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a"), play.give("b")
    assert play.leave("c") == [
        Gone(island="c", standing=Standing.LEFT, reason="done here"),
        committed({"a": 0.5, "b": 0.5}, "all 2 active islands have contributed"),
    ]


def test_what_a_dead_island_contributed_counts_and_the_divisor_is_what_came() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a", 100)
    play.leave("a")
    play.leave("c")
    [verdict] = play.give("b", 300)
    assert isinstance(verdict, Committed)
    assert verdict.shares == {"a": 0.25, "b": 0.75}
    assert sum(verdict.shares.values()) == 1
    assert play.state.members["a"].contributions == 1


@pytest.mark.parametrize("event", ["beat", "leave", "contribute", "spoil"])
@pytest.mark.parametrize("how", ["rejoined", "left", "lost", "unknown"])
def test_an_epoch_that_is_over_is_refused_and_changes_nothing(event: str, how: str) -> None:
    play = Play("rounds.quorum=2", islands="ab")
    epoch, island = play.epoch("a"), "a"
    words = {
        "rejoined": rf"island 'a' holds no lease under epoch {epoch} \(a newer lease has epoch 3\): join again",
        "left": rf"island 'a' holds no lease under epoch {epoch} \(done here\): join again",
        "lost": rf"island 'a' holds no lease under epoch {epoch} \(no heartbeat for 1000 s\): join again",
        "unknown": "island 'z' has not joined this coordinator: join again",
    }
    if how == "rejoined":
        play.join("a")
    elif how == "left":
        play.leave("a")
    elif how == "lost":
        play.tick(LEASE_S)
    else:
        island = "z"
    events: dict[str, Event] = {
        "beat": Beat(island=island, epoch=epoch, ready=True),
        "leave": Leaving(island=island, epoch=epoch, reason="too late"),
        "contribute": Contributed(fragment=0, round=0, entry=Entry(island=island, epoch=epoch, tokens=1)),
        "spoil": Spoiled(fragment=0, round=0, island=island, epoch=epoch, reason="not finite"),
    }
    play.refuses(StaleEpoch, events[event], words[how])


def test_an_epoch_that_was_never_given_is_refused() -> None:
    play = Play(islands="a")
    play.refuses(StaleEpoch, Beat(island="a", epoch=play.epoch("a") + 1, ready=True), "holds no lease under epoch 2")


def test_a_rejoin_has_a_higher_epoch_and_keeps_the_counts() -> None:
    play = Play("rounds.quorum=2", islands="ab")
    play.give("a"), play.give("b")
    play.give("a", round_=0)
    assert play.join("a") == [Admitted(island="a", epoch=3, reason="came back")]
    member = play.state.members["a"]
    assert (member.standing, member.ready) == (Standing.JOINING, False)
    assert (member.contributions, member.dropped) == (1, 1)


def test_an_island_that_comes_back_does_not_count_twice_in_a_round() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a", 100)
    play.join("a")
    assert play.give("a", 900) == [
        Dropped(fragment=0, round=0, island="a", reason="a has already contributed to round 0")
    ]
    play.give("b", 300)
    [verdict] = play.give("c", 100)
    assert isinstance(verdict, Committed)
    assert verdict.shares == {"a": 0.2, "b": 0.6, "c": 0.2}
    assert (play.state.members["a"].contributions, play.state.members["a"].dropped) == (1, 1)


def test_a_newcomer_is_waited_for_only_after_its_first_contribution() -> None:
    play = Play("rounds.quorum=1", islands="a")
    play.join("n")
    play.beat("n")
    [first] = play.give("a")
    assert isinstance(first, Committed)
    assert rounds.missing_islands(play.state, 0) == ["a"]
    play.give("n")
    assert play.state.members["n"].standing is Standing.ACTIVE
    [second] = play.give("a")
    assert isinstance(second, Committed)
    assert list(second.shares) == ["a", "n"]
    assert play.give("a") == []
    assert rounds.missing_islands(play.state, 0) == ["n"]


def test_an_island_that_comes_back_is_a_newcomer_again() -> None:
    play = Play("rounds.quorum=1", islands="ab")
    play.give("a")
    [_, verdict] = play.join("b")
    assert isinstance(verdict, Committed)
    assert list(verdict.shares) == ["a"]


# -- contributions that are not folded ------------------------------------------------------------------------------


def test_a_late_contribution_is_dropped_and_recorded() -> None:
    play = Play("rounds.quorum=1", islands="ab")
    play.give("a")
    play.tick(GRACE_S)
    before = play.state.rounds
    why = "late: round 0 has ended, round 1 is open"
    assert play.give("b", round_=0) == [Dropped(fragment=0, round=0, island="b", reason=why, lag_s=GRACE_S)]
    assert [replace(r, past=()) for r in play.state.rounds] == [replace(r, past=()) for r in before]
    assert (play.state.members["b"].contributions, play.state.members["b"].dropped) == (0, 1)


def test_a_refused_contribution_does_not_block_a_round() -> None:
    play = Play("rounds.quorum=1", islands="abc")
    assert play.spoil("b") == [Dropped(fragment=0, round=0, island="b", reason="not finite", spoiled=True)]
    assert rounds.missing_islands(play.state, 0) == ["a", "c"]
    play.give("a")
    [verdict] = play.give("c")
    assert isinstance(verdict, Committed)
    assert (verdict.reason, list(verdict.shares)) == ("all 2 active islands have contributed", ["a", "c"])
    assert (play.state.members["b"].contributions, play.state.members["b"].dropped) == (0, 1)


def test_a_round_of_refused_contributions_is_skipped() -> None:
    play = Play("rounds.quorum=1", islands="ab")
    play.spoil("b")
    assert play.spoil("a") == [
        Dropped(fragment=0, round=0, island="a", reason="not finite", spoiled=True),
        Skipped(fragment=0, round=0, reason="a: not finite; b: not finite"),
    ]
    assert (play.state.rounds[0].version, play.state.rounds[0].round) == (0, 1)


def test_a_refused_contribution_opens_a_round_with_a_deadline() -> None:
    play = Play("rounds.quorum=2", islands="ab")
    play.spoil("a")
    assert play.tick(DEADLINE_S - 0.25) == []
    why = "0 of the quorum of 2 contributed within the deadline of 60 s"
    assert play.tick(0.25) == [Skipped(fragment=0, round=0, reason=why)]


def test_parts_of_one_refused_contribution_are_recorded_once() -> None:
    play = Play("rounds.quorum=2", islands="ab")
    play.spoil("a")
    assert play.spoil("a") == []
    assert play.state.members["a"].dropped == 1


def test_a_part_spoiled_after_the_whole_contribution_came_takes_nothing_away() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a")
    play.join("a")
    assert play.spoil("a") == [Dropped(fragment=0, round=0, island="a", reason="not finite", spoiled=False)]
    play.leave("c")
    [verdict] = play.give("b")
    assert isinstance(verdict, Committed)
    assert list(verdict.shares) == ["a", "b"]


def test_a_contribution_spoiled_after_its_round_is_recorded_and_opens_nothing() -> None:
    play = Play("rounds.quorum=1", islands="a")
    play.give("a")
    assert play.spoil("a", round_=0) == [Dropped(fragment=0, round=0, island="a", reason="not finite")]
    assert play.state.rounds[0] == Round(version=1, round=1, past=play.state.rounds[0].past)


def contributed_and_spoiled(play: Play, round_: int) -> list[Event]:
    epoch = play.epoch("a")
    return [
        Contributed(fragment=0, round=round_, entry=Entry(island="a", epoch=epoch, tokens=1)),
        Spoiled(fragment=0, round=round_, island="a", epoch=epoch, reason="not finite"),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_a_round_that_is_not_open_takes_nothing(which: int) -> None:
    play = Play("rounds.quorum=1", islands="a")
    words = "round 1 of fragment 0 is not open; round 0 is"
    play.refuses(Malformed, contributed_and_spoiled(play, 1)[which], words)


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_before_the_run_no_round_takes_anything(which: int, seeded: bool) -> None:
    play = Play("rounds.start_islands=2")
    play.join("a")
    if seeded:
        play.take(Seeded())
    words = "round 0 of fragment 0 is not open: the run has not started"
    play.refuses(Malformed, contributed_and_spoiled(play, 0)[which], words)


# -- the end of a run -----------------------------------------------------------------------------------------------


def test_the_run_is_done_when_every_fragment_has_ended_its_last_round() -> None:
    play = Play("rounds.quorum=1", islands="a")
    assert [play.state.schedule.rounds(f) for f in (0, 1)] == [3, 3]
    for round_, fragment in itertools.product(range(3), range(2)):
        decisions = play.give("a", fragment=fragment)
        assert [type(d) for d in decisions[:1]] == [Committed]
        last = (round_, fragment) == (2, 1)
        assert decisions[1:] == (
            [Moved(phase=Phase.DONE, reason="every fragment has ended its last round")] if last else []
        )
    assert play.state.phase is Phase.DONE
    assert phase_reason(play.state) == ""


@pytest.mark.parametrize("which", [0, 1])
def test_there_is_no_round_after_a_fragments_last(which: int) -> None:
    play = Play("rounds.quorum=1", islands="a")
    for _ in range(3):
        play.give("a", fragment=0)
    words = "round 3 of fragment 0 is not open: the fragment's last is round 2"
    play.refuses(Malformed, contributed_and_spoiled(play, 3)[which], words)
    for _ in range(3):
        play.give("a", fragment=1)
    assert play.state.phase is Phase.DONE
    play.refuses(Malformed, contributed_and_spoiled(play, 3)[which], words)
    assert [type(d) for d in play.give("a", round_=2)] == [Dropped]


def test_a_run_that_is_taken_up_gives_full_leases_and_deadlines_and_forgets_nothing() -> None:
    play = Play("rounds.quorum=2", "rounds.lease_s=30.0", islands="abc")
    play.give("a", fragment=0)
    play.give("a", fragment=1), play.give("b", fragment=1)
    before = play.state
    play.clock.now = 5.0  # another machine's clock
    play.state = revive(before, play.clock())
    assert {m.lease_until for m in play.state.members.values()} == {35.0}
    assert [(r.opened_at, r.quorum_at) for r in play.state.rounds] == [(5.0, None), (5.0, 5.0)]
    assert [r.entries for r in play.state.rounds] == [r.entries for r in before.rounds]
    play.clock.now += 10
    for island in "abc":
        play.beat(island)
    assert play.state.rounds[0].round == 0
    assert (play.state.rounds[1].round, play.state.rounds[1].version) == (1, 1)
    assert play.give("b") == []
    assert [type(d) for d in play.give("c")] == [Committed]
    assert play.join("d") == [Admitted(island="d", epoch=4, reason="new")]


def test_epochs_begin_above_the_one_that_is_named() -> None:
    config = Play().state.config
    state = begin(config, Play().state.weights, Play().state.schedule, epoch=7)
    state, facts = rounds.step(state, rounds.Joined(island="a"), 0.0)
    assert facts == [Admitted(island="a", epoch=8, reason="new")]
    assert state.last_epoch == 8


# -- words ----------------------------------------------------------------------------------------------------------


def test_waiting_for_says_whom_and_until_when() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    assert waiting_for(play.state, 0, play.clock()) == ""
    play.give("b")
    play.tick(20)
    assert waiting_for(play.state, 0, play.clock()) == "1 more contributions (a, c), for at most 40 s more"
    play.give("a")
    play.tick(4)
    assert waiting_for(play.state, 0, play.clock()) == "c, for at most 6 s more"
    assert waiting_for(play.state, 0, play.clock() + 100) == "c, for at most 0 s more"
    play.give("c")
    assert waiting_for(play.state, 0, play.clock()) == ""


def test_waiting_for_keeps_to_the_deadline_where_the_grace_period_would_pass_it() -> None:
    play = Play("rounds.quorum=2", islands="abc")
    play.give("a")
    play.tick(DEADLINE_S - 3)
    play.give("b")
    assert waiting_for(play.state, 0, play.clock()) == "c, for at most 3 s more"


def test_waiting_for_names_no_island_where_none_is_missing() -> None:
    play = Play("rounds.quorum=2", islands="ab")
    play.give("a")
    play.leave("b")
    assert waiting_for(play.state, 0, play.clock()) == "1 more contributions (any island), for at most 60 s more"
