"""Large buffers that are used again: a fresh one costs six times what filling it does, since its pages are new."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

KEPT = 2
"""Buffers that are kept while nobody uses them."""


class Buffers:
    """Flat buffers of one type, for several threads. None is smaller than the largest that was asked for before.

    Args:
        dtype: of their elements.
        pinned: whether they are in pinned memory, as transfers to and from a GPU like it.
    """

    def __init__(self, dtype: torch.dtype, *, pinned: bool = False) -> None:
        self._dtype, self._pinned = dtype, pinned
        self._free: list[Tensor] = []
        self._largest = 0
        self._lock = threading.Lock()

    def take(self, numel: int) -> Tensor:
        """A buffer [numel] that holds anything. Whoever does not give it back lets it go."""
        with self._lock:
            self._largest = max(self._largest, numel)
            while self._free:
                found = self._free.pop()
                if found.numel() >= numel:
                    return found[:numel]
            size = self._largest
        return torch.empty(size, dtype=self._dtype, pin_memory=self._pinned)[:numel]

    def give(self, buffer: Tensor) -> None:
        """Takes back what `take` gave and nobody looks at any more."""
        whole = buffer if buffer._base is None else buffer._base
        with self._lock:
            if len(self._free) < KEPT:
                self._free.append(whole)
