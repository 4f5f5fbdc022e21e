"""Beside the run: snapshots are written, the ledger is compacted behind them, and copies go elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial

from coordinator.compaction import COMPACT_ROWS, compact
from coordinator.copies import Copies
from coordinator.fold import Outer
from coordinator.snapshots import Draft, manifests
from coordinator.store import Store
from diloco.config import RunConfig

log = logging.getLogger("diloco.coordinator")

Written = Callable[[Sequence[int], Sequence[int]], None]
"""Hears on the loop of each complete snapshot: its versions, and the rounds that the oldest snapshot kept holds."""
Still = Callable[[int], AbstractAsyncContextManager[tuple[Outer, int]]]
"""Keeps a fragment from moving: yields its outer state and how many of its rounds have ended."""


class Keeper:
    """Writes snapshots one at a time in a thread of its own, while folding and serving go on.

    Nothing is copied: a fragment stands still while it is written, and its fold waits.

    Args:
        store: the state folder.
        config: the run's settings.
        draft: begins a snapshot.
        still: keeps a fragment from moving.
        written: is told of each.
        retry_s: how long a disk that has failed is left alone.
    """

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        draft: Callable[[], Draft],
        still: Still,
        written: Written,
        retry_s: Callable[[], float],
    ) -> None:
        self._store, self._config = store, config
        self._draft, self._still, self._written, self._retry_s = draft, still, written, retry_s
        self._copies = Copies(store.root, config) if config.snapshot.url else None
        self._offered, self._one = asyncio.Event(), asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")

    async def write(self, still: Still | None = None) -> list[int]:
        """Writes a snapshot, and returns its versions when it is complete.

        Args:
            still: of fragments that are not the run's yet.

        Raises:
            OSError: the disk does not take it.
        """
        loop = asyncio.get_running_loop()
        async with self._one:
            draft = self._draft()
            for fragment in draft.fragments:
                async with (still or self._still)(fragment.index) as (outer, ended):
                    await loop.run_in_executor(self._thread, draft.add, outer, ended)
            needed = await loop.run_in_executor(self._thread, self._finish, draft)
        self._written(draft.versions, needed)
        return draft.versions

    def _finish(self, draft: Draft) -> Sequence[int]:
        self._store.sync_updates()
        manifest, needed = draft.finish(self._config.snapshot.keep)
        self._compact(COMPACT_ROWS)
        if self._copies:
            self._copies.offer(manifest)
        return needed

    def _compact(self, least: int) -> None:
        try:
            compact(self._store, self._config, least)
        except OSError as error:
            log.warning("the ledger is not compacted now: %s", error)

    def offer(self) -> None:
        """Asks for a snapshot, when the one under way is complete."""
        self._offered.set()

    async def work(self) -> None:
        """Writes snapshots that are asked for, each again and again until the disk takes it."""
        trouble, found = "", manifests(self._store.root)
        if self._copies and found:
            self._copies.offer(found[-1])  # an earlier life may not have come to it
        while True:
            await self._offered.wait()
            self._offered.clear()
            try:
                await self.write()
                trouble = ""
            except OSError as error:
                if str(error) != trouble:
                    log.error("no snapshot, and the run goes on without: %s", error)
                trouble = str(error)
                self._offered.set()
                await asyncio.sleep(self._retry_s())

    async def finish(self) -> None:
        """Compacts the ledger, waits for the last copy no longer than `copies.CLOSE_S`, and ends the threads."""
        await asyncio.get_running_loop().run_in_executor(self._thread, partial(self._compact, 1))
        if self._copies:
            await asyncio.to_thread(self._copies.close)
        self.close()

    def close(self) -> None:
        """Ends the thread when it has written what it is at."""
        self._thread.shutdown()
