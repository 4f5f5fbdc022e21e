"""What `explain` says, situation by situation."""

from __future__ import annotations

from coordinator.rounds import Drain, Kick, Pause, Progressed, Resume, Stop
from coordinator.words import explain, phase_reason
from tests.support import Play

QUORUM = ("rounds.quorum=2", "rounds.start_islands=3")


def said(play: Play, fragment: int | None = 0) -> list[str]:
    return list(explain(play.state, play.clock(), fragment))


def test_a_run_that_nobody_has_joined() -> None:
    idle = "round 0 is open and has no contribution yet, so no deadline runs."
    assert said(Play(), None) == [
        "The run is gathering: waiting for an island.",
        f"Fragment 0 is at version 0; {idle}",
        f"Fragment 1 is at version 0; {idle}",
    ]


def test_a_round_below_quorum_names_who_is_missing_and_when_it_is_skipped() -> None:
    play = Play(*QUORUM, islands="abc")
    play.give("a")
    play.clock.now += 20
    assert said(play) == [
        "The run is running.",
        "Fragment 0 is at version 0; round 0 is open for 20 s: a contributed, the quorum is 2.",
        "  It waits for b, ACTIVE, last heard 20 s ago.",
        "  It waits for c, ACTIVE, last heard 20 s ago.",
        "  Below quorum it is skipped in 40 s.",
    ]


def test_a_round_with_its_quorum_says_when_it_ends_and_why_then() -> None:
    play = Play(*QUORUM, islands="abc")
    play.give("a")
    play.give("b")
    play.clock.now += 4
    assert said(play)[-1] == "  It ends without them in 6 s (10 s of grace), in any case in 56 s."
    play.take(Progressed(fragment=0, round=0, island="c"))
    play.clock.now += 3
    assert said(play)[2] == "  It waits for c, ACTIVE, last heard 7 s ago, whose upload last brought bytes 3 s ago."


def test_who_contributes_nothing_is_named_with_the_reason() -> None:
    play = Play(*QUORUM, islands="abc")
    play.give("a")
    play.spoil("b")
    assert "  b contributes nothing to it: not finite." in said(play)
    assert not any("waits for b" in line for line in said(play))


def test_a_paused_run_says_why_its_clocks_stand_still() -> None:
    play = Play(*QUORUM, islands="abc")
    play.give("a")
    play.take(Pause(reason="by an operator"))
    assert said(play)[0] == "The run is paused: by an operator."
    assert said(play)[-1] == "  Its clock stands still: by an operator."
    play.clock.now += 1000
    play.take(Resume(reason="go on"))
    assert said(play)[-1] == "  Below quorum it is skipped in 60 s."


def test_islands_that_do_not_take_part_are_named_with_the_reason() -> None:
    play = Play("rounds.start_islands=4", islands="abcd")
    play.take(Drain(island="a", reason="its power is cut at noon"))
    play.take(Kick(island="b", reason="it talks nonsense"))
    play.leave("c")
    assert said(play)[-3:] == [
        "Island a is DRAINING: its power is cut at noon.",
        "Island b is LEFT: it talks nonsense.",
        "Island c is LEFT: done here.",
    ]


def test_a_run_that_is_being_stopped_names_whom_it_waits_for() -> None:
    play = Play(*QUORUM, islands="abc")
    play.take(Stop(reason="enough"))
    play.leave("b")
    assert phase_reason(play.state) == "ending (enough), waiting for a, c to leave"
    for island in "ac":
        play.leave(island)
    assert phase_reason(play.state) == "ending (enough), waiting for nobody to leave"


def test_a_fragment_after_its_last_round() -> None:
    play = Play(islands="a")
    for _ in range(3):
        play.give("a")
    assert said(play)[1] == "Fragment 0 is at version 3; its last round has ended."
    assert said(play, 1)[1].startswith("Fragment 1 is at version 0; round 0 is open")
