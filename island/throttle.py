"""A cap on bandwidth: whoever moves bytes asks first, and is held until they fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.05
"""How much of a second may go out at once after a pause, so that timers need not be exact."""


class Throttle:
    """Lets bytes through at a rate, shared by all threads that ask.

    Args:
        bytes_per_s: the rate; 0 for no cap.
        clock, sleep: of the process; tests bring their own.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, count: int) -> None:
        """Returns when `count` bytes may move."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            begin = max(self._free_at, now - BURST_S)
            self._free_at = begin + count / self._bytes_per_s
        if begin > now:
            self._sleep(begin - now)
