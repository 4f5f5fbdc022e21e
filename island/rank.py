"""Starts one rank: ties its life to its daemon's before the slow imports, then runs `island.worker`."""

from __future__ import annotations

import os
import sys
import traceback

from diloco.errors import ExitCode
from island.ties import tie


def main() -> int:
    """Runs the rank whose settings file is the first argument. Returns its exit code."""
    tie(int(os.environ["DILOCO_DAEMON_PID"]))
    from island.worker import main as work

    try:
        return work(sys.argv[1])
    except Exception:  # noqa: BLE001 - Python would end with 1, which means that another attempt is of no use
        traceback.print_exc()
        return ExitCode.INTERNAL


if __name__ == "__main__":
    raise SystemExit(main())
