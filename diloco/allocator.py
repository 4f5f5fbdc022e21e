"""How the C library keeps memory that was freed: enough for the messages of streams, so that no page of theirs is
asked of the kernel twice, and no more.

A fresh page costs six times what filling it does, and a message of a bulk stream is a fresh buffer several times over,
in gRPC and in Python. Left to itself glibc maps each by itself, or learns not to from what is freed.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
MESSAGE_BYTES = 5 * 2**20
"""Above the largest message of a stream."""
TENSOR_BYTES = 32 * 2**20
"""How far glibc's own bound goes."""
ARENAS = 2
"""Heaps for a process whose loop and workers all handle streams; each heap keeps what it had at its peak."""
KEPT_BYTES = 64 * 2**20
"""Free memory at the end of a heap that is kept for what comes next."""


def keep(*, heap_bytes: int, arenas: int = 0) -> None:
    """Sets how memory is kept where the C library is glibc; elsewhere it does nothing.

    Args:
        heap_bytes: from this size on a buffer is mapped by itself, and goes back to the kernel as soon as it is freed.
        arenas: heaps that threads share; 0 leaves it at one per thread, up to eight per core.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt:
        return
    if arenas:
        mallopt(_M_ARENA_MAX, arenas)
    mallopt(_M_MMAP_THRESHOLD, heap_bytes)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
