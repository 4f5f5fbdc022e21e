"""What a checkpoint holds of a tensor: the box that a rank has, as torch's distributed checkpoints (DCP) see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from diloco.layout import Box, box_of, local


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A box of a tensor. Its two methods with underscores are what DCP asks of whatever it saves and loads."""

    source: Tensor | Callable[[], Tensor]
    """The values of the box, on any device; or what gives them (CPU), where they are there only later."""
    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype = torch.float32
    fixed: bool = False
    """Whether the values never change any more, so that none needs to be copied."""

    @classmethod
    def of(cls, tensor: Tensor, name: str = "") -> Piece:
        """What this rank holds of a tensor, plain or DTensor. Raises `LayoutError` where that is not one box."""
        box = box_of(tensor, name)
        return cls(source=local(tensor), box=box, shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def tensor(self) -> Tensor:
        """The values, in the shape of the box."""
        found = self.source if isinstance(self.source, Tensor) else self.source()
        return found if found.shape == self.box.size else found.view(self.box.size)

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, object: Piece) -> list[WriteItem]:  # noqa: A002 - DCP's word
        return [write_item(fqn, self.dtype, self.shape, self.box)] if self.box.numel else []

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk(self.box)] if self.box.numel else []


def chunk(box: Box) -> ChunkStorageMetadata:
    """A box in DCP's words."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size))


def write_item(name: str, dtype: torch.dtype, shape: tuple[int, ...], box: Box) -> WriteItem:
    """That a box of a tensor is to be written."""
    data = TensorWriteData(chunk=chunk(box), properties=TensorProperties(dtype=dtype), size=torch.Size(shape))
    return WriteItem(index=MetadataIndex(name, torch.Size(box.offset)), type=WriteItemType.SHARD, tensor_data=data)
