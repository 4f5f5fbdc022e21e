"""One rank of an island in a test: a small model of every kind of tensor, in one of several layouts.

python -m tests.integration.rank SPEC.json     with RANK and WORLD_SIZE in the environment
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from coordinator.files import REAL
from island.session import Session, join

STEPS = 8
WIDTH = 7
"""Odd, so that rows split unevenly."""


class Block(nn.Module):
    """A feed-forward block; its hidden width is even, as torch's tensor parallelism asks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 6, bias=False)
        self.down = nn.Linear(6, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))  # fully_shard takes no scalar parameters

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Mixed(nn.Module):
    """Tied, frozen and buffer tensors, a scalar among them, beside plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.layers:
            x = block(x)
        if self.training:
            self.peak.copy_(torch.maximum(self.peak, x.detach().abs().max()))
            self.running.mul_(0.9).add_(x.detach().flatten(0, -2).mean(0), alpha=0.1)
        return self.head(self.frozen(x))


class Wide(nn.Module):
    """256 MiB in 32 layers, for the memory test."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(32))


def build(layout: str, seed: int) -> nn.Module:
    """A model in a layout; `seed` differs between islands, so that only the coordinator makes them equal."""
    torch.manual_seed(seed)
    if layout == "wide":
        return Wide()
    model = Mixed()
    if layout == "fsdp":
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tensor-parallel":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.layers:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        assert layout == "single", layout
    return model


def train(model: nn.Module, site: Session, seed: int, seen: list[Any]) -> None:
    """Inner SGD on the island's own data, the same on all of its ranks."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    while not site.done:
        batch = torch.randn(4, WIDTH, generator=generator)
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        site.step(tokens=batch.shape[0])
        seen.append([[p.version for p in site.replica.position], site.digests()])


def settle_wide(model: nn.Module, site: Session, seen: list[Any]) -> None:
    """Moves every parameter a little at every step; records the peak of resident memory (KiB) before and after."""
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    while not site.done:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1e-3)
        site.step(tokens=1)
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main(path: str) -> None:
    """Joins each run of the spec in turn with this island's model; writes what was seen."""
    spec = json.loads(Path(path).read_text())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=size)
    model = build(spec["layout"], spec["begin"])
    seen: list[Any] = []
    with join(
        model,
        None,
        spec["address"],
        island_id=spec["island"],
        connect_timeout_s=60,
        start_timeout_s=120,
        anchors=spec["anchors"],
    ) as site:
        if spec["layout"] == "wide":
            settle_wide(model, site, seen)
        else:
            train(model, site, spec["seed"], seen)
        sizes = [site.replica.contribution_size(f.index) for f in site.replica.fragments]
    REAL.write(Path(spec["out"]).with_suffix(f".{rank}.json"), json.dumps({"seen": seen, "sizes": sizes}).encode())
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
