"""Memory that an island will take, before it takes any: an estimate from the settings of the run and the island.

Let a rank hold N values: those of its stages of the pipeline, matrices divided by `mesh.tensor`. They are divided once
more by S = shard * context; replicas and experts change nothing about that. With w the bytes of `mesh.param_dtype`:

    N / S * (4 master + 4 gradient + the optimizer's state)    where the model is, or in RAM with `mesh.cpu_offload`
    N / S * 4                                                  there too, with `memory.anchors` on the device
    w * (outside + 2 block)                                    gathered by FSDP; all of w * N where it is not freed
                                                               (a pipeline, reshard_after_forward = "never")
    w * (outside + block) + r * most                           gradients before they are divided, and what is sent of
                                                               them in `mesh.reduce_dtype`; in a pipeline all of N

`outside` is what is in no block, `block` the largest block with the experts of this rank alone, `most` the larger of
the two. The last two lines are 0 for a float32 model with S = 1. Activations are those of
n = batch_sequences / data ranks / accumulate / microbatches sequences of sequence_length / context tokens:

    a token and layer     w * (6 D + 2 H E + 2 K E + 4 F)      H E and K E query and key heads, F feed-forward, over
                                                               `mesh.tensor`; D too with `mesh.sequence_parallel`
    a layer of experts    k * (3 D + 4 F) + shared 4 F         in place of 4 F: those of one token, not all of them;
                                                               F over `mesh.tensor`
    checkpointed          D, or D + H E + half of the products' outputs ("selective"), and one whole layer
    a token               12 V                                 logits, where the output is; over `mesh.tensor` with
                                                               `mesh.loss_parallel`

Of layers, those of a rank, times the microbatches in flight: all with "gpipe", else as many as there are stages. Of a
model that is not ours, a layer is taken to keep what goes into and comes out of each of its matrices.

In RAM beside that, for the values of a node's ranks: 4 B anchor where it is not on the device, 4 B of what the up codec
drops if any, the largest fragment as float32 and coded (with anchors on the device twice more as float32: before an
update and after), and 400 MiB a rank for Python, torch and gRPC. A model that is not ours is made whole by
each rank for a moment, which counts where it is more than the first three. What ranks on the CPU hold of the model and
of activations is taken 1.3 times.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from diloco.codec.policy import up_choice
from diloco.config import ModelConfig, RunConfig
from diloco.errors import ExitCode
from diloco.fragments import partition
from diloco.layout import Layout, TensorSpec
from island.config import IslandConfig
from island.config_mesh import MemoryConfig, MeshConfig
from island.optimizers.build import state_bytes
from island.parallel.plan import Plan, plan
from island.preflight.finding import Finding, fail, ok, warn

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
CGROUP = Path("/sys/fs/cgroup")
PROCESS_BYTES = 400 * 2**20
"""A rank before it has a model: Python, torch and gRPC."""
HEAP = 1.3
"""What the C library's heap takes for ranks on the CPU, over what they hold: it keeps what was freed in pieces."""
TIGHT = 0.85
"""Share of the memory from which on it is called tight."""
WIDTHS = {"float32": 4, "bfloat16": 2}
ADVICE = (
    "use more ranks, memory.activation_checkpointing, more parts (memory.accumulate), fewer sequences per step "
    "(data.batch_sequences), mesh.param_dtype=bfloat16, mesh.cpu_offload or memory.anchors=cpu"
)


class Need(NamedTuple):
    """Bytes that the fullest rank needs where the model is, and that a node's ranks need in RAM beside that."""

    model: int
    activations: int
    host: int


def need(run: RunConfig, island: IslandConfig, layout: Layout, nodes: int | None = None) -> Need:
    """What the run's model takes on this island's mesh.

    Args:
        nodes: of the island that train; None: all.

    Raises:
        ConfigError: the mesh does not fit the model.
    """
    shrunk = island.of(nodes or island.nodes.most)
    mesh, memory, here = shrunk.mesh, shrunk.memory, island.ranks_here
    chosen = plan(mesh, memory, run.model)
    held = transient = activations = 0
    on_device = memory.anchors == "device"
    for stages in chosen.stages:
        trained = [spec for spec in layout.tensors if spec.kind == "parameter"]
        specs = [spec for spec in trained if _holds(spec, run.model, chosen, stages)]
        values, working = _parameters(specs, run, mesh, chosen, 8 + 4 * on_device)
        sequences = shrunk.data.batch_sequences // (chosen.data_ranks * memory.accumulate * mesh.chunks)
        tokens = sequences * run.model.sequence_length // chosen.context
        kept = tokens * _per_token(specs, run.model, mesh, memory, chosen, stages)
        if values + working + kept > held + transient + activations:
            held, transient, activations = values, working, kept

    up = up_choice(run.wire)
    largest = max(
        sum((12 if on_device else 4) * spec.numel + up.of(spec).size(spec.numel) for spec in fragment.specs)
        for fragment in partition(layout, run.sync)
    )
    anchors = 4 * layout.numel * (bool(up.feedback) + (not on_device)) * mesh.replicas + largest
    kept_here = anchors * here // mesh.ranks
    whole = 0 if run.model.ours else 4 * layout.numel * here
    host = max(kept_here, whole) + here * PROCESS_BYTES
    if mesh.cpu_offload:
        return Need(transient, activations, host + here * held)
    return Need(held + transient, activations, host)


def _holds(spec: TensorSpec, model: ModelConfig, chosen: Plan, stages: tuple[int, ...]) -> bool:
    """Whether a rank with these stages holds a parameter."""
    if chosen.pipeline == 1:
        return True
    layer = _LAYER.search(spec.name)
    if layer:
        return any(int(layer[1]) in chosen.layers[number] for number in stages)
    last = len(chosen.layers) - 1 in stages
    return 0 in stages or (last and model.tie_embeddings) if spec.name.startswith("embed") else last


def _parameters(
    specs: Sequence[TensorSpec], run: RunConfig, mesh: MeshConfig, chosen: Plan, each: int
) -> tuple[int, int]:
    """Bytes that a rank holds for its parameters all the time, `each` and the optimizer's state, and those that come
    and go."""
    shards = chosen.shard * chosen.context
    held, blocks = 0, defaultdict[str, int](int)
    for spec in specs:
        cut = chosen.tensor if len(spec.shape) > 1 else 1
        held += (each * spec.numel + state_bytes(spec.name, spec.shape, run.inner)) // cut
        layer = _LAYER.search(spec.name)
        blocks[layer[1] if layer else ""] += spec.numel // cut // (chosen.expert if ".experts." in spec.name else 1)
    width, reduced = WIDTHS[mesh.param_dtype], WIDTHS[mesh.reduce_dtype]
    if shards == 1 and width == 4:
        return held, 0
    everything, outside = sum(blocks.values()), blocks.pop("", 0)
    largest = max(blocks.values(), default=0)
    stays = mesh.reshard_after_forward == "never" or (mesh.reshard_after_forward == "auto" and chosen.pipeline > 1)
    gathered = width * (everything if stays else outside + 2 * largest)
    gradients = width * (outside + largest)
    if chosen.pipeline > 1:  # they are divided behind the last microbatch
        gradients = max(width, reduced) * everything
    return held // shards, gathered + gradients + reduced * max(outside, largest)


def _per_token(
    specs: Sequence[TensorSpec], model: ModelConfig, mesh: MeshConfig, memory: MemoryConfig, chosen: Plan,
    stages: tuple[int, ...],
) -> int:  # fmt: skip
    """Bytes of activations that a rank keeps for each token of a pass."""
    if model.ours:
        layers = [layer for number in stages for layer in chosen.layers[number]]
        costs = [_layer(model, mesh, model.routed(layer)) for layer in layers]
    else:
        costs = _foreign(specs)
    which = ("none", "full", "selective").index(memory.activation_checkpointing)
    flying = mesh.chunks if mesh.pipeline_schedule == "gpipe" else min(mesh.chunks, mesh.stages)
    kept = flying * sum(cost[which] for cost in costs)
    again = max((cost[0] for cost in costs), default=0) if which else 0
    logits = 0
    if len(chosen.layers) - 1 in stages or chosen.pipeline == 1:
        waiting = flying - 1 if chosen.pipeline > 1 and mesh.pipeline_schedule == "gpipe" else 0
        logits = (12 + 4 * waiting) * model.vocab_size // (chosen.tensor if mesh.loss_parallel else 1)
    return WIDTHS[mesh.param_dtype] * (kept + again) + logits


def _layer(model: ModelConfig, mesh: MeshConfig, routed: bool) -> tuple[int, int, int]:
    """Values that a layer of our decoder keeps for a token: all, with full checkpointing, and with selective."""
    tensor = mesh.tensor
    dim = model.dim // (tensor if mesh.sequence_parallel else 1)
    queries, keys = model.heads * model.head_width // tensor, model.kv_heads * model.head_width // tensor
    if routed:
        rows, hidden = model.experts_per_token, model.expert_dim // tensor
        shared = model.shared_experts * hidden
        inner = rows * (3 * model.dim + 4 * hidden) + 4 * shared
        products = rows * (2 * hidden + model.dim) + 2 * shared + dim
    else:
        inner, products = 4 * model.ffn_dim // tensor, 2 * model.ffn_dim // tensor + dim
    collected = mesh.context if mesh.context_method == "gather" else 1
    whole = 6 * dim + 2 * queries + 2 * keys * collected + inner
    return whole, dim, dim + queries + (queries + 2 * keys + dim + products) // 2


def _foreign(specs: Sequence[TensorSpec]) -> list[tuple[int, int, int]]:
    """The same of a model whose matrices alone are known."""
    layers: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for spec in specs:
        layer = _LAYER.search(spec.name)
        if layer and len(spec.shape) == 2:
            layers[layer[1]].append(spec.shape)
    costs = [(sum(map(sum, shapes)), min(map(min, shapes))) for shapes in layers.values()]
    return [(whole, dim, whole // 2) for whole, dim in costs]


def memory(run: RunConfig, island: IslandConfig, layout: Layout, free_gpu_bytes: Sequence[int]) -> Finding:
    """Whether it fits, with all nodes of the island and with the fewest.

    Args:
        free_gpu_bytes: of each GPU that a rank of this node will use; none where the ranks use the CPU.
    """
    nodes = island.nodes
    finding = _fits(run, island, layout, free_gpu_bytes, nodes.most)
    if finding.verdict == "fail" or nodes.least == nodes.most:
        return finding
    fewest = _fits(run, island, layout, free_gpu_bytes, nodes.least)
    if fewest.verdict == "ok":
        return finding
    found = f"{finding.found}; with {nodes.least} of {nodes.most} nodes, {fewest.found}"
    return warn("memory", found, f"raise nodes.least ({nodes.least}), or {ADVICE}")


def _fits(run: RunConfig, island: IslandConfig, layout: Layout, free_gpu_bytes: Sequence[int], nodes: int) -> Finding:
    wants = need(run, island, layout, nodes)
    each = wants.model + wants.activations
    heap = 0 if free_gpu_bytes else int(HEAP * island.ranks_here * each)
    rows = [("RAM", wants.host + heap, free_ram())]
    if free_gpu_bytes:
        rows.append(("GPU", each, min(free_gpu_bytes)))
    found = "; ".join(f"{where}: about {_gb(wanted)} of {_gb(free)} free" for where, wanted, free in rows)
    found += f" (a rank: model {_gb(wants.model)}, activations {_gb(wants.activations)})"
    if any(wanted > free for _, wanted, free in rows):
        return fail("memory", found, ADVICE, ExitCode.ENVIRONMENT)
    if any(wanted > TIGHT * free for _, wanted, free in rows):
        return warn("memory", f"{found}, which is tight", ADVICE)
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
    """Free bytes of the GPU of each rank of this node; empty where the ranks will use the CPU."""
    ranks = island.ranks_here
    if island.mesh.device == "cpu" or torch.cuda.device_count() < ranks:
        return []
    return [torch.cuda.mem_get_info(rank)[0] for rank in range(ranks)]


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
