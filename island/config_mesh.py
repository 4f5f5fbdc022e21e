"""The island's `[mesh]` and `[memory]`: how its ranks share the model and the batch, and what they save memory with."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import model_validator

from diloco.settings import NonNegative, Positive, Settings

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "dualpipev"]
ContextMethod = Literal["ulysses", "gather"]
Attention = Literal["auto", "flash", "efficient", "cudnn", "math"]
AnchorPolicy = Literal["cpu", "device"]


class MeshConfig(Settings):
    ranks: Positive = 1
    """Processes of this island. With GPUs, one each."""
    replicas: Positive = 1
    """HSDP: the model is sharded over fewer ranks and replicated this often. 1 is plain FSDP. What
    replicas * tensor * pipeline * context leaves of `ranks` shards the model (FSDP2)."""
    tensor: Positive = 1
    """Ranks that share each matrix product (tensor parallel). Divides heads, kv_heads, ffn_dim and vocab_size."""
    pipeline: Positive = 1
    """Ranks that hold one part of the layers each (pipeline parallel)."""
    context: Positive = 1
    """Ranks that share each sequence (context parallel). Divides sequence_length."""
    expert: Positive = 1
    """Ranks that share the experts of each layer (expert parallel). They are among those that shard the model, so this
    divides `ranks` / (replicas * tensor * pipeline), and the number of experts."""
    sequence_parallel: bool = False
    """With `tensor`: norms and the residual stream are split along the sequence too, which saves activations."""
    loss_parallel: bool = False
    """With `tensor`: logits stay split over the vocabulary, and the loss is computed on the parts."""
    context_method: ContextMethod = "ulysses"
    """How attention sees the whole sequence: `ulysses` swaps the split from time to heads (two all-to-alls; context
    divides the heads of a tensor rank); `gather` collects keys and values and works with any number of heads."""
    pipeline_schedule: Schedule = "1f1b"
    """Order of forward and backward passes. `gpipe` and `1f1b` have one stage per rank, the others two:
    `interleaved-1f1b`, `zero-bubble` (ZBV) and `dualpipev` have smaller bubbles."""
    microbatches: NonNegative = 0
    """Parts of a rank's batch that travel through the pipeline one after the other; 0: as many as there are stages.
    A multiple of `pipeline`, and not below the number of stages."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Whether FSDP frees gathered weights between forward and backward. `auto`: yes, but not in a pipeline, where every
    microbatch would gather them again."""
    cpu_offload: bool = False
    """Masters, gradients and optimizer state stay in the CPU's memory; weights are copied to the device when used."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is a GPU per rank (NCCL), else the CPU (gloo)."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward (FSDP's mixed precision). Masters are always float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are added up over ranks."""
    threads_per_rank: NonNegative = 0
    """CPU threads of each rank; 0 shares the machine's cores among this island's ranks."""

    @model_validator(mode="after")
    def _fits(self) -> MeshConfig:
        named = {name: getattr(self, name) for name in ("replicas", "tensor", "pipeline", "context")}
        used = math.prod(named.values())
        if self.ranks % used:
            apart = {name: degree for name, degree in named.items() if degree > 1}
            product = " * ".join(f"mesh.{name} ({degree})" for name, degree in apart.items())
            [*_, (name, degree)] = apart.items()
            fits = math.gcd(self.ranks, degree) if len(apart) == 1 else 0
            fix = f"set mesh.{name}={fits}" if fits else f"set mesh.ranks={self.ranks + used - self.ranks % used}"
            raise ValueError(f"{product} must divide mesh.ranks ({self.ranks}): {fix}")
        parts = self.ranks // used * self.context
        if parts % self.expert:
            raise ValueError(
                f"mesh.expert ({self.expert}) must divide the {parts} ranks that shard the model, which is mesh.ranks "
                f"({self.ranks}) over replicas, tensor and pipeline: set mesh.expert={math.gcd(parts, self.expert)}"
            )
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(self, name) and self.tensor == 1:
                raise ValueError(
                    f"mesh.{name} shares out work among tensor-parallel ranks, and mesh.tensor is 1: "
                    f"set mesh.tensor=2 or more, or mesh.{name}=false"
                )
        if self.microbatches and (self.microbatches % self.pipeline or self.microbatches < self.stages):
            least = max(self.stages, self.microbatches + -self.microbatches % self.pipeline)
            raise ValueError(
                f"mesh.microbatches ({self.microbatches}) must be a multiple of mesh.pipeline ({self.pipeline}) and at "
                f"least the {self.stages} stages of mesh.pipeline_schedule {self.pipeline_schedule!r}: "
                f"set mesh.microbatches={least} or 0"
            )
        return self

    @property
    def stages(self) -> int:
        """Parts of the layers, over all ranks of a pipeline."""
        if self.pipeline == 1:
            return 1
        return self.pipeline * (1 if self.pipeline_schedule in ("gpipe", "1f1b") else 2)

    @property
    def data_ranks(self) -> int:
        """Shares of a batch: ranks of one tensor-parallel, pipeline or context-parallel group read the same rows."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def chunks(self) -> int:
        """Parts of a share of the batch that go through the pipeline one by one; 1 without a pipeline."""
        return self.microbatches or self.stages


class MemoryConfig(Settings):
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward computes again: nothing; all but every second matrix product and attention; every block."""
    accumulate: Positive = 1
    """Parts of a rank's share of the batch that go through forward and backward one after the other, before one
    optimizer step: activations of one part only are held."""
    compile: bool = False
    """Whether each block is compiled (`torch.compile`): faster after the first step, which takes a minute or so."""
    fp8: bool = False
    """Matrix products of the blocks in float8 with a scale per row (torchao); needs a GPU of compute capability 8.9 or
    more, unless they are emulated."""
    fp8_emulated: bool = False
    """Whether the products of `memory.fp8` are taken in the dtype of compute, of values rounded to float8: on any
    device, to see what float8 does to a training. Slower than without."""
    attention: Attention = "auto"
    """Which kernel of torch's scaled_dot_product_attention: the fastest that can; FlashAttention; memory-efficient;
    cuDNN; or the plain products."""
    anchors: AnchorPolicy = "cpu"
    """Where the anchors of what a rank holds are kept, 4 bytes a parameter. `cpu`: in RAM, pinned with CUDA; at a sync
    they come over the bus to be mixed, while training waits. `device`: beside the parameters, where there is room for
    them. Islands of either kind hold the same bits."""

    @model_validator(mode="after")
    def _check_fp8(self) -> MemoryConfig:
        if self.fp8_emulated and not self.fp8:
            raise ValueError(
                "memory.fp8_emulated says how the products of memory.fp8 are taken, and memory.fp8 is false: "
                "set memory.fp8=true, or memory.fp8_emulated=false"
            )
        return self
