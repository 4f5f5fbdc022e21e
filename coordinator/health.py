"""Whether a coordinator lives and is ready to serve islands, for `grpc.health.v1`, `explain` and the log."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio  # type: ignore[attr-defined]  # unknown to the stubs

from coordinator.run import Run
from diloco.framing import SERVICE

log = logging.getLogger("diloco.coordinator")
LOOK_S = 1.0
"""Seconds between two looks at the run."""
PROBE_S = 10.0
"""Seconds between two writes to the state folder."""
SLOW_S = 5.0
"""A write that takes longer is a fault of its own."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What readiness depends on."""

    unfolded: int
    """Rounds that were decided before the coordinator was started and are not folded yet."""
    working: bool
    """Whether the tasks that decide and fold are alive."""
    troubles: tuple[str, ...]
    """What the run waits for its disk for."""
    probe: str
    """Why the state folder cannot be written; empty where it can."""
    free_bytes: int
    """Free space on the disk of the state folder."""
    least_free_bytes: int
    closing: bool


def judge(checks: Checks) -> tuple[bool, list[str]]:
    """Whether a coordinator is ready, and for every check that fails its name and why, in words."""
    failed = {
        "shutdown": "it is shutting down" if checks.closing else "",
        "folding": "" if checks.working else "the tasks that decide and fold rounds have ended",
        "recovery": f"{checks.unfolded} rounds from before its start are not folded yet" if checks.unfolded else "",
        "disk": "; ".join(filter(None, (checks.probe, *checks.troubles))),
        "space": f"{checks.free_bytes:,} bytes are free, limits.disk_free_bytes is {checks.least_free_bytes:,}"
        if checks.free_bytes < checks.least_free_bytes
        else "",
    }
    reasons = [f"{name}: {reason}" for name, reason in failed.items() if reason]
    return not reasons, reasons


def probe(folder: Path) -> int:
    """Writes to a folder and makes it durable; returns the free bytes of its disk. Raises `OSError` where it fails."""
    path = folder / "probe"
    with path.open("wb") as file:
        file.write(b"can be written\n")
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    return shutil.disk_usage(folder).free


class Health:
    """The health of a run's coordinator: "" is whether it lives, the name of its service whether it is ready.

    Args:
        run: the run.
        clock: seconds on a monotonic clock.
        probe: writes to the state folder and returns the free bytes of its disk.
        slow_s: how long that may take.
    """

    def __init__(
        self,
        run: Run,
        clock: Callable[[], float],
        *,
        probe: Callable[[Path], int] = probe,
        slow_s: float = SLOW_S,
    ) -> None:
        self._run, self._clock, self._probe, self._slow_s = run, clock, probe, slow_s
        self._decided = [current.round for current in run.state.rounds]
        self._servicer = aio.HealthServicer()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="health")
        self._probing: asyncio.Future[int] | None = None
        self._probed_at = float("-inf")
        self._fault, self._free_bytes = "", 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.reasons: list[str] = ["startup: nothing has been checked yet"]
        """Why the coordinator is not ready; empty where it is."""

    async def serve(self, server: grpc.aio.Server) -> None:
        """Adds `grpc.health.v1` to a server, which is not ready before the first look."""
        await self._servicer.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def begin(self) -> None:
        """Looks at the run from now on; a look that fails as nobody foresaw fails the run."""
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error and not self._run.failed.done():
            self._run.failed.set_exception(error)

    async def close(self) -> None:
        """Says for good that the coordinator is shutting down."""
        self._closing = True
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._tell(self._checks())
        await self._servicer.enter_graceful_shutdown()
        self._thread.shutdown(wait=False)

    async def _work(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Looks at everything once, and says so where something has changed."""
        await self._write()
        if self._tell(self._checks()):
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        else:
            status = health_pb2.HealthCheckResponse.SERVING
        await self._servicer.set(SERVICE, status)

    async def _write(self) -> None:
        """Writes to the state folder where it is time, in a thread, and waits for that no longer than `slow_s`."""
        if self._probing is None:
            if self._clock() < self._probed_at + PROBE_S:
                return
            self._probed_at = self._clock()
            root, loop = self._run.store.root, asyncio.get_running_loop()
            self._probing = loop.run_in_executor(self._thread, self._probe, root)
        done, _ = await asyncio.wait({self._probing}, timeout=self._slow_s)
        if not done:
            self._fault = f"writing to {self._run.store.root} takes longer than {self._slow_s:g} s"
            return
        probing, self._probing = self._probing, None
        try:
            self._fault, self._free_bytes = "", probing.result()
        except OSError as error:
            self._fault = f"cannot write to {self._run.store.root}: {error}"

    def _checks(self) -> Checks:
        run = self._run
        ended = run.ended or [0] * len(self._decided)
        return Checks(
            unfolded=sum(max(0, decided - done) for decided, done in zip(self._decided, ended, strict=False)),
            working=run.working,
            troubles=tuple(filter(None, run.troubles.values())),
            probe=self._fault,
            free_bytes=self._free_bytes,
            least_free_bytes=0 if self._fault else run.config.limits.disk_free_bytes,
            closing=self._closing,
        )

    def _tell(self, checks: Checks) -> list[str]:
        """Keeps the reasons why the coordinator is not ready, and logs them where they are others than before."""
        ready, reasons = judge(checks)
        if reasons != self.reasons:
            if ready:
                log.info("ready")
            else:
                log.warning("not ready: %s", "; ".join(reasons))
        self.reasons = reasons
        return reasons
