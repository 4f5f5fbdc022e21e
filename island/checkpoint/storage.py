"""DCP's storage for checkpoints without pickle: tensors in safetensors files, one for each rank.

DCP's own writers pickle their metadata and all that is no tensor. Here the manifest says what there is (JSON), and what
is no tensor lies in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from diloco.errors import InputError
from island.checkpoint.pieces import Piece
from island.checkpoint.planning import DTYPES, NAMES, Tensors, metadata
from island.checkpoint.store import Store

_LENGTH = 8
"""Bytes that say how long a safetensors header is."""


def file_of(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class Writer(StorageWriter):
    """Writes what one rank has to write into its file.

    Args:
        store: where.
        folder: of the checkpoint.
        rank: whose file it is.
    """

    def __init__(self, store: Store, folder: str, rank: int) -> None:
        self._store, self._folder, self._name = store, folder, file_of(rank)
        self.written: dict[str, tuple[int, str]] = {}
        """Files, with their bytes and digests."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Writes to another folder."""
        self._folder = str(checkpoint_id or self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Takes the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Takes the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the file; what each item's tensor is, the planner says when its turn comes."""
        done: Future[list[WriteResult]] = Future()
        header, end, results = {}, 0, []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            start, end = end, end + data.chunk.sizes.numel() * data.properties.dtype.itemsize
            header[item.index.fqn] = {
                "dtype": NAMES[data.properties.dtype],
                "shape": list(data.chunk.sizes),
                "data_offsets": [start, end],
            }
            results.append(WriteResult(item.index, end - start, self._name))

        def parts() -> Iterator[memoryview]:
            head = json.dumps(header).encode()
            head += b" " * (-len(head) % _LENGTH)
            yield memoryview(len(head).to_bytes(_LENGTH, "little") + head)
            for item in plan.items:
                found = planner.resolve_data(item)
                assert isinstance(found, Tensor)
                yield _bytes(found)

        if plan.items:
            self.written[self._name] = self._store.write(self._folder, self._name, parts())
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Leaves it to the manifest, which speaks of all ranks."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder."""
        return bool(str(checkpoint_id))


class Reader(StorageReader):
    """Reads what any rank needs from the files of all.

    Args:
        store: where.
        folder: of the checkpoint.
        tensors: what its manifest says that there is.
    """

    def __init__(self, store: Store, folder: str, tensors: Tensors) -> None:
        self._store, self._folder, self._tensors = store, folder, tensors
        self._ranks: Mapping[MetadataIndex, int] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reads from another folder."""
        self._folder = str(checkpoint_id or self._folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the manifest says."""
        return metadata(self._tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes up in whose file each chunk is."""
        self._ranks = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Takes the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Takes the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items, file by file.

        Raises:
            EnvironmentFault: the store fails.
            InputError: a file does not hold what the manifest says.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            rank = self._ranks[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            by_file.setdefault(file_of(rank), []).append(item)
        for name, items in sorted(by_file.items()):
            with self._store.open(self._folder, name) as file:
                length = int.from_bytes(file.read(_LENGTH), "little")
                try:
                    header = json.loads(file.read(length))
                    for item in items:
                        target = planner.resolve_tensor(item)
                        target.copy_(_read(file, _LENGTH + length, header[item.storage_index.fqn], item))
                        planner.commit_tensor(item, target)
                except (ValueError, KeyError, TypeError, RuntimeError) as error:
                    raise InputError(f"{self._store.url}/{self._folder}/{name} is damaged: {error!r}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder."""
        return bool(str(checkpoint_id))


class Saving(DefaultSavePlanner):
    """Has the pieces that are to be written at hand.

    Args:
        pieces: by name.
    """

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a piece."""
        return self._pieces[write_item.index.fqn].tensor


class Loading(DefaultLoadPlanner):
    """Plans what a rank reads into its pieces, however they were cut when they were written."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes up the pieces, by name, that are to be filled."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The values of a piece, to be written into."""
        piece: Piece = self.state_dict[index.fqn]
        return piece.tensor


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _read(file: Any, base: int, entry: Mapping[str, Any], item: ReadItem) -> Tensor:
    """What an item wants of a chunk: its rows are read, and of those only what is wanted is kept."""
    dtype, shape = DTYPES[entry["dtype"]], list(entry["shape"])
    start, end = entry["data_offsets"]
    if shape:
        row = (end - start) // shape[0]
        shape[0] = item.lengths[0]
        start, end = start + item.storage_offsets[0] * row, start + (item.storage_offsets[0] + shape[0]) * row
    file.seek(base + start)
    data = bytearray(file.read(end - start))
    if len(data) != end - start:
        raise ValueError(f"{item.storage_index.fqn} is cut short")
    found = torch.frombuffer(data, dtype=dtype).view(shape)
    for dim in range(1, len(shape)):
        found = found.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    return found
