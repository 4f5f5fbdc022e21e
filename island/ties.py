"""Ties the life of a process to that of the one that started it, so that none is left behind by a SIGKILL (Linux)."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def tie(parent: int) -> None:
    """Has the kernel kill this process once its parent is gone. Ends it where that is so already.

    No code of this process has a part in that: it may be stopped, or in a call that does not return. The kernel
    looks at the thread of the parent that started it.

    Args:
        parent: the process id of the one that started this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)


def tie_worker(number: int) -> None:
    """Ties a worker of a torch `DataLoader`, by its number. torch's own watch begins after the worker's imports, and so
    takes whoever has inherited the worker by then for its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    tie(parent.pid)
