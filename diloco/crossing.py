"""The way between the device of a rank's parameters and the CPU: all that only CUDA has of anchors on a device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor


class Crossing:
    """Copies tensors over, beside training, for threads that can wait. Where the device is the CPU it only copies.

    Args:
        device: of the parameters. With CUDA copies run on a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.pinned = device, device.type == "cuda"
        """Whether buffers on the CPU are to be pinned."""
        self._side = torch.cuda.Stream(device) if self.pinned else None  # type: ignore[no-untyped-call]

    def down(self, sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
        """Copies tensors of the device that nobody writes to now; returns once the copies are there."""
        with torch.cuda.stream(self._side) if self._side else nullcontext():
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        if self._side:
            self._side.synchronize()

    def up(self, sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
        """Copies tensors to the device, once what was to read the targets has done so; returns once they are there."""
        self.wait()
        self.down(sources, targets)

    def wait(self) -> None:
        """Waits for all that the device has been told to do so far."""
        if self.pinned:
            torch.cuda.synchronize(self._device)
