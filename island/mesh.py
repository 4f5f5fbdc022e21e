"""This rank's device and process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from diloco.errors import EnvironmentFault
from island.config_mesh import MeshConfig


def start(mesh: MeshConfig) -> torch.device:
    """Initialises this rank's process group; returns its device.

    gloo carries CPU tensors (the session's small collectives too), and NCCL those on GPUs.

    Raises:
        EnvironmentFault: CUDA is asked for and there is no GPU for this rank.
    """
    rank, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", mesh.ranks))
    gpus = torch.cuda.device_count()
    if mesh.device == "cuda" and gpus <= rank:
        raise EnvironmentFault(
            f"mesh.device is 'cuda', but there are {gpus} GPUs for rank {rank}: set mesh.device='cpu'"
        )
    use_cuda = mesh.device != "cpu" and gpus >= here
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(mesh.threads_per_rank or max(1, (os.cpu_count() or 1) // here))
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    return device
