"""The compiled kernels, where they were built. The eager definitions give the same bits without them, slower."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

try:
    from diloco.codec import _kernels as library
except ImportError:  # no compiler when it was installed
    library = None  # type: ignore[assignment]

ENABLED = library is not None
"""Whether kernels are used."""
_KINDS = {"int8": 0, "int4": 1, "e3m0": 2, "int2": 3, "fp16": 4, "topk-2": 5, "topk-8": 6, "coded-2": 7, "coded-8": 8}


def usable(values: Tensor, records: Tensor) -> bool:
    """Whether kernels can work on these tensors."""
    return ENABLED and all(x.device.type == "cpu" and x.is_contiguous() for x in (values, records))


@dataclass(frozen=True)
class Kernel:
    """One codec's kernels. They do whole blocks, without the GIL, on as many threads as torch computes with.

    Tensors are contiguous, on the CPU, and long enough: the caller sees to that.
    """

    kind: str
    keep: int = 0

    def encode(self, values: Tensor, records: Tensor, blocks: int) -> bool:
        """Writes records; whether all values are below 2^118."""
        return library.encode(*self._where(values, records, blocks))

    def decode(self, values: Tensor, records: Tensor, blocks: int) -> bool:
        """Writes values; whether all records are good."""
        return library.decode(*self._where(values, records, blocks))

    def _where(self, values: Tensor, records: Tensor, blocks: int) -> tuple[int, int, int, int, int, int]:
        threads = torch.get_num_threads()
        return _KINDS[self.kind], values.data_ptr(), records.data_ptr(), blocks, self.keep, threads
