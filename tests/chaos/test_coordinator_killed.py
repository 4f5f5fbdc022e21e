"""The coordinator is killed at every step of its protocol, and started again: the run ends with the same bits."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.failpoints import COORDINATOR
from tests.chaos.nursery import Nursery
from tests.chaos.trial import FRAGMENTS, PATIENT, ROUNDS, Trial

LATE = "rounds.late=discount"
STEPS = {
    "join-begun": (1, 2),
    "join-recorded": (1, 2),
    "seed-received": (1,),
    "plant-begun": (1,),
    "plant-saved": (1,),
    "plant-recorded": (1,),
    "push-announced": (2, 4),
    "push-chunk": (3, 14),
    "push-whole": (4,),
    "push-named": (3,),
    "push-recorded": (3, 4),
    "round-decided": (3,),
    "round-recorded": (3, 2 * ROUNDS),
    "fold-begun": (3,),
    "fold-computed": (3,),
    "fold-written": (3,),
    "fold-recorded": (3,),
    "snapshot-fragments": (1, 3),
    "snapshot-manifest": (1, 3),
    "compact-begun": (1,),
    "compact-done": (1,),
    "fetch-chunk": (3, 14),
}
"""At which passings of each step the coordinator is killed, each in a run of its own."""
USUAL = {"plant-recorded:1", "push-chunk:14", "push-named:3", "push-recorded:4", "round-recorded:3", "fold-written:3"}
"""What is played with every run of the tests; the others are slow."""
CASES = [f"{step}:{passing}" for step, passings in STEPS.items() for passing in passings]


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of a run in which nobody is killed."""
    with ExitStack() as stack:
        trial = Trial(nursery, tmp_path_factory.mktemp("undisturbed"), stack, *PATIENT)
        return play(trial)


def play(trial: Trial, failpoint: str = "", joins: int = 2) -> list[str]:
    """Plays a run to its end; returns its digests."""
    trial.coordinator(failpoint)
    trial.begin()
    trial.finish()
    trial.check()
    kinds = Counter(row["kind"] for row in trial.rows())
    assert kinds["admitted"] == joins
    assert (kinds["accepted"], kinds["committed"], kinds["folded"]) == tuple(n * FRAGMENTS * ROUNDS for n in (2, 1, 1))
    assert [trial.result(name)["rejoins"] for name in ("a", "b")] == [0, 0]
    return trial.digests()


def test_every_step_of_the_coordinator_is_played() -> None:
    assert set(STEPS) == set(COORDINATOR)
    assert set(CASES) > USUAL


@pytest.mark.parametrize(
    "failpoint", [pytest.param(c, marks=[] if c in USUAL else pytest.mark.slow, id=c) for c in CASES]
)
def test_a_coordinator_that_is_killed_at_any_step_ends_with_the_same_bits(
    nursery: Nursery, tmp_path: Path, stack: ExitStack, undisturbed: list[str], failpoint: str
) -> None:
    late = [LATE] if CASES.index(failpoint) % 2 else []
    trial = Trial(nursery, tmp_path, stack, *PATIENT, *late)
    # An island whose answer to a join was lost asks again, and gets another epoch.
    joins = 3 if failpoint.startswith("join-recorded") else 2
    assert play(trial, failpoint, joins) == undisturbed
    assert [name for name, _ in trial.killed] == ["coordinator"], "the step was not passed"
