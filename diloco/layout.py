"""What a model is made of, whatever shards it: tensors with canonical names, and the boxes that ranks hold.

    Layout     all tensors of a model, in natural order of their names; its digest is the model's identity
    Box        a part of a tensor: `offset` and `size` per dimension
    Piece      a box of one tensor of the layout

A rank's shard of a DTensor is always one box, whatever the placement: rows (FSDP), columns or rows (tensor
parallel), both (2-D meshes, also where FSDP shards an already sharded dimension), replicas (HSDP), or nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from diloco.config import BufferPolicy
from diloco.errors import LayoutError

Kind = Literal["parameter", "buffer", "static"]
"""`parameter` takes outer steps; `buffer` takes the mean; `static` is the first island's, for ever."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model: its canonical name, its full shape, and what a sync does with it."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "parameter"

    @property
    def numel(self) -> int:
        """Elements of the full tensor; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: `offset` and `size` per dimension. A scalar's box has none."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the box; 1 for a scalar's."""
        return math.prod(self.size)

    def within(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of `shape`."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offset, self.size, shape, strict=True)
        )

    def overlaps(self, other: Box) -> bool:
        """Whether two boxes of one tensor share an element."""
        return bool(self.numel and other.numel) and all(
            a < b + m and b < a + n for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in a tensor of the full shape."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def runs(self, shape: Sequence[int]) -> tuple[Tensor, int]:
        """The box as equal contiguous runs of the flattened tensor.

        Returns:
            (starts, length): int64 flat offsets in ascending order, and the elements of each run.
        """
        if not self.numel:
            return torch.empty(0, dtype=torch.int64), 0
        split = len(shape)
        while split and self.size[split - 1] == shape[split - 1]:
            split -= 1
        length = math.prod(shape[split:])
        starts = torch.zeros(1, dtype=torch.int64)
        if split:
            length *= self.size[split - 1]
        for dim, (offset, size) in enumerate(zip(self.offset[:split], self.size[:split], strict=True)):
            stride = math.prod(shape[dim + 1 :])
            last = dim == split - 1
            steps = torch.tensor([offset]) if last else torch.arange(offset, offset + size)
            starts = (starts[:, None] + steps * stride).flatten()
        return starts, length


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of tensor number `tensor` of a layout."""

    tensor: int
    box: Box


class Layout:
    """All tensors of a model in natural order of their names (`layers.2` before `layers.10`).

    The order, and so the digest, depends on the names alone: not on the order of definition, on wrappers, nor on
    which rank was asked.
    """

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        self.tensors = tuple(sorted(tensors, key=lambda spec: natural_key(spec.name)))
        self.index: Mapping[str, int] = {spec.name: i for i, spec in enumerate(self.tensors)}
        if len(self.index) != len(self.tensors):
            raise LayoutError("two tensors of the model have the same name")

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of names, shapes and kinds."""
        rows = [[spec.name, list(spec.shape), spec.kind] for spec in self.tensors]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    def under(self, policy: BufferPolicy) -> Layout:
        """The tensors that a run with this buffer policy keeps in common."""
        if policy == "average":
            return self
        if policy == "local":
            return Layout(spec for spec in self.tensors if spec.kind != "buffer")
        return Layout(replace(spec, kind="static") if spec.kind == "buffer" else spec for spec in self.tensors)

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(spec.numel for spec in self.tensors)

    def difference(self, other: Layout) -> str:
        """Says in words where two layouts first differ; empty where they do not."""
        for name in sorted({*self.index, *other.index}, key=natural_key):
            mine, theirs = (x.tensors[x.index[name]] if name in x.index else None for x in (self, other))
            if mine != theirs:
                return f"tensor '{name}' is {_describe(mine)} here and {_describe(theirs)} there"
        return ""


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that orders numbers in names by value."""
    return [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in re.split(r"(\d+)", name)]


def _describe(spec: TensorSpec | None) -> str:
    return f"{spec.kind} {list(spec.shape)}" if spec else "missing"


def canonical_name(name: str) -> str:
    """The tensor's name without the parts that torch.compile, activation checkpointing and FSDP1 put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, Kind]]:
    """Yields (canonical name, tensor, kind) for every tensor of a model, in no particular order.

    Tied parameters appear once, under the first of their names. Frozen parameters are `static`: islands take them
    from the coordinator once. Buffers are those that are floating-point and saved with the model; the run's policy
    says what becomes of them (`Layout.under`). Other buffers are no part of a run.
    """
    module = _unwrapped(module)
    found: dict[int, tuple[str, Tensor, Kind]] = {}
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        name = canonical_name(raw)
        known = found.get(id(parameter))
        if known is None or natural_key(name) < natural_key(known[0]):
            found[id(parameter)] = name, parameter, "parameter" if parameter.requires_grad else "static"
    yield from found.values()
    saved = {canonical_name(raw) for raw in module.state_dict(keep_vars=True)}
    for raw, buffer in module.named_buffers():
        if canonical_name(raw) in saved and buffer.is_floating_point():
            yield canonical_name(raw), buffer, "buffer"


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, whichever is around the other."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in dict(module.named_children()):
            module = module.get_submodule("_orig_mod")
        else:
            return module


def box_of(tensor: Tensor, name: str = "") -> Box:
    """The box of `tensor` that this rank holds; of no elements where it holds none.

    Raises:
        LayoutError: the placement leaves partial sums, or a shard that is not one box.
    """
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    if any(p.is_partial() for p in tensor.placements):
        raise LayoutError(f"tensor '{name}' has partial sums ({tensor.placements}): redistribute it first")
    mesh, held = tensor.device_mesh, tuple(tensor.to_local().shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    offset, size = [0] * tensor.ndim, list(tensor.shape)
    for dim, over in _cuts(tensor, name):
        each = -(-size[dim] // mesh.size(over))
        start = min(size[dim], each * coordinate[over])
        offset[dim] += start
        size[dim] = min(each, size[dim] - start)
    if tuple(size) != held and math.prod(size) + math.prod(held):
        raise _not_one_box(tensor, name)
    return Box(tuple(offset), tuple(size))


def _cuts(tensor: DTensor, name: str) -> Iterator[tuple[int, int]]:
    """Yields (tensor dimension, mesh dimension) for every cut that makes the shards, in the order of cutting.

    Mesh dimensions cut from left to right, but a strided shard comes after `split_factor` parts have been made by
    those to its right: FSDP over tensor parallelism on one dimension cuts what each tensor-parallel rank holds.
    """
    order: dict[int, list[int]] = {}
    for over, placement in reversed([*enumerate(tensor.placements)]):
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise _not_one_box(tensor, name)
        cuts = order.setdefault(placement.dim, [])
        parts = [*accumulate((tensor.device_mesh.size(other) for other in cuts), mul, initial=1)]
        wanted = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        if wanted not in parts:
            raise _not_one_box(tensor, name)
        cuts.insert(parts.index(wanted), over)
    for dim, cuts in order.items():
        yield from ((dim, over) for over in cuts)


def _not_one_box(tensor: DTensor, name: str) -> LayoutError:
    return LayoutError(
        f"tensor '{name}' is placed as {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}: "
        "a shard of it is not one box"
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its storage and outside of autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
