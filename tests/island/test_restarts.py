"""When ranks that failed are started again, and when the island gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import ExitCode
from island import restarts
from island.restarts import FINAL, GivenUp, Restarts, rest_s


@pytest.fixture(autouse=True)
def longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts.random, "uniform", lambda low, high: high)


def play(folder: Path, ends: list[tuple[int, bool]], logs: str = "") -> tuple[int, list[float], int]:
    """Lets ranks end with these (exit code, whether an update was applied); returns the code with which the island gave
    up, how long it rested each time, and how many ends are left over."""
    rests: list[float] = []
    progress = folder / "progress"
    counting = Restarts("x", 2, progress, logs, rests.append)
    ends = list(ends)
    while True:
        code, moved = ends.pop(0)
        assert not progress.exists()
        if moved:
            progress.touch()
        try:
            counting.failed(code)
        except GivenUp as given_up:
            return given_up.code, rests, len(ends)


def test_a_crash_that_repeats_ends_the_island(tmp_path: Path) -> None:
    assert play(tmp_path, [(5, False)] * 9) == (5, [1.0, 2.0], 6)


def test_failures_count_from_the_last_update(tmp_path: Path) -> None:
    ends = [(5, False), (75, False), (5, True), (5, False), (5, True), (5, False), (5, False), (0, True)]
    assert play(tmp_path, ends) == (5, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0], 1)


@pytest.mark.parametrize("code", FINAL)
def test_an_end_that_another_attempt_would_meet_again_is_the_end(code: int, tmp_path: Path) -> None:
    assert play(tmp_path, [(code, False), (0, False)]) == (code, [], 1)


def test_the_log_says_where_to_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    play(tmp_path, [(ExitCode.REFUSED, False)], logs="/var/log/x")
    assert caplog.messages == ["island x: a rank failed with exit code 1 (failure 1); its log is in /var/log/x"]


def test_rests_have_a_bound() -> None:
    assert [rest_s(failures) for failures in (1, 5, 100)] == [1.0, 16.0, 60.0]
