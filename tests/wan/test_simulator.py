"""The simulator: the same seed plays the same run, sound runs are clean, and every planted fault is found."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from multiprocessing import resource_tracker

import pytest
from click.testing import CliRunner

from wan.sim_plants import PLANTS
from wan.sim_run import Simulation
from wan.simulator import main, play, play_all

SEEDS = 1000
"""Runs that every test run plays; `make simulate` plays more."""
RARE = {
    "hang-up": 150,
    "trust-unsynced-partial": 150,
    "forget-outcomes": 225,
    "forget-superseded": 370,
    "settle-alone": 540,
    "read-while-moving": 1370,
}
"""Where to begin to look for faults that few seeds meet."""
FOUND_WITHIN = 120
"""Seeds within which every planted fault is found."""
HAPPENS = (
    "resumed",
    "Superseded",
    "Overload",
    "StaleEpoch",
    "DeadlineExceeded",
    "CodecError",
    "ledger compacted",
    "joined again in place",
    "applied late",
    "session failed",
)
"""What must come about in some of them, or they say little."""
LAST = re.compile(r"(\d+) schedules, (\d+) violations, \d+\.\d schedules/s")


def test_a_seed_says_everything() -> None:
    lines: list[list[str]] = [[], []]
    results = [Simulation(3, say=into.append).run() for into in lines]
    assert results[0] == results[1]
    assert lines[0] == lines[1]
    assert len(lines[0]) > 50


def test_different_seeds_play_different_runs() -> None:
    assert len({result.trace for result in play(range(5))}) == 5


@pytest.fixture
def tracker() -> None:
    """Python's tracker of resources, which tests before this one may have started and ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        resource_tracker.ensure_running()


@pytest.mark.usefixtures("tracker")
def test_sound_runs_are_clean_and_processes_change_nothing() -> None:
    results = list(play_all(range(SEEDS)))
    assert [r.seed for r in results] == list(range(SEEDS))
    assert not [(r.seed, violation) for r in results for violation in r.violations]
    assert results[26:29] == play(range(26, 29))
    seen = sum((Counter(dict(r.seen)) for r in results), Counter())
    assert not [what for what in HAPPENS if not seen[what]]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str) -> None:
    first = RARE.get(plant, 0)
    found = next(
        (r for seed in range(first, first + FOUND_WITHIN) for r in play(range(seed, seed + 1), plant) if r.violations),
        None,
    )
    assert found, f"{plant} is not found within {FOUND_WITHIN} seeds from {first}"
    assert all(re.fullmatch(r"I\d+", violation.invariant) for violation in found.violations)
    assert not Simulation(found.seed).run().violations


def test_the_command_counts_and_succeeds_where_nothing_is_violated() -> None:
    done = CliRunner().invoke(main, ["--seeds", "2", "--first", "7"])
    assert done.exit_code == 0
    assert LAST.fullmatch(done.output.strip()), done.output
    assert done.output.startswith("2 schedules, 0 violations, ")


def test_the_command_fails_and_says_how_to_replay_a_violation() -> None:
    done = CliRunner().invoke(main, ["--seeds", "1", "--first", "0", "--plant", "apply-twice"])
    assert done.exit_code == 1
    *violations, replay, last = done.output.splitlines()
    assert re.match(r"seed 0 at \d+\.\d+ s: I\d+: fragment ", violations[0])
    assert replay.endswith("replay: python -m wan.simulator --seeds 1 --first 0 --plant apply-twice -v")
    counted = LAST.fullmatch(last)
    assert counted and int(counted[2]) >= len(violations) > 0


def test_the_command_tells_the_story_of_a_run() -> None:
    done = CliRunner().invoke(main, ["--seeds", "1", "--first", "7", "-v"])
    assert done.exit_code == 0
    assert re.search(r"^ +\d+\.\d{3}  ledger: committed ", done.output, re.MULTILINE)


def test_a_fault_that_nobody_planted_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["--plant", "none-such"]).exit_code == 2
