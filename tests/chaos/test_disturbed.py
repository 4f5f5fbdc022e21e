"""Processes that are stopped, cut off, slow, or wrong about the time or their numbers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.nursery import Nursery
from tests.chaos.test_island_killed import lost
from tests.chaos.trial import BRISK, FRAGMENTS, ROUNDS, Trial
from tests.proxy import Proxy, proxied

YEAR_S = 365.0 * 86_400
STEP_S = 0.02


@pytest.fixture
def trial(nursery: Nursery, tmp_path: Path, stack: ExitStack) -> Trial:
    return Trial(nursery, tmp_path, stack, *BRISK)


@pytest.fixture
def calm(nursery: Nursery, tmp_path: Path, stack: ExitStack) -> Trial:
    """A run in which no lease ends."""
    return Trial(nursery, tmp_path, stack, *BRISK, "rounds.lease_s=60")


def stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def test_an_island_that_is_stopped_for_longer_than_its_lease_goes_on_in_the_same_process(trial: Trial) -> None:
    trial.coordinator()
    trial.begin(b="stage-begun:3:stop", step_s=STEP_S)
    island = trial.alive["b"]
    trial.until(lambda: stopped(island.pid), "island b is stopped")
    trial.until(lambda: lost(trial, "b"), "its lease runs out")
    os.kill(island.pid, signal.SIGCONT)
    trial.finish()
    trial.check()
    result = trial.result("b")
    assert result["pid"] == island.pid
    assert result["rejoins"]


def test_a_coordinator_that_is_stopped_for_longer_than_all_leases_goes_on(trial: Trial) -> None:
    coordinator = trial.coordinator("round-recorded:3:stop")
    trial.begin(step_s=STEP_S)
    trial.until(lambda: stopped(coordinator.pid), "the coordinator is stopped")
    trial.until(lambda: trial.logs().count("heartbeat: ") >= 2, "both islands see that it is silent")
    os.kill(coordinator.pid, signal.SIGCONT)
    trial.finish()
    trial.check()
    assert not trial.killed


@pytest.mark.parametrize(
    "heal",
    [
        pytest.param(Proxy.release, id="connections stand"),
        pytest.param(Proxy.cut, id="connections break", marks=pytest.mark.slow),
    ],
)
def test_an_island_that_is_cut_off_for_longer_than_its_lease_goes_on_in_the_same_process(
    trial: Trial, heal: Callable[[Proxy], None]
) -> None:
    trial.coordinator()
    with proxied(trial.address) as line:
        trial.island("a", step_s=STEP_S)
        trial.until(lambda: trial.rows("admitted"), "island a is admitted")
        island = trial.island("b", address=line.address, step_s=STEP_S)
        trial.until(lambda: any(r["entry"]["island"] == "b" for r in trial.rows("accepted")), "island b contributes")
        line.hold_after("up", 0)
        line.hold_after("down", 0)
        trial.until(lambda: lost(trial, "b"), "its lease runs out")
        heal(line)
        trial.finish()
    trial.check()
    result = trial.result("b")
    assert result["pid"] == island.pid
    assert result["rejoins"]


@pytest.mark.slow
def test_the_deadline_follows_an_island_that_takes_three_times_as_long(nursery: Nursery, tmp_path: Path) -> None:
    with ExitStack() as stack:
        overrides = [o for o in BRISK if "grace" not in o]
        trial = Trial(nursery, tmp_path, stack, *overrides, "rounds.grace_s=0.1", "rounds.late=discount")
        trial.coordinator()
        trial.island("a", step_s=0.05)
        trial.until(lambda: trial.rows("admitted"), "island a is admitted")
        trial.island("b", step_s=0.15)
        trial.finish()
        trial.check()
        assert [row for row in trial.rows("committed") if row["round"] >= 3 and set(row["shares"]) >= {"a", "b"}]


def test_an_island_whose_parameters_become_nan_once_goes_back_to_the_anchors(calm: Trial) -> None:
    calm.coordinator()
    calm.island("a")
    calm.until(lambda: calm.rows("admitted"), "island a is admitted")
    calm.island("b", nan_at=8)
    calm.finish()
    calm.check()
    assert [calm.result(name)["rollbacks"] for name in ("a", "b")] == [0, 1]
    spoiled = [row for row in calm.rows("dropped") if row["spoiled"]]
    assert {row["island"] for row in spoiled} == {"b"}
    given = [row["entry"]["island"] for row in calm.rows("accepted")]
    assert (given.count("a"), given.count("b")) == (FRAGMENTS * ROUNDS, FRAGMENTS * ROUNDS - len(spoiled))


def test_wall_clocks_that_jump_by_years_decide_nothing(calm: Trial) -> None:
    calm.coordinator(clock_s=YEAR_S)
    calm.island("a", clock_s=-YEAR_S)
    calm.until(lambda: calm.rows("admitted"), "island a is admitted")
    calm.island("b", clock_s=3 * YEAR_S)
    calm.finish()
    calm.check()
    assert len(calm.rows("accepted")) == 2 * FRAGMENTS * ROUNDS
    assert not calm.rows("suspected")
    assert {row["standing"] for row in calm.rows("gone")} == {"LEFT"}
