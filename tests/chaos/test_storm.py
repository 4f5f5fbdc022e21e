"""Several processes of a run are killed, some again and again; contributions come late meanwhile."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.failpoints import COORDINATOR, ISLAND
from tests.chaos.nursery import Nursery
from tests.chaos.trial import BRISK, FRAGMENTS, PATIENT, ROUNDS, Trial

HASTY = (
    "rounds.lease_s=2",
    "rounds.grace_s=0",
    "rounds.deviations=0",
    "rounds.start_islands=2",
    "rounds.deadline_s=25",
)
"""Rounds end with the first contribution; the other island's come late and count by their policy."""
VARIED = {
    "sync.max_steps_without_coordinator": (0, 2, 500),
    "sync.overlap_steps": (0, 1, 3),
    "sync.alpha": (0.0, 0.5),
    "wire.up": ("fp32", "bf16"),
    "wire.down": ("fp32", "bf16"),
    "snapshot.every_rounds": (1, 3),
    "snapshot.keep": (1, 3),
}
LATE = ("rounds.late=discount", "rounds.late_rounds=8")


@pytest.mark.parametrize(
    "failpoint",
    [
        pytest.param(name, marks=[] if name == "push-named:9" else pytest.mark.slow)
        for name in (
            "push-chunk:20",
            "push-named:9",
            "push-recorded:9",
            "round-recorded:4",
            "fold-written:4",
            "fetch-chunk:20",
        )
    ],
)
def test_a_coordinator_that_is_killed_while_contributions_come_late(
    nursery: Nursery, tmp_path: Path, stack: ExitStack, failpoint: str
) -> None:
    trial = Trial(nursery, tmp_path, stack, *HASTY, *LATE)
    trial.coordinator(failpoint)
    trial.island("a", step_s=0.03)
    trial.until(lambda: trial.rows("admitted"), "island a is admitted")
    trial.island("b", step_s=0.05)
    trial.finish()
    trial.check()
    assert trial.rows("carried")
    assert [name for name, _ in trial.killed] == ["coordinator"]


@pytest.mark.slow
def test_a_coordinator_none_of_whose_lives_folds_twice(nursery: Nursery, tmp_path: Path, stack: ExitStack) -> None:
    trial = Trial(nursery, tmp_path, stack, *PATIENT)
    trial.lives["coordinator"] = ["fold-written:2"] * FRAGMENTS * ROUNDS
    trial.coordinator("fold-written:2")
    trial.begin()
    trial.finish()
    trial.check()
    assert len(trial.killed) >= FRAGMENTS * ROUNDS / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_killed_the_run_ends_well(nursery: Nursery, tmp_path: Path, stack: ExitStack, seed: int) -> None:
    chance = random.Random(seed)

    def draw(steps: dict[str, str], lives: int) -> list[str]:
        return [f"{chance.choice(sorted(steps))}:{chance.randint(1, 9)}" for _ in range(lives)]

    settings = chance.choice([BRISK, (*BRISK, *LATE), (*HASTY, *LATE)])
    varied = [f"{key}={chance.choice(values)}" for key, values in VARIED.items()]
    trial = Trial(nursery, tmp_path, stack, *settings, *varied)
    trial.lives = {"coordinator": draw(COORDINATOR, 3), "a": draw(ISLAND, 2), "b": draw(ISLAND, 2)}
    [first], [a], [b] = draw(COORDINATOR, 1), draw(ISLAND, 1), draw(ISLAND, 1)
    trial.coordinator(first)
    trial.begin(a=a, b=b, step_s=0.02)
    trial.finish()
    trial.check()
