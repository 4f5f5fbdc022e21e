"""Memory that an island will take, before it takes any: an estimate from the run's settings and the mesh.

Per value of the model and rank, over `shards`, the ranks among which the parameters are divided:

    4 B master + 4 B gradient + the optimizer's state      where the model is: on the GPU, or in the CPU's memory
    4 B anchor + 4 B of what the up codec drops, if any    in the CPU's memory
    4 B staged values + the coded bytes                    there too, of the largest fragment

Added to it are FSDP's gathered copy of two blocks and of what is outside of blocks, and the activations of one step:
per token and layer six vectors of the model's width, keys and values, and four of the feed-forward's, and per token
three vectors of the vocabulary's size in float32 for the loss.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from diloco.codec.policy import up_choice
from diloco.config import RunConfig
from diloco.errors import ExitCode
from diloco.fragments import partition
from diloco.layout import Layout
from island.config import IslandConfig
from island.optimizers.build import state_bytes
from island.preflight.finding import Finding, fail, ok, warn

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
CGROUP = Path("/sys/fs/cgroup")
PROCESS_BYTES = 400 * 2**20
"""A rank before it has a model: Python, torch and gRPC."""
TIGHT = 0.85
"""Share of the memory from which on it is called tight."""


class Need(NamedTuple):
    """Bytes that a rank needs where the model is, and that all ranks need in the CPU's memory beside that."""

    model: int
    activations: int
    host: int


def need(run: RunConfig, island: IslandConfig, layout: Layout) -> Need:
    """What the run's model takes on this island's mesh."""
    mesh = island.mesh
    shards = mesh.ranks // mesh.replicas
    parameters = [spec for spec in layout.tensors if spec.kind == "parameter"]
    values = sum(spec.numel for spec in parameters)
    held = 8 * values + sum(state_bytes(spec.name, spec.shape, run.inner) for spec in parameters)
    width = 4 if mesh.param_dtype == "float32" else 2
    blocks: dict[str, int] = defaultdict(int)
    for spec in parameters:
        layer = _LAYER.search(spec.name)
        blocks[layer[1] if layer else ""] += spec.numel
    gathered = width * (blocks.pop("", 0) + 2 * max(blocks.values(), default=0)) if shards > 1 else 0

    model, sequences = run.model, math.ceil(island.data.batch_sequences / mesh.ranks)
    tokens = sequences * model.sequence_length
    per_layer = 6 * model.dim + 2 * model.dim * model.kv_heads // model.heads + 4 * model.ffn_dim
    activations = tokens * (width * model.layers * per_layer + 12 * model.vocab_size)

    up = up_choice(run.wire)
    largest = max(
        sum(4 * spec.numel + up.of(spec).size(spec.numel) for spec in fragment.specs)
        for fragment in partition(layout, run.sync)
    )
    kept = 4 * layout.numel * (2 if up.feedback else 1)
    return Need(held // shards + gathered, activations, kept * mesh.replicas + largest + mesh.ranks * PROCESS_BYTES)


def memory(run: RunConfig, island: IslandConfig, layout: Layout, free_gpu_bytes: Sequence[int]) -> Finding:
    """Whether it fits.

    Args:
        free_gpu_bytes: of each GPU that a rank will use; none where the ranks use the CPU.
    """
    wants, ranks = need(run, island, layout), island.mesh.ranks
    each = wants.model + wants.activations
    rows = [("RAM", wants.host + (0 if free_gpu_bytes else ranks * each), free_ram())]
    if free_gpu_bytes:
        rows.append(("GPU", each, min(free_gpu_bytes)))
    found = "; ".join(f"{where}: about {_gb(wanted)} of {_gb(free)} free" for where, wanted, free in rows)
    found += f" (a rank: model {_gb(wants.model)}, activations {_gb(wants.activations)})"
    advice = "use more ranks, fewer sequences per step (data.batch_sequences) or mesh.param_dtype=bfloat16"
    if any(wanted > free for _, wanted, free in rows):
        return fail("memory", found, advice, ExitCode.ENVIRONMENT)
    if any(wanted > TIGHT * free for _, wanted, free in rows):
        return warn("memory", f"{found}, which is tight", advice)
    return ok("memory", found)


def free_ram(cgroup: Path = CGROUP) -> int:
    """Bytes of memory that this process may still take: of the machine, or of its control group where that is less."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no such control group: the machine's memory is the limit
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def free_gpus(island: IslandConfig) -> list[int]:
    """Free bytes of the GPU of each rank; empty where the ranks will use the CPU."""
    ranks = island.mesh.ranks
    if island.mesh.device == "cpu" or torch.cuda.device_count() < ranks:
        return []
    return [torch.cuda.mem_get_info(rank)[0] for rank in range(ranks)]


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
