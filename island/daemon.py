"""The island daemon: starts the ranks with torch's elastic agent and watches them."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from diloco.errors import ExitCode
from diloco.settings import to_toml
from island.config import PROGRESS, IslandConfig

SHUTDOWN_S = 10
"""How long ranks may take to leave after a signal before they are killed."""

REST_S = 1.0
"""The first rest before ranks are started again; each one is twice as long as the one before it."""
LONGEST_REST_S = 60.0

FINAL = (ExitCode.REFUSED, ExitCode.UNREACHABLE, ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DIVERGED)
"""Exit codes that another attempt would end with again."""

ENDED = (ExitCode.OK, ExitCode.INTERRUPTED)
"""Exit codes of an island that has done what it was asked."""

log = logging.getLogger("diloco.island")


def run(config: IslandConfig) -> int:
    """Runs an island until its run is complete, a signal comes, or its ranks have failed too often.

    Failures count from the last update that was applied: a crash that repeats ends the island, and one now and then in
    a long run does not.

    Returns:
        The exit code: that of the first rank that failed, where one did.
    """
    mesh, name = config.mesh, config.island.id
    threads = mesh.threads_per_rank or max(1, (os.cpu_count() or 1) // mesh.ranks)
    os.environ["DILOCO_DAEMON_PID"] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting ranks leave their core to others
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="diloco-island-") as folder:
        settings = Path(folder) / "island.toml"
        settings.write_text(to_toml(config), encoding="utf-8")
        progress = settings.with_name(PROGRESS)
        failures = 0
        while True:
            progress.unlink(missing_ok=True)
            code = attempt(lambda: _launch(config, settings, Path(config.island.log_dir or folder)))
            if code in ENDED:
                return code
            failures = 1 if progress.exists() else failures + 1
            if code not in FINAL or config.island.log_dir:
                where = f"; its log is in {config.island.log_dir}" if config.island.log_dir else ""
                log.error("island %s: a rank failed with exit code %d (failure %d)%s", name, code, failures, where)
            if code in FINAL or failures > config.island.max_restarts:
                return code
            if (code := attempt(partial(_rest, failures))) in ENDED:
                return code


def _rest(failures: int) -> int:
    """Rests after so many failures in a row, 1 or more: longer and longer, and not for as long everywhere."""
    time.sleep(min(LONGEST_REST_S, REST_S * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0))
    return ExitCode.AGAIN


def _launch(config: IslandConfig, settings: Path, logs: Path) -> int:
    """Starts the ranks once and waits for them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.mesh.ranks,
        run_id=config.island.id,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": True},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL if config.island.log_dir else Std.NONE),
        shutdown_timeout=SHUTDOWN_S,
    )
    elastic_launch(launch, sys.executable)("-m", "island.rank", str(settings))
    return ExitCode.OK


def attempt(work: Callable[[], int]) -> int:
    """Does work, and returns its exit code, or that of what ended it: a signal, or a rank that failed."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        return work()
    except SignalException as received:
        return ExitCode.OK if received.sigval is signal.SIGTERM else ExitCode.INTERRUPTED
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else ExitCode.INTERNAL
