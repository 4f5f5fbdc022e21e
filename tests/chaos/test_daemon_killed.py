"""An island with a daemon loses one rank, all ranks, or the daemon at every step: it returns, and no bit is lost."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from diloco.failpoints import ISLAND
from tests.chaos.nursery import Nursery
from tests.chaos.trial import FRAGMENTS, PATIENT, ROUNDS, Trial

STEPS = {
    "site-begun": (1,),
    "join-answered": (1,),
    "take-up-half": (1,),
    "ready": (1,),
    "edge-begun": (11,),
    "stage-begun": (5,),
    "push-encoded": (5,),
    "push-begun": (5,),
    "push-sending": (10,),
    "push-sent": (5,),
    "push-answered": (5,),
    "outcome-asked": (7,),
    "fetch-receiving": (1, 20),
    "anchor-moved": (7,),
    "mixed": (8,),
    "checkpoint-staged": (3,),
    "checkpoint-written": (3,),
    "checkpoint-complete": (3,),
    "leave-begun": (1,),
}
"""At which passings of each step something is killed, each in a run of its own: before the run begins, or once there
are checkpoints. What is received first are anchors, and later updates."""
FIRST = {"join-answered", "checkpoint-complete", "leave-begun"}
"""Steps of rank 0 alone; the others are those of rank 1 here."""
BEGUN = "ready:1"
"""Where the run may begin without the island, which has no checkpoint yet, and then does not train all of it."""
WHOM = ("rank", "ranks", "daemon")
CASES = [(whom, f"{step}:{passing}") for step, passings in STEPS.items() for passing in passings for whom in WHOM]
USUAL = {
    ("daemon", "fetch-receiving:1"),
    ("rank", "push-sending:10"),
    ("daemon", "anchor-moved:7"),
    ("ranks", "checkpoint-written:3"),
}
"""What is played with every run of the tests; the others are slow."""


def test_every_step_of_an_island_is_played() -> None:
    assert set(STEPS) == set(ISLAND)
    assert set(CASES) > USUAL


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of a run in which nothing is killed."""
    with ExitStack() as stack:
        trial = Trial(nursery, tmp_path_factory.mktemp("undisturbed"), stack, *PATIENT)
        begin(trial)
        return end(trial)


def begin(trial: Trial, failpoint: str = "", rank: int = 0) -> None:
    """Starts the coordinator, island a, which brings the first parameters, and island b with its daemon."""
    trial.coordinator()
    trial.island("a", run=f"{trial.folder}/run.toml")
    trial.until(lambda: trial.rows("admitted"), "island a is admitted")
    trial.daemon("b", failpoint, rank)


def end(trial: Trial) -> list[str]:
    """Plays a run to its end, to which both islands have contributed all along; returns its digests."""
    trial.finish()
    trial.check()
    kinds = Counter(row["kind"] for row in trial.rows())
    assert (kinds["accepted"], kinds["committed"], kinds["folded"]) == tuple(n * FRAGMENTS * ROUNDS for n in (2, 1, 1))
    return trial.digests()


@pytest.mark.parametrize(
    ("whom", "failpoint"),
    [pytest.param(*case, marks=[] if case in USUAL else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_an_island_whose_processes_are_killed_at_any_step_returns_with_the_same_bits(
    nursery: Nursery, tmp_path: Path, stack: ExitStack, undisturbed: list[str], whom: str, failpoint: str
) -> None:
    trial = Trial(nursery, tmp_path, stack, *PATIENT)
    begin(trial, f"{failpoint}:stop", rank=0 if failpoint.partition(":")[0] in FIRST else 1)
    daemon = psutil.Process(trial.alive["b"].pid)
    trial.until(lambda: stopped(daemon), "a rank stands at the step")
    ranks = daemon.children()
    assert len(ranks) == 2
    for process in {"rank": stopped(daemon), "ranks": ranks, "daemon": [daemon]}[whom]:
        process.kill()
    digests = end(trial)
    assert [name for name, _ in trial.killed] == ["b"] * (whom == "daemon")
    trial.until(lambda: not any(map(alive, ranks)), "the ranks of the first life have ended")
    assert digests == undisturbed or failpoint == BEGUN
    assert not [*tmp_path.glob("diloco-island-*")], "a daemon has left its folder behind"


def stopped(daemon: psutil.Process) -> list[psutil.Process]:
    """The ranks of a daemon that a signal has stopped."""
    return [rank for rank in daemon.children() if rank.status() == psutil.STATUS_STOPPED]


def alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; whoever it is left to need not have asked for its exit code."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
