"""Beside the run: snapshots are written, the ledger is compacted behind them, and copies go elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from coordinator.compaction import COMPACT_ROWS, compact
from coordinator.copies import Copies
from coordinator.snapshots import Snapshot, manifests
from coordinator.store import Store
from diloco.config import RunConfig

log = logging.getLogger("diloco.coordinator")

Written = Callable[[Snapshot, Sequence[int]], None]
"""Hears on the loop of each complete snapshot, with the rounds that the oldest snapshot kept holds."""


class Keeper:
    """Writes snapshots one at a time in a thread of its own, while folding and serving go on.

    Tensors of `Outer` never change, so nothing is copied.

    Args:
        store: the state folder.
        config: the run's settings.
        written: is told of each.
        retry_s: how long a disk that has failed is left alone.
    """

    def __init__(self, store: Store, config: RunConfig, written: Written, retry_s: Callable[[], float]) -> None:
        self._store, self._config, self._written, self._retry_s = store, config, written, retry_s
        self._copies = Copies(store.root, config) if config.snapshot.url else None
        self._waiting: Snapshot | None = None
        self._offered = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")

    async def write(self, snapshot: Snapshot) -> None:
        """Writes a snapshot, and returns when it is complete. Raises `OSError` where the disk does not take it."""
        loop = asyncio.get_running_loop()
        needed = await loop.run_in_executor(self._thread, self._write, snapshot)
        self._written(snapshot, needed)

    def _write(self, snapshot: Snapshot) -> Sequence[int]:
        manifest, needed = self._store.save(snapshot, self._config.snapshot.keep)
        self._compact(COMPACT_ROWS)
        if self._copies:
            self._copies.offer(manifest)
        return needed

    def _compact(self, least: int) -> None:
        try:
            compact(self._store, self._config, least)
        except OSError as error:
            log.warning("the ledger is not compacted now: %s", error)

    def offer(self, snapshot: Snapshot) -> None:
        """Takes a snapshot to write when the one under way is complete, in place of an older one that waits."""
        self._waiting = snapshot
        self._offered.set()

    async def work(self) -> None:
        """Writes what is offered, again and again until the disk takes it or a newer one is there."""
        trouble, found = "", manifests(self._store.root)
        if self._copies and found:
            self._copies.offer(found[-1])  # an earlier life may not have come to it
        while True:
            await self._offered.wait()
            snapshot = self._waiting
            assert snapshot is not None
            try:
                await self.write(snapshot)
                trouble = ""
            except OSError as error:
                if str(error) != trouble:
                    log.error("no snapshot, and the run goes on without: %s", error)
                trouble = str(error)
                await asyncio.sleep(self._retry_s())
                continue
            if self._waiting is snapshot:
                self._waiting = None
                self._offered.clear()

    async def finish(self) -> None:
        """Compacts the ledger, waits for the last copy no longer than `copies.CLOSE_S`, and ends the threads."""
        await asyncio.get_running_loop().run_in_executor(self._thread, partial(self._compact, 1))
        if self._copies:
            await asyncio.to_thread(self._copies.close)
        self.close()

    def close(self) -> None:
        """Ends the thread when it has written what it is at."""
        self._thread.shutdown()
