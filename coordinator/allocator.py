"""How the C library keeps memory that was freed: little of it, so that a peak of streams leaves no heap behind."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
ARENAS = 2
"""The loop and the workers share so many heaps; by default every thread may have one, and each keeps what it had."""
MAPPED_BYTES = 2**19
"""From this size on a buffer is mapped by itself and goes back to the kernel as soon as it is freed, as tensors and
chunks do. By default the bound follows what is freed, up to 32 MiB."""


def bound() -> None:
    """Sets both where the C library is glibc; elsewhere it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
