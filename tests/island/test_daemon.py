"""What ends a daemon: its run, a signal, a notice, ranks that failed too often; and nodes that cannot meet."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from diloco.errors import ExitCode
from island import daemon, elastic
from island.config import IslandConfig, load_island
from island.daemon import FOLDER, LOCK
from island.restarts import GivenUp, Restarts
from tests.processes import free_port

Work = Callable[[Restarts], int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs a daemon of which each launch does the next of these."""

    def play(*launches: Work, settings: str = "", over: bool = False) -> int:
        left = list(launches)

        def launch(config: IslandConfig, path: Path, logs: Path, restarts: Restarts) -> int:
            assert load_island(path.read_text(), "the ranks' settings").value == config
            return left.pop(0)(restarts)

        monkeypatch.setattr(elastic, "launch", launch)
        monkeypatch.setattr(daemon, "ended", lambda config: over)
        config = load_island(f'[island]\nid = "x"\nmax_restarts = 2\n{settings}', "the test").value
        code = daemon.run(config)
        assert not left
        return code

    handlers = {which: signal.getsignal(which) for which in daemon.ASKED}
    with monkeypatch.context():
        for name in ("DILOCO_DAEMON_PID", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setattr(daemon.time, "sleep", lambda seconds: None)
        yield play
    for which, handler in handlers.items():
        signal.signal(which, handler)


def receive(which: signal.Signals) -> Work:
    """A launch during which a signal comes."""

    def work(restarts: Restarts) -> int:
        os.kill(os.getpid(), which)
        signal.pause()
        return ExitCode.INTERNAL

    return work


def give_up(restarts: Restarts) -> int:
    raise GivenUp(ExitCode.DIVERGED)


def lose(restarts: Restarts) -> int:
    raise RendezvousConnectionError("the host is gone")


def end(restarts: Restarts) -> int:
    return ExitCode.OK


def test_a_run_that_is_complete(run: Callable[..., int]) -> None:
    assert run(end) == ExitCode.OK


def test_ranks_that_failed_too_often(run: Callable[..., int]) -> None:
    assert run(give_up) == ExitCode.DIVERGED


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_leave(which: signal.Signals, run: Callable[..., int]) -> None:
    assert run(receive(which)) == ExitCode.OK


def test_an_interrupt(run: Callable[..., int]) -> None:
    assert run(receive(signal.SIGINT)) == ExitCode.INTERRUPTED


def test_a_notice_has_the_island_leave(run: Callable[..., int], tmp_path: Path) -> None:
    notice = tmp_path / "notice"

    def wait(restarts: Restarts) -> int:
        notice.touch()
        signal.pause()
        return ExitCode.INTERNAL

    settings = f'[preemption]\nsource = "file:{notice}"\nevery_s = 0.01\n'
    assert run(wait, settings=settings) == ExitCode.OK


def test_a_daemon_removes_what_killed_ones_have_left_behind_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, beginning, others = (tmp_path / name for name in (f"{FOLDER}killed", f"{FOLDER}beginning", "others"))
    for folder in (killed, beginning, others):
        folder.mkdir()
    for folder in (killed, others):
        (folder / LOCK).touch()
    with daemon.own_folder() as first:
        with daemon.own_folder() as second:
            assert {*tmp_path.iterdir()} == {first, second, beginning, others}
        assert {*tmp_path.iterdir()} == {first, beginning, others}


def test_a_lost_rendezvous_is_looked_for_again(run: Callable[..., int]) -> None:
    assert run(lose, lose, end) == ExitCode.OK


def test_a_rendezvous_that_stays_lost_ends_the_island(run: Callable[..., int]) -> None:
    assert run(lose, lose, lose) == ExitCode.TIMEOUT


def test_a_spare_ends_where_the_run_has_ended_meanwhile(run: Callable[..., int]) -> None:
    assert run(lose, over=True) == ExitCode.OK


def test_a_coordinator_that_does_not_answer_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "ASK_S", 0.1)
    settings = f'[island]\nid = "x"\ncoordinator = "127.0.0.1:{free_port()}"\n'
    assert not daemon.ended(load_island(settings, "the test").value)
