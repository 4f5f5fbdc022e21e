"""When the daemon starts ranks again, and when it gives up."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from diloco.errors import ExitCode
from island import daemon
from island.config import PROGRESS, IslandConfig, load_island

Script = Callable[[list[tuple[int, bool]]], tuple[int, list[float], int]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Runs a daemon whose ranks end with these (exit code, whether an update was applied); returns its exit code, how
    long it rested each time, and how many starts are left over."""

    def run(ends: list[tuple[int, bool]]) -> tuple[int, list[float], int]:
        rests: list[float] = []

        def launch(config: IslandConfig, settings: Path, logs: Path) -> int:
            code, progress = ends.pop(0)
            assert not settings.with_name(PROGRESS).exists()
            if progress:
                settings.with_name(PROGRESS).touch()
            return code

        monkeypatch.setattr(daemon, "_launch", launch)
        monkeypatch.setattr(daemon.time, "sleep", rests.append)
        monkeypatch.setattr(daemon.random, "uniform", lambda low, high: high)
        config = load_island('[island]\nid = "x"\nmax_restarts = 2\n', "the test").value
        return daemon.run(config), rests, len(ends)

    with monkeypatch.context():
        for name in ("DILOCO_DAEMON_PID", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
            monkeypatch.setenv(name, "1")
        yield run


def test_a_crash_that_repeats_ends_the_island(play: Script) -> None:
    assert play([(5, False)] * 9) == (5, [1.0, 2.0], 6)


def test_failures_count_from_the_last_update(play: Script) -> None:
    ends = [(5, False), (75, False), (5, True), (5, False), (5, True), (5, False), (5, False), (0, True)]
    assert play(ends) == (5, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0], 1)


@pytest.mark.parametrize("code", [*daemon.FINAL, ExitCode.OK, ExitCode.INTERRUPTED])
def test_an_end_that_another_attempt_would_meet_again_is_the_end(code: int, play: Script) -> None:
    assert play([(code, False), (0, False)]) == (code, [], 1)


@pytest.mark.parametrize(("which", "code"), [(signal.SIGTERM, ExitCode.OK), (signal.SIGINT, ExitCode.INTERRUPTED)])
def test_a_signal_ends_a_rest(which: signal.Signals, code: int, play: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def received(failures: int) -> int:
        raise SignalException("received", which)

    monkeypatch.setattr(daemon, "_rest", received)
    assert play([(5, False), (0, False)]) == (code, [], 1)


def test_rests_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(daemon.time, "sleep", rests.append)
    for failures in (1, 5, 100):
        daemon._rest(failures)
    assert 0.5 <= rests[0] <= 1.0
    assert 8.0 <= rests[1] <= 16.0
    assert 30.0 <= rests[2] <= 60.0
