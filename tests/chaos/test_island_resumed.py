"""An island with checkpoints is killed at every step of its protocol and started again: it ends with the same bits."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.failpoints import ISLAND
from tests.chaos.nursery import Nursery
from tests.chaos.trial import PATIENT, Trial

EVERY = 3
"""Steps between two checkpoints; rounds are sent and applied at other steps, and some at the same."""
WIRES = {"bf16": (), "int4": ("wire.up=int4", "wire.down=int8"), "sparse": ("wire.up=topk-64", "wire.down=int4")}
STEPS = {
    "edge-begun": 11,
    "stage-begun": 5,
    "push-encoded": 5,
    "push-begun": 5,
    "push-sending": 20,
    "push-sent": 5,
    "push-answered": 6,
    "outcome-asked": 7,
    "fetch-receiving": 18,
    "anchor-moved": 7,
    "mixed": 8,
    "checkpoint-staged": 3,
    "checkpoint-written": 3,
    "checkpoint-complete": 3,
}
"""At which passing of each step it is killed; by then there are checkpoints, or one is about to be."""
BEFORE = {"site-begun", "join-answered", "take-up-half", "ready", "leave-begun"}
"""Steps that are before the first checkpoint, or after the last round."""
CASES = [f"{step}:{passing}" for step, passing in STEPS.items()]
USUAL = {("int4", "anchor-moved:7"), ("sparse", "checkpoint-complete:3")}
"""What is played with every run of the tests; the others are slow."""


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By wire, the digests of runs in which nobody is killed and nothing is kept; filled as they are played."""
    return {}


def test_every_step_of_an_island_is_played() -> None:
    assert set(STEPS) | BEFORE == set(ISLAND)


def play(trial: Trial, failpoint: str = "", **options: int) -> list[str]:
    trial.coordinator()
    trial.begin(b=failpoint, **options)
    trial.finish()
    trial.check()
    return trial.digests()


@pytest.mark.parametrize(
    ("wire", "failpoint"),
    [
        pytest.param(wire, case, marks=[] if (wire, case) in USUAL else pytest.mark.slow, id=f"{wire}-{case}")
        for wire in WIRES
        for case in CASES
    ],
)
def test_an_island_that_is_killed_ends_with_the_same_bits(
    nursery: Nursery, tmp_path: Path, stack: ExitStack, undisturbed: dict[str, list[str]], wire: str, failpoint: str
) -> None:
    if wire not in undisturbed:
        with ExitStack() as own:
            undisturbed[wire] = play(Trial(nursery, tmp_path / "undisturbed", own, *PATIENT, *WIRES[wire]))
    trial = Trial(nursery, tmp_path / "killed", stack, *PATIENT, *WIRES[wire])
    assert play(trial, failpoint, checkpoint_every=EVERY) == undisturbed[wire]
    assert [name for name, _ in trial.killed] == ["b"]
    assert trial.result("b")["exact"]
