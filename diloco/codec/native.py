"""The compiled kernels, where they were built. The eager definitions give the same bits without them, slower."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

try:
    from diloco.codec import _kernels as library
except ImportError:  # no compiler when it was installed
    library = None  # type: ignore[assignment]

ENABLED = library is not None
"""Whether kernels are used."""
_KINDS = {
    **{"int8": 0, "int4": 1, "e3m0": 2, "int2": 3, "fp16": 4, "topk-2": 5, "topk-8": 6, "coded-2": 7, "coded-8": 8},
    **{"fp32": 9, "bf16": 10},
}


def usable(*tensors: Tensor) -> bool:
    """Whether kernels can work on these tensors."""
    return ENABLED and all(x.device.type == "cpu" and x.is_contiguous() for x in tensors)


def digest(values: Tensor, starts: Tensor) -> int:
    """The sum of `diloco.digest` over runs of fp32 values: row i begins at flat index `starts[i]` (int64)."""
    runs = starts.numel()
    length = values.numel() // runs
    return library.digest(values.data_ptr(), starts.data_ptr(), runs, length, torch.get_num_threads())


def copy(source: Tensor, out: Tensor) -> bool:
    """Copies fp32 values past the cache; returns whether all are finite."""
    return library.copy(source.data_ptr(), out.data_ptr(), out.numel(), torch.get_num_threads())


@dataclass(frozen=True)
class Kernel:
    """One codec's kernels. They do whole blocks, without the GIL, on as many threads as torch computes with.

    Tensors are contiguous, on the CPU, and long enough: the caller sees to that. `encode`, `decode` and `sound` are for
    codecs of records.
    """

    kind: str
    keep: int = 0

    @property
    def number(self) -> int:
        """What the kernels know the codec by."""
        return _KINDS[self.kind]

    def encode(self, values: Tensor, records: Tensor, blocks: int) -> bool:
        """Writes records; whether all values are below 2^118."""
        return library.encode(*self._where(values, records, blocks))

    def decode(self, values: Tensor, records: Tensor, blocks: int) -> bool:
        """Writes values; whether all records are good."""
        return library.decode(*self._where(values, records, blocks))

    def sound(self, records: Tensor, blocks: int) -> bool:
        """Whether all records are good."""
        return library.sound(self.number, records.data_ptr(), blocks, self.keep, torch.get_num_threads())

    def largest(self, records: Tensor, blocks: int, threads: int) -> int:
        """Bits of the largest magnitude of the values of records; -1 where one is not good. On `threads` threads; 0 for
        as many as torch computes with."""
        return library.largest(self.number, records.data_ptr(), blocks, self.keep, threads or torch.get_num_threads())

    def move(self, anchor: Tensor, out: Tensor, records: Tensor, blocks: int, first: int) -> int | None:
        """Writes `anchor` minus the values of records; returns the digest of that, or None where a record is not good.

        `first` is the flat index of the first value in its fragment.
        """
        where = (anchor.data_ptr(), out.data_ptr(), records.data_ptr())
        bad, found = library.move(self.number, *where, blocks, first, self.keep, torch.get_num_threads())
        return None if bad else found

    def step(
        self,
        state: Sequence[Tensor],
        update: Tensor,
        numel: int,
        first: int,
        lr: float,
        mu: float,
        pieces: Sequence[int],
    ) -> tuple[int, int]:
        """The outer step of `numel` values whose update this codec encodes: see `diloco.outer`.

        Args:
            state: anchor, momentum and residual.
            update: where to write the update's records.
            numel: whole blocks.
            first: flat index in the fragment.
            lr, mu: of the outer optimizer.
            pieces: `PIECE` numbers for each piece of a contribution, in the order to add them.

        Returns:
            0, or 1 where a payload is bad, or 2 where there are no codes for a value; and the digest of the anchor.
        """
        where = array("q", pieces)
        anchor, momentum, residual = (x.data_ptr() for x in state)
        return library.step(
            anchor,
            momentum,
            residual,
            update.data_ptr(),
            numel,
            first,
            self.number,
            self.keep,
            lr,
            mu,
            where.buffer_info()[0],
            len(where) // PIECE,
            torch.get_num_threads(),
        )

    def _where(self, values: Tensor, records: Tensor, blocks: int) -> tuple[int, int, int, int, int, int]:
        threads = torch.get_num_threads()
        return self.number, values.data_ptr(), records.data_ptr(), blocks, self.keep, threads


DIMS = 8
"""Most dimensions that the runs of a piece count in."""
PIECE = 9 + 2 * DIMS
"""Numbers of a piece: payload, tail, values, kind, keep, share (bits), base, length, dimensions; sizes; strides."""
