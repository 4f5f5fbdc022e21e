"""One rank of an island whose optimizers step a model in every layout, with gradients that are given.

python -m tests.integration.optimizer_rank FOLDER     with RANK and WORLD_SIZE (4) in the environment
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from diloco.layout import box_of, canonical_name, local
from island.optimizers import Muon, build, muon
from tests.island.test_optimizers import Mixed, gradient, inner

RANKS = 4
OPTIMIZERS = ("adamw", "muon", "lamb")
STEPS = 3


def rows(model: Mixed) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), ignored_params={model.gain})


def replicas(model: Mixed) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh, ignored_params={model.gain})


def columns(model: Mixed) -> None:
    """Tensor parallelism; four ranks share three experts, so that one has none; norms and biases are plain."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for module, dim in ((model.wide, 0), (model.tall, 1), (model.embed_tokens, 1), (model.lm_head, 0)):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(dim)]))
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, [Shard(0)]))


def both(model: Mixed) -> None:
    """FSDP over tensor parallelism, which cuts some dimensions twice; experts on a mesh of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "columns"))
    parallelize_module(model, mesh["columns"], {"wide": ColwiseParallel(), "tall": RowwiseParallel()})
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "inside"))
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), other, [Shard(0), Shard(2)]))
    fully_shard(model, mesh=mesh["shards"], ignored_params={model.gain, model.experts})


def stages(model: Mixed) -> None:
    """Two pipeline stages of two ranks each: none holds the whole model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    for name in ("embed_tokens", "wide", "experts") if mesh.get_local_rank("stages") else ("tall", "norm", "lm_head"):
        delattr(model, name)
    fully_shard(model, mesh=mesh["shards"], ignored_params={model.gain})


def copies(model: Mixed) -> None:
    """The same plain tensors on every rank, but for one that is replicated by its placement."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model.wide.weight = nn.Parameter(distribute_tensor(model.wide.weight.detach(), mesh, [Replicate()]))


LAYOUTS: dict[str, Callable[[Mixed], None]] = {
    function.__name__: function for function in (rows, replicas, columns, both, stages, copies)
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step with this rank's parts of the gradients that a single process has."""
    for raw, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = canonical_name(raw)
        part = gradient(name, parameter.shape, number)[box_of(parameter, name).slices].clone()
        if not isinstance(parameter, DTensor):
            parameter.grad = part
        else:
            parameter.grad = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
    optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of the model in full. Collective."""
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach().clone()
        for name, parameter in model.named_parameters()
    }


def made(layout: str, name: str) -> tuple[Mixed, torch.optim.Optimizer]:
    model = Mixed()
    LAYOUTS[layout](model)
    return model, build(model, inner(name))


def check_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, layout: str, name: str, folder: Path) -> None:
    """What is saved and loaded goes on as if nothing had been, to the bit."""
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=str(folder))
    again, other = made(layout, name)
    state: dict[str, Any] = get_optimizer_state_dict(again, other)
    dcp.load(state, checkpoint_id=str(folder))
    set_optimizer_state_dict(again, other, copy.deepcopy(state))
    with torch.no_grad():
        for parameter, source in zip(again.parameters(), model.parameters(), strict=True):
            local(parameter).copy_(local(source))
    for each, by in ((model, optimizer), (again, other)):
        step(each, by, STEPS)
    for parameter, source in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(local(parameter), local(source)), (layout, name)


def main(folder: Path) -> None:
    """Writes what every optimizer made of the model in every layout: FOLDER/LAYOUT-OPTIMIZER-RANK.safetensors."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    muon.ROUND_VALUES = 16
    for layout in LAYOUTS:
        for name in OPTIMIZERS:
            model, optimizer = made(layout, name)
            if isinstance(optimizer, Muon):
                assert len(optimizer._plan) > 1
                assert len({matrix.owner for matrices in optimizer._plan for matrix in matrices}) > 1
            for number in range(STEPS):
                step(model, optimizer, number)
            save_file(whole(model), folder / f"{layout}-{name}-{rank}.safetensors")
            if layout != "stages":
                check_checkpoint(model, optimizer, layout, name, folder / f"{layout}-{name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
