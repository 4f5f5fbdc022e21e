"""What the coordinator may use, and what is taken of it. No I/O and no clock: sizes and leases are arguments.

Whoever comes when a budget is spent is refused before anything is received, and told how long to wait: a queue would
hold memory and hide from islands that they wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from diloco.config import LimitsConfig
from diloco.errors import Overload

LEAST_WINDOW_BYTES, LARGEST_WINDOW_BYTES = 2**18, 64 * 2**20
"""Of one stream."""
PROBE, PROBES = "", 2
"""Where streams that belong to no island are counted, and how many there may be."""


class Admission:
    """The budgets of one run."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._streams: Counter[str] = Counter()
        self.streams = 0
        """Bulk streams under way."""

    @property
    def window_bytes(self) -> int:
        """What each sender may have under way: an equal share of what all of them may, within bounds. On any thread."""
        share = self._limits.receive_bytes // max(1, self.streams)
        return max(LEAST_WINDOW_BYTES, min(share, LARGEST_WINDOW_BYTES))

    def lease(self, island: str, holders: Collection[str]) -> None:
        """Raises `Overload` where `holders` of a lease are as many as may be, and `island` is not one of them."""
        limit = self._limits.islands
        if island not in holders and len(holders) >= limit:
            raise self._spent("the run", f"{limit} islands (limits.islands)", f"{len(holders)} hold a lease")

    @contextmanager
    def stream(self, island: str) -> Iterator[None]:
        """Counts a bulk stream of an island while the block lasts. Raises `Overload` where it is one too many."""
        limits = self._limits
        if self.streams >= limits.streams:
            raise self._spent("the run", f"{limits.streams} bulk streams (limits.streams)", "all are under way")
        if self._streams[island] >= limits.streams_per_island:
            what = f"{limits.streams_per_island} bulk streams of an island (limits.streams_per_island)"
            raise self._spent(f"island '{island}'", what, "all are under way")
        self._streams[island] += 1
        self.streams += 1
        try:
            yield
        finally:
            self._streams[island] -= 1
            self.streams -= 1
            self._streams += Counter()  # forgets islands at zero

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Counts a stream that only tries the line. Raises `Overload` where it is one too many."""
        if self._streams[PROBE] >= PROBES:
            raise self._spent("the run", f"{PROBES} probes of the line at a time", "all are under way")
        with self.stream(PROBE):
            yield

    def room(self, fresh_bytes: int, *, kept_bytes: int, coming_bytes: int, free_bytes: int) -> None:
        """Raises `Overload` where a payload does not fit on the disk.

        Args:
            fresh_bytes: what it will take that is not yet counted in the others.
            kept_bytes: contributions, updates, and the whole of all uploads under way.
            coming_bytes: what uploads under way have still to bring.
            free_bytes: free space of the disk.
        """
        limits = self._limits
        if limits.disk_bytes and kept_bytes + fresh_bytes > limits.disk_bytes:
            what = f"{limits.disk_bytes} bytes of contributions and updates (limits.disk_bytes)"
            raise self._spent("the run", what, f"{kept_bytes} are taken, and {fresh_bytes} would come")
        if free_bytes - coming_bytes - fresh_bytes < limits.disk_free_bytes:
            what = f"no less than {limits.disk_free_bytes} free bytes on its disk (limits.disk_free_bytes)"
            raise self._spent("the run", what, f"{free_bytes} are free, and {coming_bytes + fresh_bytes} would come")

    def _spent(self, scope: str, limit: str, taken: str) -> Overload:
        wait_s = self._limits.retry_s
        return Overload(f"{scope} may have {limit}; {taken}: try again in {wait_s:g} s", retry_after_s=wait_s)
