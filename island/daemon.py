"""The island daemon: starts the ranks with torch's elastic agent and watches them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from diloco.errors import ExitCode
from diloco.settings import to_toml
from island.config import IslandConfig

SHUTDOWN_S = 10
"""How long ranks may take to leave after a signal before they are killed."""


FINAL = (ExitCode.REFUSED, ExitCode.UNREACHABLE, ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DIVERGED)
"""Exit codes that another attempt would end with again."""

log = logging.getLogger("diloco.island")


def run(config: IslandConfig) -> int:
    """Runs an island until its run is complete, a signal comes, or its ranks have failed too often.

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
        for attempt in range(config.island.max_restarts + 1):
            code = _attempt(config, settings, Path(config.island.log_dir or folder))
            if code in (ExitCode.OK, ExitCode.INTERRUPTED):
                return code
            if code not in FINAL or config.island.log_dir:
                where = f"; its log is in {config.island.log_dir}" if config.island.log_dir else ""
                log.error("island %s: a rank failed with exit code %d (attempt %d)%s", name, code, attempt + 1, where)
            if code in FINAL:
                return code
    return code


def _attempt(config: IslandConfig, settings: Path, logs: Path) -> int:
    """Starts the ranks once and waits for them; returns an exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
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
    try:
        elastic_launch(launch, sys.executable)("-m", "island.rank", str(settings))
    except SignalException as received:
        return ExitCode.OK if received.sigval is signal.SIGTERM else ExitCode.INTERRUPTED
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else ExitCode.INTERNAL
    return ExitCode.OK
