"""One rank that trains a small model on one mesh after the other, each beside the same model in one process.

python -m tests.island.parallel.rank SPEC.json     with RANK and WORLD_SIZE in the environment
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coordinator.files import REAL
from diloco.config import RunConfig
from diloco.errors import DilocoError
from diloco.layout import box_of, canonical_name, local
from island.config_mesh import MemoryConfig, MeshConfig
from island.group import Group
from island.model import allocate, build_meta, fill
from island.model import loss as token_loss
from island.parallel import Engine, Whole, assemble

ROWS, STEPS, HELD_OUT = 8, 3, 6
RATE = 0.5
CLIP_NORM = 0.4
"""Below the norm of the first gradients, so that clipping is at work."""


class Layer(nn.Module):
    """A block of somebody's model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Foreign(nn.Module):
    """Somebody's model: each token is predicted from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.out = (
            nn.Embedding(32, 32),
            nn.ModuleList(Layer() for _ in range(3)),
            nn.Linear(32, 32),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(x)
        return logits


def run_config(model: dict[str, Any]) -> RunConfig:
    shape = {"vocab_size": 32, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "sequence_length": 16}
    return RunConfig.model_validate(
        {
            "run": {"id": "table", "steps": STEPS},
            "model": shape | model,
            "inner": {"clip_norm": CLIP_NORM},
            "sync": {"every_steps": 2, "buffers": "average"},
        }
    )


def train(engine: Engine, run: RunConfig) -> list[float]:
    """The losses of some steps of SGD on the island's batch, and that of held-out rows at the end."""
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(5)
    size = ROWS, run.model.sequence_length + 1
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(run.model.vocab_size, size, generator=generator)
        mine = batch.chunk(engine.data_ranks)[engine.data_rank]
        losses.append(engine.step(mine[:, :-1], mine[:, 1:]).item())
        optimizer.step()
        optimizer.zero_grad()
    batch = torch.randint(run.model.vocab_size, (HELD_OUT, size[1]), generator=generator)
    return [*losses, engine.evaluate(batch[:, :-1], batch[:, 1:]).item()]


class One(Engine):
    """Clips without asking other ranks."""

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        value = super().step(inputs, targets)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        return value


def alone(run: RunConfig) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process: losses, and the parameters at the end."""
    model = allocate(build_meta(run), "cpu")
    fill(model, run)
    engine = One(
        model,
        Whole(model, lambda x, y: token_loss(x, y, run.model.z_loss * torch.is_grad_enabled()), 1.0),
        torch.device("cpu"),
    )
    return train(engine, run), {canonical_name(name): p.detach() for name, p in model.named_parameters()}


def compare(case: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Trains on the case's mesh; returns losses, and how far this rank's parameters are from those of one process."""
    torch.compiler.reset()
    run = run_config(case.get("model", {}))
    key = json.dumps(case.get("model", {}))
    if key not in reference:
        reference[key] = alone(run)
    losses, parameters = reference[key]
    mesh = MeshConfig.model_validate({"ranks": dist.get_world_size(), "device": "cpu"} | case.get("mesh", {}))
    engine = assemble(run, mesh, MemoryConfig.model_validate(case.get("memory", {})), torch.device("cpu"))
    found = [Group().mean(loss) for loss in train(engine, run)]
    apart, seen = 0.0, []
    for raw, parameter in engine.model.named_parameters():
        name = canonical_name(raw)
        mine, box = local(parameter), box_of(parameter, name)
        if mine.numel():
            seen.append(name)
            apart = max(apart, (mine - parameters[name][box.slices]).abs().max().item())
    return {"losses": found, "alone": losses, "apart": apart, "held": sum(1 for _ in seen), "of": len(parameters)}


def main(path: str) -> None:
    """Runs the cases of the spec in turn; writes what came out."""
    spec = json.loads(Path(path).read_text())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    setattr(torch, "compile", partial(torch.compile, backend=spec["backend"]))  # noqa: B010  of this process alone
    dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=size)
    out: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    for name, case in spec["cases"].items():
        try:
            out[name] = compare(case, reference)
        except DilocoError as error:
            out[name] = {"error": f"{type(error).__name__}: {error.message}"}
        REAL.write(Path(spec["out"]).with_suffix(f".{rank}.json"), json.dumps(out).encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
