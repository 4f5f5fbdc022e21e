"""How processes end: none outlives a parent that was killed (Linux), and a worker's threads have no say in it."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
from multiprocessing import util
from multiprocessing.context import SpawnContext, SpawnProcess

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


class Worker(SpawnProcess):
    """A process that is started anew, tied to its parent, and ends when its work does.

    What threads of libraries still do then is cut off, as in a process that was forked. The interpreter would end each
    of them at the moment when it next wants the GIL; in C++, as in pyarrow's read-ahead of a file, that is an abort.
    """

    def run(self) -> None:
        """Ties the process before it does its work: a watch of its own would begin too late, behind its imports."""
        parent = multiprocessing.parent_process()
        assert parent is not None and parent.pid is not None
        tie(parent.pid)
        super().run()

    def _bootstrap(self, parent_sentinel: int | None = None) -> None:
        """Does all that `multiprocessing` and the interpreter do for a process that ends, but for tearing it down."""
        code = 1
        try:
            code = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
            atexit._run_exitfuncs()
            util._flush_std_streams()  # type: ignore[attr-defined]
        finally:
            os._exit(code)


class Workers(SpawnContext):
    """What starts workers, as `multiprocessing.get_context` gives it; for `DataLoader(multiprocessing_context=)`."""

    Process = Worker
