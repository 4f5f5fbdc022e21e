"""One rank of an island in a test: the project's decoder on the mesh that its spec names.

python -m tests.integration.mesh_rank SPEC.json     with RANK and WORLD_SIZE in the environment
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordinator.files import REAL
from diloco.config import RunConfig
from island.config_mesh import MemoryConfig, MeshConfig
from island.parallel import assemble
from island.session import join

ROWS = 8


def main(path: str) -> None:
    """Trains in the run on random tokens of the island's own; writes versions and digests after every step."""
    spec = json.loads(Path(path).read_text())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=size)
    run = RunConfig.model_validate(spec["run"])
    memory = {key: value for key, value in spec["mesh"].items() if key in MemoryConfig.model_fields}
    rest = {key: value for key, value in spec["mesh"].items() if key not in memory}
    mesh = MeshConfig.model_validate({"ranks": size, "device": "cpu"} | rest)
    engine = assemble(run, mesh, MemoryConfig.model_validate(memory), torch.device("cpu"))
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(spec["seed"])
    seen: list[Any] = []
    with join(engine.model, None, spec["address"], island_id=spec["island"], connect_timeout_s=60) as site:
        while not site.done:
            batch = torch.randint(run.model.vocab_size, (ROWS, run.model.sequence_length + 1), generator=generator)
            mine = batch.chunk(engine.data_ranks)[engine.data_rank]
            engine.step(mine[:, :-1], mine[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
            site.step(tokens=mine[:, 1:].numel() if engine.leads else 0)
            seen.append([[p.version for p in site.replica.position], site.digests()])
        held = sorted(site.layout.tensors[h.piece.tensor].name for f in (0, 1) for h in site.replica.held(f))
    REAL.write(
        Path(spec["out"]).with_suffix(f".{rank}.json"),
        json.dumps({"seen": seen, "held": held, "tokens": site.tokens}).encode(),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
