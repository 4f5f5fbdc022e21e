"""Which rank of the island holds which part of which parameter, and how parts come together.

Optimizers that need a whole tensor (its norm, its singular vectors) ask here. One table of all ranks serves every
layout, because a shard is one box whatever the mesh: FSDP, tensor parallel, both, replicas, experts, pipeline stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.layout import Box, box_of, natural_key
from island.group import Group


class Shards:
    """The boxes of every rank. Made collectively by all ranks of the island.

    Args:
        tensors: the parameters of this rank, plain or DTensor, by names that are the same on all ranks.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.group = Group()
        mine = {}
        for name, tensor in tensors.items():
            box = box_of(tensor, name)
            mine[name] = [list(tensor.shape), list(box.offset), list(box.size)]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.boxes: dict[str, dict[int, Box]] = {}
        """Per name, the boxes that are not empty by rank, which ascends."""
        for rank, table in enumerate(self.group.gather(mine)):
            for name, (shape, offset, size) in table.items():
                box = Box(tuple(offset), tuple(size))
                self.shapes[name] = tuple(shape)
                if box.numel:
                    self.boxes.setdefault(name, {})[rank] = box
        self.names = sorted(self.shapes, key=natural_key)
        """All parameters of the island's model, in the same order on every rank."""

    def counts(self, name: str) -> bool:
        """Whether this rank speaks for its part: of several ranks with the same box, the first one does."""
        boxes = self.boxes.get(name, {})
        mine = boxes.get(self.group.rank)
        return mine is not None and next(rank for rank, box in boxes.items() if box == mine) == self.group.rank

    def total(self, values: Tensor) -> Tensor:
        """The sum of every rank's `values`, in place: the same bits on every rank. Collective."""
        if not self.group.alone:
            dist.all_reduce(values)
        return values


class Parcels:
    """Values on their way between ranks; everybody says what it sends and what it expects.

    Args:
        like: an empty tensor; values travel in its dtype, on its device.
    """

    def __init__(self, shards: Shards, like: Tensor) -> None:
        self._group, self._like = shards.group, like
        self._sent: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        self._expected = [0] * self._group.size

    def send(self, rank: int, values: Tensor) -> None:
        """Adds values of any shape to what goes to `rank`."""
        self._sent[rank].append(values.to(self._like.dtype).flatten())

    def expect(self, rank: int, values: int) -> None:
        """Says how many more values come from `rank`, which names them in the same order."""
        self._expected[rank] += values

    def exchange(self) -> list[Stream]:
        """What each rank has sent to this one. Collective."""
        sent = torch.cat([self._like, *(values for row in self._sent for values in row)])
        if self._group.alone:
            return [Stream(sent)]
        received = self._like.new_empty(sum(self._expected))
        sizes = [sum(values.numel() for values in row) for row in self._sent]
        dist.all_to_all_single(received, sent, self._expected, sizes)
        return [Stream(values) for values in torch.split(received, self._expected)]


class Stream:
    """Flat values, taken in the order in which they were sent."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._at = values, 0

    def take(self, box: Box) -> Tensor:
        """The next values, in the shape of a box."""
        begin, self._at = self._at, self._at + box.numel
        return self._values[begin : self._at].view(box.size)


def local_gradient(parameter: Tensor) -> Tensor:
    """The gradient of this rank's part of a parameter that has one; partial sums are added up first."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient
