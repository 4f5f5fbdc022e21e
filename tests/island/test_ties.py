"""Processes whose parent is killed end with it, whatever they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

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
