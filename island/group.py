"""The ranks of one island, as its session needs them: bytes and numbers over the CPU backend, never pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import BY_NAME, DilocoError

_CPU: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""By default group, the one for CPU tensors where it has no CPU backend of its own."""


class Group:
    """The island's process group, or a single process where none is initialised.

    Where the default group carries no CPU tensors (`init_process_group("nccl")`), a gloo group of all its ranks is made
    for it, once. Collective then.
    """

    def __init__(self) -> None:
        self.alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if self.alone else dist.get_rank()
        self.size = 1 if self.alone else dist.get_world_size()
        self._whole = None if self.alone else _for_cpu()
        self._subgroups: dict[tuple[int, ...], Any] = {}

    def numbers(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers (int64), by rank. Collective."""
        if self.alone:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(out, mine, group=self._whole)
        return [row.tolist() for row in out]

    def mean(self, value: float) -> float:
        """The mean of every rank's number. Collective."""
        rows = self.numbers([struct.unpack("=q", struct.pack("=d", value))[0]])
        return float(sum(struct.unpack("=d", struct.pack("=q", row[0]))[0] for row in rows) / self.size)

    def total(self, values: Tensor) -> Tensor:
        """The sum of every rank's values (int64), on the device of this rank's. Collective."""
        whole = values.cpu().clone()
        if not self.alone:
            dist.all_reduce(whole)
        return whole.to(values.device)

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """The bytes of rank `source`, on every rank. Collective."""
        if self.alone:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, source, group=self._whole)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, source, group=self._whole)
        return buffer.numpy().tobytes()

    def from_first(self, work: Callable[[], bytes]) -> bytes:
        """What `work` gives on rank 0, on every rank; its foreseen error is raised on every rank too. Collective."""
        if self.alone:
            return work()
        data = b""
        if self.rank == 0:
            try:
                data = b"+" + work()
            except DilocoError as error:
                data = b"-" + json.dumps([type(error).__name__, error.message]).encode()
        data = self.broadcast(data)
        if data[:1] == b"-":
            name, message = json.loads(data[1:])
            raise BY_NAME[name](message)
        return data[1:]

    def raise_first(self, error: DilocoError | None) -> None:
        """Raises the error of the first rank that has one, on every rank. Collective."""
        if self.alone:
            if error:
                raise error
            return
        for row in self.gather([type(error).__name__, error.message] if error else None):
            if row:
                raise BY_NAME[row[0]](row[1]) from error

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank. Collective."""
        return [json.loads(self.broadcast(json.dumps(value).encode(), rank)) for rank in range(self.size)]

    def form(self, ranks: tuple[int, ...]) -> None:
        """Makes a subgroup. Collective over the whole island; call it in the same order everywhere."""
        if ranks not in self._subgroups:
            self._subgroups[ranks] = dist.new_group(list(ranks), backend="gloo")

    def share(self, buffer: Tensor, ranks: tuple[int, ...], source: int) -> None:
        """Fills `buffer` (uint8) on all of a subgroup with that of `source`. Collective over the subgroup."""
        here = buffer.cpu()
        dist.broadcast(here, source, group=self._subgroups[ranks])
        buffer.copy_(here)


def _for_cpu() -> dist.ProcessGroup | None:
    """None for the default group; one of the same ranks over gloo where that has no backend for CPU tensors."""
    default = dist.group.WORLD
    if default is None or "cpu:" in dist.get_backend_config(default):
        return None
    if default not in _CPU:
        _CPU[default] = dist.new_group(backend="gloo")
    return _CPU[default]
