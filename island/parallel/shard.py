"""FSDP2 and HSDP: every tensor is cut over the ranks and gathered when it is used."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from island.config_mesh import MeshConfig
from island.model import Decoder, blocks
from island.parallel.ranks import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(model: nn.Module, mesh: MeshConfig, ranks: Ranks) -> None:
    """Shards a model, or the stage of a pipeline, block by block; masters stay in the dtype that they have.

    Gradients are added up over ranks, not averaged: the loss of each rank is its share of the island's.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # for code that changes it
    policy = MixedPrecisionPolicy(
        param_dtype=None if mesh.param_dtype == "float32" else DTYPES[mesh.param_dtype],
        reduce_dtype=DTYPES[mesh.reduce_dtype],
    )
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if mesh.cpu_offload else OffloadPolicy()
    again = mesh.reshard_after_forward == "always" or (mesh.reshard_after_forward == "auto" and mesh.pipeline == 1)

    def apply(module: nn.Module | list[nn.Module], *, reshard: bool = again) -> None:
        fully_shard(
            module,
            mesh=ranks.data,
            reshard_after_forward=reshard,
            shard_placement_fn=place,
            mp_policy=policy,
            offload_policy=offload,
        )

    place = _beside_experts(ranks) if ranks.plan.expert > 1 else None
    for block in blocks(model):
        apply(block)
    if isinstance(model, Decoder) and not (
        model.config.tie_embeddings and model.embed_tokens is not None and model.lm_head is not None
    ):
        if model.embed_tokens is not None:
            apply(model.embed_tokens)
        if model.norm is not None and model.lm_head is not None:
            apply([model.norm, model.lm_head], reshard=False)  # backward begins with them
    apply(model, reshard=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _beside_experts(ranks: Ranks) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """Where FSDP puts a weight: one that is cut over the experts' ranks, on those that hold the same experts.

    It is cut within its experts where there are fewer of them than such ranks.
    """
    mesh = ranks.beside_expert
    rest = mesh.size(-1)
    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def place(weight: nn.Parameter) -> ShardPlacementResult | None:
        if not isinstance(weight, DTensor) or "expert" not in (weight.device_mesh.mesh_dim_names or ()):
            return None
        held = weight.to_local().shape
        few = held[0] < rest and not held[1] % rest
        return ShardPlacementResult(Shard(1 if few else 0), info)

    return place
