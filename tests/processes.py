"""The `diloco` command as processes of their own, none of which outlives its test."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click
import psutil

from diloco import cli

T = TypeVar("T")
DILOCO = str(Path(sys.executable).with_name("diloco"))
RUN_S = 200.0
"""Longest any command or wait of a test takes, on a busy machine."""
HAND_RUN = """
[run]
id = "by-hand"
steps = {steps}
[model]
dim = 16
layers = 2
ffn_dim = 32
sequence_length = 16
"""
HAND_ISLAND = """
[island]
id = "x"
max_restarts = 0
[data]
text = ["{folder}/text.txt"]
[metrics]
dir = "{folder}/metrics"
"""
_MARK = "DILOCO_TEST_FAMILY"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


def diloco_here(*args: str) -> Ended:
    """Runs `diloco ARGS` to its end in this process, which is quick: torch is imported once for all tests."""
    return command_here(cli.cli, *args)


def command_here(command: click.Command, *args: str) -> Ended:
    """Runs one command of `diloco` to its end in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.run(command, list(args)) or 0
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


class Hand:
    """A run by hand: a coordinator, and islands of one rank each on a small model. Within the context of `stack`.

    Args:
        folder: gets the settings, the state, the metrics and a log of each process.
        stack: ends what is still running.
        steps: inner steps of the run.
        run: what else its file says.
    """

    def __init__(self, folder: Path, stack: ExitStack, *, steps: int, run: str) -> None:
        self.folder, self._stack = folder, stack
        self.address = ""
        self.islands: dict[str, Process] = {}
        (folder / "run.toml").write_text(HAND_RUN.format(steps=steps) + run)
        (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 2000)
        (folder / "island.toml").write_text(HAND_ISLAND.format(folder=folder))

    def coordinator(self, listen: str = "127.0.0.1:0", *options: str) -> Process:
        """Starts the coordinator and waits until it listens."""
        command = ["coordinator", f"{self.folder}/run.toml", "--state", f"{self.folder}/state", "--listen", listen]
        process = self._stack.enter_context(background(*command, *options, log=self.folder / "coordinator.log"))
        address = self.folder / "state" / "address"
        wait_until(lambda: address.exists() or not process.running, "the coordinator listens")
        assert process.running, process.output
        self.address = address.read_text()
        return process

    def island_command(self, name: str, *overrides: str) -> list[str]:
        """The arguments that start an island."""
        settings = [part for setting in (f"island.id={name}", *overrides) for part in ("--set", setting)]
        return ["island", f"{self.folder}/island.toml", "--coordinator", self.address, *settings]

    def island(self, name: str, *overrides: str) -> Process:
        """Starts an island."""
        command = self.island_command(name, *overrides)
        self.islands[name] = self._stack.enter_context(background(*command, log=self.folder / f"{name}.log"))
        return self.islands[name]

    def status(self) -> dict[str, Any]:
        """What `diloco status --json` says."""
        ended = diloco_here("status", "--coordinator", self.address, "--json")
        assert ended.code == 0, ended
        status: dict[str, Any] = json.loads(ended.out)
        return status

    def standing(self, name: str) -> dict[str, Any]:
        """What the status says of one island; nothing where it is not known."""
        return next((i for i in self.status()["islands"] if i["id"] == name), {})

    def until_step(self, step: int) -> None:
        """Waits until every island has taken so many steps."""

        def there() -> bool:
            return all(self.standing(name).get("step", 0) >= step for name in self.islands)

        wait_until(there, f"every island has taken {step} steps")

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        """An island's metrics of one kind."""
        rows = [json.loads(line) for line in (self.folder / "metrics" / f"{name}.jsonl").read_text().splitlines()]
        return [row for row in rows if row["kind"] == kind]


def all_end_well(processes: Sequence[subprocess.Popen[Any]], within_s: float = RUN_S) -> None:
    """Waits until all ranks have ended with 0, and leaves none. Fails the test as soon as one has not, or is late."""
    try:
        wait_until(lambda: _all_good([process.poll() for process in processes]), "all ranks have ended", within_s)
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)


def _all_good(codes: Sequence[int | None]) -> bool:
    assert not any(codes), f"a rank failed: {codes}"
    return None not in codes


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = RUN_S) -> T:
    """Polls until `condition` gives something true, and returns that. Fails the test where it never does."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {what}"
        time.sleep(0.02)
    return found


_PORTS = itertools.islice(itertools.cycle(range(20_000, 32_000)), os.getpid() * 37 % 12_000, None)
"""Below those that the kernel gives out, each only once in a while."""


def free_port() -> int:
    """A port that nobody listens on, and that the kernel gives nobody else, be its owner dead for the moment: neither
    who asks for port 0 nor who connects gets it. Prefer port 0 where the command can say which one it took."""
    for port in itertools.islice(_PORTS, 12_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")
