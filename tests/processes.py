"""The `diloco` command as processes of their own, none of which outlives its test."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import psutil

from diloco import cli

T = TypeVar("T")
DILOCO = str(Path(sys.executable).with_name("diloco"))
RUN_S = 120.0
"""Longest any command or wait of a test takes, on a busy machine."""
_MARK = "DILOCO_TEST_FAMILY"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


def diloco_here(*args: str) -> Ended:
    """Runs `diloco ARGS` to its end in this process, which is quick: torch is imported once for all tests."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.run(cli.cli, list(args)) or 0
        except SystemExit as leave:
            code = leave.code
    return Ended(code=code, out=out.getvalue(), err=err.getvalue())


def diloco(*args: str, timeout_s: float = RUN_S) -> Ended:
    """Runs `diloco ARGS` to its end in a process of its own."""
    with TemporaryDirectory() as folder, background(*args, log=Path(folder) / "out", err=Path(folder) / "err") as it:
        code = it.wait(timeout_s)
        return Ended(code=code, out=it.output, err=(Path(folder) / "err").read_text(errors="replace"))


class Process:
    """A `diloco` command in the background, in a session of its own.

    Everything it starts carries a mark in its environment, by which it is found whoever its parent is by then.
    """

    def __init__(self, *args: str, log: Path, err: Path | None = None) -> None:
        self.log = log
        self._mark = uuid.uuid4().hex
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # children would inherit it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("wb") as out, (err or Path(os.devnull)).open("wb") as apart:
            self._popen = subprocess.Popen(
                [DILOCO, *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=apart if err else subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, _MARK: self._mark},
            )
        self.pid = self._popen.pid

    @property
    def output(self) -> str:
        """What the command has printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether the command has not ended yet."""
        return self._popen.poll() is None

    def signal(self, which: signal.Signals) -> None:
        """Sends a signal to the command alone."""
        self._popen.send_signal(which)

    def wait(self, timeout_s: float = RUN_S) -> int:
        """Waits for the command to end; returns its exit code."""
        return self._popen.wait(timeout_s)

    def family(self) -> list[psutil.Process]:
        """The command and everything it has started, as far as it still runs."""
        return [process for process in psutil.process_iter() if _environ(process).get(_MARK) == self._mark]

    def kill(self) -> None:
        """Ends the whole family."""
        while family := self.family():
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=RUN_S)
        self._popen.wait(RUN_S)


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # ended, a zombie, or another user's
        return {}


@contextmanager
def background(*args: str, log: Path, err: Path | None = None) -> Iterator[Process]:
    """Runs `diloco ARGS` during the context; its output goes to `log`, its errors too unless `err` is given."""
    process = Process(*args, log=log, err=err)
    try:
        yield process
    finally:
        process.kill()


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = RUN_S) -> T:
    """Polls until `condition` gives something true, and returns that. Fails the test where it never does."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {what}"
        time.sleep(0.02)
    return found


def free_port() -> int:
    """A port that nobody listens on. Prefer port 0 where the command can say which one it took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
