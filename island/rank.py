"""Starts one rank: ties its life to its daemon's before the slow imports, then runs `island.worker`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback

from diloco.errors import ExitCode

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Runs the rank whose settings file is the first argument. Returns its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["DILOCO_DAEMON_PID"]):
        return 0  # the daemon ended before this rank began
    from island.worker import main as work

    try:
        return work(sys.argv[1])
    except Exception:  # noqa: BLE001 - Python would end with 1, which means that another attempt is of no use
        traceback.print_exc()
        return ExitCode.INTERNAL


if __name__ == "__main__":
    raise SystemExit(main())
