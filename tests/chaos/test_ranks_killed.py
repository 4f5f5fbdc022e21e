"""Real islands of several ranks with checkpoints: one rank or all are killed, and they go on, also on other ranks."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.errors import ExitCode
from diloco.failpoints import VARIABLE
from tests.processes import Hand, Process, background, diloco_here, wait_until

RUN = """
[sync]
strategy = "strided"
fragments = 2
every_steps = 4
overlap_steps = 1
[wire]
up = "int4"
down = "int8"
[rounds]
lease_s = 120.0
grace_s = 120.0
[snapshot]
keep = 3
"""
STEPS = 24


def start(hand: Hand, stack: ExitStack, ranks: int, *settings: str, log: str = "a") -> Process:
    own = ("checkpoint.url=" + str(hand.folder / "kept"), "checkpoint.every_steps=4", f"mesh.ranks={ranks}", *settings)
    return stack.enter_context(background(*hand.island_command("a", *own), log=hand.folder / f"{log}.log"))


def begin(folder: Path, stack: ExitStack) -> Hand:
    folder.mkdir()
    hand = Hand(folder, stack, steps=STEPS, run=RUN)
    hand.coordinator()
    return hand


def digests(hand: Hand) -> list[str]:
    """Those of the coordinator, which the island had in the end."""
    [end] = hand.records("a", "end")
    found = [f["digest"] for f in hand.status()["fragments"]]
    assert end["digests"].split()[: len(found)] == found
    assert diloco_here("ledger", "verify", str(hand.folder / "state")).code == 0
    return found


@pytest.mark.slow
def test_a_rank_that_is_killed_again_and_again_costs_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        hand = begin(tmp_path / "undisturbed", stack)
        process = start(hand, stack, 2)
        assert process.wait() == ExitCode.OK, process.output
        undisturbed = digests(hand)
    with ExitStack() as stack:
        hand = begin(tmp_path / "killed", stack)
        monkeypatch.setenv(VARIABLE, "checkpoint-complete:2")  # which only rank 0 passes, in each of its lives
        process = start(hand, stack, 2, "island.max_restarts=2")
        assert process.wait() == ExitCode.OK, process.output
        assert "going on exactly from step 8" in process.output
        assert digests(hand) == undisturbed


@pytest.mark.slow
def test_an_island_goes_on_with_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        hand = begin(tmp_path / "run", stack)
        monkeypatch.setenv(VARIABLE, "checkpoint-complete:2")
        for life, ranks in enumerate((2, 1)):
            process = start(hand, stack, ranks, "island.max_restarts=0", log=f"life-{life}")
            assert process.wait() != ExitCode.OK, process.output
        assert "going on exactly from step 8" in process.output
        monkeypatch.delenv(VARIABLE)
        process = start(hand, stack, 2)
        assert process.wait() == ExitCode.OK, process.output
        assert "going on exactly from step 16" in process.output
        assert len(digests(hand)) == 2
        assert hand.standing("a")["contributions"] == 2 * STEPS // 4


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGUSR1])
def test_an_island_that_is_asked_to_leave_goes_on_where_it_left(tmp_path: Path, which: signal.Signals) -> None:
    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=100_000, run=RUN)
        hand.coordinator()
        process = start(hand, stack, 2, "checkpoint.every_steps=100000")
        wait_until(lambda: hand.standing("a").get("step", 0) >= 10, "it trains")
        process.signal(which)
        assert process.wait() == ExitCode.OK, process.output
        [end] = hand.records("a", "end")
        process = start(hand, stack, 1, log="again")
        wait_until(lambda: f"going on exactly from step {end['step']}" in process.output, "it goes on")
        process.signal(which)
        assert process.wait() == ExitCode.OK, process.output
