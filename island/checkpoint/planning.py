"""Which rank writes what: DCP's plans, agreed on without pickle, and what all of them hold as JSON.

DCP gathers plans as pickled objects. Here ranks gather rows of plain values, and each makes the plans of all from them:
the same everywhere, since it is a function of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from diloco.errors import InputError, LayoutError
from diloco.layout import Box
from island.checkpoint.pieces import Piece, chunk, write_item

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors by their names in safetensors files."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Row = tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]
"""Tensor, type, whole shape, and offset and size of a box."""
Tensors = Mapping[str, Any]
"""By tensor: {"dtype", "shape", "chunks": [[offset, size, rank], ...]}; JSON."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who writes what of a checkpoint."""

    mine: SavePlan
    tensors: Tensors
    """What all ranks write."""


def rows(pieces: Mapping[str, Piece]) -> list[Row]:
    """What a rank could write. Raises `LayoutError` for a tensor of a type that safetensors files do not have."""
    for name, piece in pieces.items():
        if piece.dtype not in NAMES:
            raise LayoutError(f"tensor '{name}' is {piece.dtype}, which no checkpoint can hold")
    return [
        (name, NAMES[piece.dtype], piece.shape, piece.box.offset, piece.box.size)
        for name, piece in pieces.items()
        if piece.box.numel
    ]


def share_out(by_rank: Sequence[Sequence[Row]], rank: int) -> Plan:
    """Has each box written once, by the rank of those that hold it which has least to write; the first of several.

    Args:
        by_rank: `rows` of every rank.
        rank: whose plan is returned.

    Raises:
        LayoutError: the boxes of a tensor do not make it up.
    """
    holders: dict[tuple[str, Box], list[tuple[int, Row]]] = {}
    for number, theirs in enumerate(by_rank):
        for row in theirs:
            holders.setdefault((row[0], Box(tuple(row[3]), tuple(row[4]))), []).append((number, row))
    load, plans = [0] * len(by_rank), [SavePlan([]) for _ in by_rank]
    tensors: dict[str, Any] = {}
    for (name, box), found in sorted(holders.items(), key=lambda item: (item[0][0], item[0][1].offset)):
        number, (_, dtype, shape, *_) = min(found, key=lambda one: (load[one[0]], one[0]))
        load[number] += box.numel * DTYPES[dtype].itemsize
        plans[number].items.append(write_item(name, DTYPES[dtype], tuple(shape), box))
        entry = tensors.setdefault(name, {"dtype": dtype, "shape": list(shape), "chunks": []})
        entry["chunks"].append([list(box.offset), list(box.size), number])
    for name, entry in tensors.items():
        whole = Box.whole(entry["shape"]).numel
        if sum(Box(tuple(o), tuple(s)).numel for o, s, _ in entry["chunks"]) != whole:
            raise LayoutError(f"the ranks' parts of tensor '{name}' {entry['shape']} do not make it up exactly")
    indexed, _ = create_default_global_save_plan(plans)
    return Plan(mine=indexed[rank], tensors=tensors)


def metadata(tensors: Tensors) -> Metadata:
    """What a checkpoint holds, in DCP's words; its storage data is the rank that has written each chunk.

    Raises:
        InputError: it is not what a checkpoint says of its tensors.
    """
    described: dict[str, STORAGE_TYPES] = {}
    ranks: dict[MetadataIndex, int] = {}
    try:
        for name, entry in tensors.items():
            chunks = [(chunk(Box(tuple(offset), tuple(size))), rank) for offset, size, rank in entry["chunks"]]
            described[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[entry["dtype"]]),
                size=torch.Size(entry["shape"]),
                chunks=[one for one, _ in chunks],
            )
            ranks.update({MetadataIndex(name, one.offsets): int(rank) for one, rank in chunks})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the manifest does not say what tensors there are: {error!r}") from error
    return Metadata(described, storage_data=ranks)
