"""What an island brings into a run: its name, its tensors, its layout, and the pieces that each of its ranks holds."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diloco.config import SyncConfig
from diloco.errors import InputError, LayoutError
from diloco.fragments import partition
from diloco.framing import PROTOCOL
from diloco.layout import Box, Kind, Layout, Piece, TensorSpec, box_of, local, named_tensors
from diloco.replica import Held
from diloco.v1 import coordinator_pb2 as pb
from island.config_mesh import AnchorPolicy
from island.group import Group

Tensors = dict[str, tuple[Tensor, Kind]]


_UNFIT = {
    "FullyShardedDataParallel": "FSDP1, whose flat parameters have no shape of their own: shard it with `fully_shard` "
    "(FSDP2; in Accelerate `fsdp_version=2`, in Lightning ModelParallelStrategy)",
    "DataParallel": "nn.DataParallel: run one process per device with torchrun, and DistributedDataParallel",
    "DeepSpeedEngine": "DeepSpeed, which keeps the fp32 parameters where others cannot reach them: use DDP or FSDP2",
}


def name_here(group: Group) -> str:
    """The host name of the island's first rank, as the id of an island that was given none. Collective."""
    return group.from_first(lambda: _as_id(socket.gethostname()).encode()).decode()


def _as_id(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]|^[^A-Za-z0-9]+", "-", name).lstrip("-._")[:64] or "island"


def check(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuses what cannot take part in a run, and says what can.

    Raises:
        LayoutError: a wrapper that hides the parameters, or trainable parameters that are not float32.
        InputError: optimizers of other parameters than the model's.
    """
    for module in model.modules():
        if why := next((_UNFIT[base.__name__] for base in type(module).__mro__ if base.__name__ in _UNFIT), ""):
            raise LayoutError(f"this model is wrapped in {why}")
    for name, tensor, kind in named_tensors(model):
        if kind == "parameter" and tensor.dtype != torch.float32:
            raise LayoutError(
                f"parameter '{name}' is {tensor.dtype}, in which small inner steps vanish: keep float32 parameters "
                "(model.float(), or from_pretrained(dtype=torch.float32)), make the optimizer after that, and compute "
                "in bfloat16 under torch.autocast, or with FSDP2's MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
            )
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise InputError(
                f"no parameter of this {type(optimizer).__name__} is in the model: make the optimizer after the model "
                "is moved, wrapped and sharded, and join after both"
            )


def inventory(model: nn.Module, group: Group) -> tuple[Tensors, Layout]:
    """This rank's tensors by name, and the layout of the whole island's model. Collective."""
    tensors = {name: (tensor, kind) for name, tensor, kind in named_tensors(model)}
    rows = [[name, list(tensor.shape), kind] for name, (tensor, kind) in tensors.items()]
    specs: dict[str, TensorSpec] = {}
    for rank, theirs in enumerate(group.gather(rows)):
        for name, shape, kind in theirs:
            spec = TensorSpec(name, tuple(shape), kind)
            if specs.setdefault(name, spec) != spec:
                raise LayoutError(f"tensor '{name}' is {specs[name]} on an earlier rank and {spec} on rank {rank}")
    return tensors, Layout(specs.values())


def settle(model: nn.Module) -> None:
    """Has FSDP drop gathered copies, which would be stale once the shards change."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard):
            reshard()


def join_request(layout: Layout, *, island_id: str, run_id: str, ranks: int, resumes: bool = False) -> pb.JoinRequest:
    """What an island says of itself to enter a run."""
    return pb.JoinRequest(
        protocol_min=PROTOCOL,
        protocol_max=PROTOCOL,
        run_id=run_id,
        island_id=island_id,
        ranks=ranks,
        tensors=[pb.TensorSpec(name=s.name, shape=s.shape, kind=s.kind) for s in layout.tensors],
        layout_digest=layout.digest,
        resumes=resumes,
    )


def hold(tensors: Tensors, layout: Layout, sync: SyncConfig, group: Group, anchors: AnchorPolicy = "cpu") -> list[Held]:
    """This rank's pieces, with the ranks that hold the same; forms the subgroups that share a piece. Collective."""
    boxes = {name: box_of(tensor, name) for name, (tensor, _) in tensors.items()}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, rows in enumerate(group.gather([[n, b.offset, b.size] for n, b in boxes.items() if b.numel])):
        for name, offset, size in rows:
            holders.setdefault(name, {}).setdefault(Box(tuple(offset), tuple(size)), []).append(rank)
    load = [0] * group.size
    held = []
    starts = {
        tensor: start
        for fragment in partition(layout, sync)
        for tensor, start in zip(fragment.tensors, fragment.starts, strict=True)
    }
    for number, spec in enumerate(layout.tensors):
        found = holders.get(spec.name, {})
        _check_tiles(spec, list(found))
        for box, ranks in sorted(found.items(), key=lambda item: item[0].offset):
            first = min(ranks, key=lambda r: (load[r], r))
            load[first] += box.numel
            if len(ranks) > 1:
                group.form(tuple(ranks))
            if group.rank in ranks:
                owners = (first, *(r for r in ranks if r != first))
                piece, tensor = Piece(number, box), local(tensors[spec.name][0])
                held.append(
                    Held(
                        piece=piece,
                        spec=spec,
                        start=starts[number],
                        local=tensor,
                        owners=owners,
                        on_device=anchors == "device",
                    )
                )
    return held


def _check_tiles(spec: TensorSpec, boxes: list[Box]) -> None:
    overlap = any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    if overlap or sum(box.numel for box in boxes) != spec.numel:
        raise LayoutError(
            f"the ranks' parts of tensor '{spec.name}' {list(spec.shape)} do not make it up exactly: {boxes}"
        )
