"""Processes that begin at once: a process that has imported everything forks one whenever it is asked to.

Each is a process of its own all the same, with its own threads, sockets and signals; only the seconds that imports
take are spent once. The nursery itself starts no thread and opens no connection before it forks.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.processes import wait_until

ROOT = Path(__file__).parents[2]
CASE_S = 30.0
"""Longest that a process may take to come to what a test waits for."""


class Nursery:
    """Starts processes. They end with it."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def start(self, kind: str, args: list[str], log: Path, env: Mapping[str, str]) -> Child:
        """Starts `diloco ARGS` ("diloco", or "daemon" whose ranks begin at once too) or a scripted island ("island").

        Its output is added to `log`.
        """
        return Child(self, int(self.ask(kind=kind, args=args, log=str(log), env=dict(env))), log)

    def ask(self, **request: Any) -> Any:
        """What the nursery answers."""
        assert self._popen.stdin
        assert self._popen.stdout
        self._popen.stdin.write(json.dumps(request) + "\n")
        self._popen.stdin.flush()
        return json.loads(self._popen.stdout.readline())

    def close(self) -> None:
        """Ends all that is left."""
        self._popen.communicate(timeout=CASE_S)


@dataclass
class Child:
    """A process from the nursery."""

    nursery: Nursery
    pid: int
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, below 0 for a signal; None while it runs."""
        if self.code is None:
            self.code = self.nursery.ask(poll=self.pid)
        return self.code

    def signal(self, which: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, which)

    def wait(self) -> int:
        """Waits for it to end; returns its exit code."""
        wait_until(lambda: self.poll() is not None, f"process {self.pid} ends: {self.log}", CASE_S)
        assert self.code is not None
        return self.code

    def end(self) -> None:
        """Kills it, if it still runs."""
        self.signal(signal.SIGKILL)
        self.wait()


# -- in the nursery ---------------------------------------------------------------------------------------------------


def serve() -> NoReturn:
    """Answers requests until there are no more; never returns."""
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            alive.discard(pid)
        else:
            answer = os.fork()
            if not answer:
                become(**request)
            alive.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def become(kind: str, args: list[str], log: str, env: dict[str, str]) -> NoReturn:
    """Is another process from now on. Ends with that one's exit code."""
    with open(os.devnull, "rb") as nothing, open(log, "ab") as out:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(env)
    tempfile.tempdir = None  # it follows the environment
    if "CLOCK" in env:
        disturb_clock(float(env["CLOCK"]))
    live(partial(run, kind, args))


def live(work: Callable[[], int]) -> NoReturn:
    """Does the work of a process, and ends it with the exit code of that."""
    code: Any = 1
    try:
        code = work()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # to take apart all that was imported takes seconds, and is the same for all processes


def run(kind: str, args: list[str]) -> int:
    """Runs what the process is to run. Returns its exit code, or raises `SystemExit` with it."""
    if kind == "daemon":
        from tests.chaos.ranks import fork_ranks

        fork_ranks()
    if kind in ("diloco", "daemon"):
        from diloco.__main__ import main

        sys.argv[:] = ["diloco", *args]
        main()
    from tests.chaos.site import train

    train(*args)
    return 0


def disturb_clock(by_s: float) -> None:
    """Has the wall clock be wrong by so much, now ahead and now behind, for all but gRPC.

    gRPC makes deadlines of the wall clock that its core reads by itself; a machine has but one.
    """
    real, sign = time.time, 1.0

    def jumping() -> float:
        nonlocal sign
        if sys._getframe(1).f_globals["__name__"].startswith("grpc"):
            return real()
        sign = -sign
        return real() + sign * by_s

    time.time = jumping


def preload() -> None:
    """Imports what the processes need."""
    for name in (
        "coordinator.cli",
        "coordinator.run",
        "coordinator.service",
        "diloco.cli",
        "island.cli",
        "island.daemon",
        "island.worker",
        "tests.chaos.ranks",
        "tests.chaos.site",
    ):
        importlib.import_module(name)


if __name__ == "__main__":
    preload()
    serve()
