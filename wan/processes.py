"""The demo's processes: started with a log each, and ended without leaving one behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from diloco.errors import EnvironmentFault

LEAVE_S = 2.0
"""How long processes may take to leave before they are killed."""
_PR_SET_CHILD_SUBREAPER = 36


class Processes:
    """Starts processes in sessions of their own and ends all of their descendants on the way out.

    A Ctrl-C reaches only this process, which then ends the others in order. As a subreaper it also inherits, and
    ends, grandchildren whose parents are gone.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def __enter__(self) -> Processes:
        heard = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
        self._before = {which: signal.signal(which, _as_interrupt) for which in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which in self._before:
            signal.signal(which, signal.SIG_IGN)
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        psutil.wait_procs(_descendants(), timeout=LEAVE_S)
        left = _descendants()
        for descendant in left:
            descendant.kill()
        psutil.wait_procs(left, timeout=LEAVE_S)
        for which, handler in self._before.items():
            signal.signal(which, handler)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process whose output goes to `<logs>/<name>.log`."""
        with (self._logs / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "DILOCO_PARENT_PID": str(os.getpid()), **(environment or {})},
            )
        return self._running[name]

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of `names` have ended well. Raises `EnvironmentFault` where one has failed."""
        codes = {name: self._running[name].poll() for name in names}
        for name, code in codes.items():
            if code:
                log = self._logs / f"{name}.log"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise EnvironmentFault(f"{name} ended with exit code {code}; the end of {log}:\n{tail}")
        return all(code == 0 for code in codes.values())

    def stop(self, name: str, timeout_s: float) -> None:
        """Asks a process to end, and waits for it."""
        process = self._running[name]
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise EnvironmentFault(f"{name} did not end within {timeout_s:g} s")
            time.sleep(0.05)
        self.check([name])


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _as_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
