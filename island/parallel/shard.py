"""FSDP2 and HSDP: every tensor is cut over the ranks and gathered when it is used."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from island.config_mesh import MeshConfig
from island.model import Decoder, blocks
from island.model.moe import Experts
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

    def apply(module: nn.Module | list[nn.Module], *, reshard: bool = again, over: DeviceMesh = ranks.data) -> None:
        fully_shard(module, mesh=over, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    for block in blocks(model):
        if ranks.plan.expert > 1:
            for experts in (module for module in block.modules() if isinstance(module, Experts)):
                apply(experts, over=ranks.beside_expert)
        apply(block)
    if isinstance(model, Decoder) and not model.config.tie_embeddings:
        if model.embed_tokens is not None:
            apply(model.embed_tokens)
        if model.norm is not None and model.lm_head is not None:
            apply([model.norm, model.lm_head], reshard=False)  # backward begins with them
    apply(model, reshard=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
