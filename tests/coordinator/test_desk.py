"""What operators are told and what their commands do, over a real connection."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from coordinator.desk import LONGEST_REASON, plain
from coordinator.snapshots import load_snapshot
from diloco.errors import Dismissed, Malformed, Refused, StaleEpoch
from diloco.v1 import coordinator_pb2 as pb
from tests.support import Rig, Visitor, draw

Make = Callable[..., Rig]
ME = "by an operator at 127.0.0.1"


def command(visitor: Visitor, verb: str, island: str = "", reason: str = "") -> str:
    return visitor.link.command(pb.CommandRequest(verb=verb, island_id=island, reason=reason)).message


def explained(at: Rig, **request: object) -> list[str]:
    at.served.call(at.served.health.look())
    return list(at.visitor("x").link.explain(pb.ExplainRequest(**request)).lines)  # type: ignore[arg-type]


def decline(visitor: Visitor, reason: str = "the loss is not finite", **fields: object) -> pb.Receipt:
    request = pb.DeclineRequest(**{**visitor.key(), "reason": reason, **fields})
    return visitor.link._call("Decline", request, pb.Receipt)


@pytest.fixture
def three(make: Make) -> Rig:
    return make("rounds.start_islands=3", "rounds.quorum=2", "rounds.grace_s=10.0", "snapshot.every_rounds=1000")


# -- what is seen ---------------------------------------------------------------------------------------------------


def test_a_fragment_shows_who_has_contributed_who_is_missing_and_when_its_round_ends(three: Rig) -> None:
    a, b, _ = three.started("a", "b", "c")
    f = three.run.fragments[0]
    idle = a.beat().fragments[0]
    assert (list(idle.contributed), list(idle.missing), idle.open_s) == ([], [], 0)
    assert math.isnan(idle.soft_s)
    assert math.isnan(idle.hard_s)
    a.push(f, draw(f, 1))
    three.clock.now += 2
    below = a.beat().fragments[0]
    assert (list(below.contributed), list(below.missing)) == (["a"], ["b", "c"])
    assert (below.open_s, below.hard_s) == (2, 598)
    assert math.isnan(below.soft_s)
    b.push(f, draw(f, 1))
    three.clock.now += 3
    within = a.beat().fragments[0]
    assert (list(within.contributed), list(within.missing)) == (["a", "b"], ["c"])
    assert (within.open_s, within.soft_s, within.hard_s) == (5, 7, 595)
    command(a, "pause")
    three.clock.now += 100
    held = a.beat().fragments[0]
    assert (held.soft_s, held.hard_s) == (7, 595)


def test_the_status_counts_aborted_rounds_and_participation(three: Rig) -> None:
    a, b, c = three.started("a", "b", "c")
    f = three.run.fragments[0]
    assert math.isnan(a.link.status().participation)
    for visitor in (a, b):
        visitor.push(f, draw(f, 1))
    three.tick(10)
    a.fetch(f)
    assert a.link.status().participation == pytest.approx(2 / 3)
    a.push(f, draw(f, 2), round=1, base_version=1)
    command(a, "stop")
    for visitor in (a, b, c):
        visitor.leave("told to")
    assert three.served.ask(lambda run: run.state.rounds[0].round) == 2
    three.served.call(three.run.settle(30.0))
    assert three.visitor("x").link.status().rounds_aborted == 1


# -- what islands are told ------------------------------------------------------------------------------------------


def test_islands_hear_what_they_are_to_do_and_why(three: Rig) -> None:
    a, b, c = three.started("a", "b", "c")
    assert (a.beat().directive, a.beat().paused) == ("", "")
    command(a, "pause", reason="a new cable")
    told = a.beat()
    assert (told.directive, told.directive_reason, told.paused) == ("pause", *[f"{ME}: a new cable"] * 2)
    assert three.island("n").join().state.directive == "pause"
    command(a, "drain", "b")
    assert (b.beat().directive, b.beat().directive_reason) == ("leave", f"asked to leave {ME}")
    command(a, "resume")
    assert [visitor.beat().directive for visitor in (a, b, c)] == ["", "leave", ""]
    command(a, "stop", reason="enough")
    assert (c.beat().directive, c.beat().directive_reason) == ("leave", f"stopped {ME}: enough")
    with pytest.raises(Refused, match=r"the run is being stopped \(.*: enough\)"):
        three.island("m")


def test_a_round_does_not_wait_for_an_island_that_declines(three: Rig) -> None:
    a, b, c = three.started("a", "b", "c")
    f = three.run.fragments[0]
    assert decline(c, "it is\nnot finite") == pb.Receipt(dropped="it is not finite")
    assert decline(c, "again") == pb.Receipt(duplicate=True, dropped="it is not finite")
    assert c.push(f, draw(f, 1)).dropped == "it is not finite"
    for visitor in (a, b):
        visitor.push(f, draw(f, 1))
    assert a.fetch(f)[0].reason == "all 2 active islands have contributed"
    assert [i.dropped for i in a.link.status().islands] == [0, 0, 1]
    assert decline(c).dropped == "late: round 0 has ended, round 1 is open"
    assert a.link.status().islands[2].dropped == 1
    a.push(f, draw(f, 2), round=1, base_version=1)
    assert decline(a, round=1).dropped == "a has already contributed to round 1"


def test_a_decline_that_cannot_be_is_refused(three: Rig) -> None:
    a, *_ = three.started("a", "b", "c")
    with pytest.raises(Malformed, match="there is no fragment 2 with rounds; the run has 2"):
        decline(a, fragment=2)
    with pytest.raises(Malformed, match="round 1 of fragment 0 is not open; round 0 is"):
        decline(a, round=1)
    with pytest.raises(Malformed, match="at most 200 characters"):
        decline(a, "x" * 201)
    with pytest.raises(StaleEpoch):
        decline(a, epoch=99)
    assert not three.served.ask(lambda run: run.state.rounds[0].refused)


# -- commands -------------------------------------------------------------------------------------------------------


def test_a_command_says_what_it_did_or_that_it_was_so_already(three: Rig) -> None:
    a, b, _ = three.started("a", "b", "c")
    assert command(a, "resume") == "the run is not paused"
    assert command(a, "pause", reason="lunch").startswith("the run is paused: ")
    assert command(a, "pause") == f"the run is paused already, {ME}: lunch"
    assert command(a, "resume") == f"the run goes on; it was paused {ME}: lunch"
    assert command(a, "drain", "b", "repairs") == "asked to leave: b"
    assert command(a, "drain", "b") == f"island b is leaving already: asked to leave {ME}: repairs"
    assert command(a, "drain", "*") == "asked to leave: a, c"
    assert command(a, "drain", "*") == "there is no island to ask to leave"
    assert command(a, "kick", "b") == "the lease of island b has ended; no round waits for it"
    with pytest.raises(Dismissed, match="an operator has ended the lease of island 'b'"):
        b.beat()
    assert command(a, "stop") == "the coordinator ends once these have left: a, c"
    assert command(a, "stop") == f"the run is ending already: stopped {ME}"


def test_commands_are_facts_that_say_who_and_why(three: Rig) -> None:
    [a, *_] = three.started("a", "b", "c")
    command(a, "pause", reason="lunch")
    rows = three.served.ask(lambda run: [(row.kind, row.body) for row in run.store.ledger.read()])
    assert rows[-1] == ("paused", {"reason": f"{ME}: lunch"})


@pytest.mark.parametrize("verb", ["drain", "kick"])
def test_a_command_for_an_island_that_is_not_there_lists_those_that_are(three: Rig, verb: str) -> None:
    [a, *_] = three.started("a", "b", "c")
    for island in ("", "z"):
        with pytest.raises(Malformed, match=f"island '{island}' holds no lease in this run; those that do: a, b, c"):
            command(a, verb, island)


def test_a_command_that_there_is_not_lists_those_that_there_are(three: Rig) -> None:
    x = three.visitor("x")
    with pytest.raises(Malformed, match="there is no command 'halt'; there are pause, resume, drain, kick, snapshot,"):
        command(x, "halt")
    with pytest.raises(Malformed, match=f"at most {LONGEST_REASON} characters, not 1000"):
        command(x, "pause", reason="x" * 1000)
    assert not three.served.ask(lambda run: run.state.paused)
    with pytest.raises(Refused, match="nothing to take a snapshot of"):
        command(x, "snapshot")


def test_a_reason_is_one_line_that_a_terminal_can_show() -> None:
    assert plain("  two\nlines\t\x1b[31mred ") == "two lines [31mred"


def test_a_snapshot_is_taken_at_once(three: Rig) -> None:
    a, b, c = three.started("a", "b", "c")
    f = three.run.fragments[0]
    for visitor in (a, b, c):
        visitor.push(f, draw(f, 1))
    a.fetch(f)
    assert command(a, "snapshot") == "a snapshot is taken, of versions 1, 0, 0"
    found = load_snapshot(three.run.store.root)
    assert found is not None
    assert [outer.version for outer in found.outers] == [1, 0, 0]


def test_a_run_that_was_told_to_stop_is_over_once_everybody_has_left(three: Rig) -> None:
    visitors = three.started("a", "b", "c")
    command(visitors[0], "stop")
    for visitor in visitors:
        assert not three.run.stopped.is_set()
        visitor.leave("told to")
    three.served.call(three.run.stopped.wait())


# -- why ------------------------------------------------------------------------------------------------------------


def test_explain_speaks_of_all_fragments_or_of_one(three: Rig) -> None:
    [a, *_] = three.started("a", "b", "c")
    f = three.run.fragments[1]
    a.push(f, draw(f, 1))
    whole = explained(three, all=True)
    assert whole[0] == "The run is running."
    assert any(line.startswith("Fragment 0 is at version 0") for line in whole)
    assert "  It waits for b, ACTIVE, last heard 0 s ago." in whole
    one = explained(three, fragment=1)
    assert set(one) < set(whole)
    assert not any(line.startswith("Fragment 0") for line in one)
    with pytest.raises(Malformed, match="there is no fragment 2 with rounds; the run has 2, from 0"):
        explained(three, fragment=2)


def test_explain_says_what_the_disk_holds_up(three: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = three.started("a", "b", "c")
    f = three.run.fragments[0]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(three.run.store.files, "create", full)
        patch.setattr("coordinator.run.DISK_RETRY_S", 0.0)
        for visitor in (a, b, c):
            visitor.push(f, draw(f, 1))
        assert a.fetch(f, wait_s=0.0)[0].outcome == "open"
        held = explained(three, all=True)
        why = "the run waits for its disk: [Errno 28] No space left on device"
        assert held[0] == f"The coordinator is not ready: disk: {why}."
        assert "Rounds of fragment 0 that are decided and not folded yet: 1." in held
    assert a.fetch(f)[0].outcome == "committed"
    three.served.call(three.run.settle(30.0))
    assert explained(three, all=True)[0] == "Commits that are in no snapshot yet: 1; one is taken every 1000."
