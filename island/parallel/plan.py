"""What a mesh means for a model: the size of each dimension and who holds which layers, or why it cannot be. Pure.

The ranks of an island are one array of five dimensions, the slowest first, so that ranks that talk most are neighbours:

    pipeline   parts of the layers                          replicas   copies of the model (HSDP)
    shard      parts of every tensor, and of the batch      context    parts of every sequence
    tensor     parts of every matrix product

FSDP shards over `shard` and `context` together; `expert` is the fastest part of these two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from diloco.config import ModelConfig
from diloco.errors import ConfigError
from island.config_mesh import MemoryConfig, MeshConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The dimensions of a mesh."""

    pipeline: int
    replicas: int
    shard: int
    context: int
    tensor: int
    expert: int
    layers: tuple[range, ...]
    """The layers of each stage. The embedding belongs to the first stage, the last norm and the output to the last."""
    stages: tuple[tuple[int, ...], ...]
    """The stages that each rank of a pipeline holds, in order."""

    @property
    def data_ranks(self) -> int:
        """Shares of a batch."""
        return self.replicas * self.shard

    @property
    def summed(self) -> int:
        """Ranks whose gradients of a weight are added up: those of different rows, or parts of sequences."""
        return self.data_ranks * self.context

    def data_rank(self, rank: int) -> int:
        """Which share of the batch a rank reads."""
        return rank // (self.context * self.tensor) % self.data_ranks

    def context_part(self, rank: int) -> int:
        """Which part of each sequence a rank has."""
        return rank // self.tensor % self.context

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of those that read the same rows: it alone counts their tokens."""
        return rank < self.data_ranks * self.context * self.tensor and rank % (self.context * self.tensor) == 0


def plan(mesh: MeshConfig, memory: MemoryConfig, model: ModelConfig) -> Plan:
    """The dimensions of `mesh` for `model`.

    Raises:
        ConfigError: with every reason why they do not fit, and what to set.
    """
    reasons = [*refusals(mesh, memory, model)]
    if reasons:
        raise ConfigError("the mesh does not fit the model:\n  " + "\n  ".join(reasons))
    return Plan(
        pipeline=mesh.pipeline,
        replicas=mesh.replicas,
        shard=mesh.data_ranks // mesh.replicas,
        context=mesh.context,
        tensor=mesh.tensor,
        expert=mesh.expert,
        layers=spread(model.layers, mesh.stages),
        stages=placed(mesh),
    )


def spread(layers: int, stages: int) -> tuple[range, ...]:
    """Even runs of layers, one per stage; where they do not divide, the last stages, which also hold the output, and
    then those before them have one layer less."""
    edges = [-(-layers * i // stages) for i in range(stages + 1)]
    return tuple(range(a, b) for a, b in pairwise(edges))


def placed(mesh: MeshConfig) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank: one; two in a loop; or two in the shape of a V, so that the last rank turns around."""
    ranks, last = range(mesh.pipeline), mesh.stages - 1
    if mesh.stages == mesh.pipeline:
        return tuple((r,) for r in ranks)
    if mesh.pipeline_schedule == "interleaved-1f1b":
        return tuple((r, r + mesh.pipeline) for r in ranks)
    return tuple((r, last - r) for r in ranks)


def refusals(mesh: MeshConfig, memory: MemoryConfig, model: ModelConfig) -> Iterator[str]:
    """Why a mesh and a model do not fit; nothing where they do."""
    if mesh.cpu_offload and memory.anchors == "device":
        yield (
            "memory.anchors 'device' keeps anchors beside the parameters, which mesh.cpu_offload has on the CPU: set "
            "memory.anchors=cpu, or mesh.cpu_offload=false"
        )
    if not model.ours:
        yield from _foreign(mesh, model)
        return
    yield from _tensor(mesh, memory, model)
    yield from _context(mesh, model)
    yield from _pipeline(mesh, memory, model)
    yield from _expert(mesh, model)


def _foreign(mesh: MeshConfig, model: ModelConfig) -> Iterator[str]:
    for name in ("tensor", "pipeline", "context", "expert"):
        if getattr(mesh, name) > 1:
            yield (
                f"mesh.{name} ({getattr(mesh, name)}) cuts a model whose parts are known, and model.source is "
                f"{model.source!r}, which FSDP alone can shard: set mesh.{name}=1 or model.source=decoder"
            )


def _divides(what: str, count: int, name: str, by: int) -> Iterator[str]:
    """Refuses a degree that does not divide a count of the model's."""
    if count % by:
        yield f"{name} ({by}) must divide {what} ({count}): set it to {math.gcd(count, by)}"


def _tensor(mesh: MeshConfig, memory: MemoryConfig, model: ModelConfig) -> Iterator[str]:
    if mesh.tensor == 1:
        return
    for key in ("heads", "kv_heads", "ffn_dim", "vocab_size", *(("expert_dim",) if model.experts else ())):
        yield from _divides(f"model.{key}", getattr(model, key), "mesh.tensor", mesh.tensor)
    if mesh.sequence_parallel and model.sequence_length % (mesh.context * mesh.tensor):
        yield (
            f"mesh.sequence_parallel splits model.sequence_length ({model.sequence_length}) over mesh.context * "
            f"mesh.tensor ({mesh.context * mesh.tensor}), which must divide it: set mesh.sequence_parallel=false"
        )
    if memory.fp8:
        yield (
            "memory.fp8 scales rows of whole matrices, and mesh.tensor cuts them: set mesh.tensor=1 or memory.fp8=false"
        )


def _context(mesh: MeshConfig, model: ModelConfig) -> Iterator[str]:
    if mesh.context == 1:
        return
    yield from _divides("model.sequence_length", model.sequence_length, "mesh.context", mesh.context)
    split = mesh.context * mesh.tensor
    for key in ("heads", "kv_heads"):
        if mesh.context_method == "ulysses" and getattr(model, key) % split:
            yield (
                f"mesh.context_method 'ulysses' gives each of mesh.context * mesh.tensor ({split}) ranks whole heads, "
                f"and model.{key} is {getattr(model, key)}: set mesh.context_method=gather"
            )


def _pipeline(mesh: MeshConfig, memory: MemoryConfig, model: ModelConfig) -> Iterator[str]:
    if mesh.pipeline == 1:
        return
    if model.layers < mesh.stages:
        yield (
            f"mesh.pipeline ({mesh.pipeline}) with mesh.pipeline_schedule {mesh.pipeline_schedule!r} makes "
            f"{mesh.stages} stages, and model.layers is {model.layers}: lower mesh.pipeline"
            + ("" if mesh.stages == mesh.pipeline else ", or set mesh.pipeline_schedule=1f1b")
        )
    if mesh.pipeline_schedule not in ("zero-bubble", "dualpipev"):
        return
    apart = f"mesh.pipeline_schedule {mesh.pipeline_schedule!r} takes the gradients of inputs and of weights apart"
    if memory.compile:
        yield (
            f"{apart}, which compiled code cannot: set memory.compile=false or mesh.pipeline_schedule=interleaved-1f1b"
        )
    if memory.activation_checkpointing == "selective":
        yield (
            f"{apart}, and what selective checkpointing keeps serves once: set memory.activation_checkpointing=full or "
            "mesh.pipeline_schedule=interleaved-1f1b"
        )


def _expert(mesh: MeshConfig, model: ModelConfig) -> Iterator[str]:
    if mesh.expert > 1 and not model.experts:
        yield f"mesh.expert ({mesh.expert}) shares out experts, and the model has none: set mesh.expert=1"
    elif mesh.expert > 1:
        yield from _divides("model.experts", model.experts, "mesh.expert", mesh.expert)
