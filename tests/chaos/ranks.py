"""Ranks of a daemon that begin at once: it forks them, where it would start a Python that imports everything.

All else is as ever: each is the daemon's own child, in a process group of its own, and begins in `island.rank`.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed.elastic import agent  # noqa: F401 - what the daemon imports, ahead of it
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

import island.elastic  # noqa: F401 - the same
from diloco.failpoints import VARIABLE
from island import rank
from tests.chaos.nursery import live
from tests.chaos.trial import WHICH


class Forked:
    """A child as `subprocess.Popen` shows one, as far as torch's agent looks."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            become(args, env)
        os.setpgid(self.pid, self.pid)  # by which the agent ends it

    def poll(self) -> int | None:
        """Its exit code, below 0 for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits for it to end; returns its exit code. Raises `TimeoutExpired`."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def become(args: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Is a rank from now on."""
    for which in signal.Signals:
        if which not in (signal.SIGKILL, signal.SIGSTOP) and callable(signal.getsignal(which)):
            signal.signal(which, signal.SIG_DFL)
    gc.freeze()  # nothing of the daemon's is taken apart here
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    logging.getLogger().handlers.clear()
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = args[2:]
    live(rank.main)


def fork_ranks() -> None:
    """Has the daemon of this process fork its ranks. A failpoint is for the first life of one of them (`WHICH`)."""
    met = set[str]()

    def popen(self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
        number = env["RANK"]
        if number in met or env.get(WHICH) != number:
            env.pop(VARIABLE, None)
        met.add(number)
        return Forked(args, env)

    SubprocessHandler._popen = popen  # type: ignore[method-assign]
