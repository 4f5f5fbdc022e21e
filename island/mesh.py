"""This rank's device and process group, and the model on the island's mesh."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from diloco.config import RunConfig
from diloco.errors import EnvironmentFault
from island.config import MeshConfig
from island.model import allocate, blocks, build_meta, fill


def start(mesh: MeshConfig) -> torch.device:
    """Initialises this rank's process group; returns its device.

    gloo carries CPU tensors (the session's small collectives too), and NCCL those on GPUs.

    Raises:
        EnvironmentFault: CUDA is asked for and there is no GPU for this rank.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    if mesh.device == "cuda" and gpus <= rank:
        raise EnvironmentFault(
            f"mesh.device is 'cuda', but there are {gpus} GPUs for rank {rank}: set mesh.device='cpu'"
        )
    use_cuda = mesh.device != "cpu" and gpus >= mesh.ranks
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(mesh.threads_per_rank or max(1, (os.cpu_count() or 1) // mesh.ranks))
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    return device


def build(run: RunConfig, mesh: MeshConfig, device: torch.device) -> nn.Module:
    """The run's model, sharded over the island (FSDP2, or HSDP with `mesh.replicas`), with its first parameters.

    The model is made on the meta device. Of our decoder each tensor's first value is made and cut alone, so no rank
    ever holds the whole model; of another, each rank holds it on the CPU for a moment (`island.model.fill`).
    """
    model = build_meta(run)
    shape = (mesh.replicas, mesh.ranks // mesh.replicas) if mesh.replicas > 1 else (mesh.ranks,)
    names = ("replicas", "shards")[-len(shape) :]
    device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    dtype = None if mesh.param_dtype == "float32" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=device_mesh, mp_policy=policy)
    fully_shard(model, mesh=device_mesh, mp_policy=policy)
    allocate(model, device)
    fill(model, run)
    return model
