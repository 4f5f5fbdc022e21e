"""The island daemon: has torch's elastic agent run the ranks of this node, and hears what asks the island to leave."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from diloco.errors import DilocoError, ExitCode
from diloco.settings import to_toml
from island.config import PROGRESS, IslandConfig
from island.notices import Notices
from island.restarts import GivenUp, Restarts

if TYPE_CHECKING:
    from types import FrameType

ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that have the island leave at the next step edge; the last is what Slurm sends before a job's time is up."""

ASK_S = 10.0
"""How long to look for a coordinator that may say that the run is over."""

FOLDER = "diloco-island-"
"""How the names of the daemons' temporary folders begin."""
LOCK = "lock"
"""A file that a daemon holds a lock on for as long as it lives."""

log = logging.getLogger("diloco.island")


def run(config: IslandConfig) -> int:
    """Runs an island until its run is complete, a signal or a notice comes, or its ranks have failed too often.

    Returns:
        The exit code: that of the first rank that failed, where one did.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    mesh, island = config.mesh, config.island
    threads = mesh.threads_per_rank or max(1, (os.cpu_count() or 1) // config.ranks_here)
    os.environ["DILOCO_DAEMON_PID"] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting ranks leave their core to others
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with (
        own_folder() as folder,
        Notices(config.preemption, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    ):
        settings = folder / "island.toml"
        settings.write_text(to_toml(config), encoding="utf-8")
        progress = settings.with_name(PROGRESS)
        restarts = Restarts(island.id, island.max_restarts, progress, island.log_dir, time.sleep)
        for which in ASKED:
            signal.signal(which, _asked)
        try:
            return keep_running(config, settings, Path(island.log_dir) if island.log_dir else folder, restarts)
        except SignalException as received:
            return ExitCode.INTERRUPTED if received.sigval is signal.SIGINT else ExitCode.OK
        except GivenUp as given_up:
            return given_up.code


@contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary folder for as long as the context lasts, without those that killed daemons have left behind."""
    for left in Path(tempfile.gettempdir()).glob(FOLDER + "*"):
        if abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as name:
        folder = Path(name)
        with folder.joinpath(LOCK + ".new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)  # whoever finds it finds it held
            yield folder


def abandoned(folder: Path) -> bool:
    """Whether the daemon of a temporary folder is known to be gone."""
    try:
        with folder.joinpath(LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # held; not there yet; another user's
        return False


def _asked(number: int, frame: FrameType | None) -> NoReturn:
    from torch.distributed.elastic.multiprocessing import SignalException

    raise SignalException("asked to leave", signal.Signals(number))


def ended(config: IslandConfig) -> bool:
    """Whether the coordinator says that the run is over; not where it does not answer."""
    from island.link import Link

    link = Link(config.island.coordinator, patience_s=ASK_S, say=log.debug, tls=config.tls.files())
    try:
        return link.status().state.phase == "done"
    except DilocoError as error:
        log.warning("whether the run is over is not known: %s", error.message)
        return False
    finally:
        link.close()


def keep_running(config: IslandConfig, settings: Path, logs: Path, restarts: Restarts) -> int:
    """Runs the ranks of this node; meets the other daemons again where the rendezvous was lost."""
    from island.elastic import LOST, launch

    while True:
        try:
            return launch(config, settings, logs, restarts)
        except LOST as error:
            if ended(config):
                log.info("the run has ended meanwhile")
                return ExitCode.OK
            log.error("no rendezvous of the island's nodes at %s: %s", config.nodes.rendezvous, error)
            restarts.failed(ExitCode.TIMEOUT)
