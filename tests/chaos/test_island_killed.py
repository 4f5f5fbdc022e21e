"""An island is killed at every step of its protocol, and started again: the run goes on without it, then with it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.failpoints import ISLAND
from tests.chaos.nursery import Nursery
from tests.chaos.trial import BRISK, ENDS, LEASE_S, Trial

LATE = "rounds.late=discount"
STEPS = {
    "site-begun": (1,),
    "join-answered": (1,),
    "take-up-half": (1,),
    "ready": (1,),
    "edge-begun": (7,),
    "stage-begun": (3,),
    "push-encoded": (3,),
    "push-begun": (3,),
    "push-sending": (2, 8),
    "push-sent": (3,),
    "push-answered": (3, 12),
    "outcome-asked": (4,),
    "fetch-receiving": (2, 12),
    "anchor-moved": (3,),
    "mixed": (3, 12),
    "checkpoint-staged": (2,),
    "checkpoint-written": (2,),
    "checkpoint-complete": (1, 2),
    "leave-begun": (1,),
}
"""At which passings of each step an island is killed, each in a run of its own."""
USUAL = {"push-sending:8", "anchor-moved:3"}
"""What is played with every run of the tests; the others are slow."""
CASES = [f"{step}:{passing}" for step, passings in STEPS.items() for passing in passings]
BEFORE = "site-begun:1"
"""Where it has no lease yet that could end."""
SLACK_S = 5.0
"""What a busy machine may take to do what is due."""


def test_every_step_of_an_island_is_played() -> None:
    assert set(STEPS) == set(ISLAND)
    assert set(CASES) > USUAL


@pytest.mark.parametrize(
    "failpoint", [pytest.param(c, marks=[] if c in USUAL else pytest.mark.slow, id=c) for c in CASES]
)
def test_an_island_that_is_killed_at_any_step_comes_back(
    nursery: Nursery, tmp_path: Path, stack: ExitStack, failpoint: str
) -> None:
    number = CASES.index(failpoint)
    trial = Trial(nursery, tmp_path, stack, *BRISK, *([LATE] if number % 2 else []))
    trial.coordinator()
    if number % 4 < 2 and failpoint != BEFORE:
        trial.held.add("b")  # it comes back when its lease is over; else at once
    trial.begin(b=failpoint, step_s=0.02, checkpoint_every=5)
    trial.until(lambda: trial.killed, "island b is killed")
    if trial.held:
        trial.until(lambda: lost(trial, "b") or trial.alive["a"].code == 0, "the lease of island b runs out")
        trial.again("b")
    trial.finish()
    trial.check()
    assert [name for name, _ in trial.killed] == ["b"]
    check_others_went_on(trial)
    assert not [row for row in trial.rows(*ENDS) if "deadline" in row["reason"]]


@pytest.mark.slow
def test_an_island_that_is_killed_while_it_brings_the_first_parameters(
    nursery: Nursery, tmp_path: Path, stack: ExitStack
) -> None:
    trial = Trial(nursery, tmp_path, stack, *BRISK)
    trial.coordinator()
    trial.begin(a="push-sending:3")
    trial.finish()
    trial.check()
    assert [name for name, _ in trial.killed] == ["a"]


def lost(trial: Trial, name: str) -> bool:
    return any(row["island"] == name and row["standing"] == "LOST" for row in trial.rows("gone"))


def check_others_went_on(trial: Trial) -> None:
    """No round waited for longer than the lease of an island that was killed."""
    [(_, at)] = trial.killed
    started = trial.rows("moved")[0]["at"]
    after = [row["at"] for row in trial.rows(*ENDS) if row["at"] > at]
    if after and started < at:
        tick_s = LEASE_S / 10
        assert after[0] - at < LEASE_S + tick_s + SLACK_S
