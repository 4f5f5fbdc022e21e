"""Processes whose parent is killed end with it, whatever they do."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from island.ties import Workers
from tests.island.data.support import read_ahead

WITHIN_S = 60.0
"""Longest that this takes on a busy machine."""
PARENT = """
import os, signal, sys
from island.ties import tie
ready, told = os.pipe()
parent = os.getpid()
child = os.fork()
if not child:
    tie(parent)
    os.write(told, b"x")
    {then}
os.read(ready, 1)
{wait}
print("tied", flush=True)
os.kill(parent, signal.SIGKILL)
"""
WAYS = {
    "waits": ("signal.pause()", ""),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "os.waitid(os.P_PID, child, os.WSTOPPED)"),
    "hears no signal": ("signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); signal.pause()", ""),
}

RANK = """
import os, signal
from island.data import Cursor
from tests.island.data.support import numbered, reader
if __name__ == "__main__":
    batches = reader(numbered(spans=20), Cursor.at([0], 0), workers=2)
    {then}
    os.kill(os.getpid(), signal.SIGKILL)
"""


def well(queue: Any) -> None:
    queue.put(bytes(2**20))
    atexit.register(lambda: print("at the end"))
    print("well")


def by_itself(queue: Any) -> None:
    queue.put(b"")
    sys.exit(3)


def with_an_error(queue: Any) -> None:
    queue.put(b"")
    raise ValueError("of the work")


def at_work(queue: Any) -> None:
    queue.put(b"")
    pytest.importorskip("pyarrow")
    read_ahead()


ENDS: dict[Callable[[Any], None], tuple[int, str, str]] = {
    well: (0, "well\nat the end\n", ""),
    by_itself: (3, "", ""),
    with_an_error: (1, "", "ValueError: of the work\n"),
    at_work: (0, "", ""),
}
"""What a worker does, its exit code, what it puts out, and what it says at the end of its errors."""


@pytest.mark.parametrize("work", ENDS)
def test_a_worker_ends_as_its_work_does_and_loses_nothing(
    work: Callable[[Any], None], capfd: pytest.CaptureFixture[str]
) -> None:
    workers = Workers()
    queue = workers.Queue()
    worker = workers.Process(target=work, args=(queue,))
    worker.start()
    sent = queue.get(timeout=WITHIN_S)
    try:
        worker.join(WITHIN_S)
    finally:
        worker.kill()
    code, out, error = ENDS[work]
    told = capfd.readouterr()
    assert (worker.exitcode, told.out) == (code, out)
    assert told.err.endswith(error) and bool(told.err) == bool(error)
    assert len(sent) == (2**20 if work is well else 0)


def output(*args: str) -> tuple[int, bytes]:
    """The exit code of a Python program, and all that it and its children have put out when the last of them ends."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, *args], stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as parent:
        try:
            out, _ = parent.communicate(timeout=WITHIN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    return parent.returncode, out


@pytest.mark.parametrize("way", WAYS)
def test_a_process_ends_with_its_parent(way: str) -> None:
    then, wait = WAYS[way]
    assert output("-c", PARENT.format(then=then, wait=wait)) == (-signal.SIGKILL, b"tied\n")


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    assert output("-c", "from island.ties import tie; tie(2**30); print('goes on')") == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize("then", ["pass", "batches.next()"], ids=["importing", "reading"])
def test_workers_of_the_data_end_with_their_rank(then: str, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(then=then))
    assert output(str(script)) == (-signal.SIGKILL, b"")
