"""A run started by hand, as users do: islands first, then the coordinator, and one island that comes late."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from diloco.errors import ExitCode, RunMismatch
from diloco.layout import Layout, TensorSpec
from island.session import join
from tests.processes import Ended, Hand, diloco, diloco_here, free_port, wait_until

STEPS = 160
"""Enough that the run is not over before it can be held."""
RUN = """
[sync]
every_steps = 4
fragments = 2
strategy = "strided"
[rounds]
start_islands = 2
quorum = 2
grace_s = 300.0
lease_s = 300.0
"""
LINEAR = Layout([TensorSpec("weight", (2, 3)), TensorSpec("bias", (2,))])


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happened in the run of these tests."""

    hand: Hand
    early: dict[str, str]
    """What the first islands had printed before there was a coordinator."""
    held: dict[str, Any]
    """The status while b stood still."""
    other_run: Ended
    """An island that meant another run."""
    other_model: RunMismatch
    """What an island with another model was told."""
    joined: dict[str, Any]
    """The status of the late island once it had joined."""
    codes: dict[str, int]
    """Exit codes of the islands."""
    done: dict[str, Any]
    """The status once all islands had ended."""
    shown: str
    """The same for people."""


def held_up(status: dict[str, Any]) -> dict[str, Any]:
    """The status, once a round waits for b and a has reported its steps; nothing before."""
    waits = any("(b)" in f["waiting_for"] for f in status["fragments"])
    return status if waits and status["islands"][0]["step"] else {}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Plays the run once. While b stands still no round can end, so what comes in between comes in mid-run."""
    with ExitStack() as stack:
        hand = Hand(tmp_path_factory.mktemp("hand"), stack, steps=STEPS, run=RUN)
        hand.address = f"127.0.0.1:{free_port()}"
        first = [hand.island(name) for name in "ab"]
        wait_until(lambda: all("trying again" in i.output for i in first), "the islands look for the coordinator")
        early = {name: island.output for name, island in hand.islands.items()}

        hand.coordinator(hand.address)
        wait_until(lambda: hand.status()["rounds"] > 0, "the first round is committed")
        still = hand.islands["b"].family()
        for process in still:
            process.suspend()
        held = wait_until(lambda: held_up(hand.status()), "a waits for b, and has said so")

        hand.island("c")
        other_run = diloco(*hand.island_command("d", "island.run_id=other"))
        with pytest.raises(RunMismatch) as other_model:
            join(nn.Linear(3, 2), None, hand.address, island_id="e", run_id="by-hand")
        wait_until(lambda: hand.standing("c"), "c has joined")
        joined = hand.standing("c")

        for process in still:
            process.resume()
        codes = {name: island.wait() for name, island in hand.islands.items()}
        shown = diloco_here("status", "--coordinator", hand.address).out
        return Story(
            hand=hand,
            early=early,
            held=held,
            other_run=other_run,
            other_model=other_model.value,
            joined=joined,
            codes=codes,
            done=hand.status(),
            shown=shown,
        )


def test_islands_wait_for_a_coordinator_that_is_not_there_yet(story: Story) -> None:
    for output in story.early.values():
        assert f"no coordinator answers at {story.hand.address} (Connection refused); trying again" in output
    assert story.codes["a"] == story.codes["b"] == ExitCode.OK
    assert "run by-hand, epoch " in story.hand.islands["a"].output


def test_the_status_says_what_a_round_waits_for(story: Story) -> None:
    held = story.held
    assert (held["run_id"], held["phase"], held["steps"]) == ("by-hand", "running", STEPS)
    assert [(i["id"], i["state"], i["ranks"]) for i in held["islands"]] == [("a", "ACTIVE", 1), ("b", "ACTIVE", 1)]
    a, b = held["islands"]
    assert a["epoch"] != b["epoch"]
    assert 0 < a["step"] < STEPS
    assert [f["fragment"] for f in held["fragments"]] == [0, 1]
    assert sum(f["version"] for f in held["fragments"]) == held["rounds"] > 0
    assert any(
        re.match(r"1 more contributions \(b\), for at most \d+ s more", f["waiting_for"]) for f in held["fragments"]
    )


def test_all_islands_end_with_the_digests_of_the_coordinator(story: Story) -> None:
    done = story.done
    assert (done["phase"], done["rounds"], done["rounds_skipped"]) == ("done", 2 * STEPS // 4, 0)
    assert {(i["state"], i["reason"], i["step"]) for i in done["islands"]} == {("LEFT", "finished", STEPS)}
    digests = [f["digest"] for f in done["fragments"]]
    assert len(set(digests)) == 2
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)
    for name in story.hand.islands:
        [end] = story.hand.records(name, "end")
        assert end["digests"].split() == digests
        assert end["versions"].split() == [str(f["version"]) for f in done["fragments"]]


def test_an_island_that_comes_late_takes_up_the_run(story: Story) -> None:
    assert story.codes["c"] == ExitCode.OK
    assert story.joined["epoch"] > max(i["epoch"] for i in story.held["islands"])
    found = re.search(r"run by-hand, epoch (\d+), from step (\d+)", story.hand.islands["c"].output)
    assert found
    assert int(found[1]) == story.joined["epoch"]
    assert 0 < int(found[2]) < STEPS
    contributions = {i["id"]: i["contributions"] for i in story.done["islands"]}
    assert 0 < contributions["c"] < contributions["a"] == contributions["b"] == story.done["rounds"]


def test_an_island_that_means_another_run_is_refused(story: Story) -> None:
    digest = story.done["layout_digest"][:16]
    assert story.other_run.code == ExitCode.REFUSED
    assert story.other_run.err.splitlines()[-1] == (
        f"error: this coordinator serves run 'by-hand' (model layout {digest}), and the island means to join run "
        f"'other' (model layout {digest}): check the address or island.run_id"
    )
    assert "Traceback" not in story.other_run.err


def test_an_island_with_another_model_is_refused(story: Story) -> None:
    told = story.other_model.message
    assert f"run 'by-hand' trains a model with layout {story.done['layout_digest'][:16]}" in told
    assert f"island 'e' has layout {LINEAR.digest[:16]}: tensor 'bias' is missing here" in told


def test_who_was_refused_is_no_part_of_the_run(story: Story) -> None:
    assert [i["id"] for i in story.done["islands"]] == ["a", "b", "c"]


def test_the_status_for_people_says_the_same(story: Story) -> None:
    assert story.shown.startswith(f"run by-hand is done; {story.done['rounds']} rounds committed; participation ")
    for i in story.done["islands"]:
        assert re.search(rf"^ *{i['id']} +LEFT +{i['epoch']} +1 +{STEPS}/{STEPS} ", story.shown, re.MULTILINE)
    for f in story.done["fragments"]:
        assert re.search(rf"^ *{f['fragment']} +{f['version']} +{f['digest']}", story.shown, re.MULTILINE)
