"""Pipeline parallel: each rank holds one or two stages of the layers, and microbatches travel through them.

torch's schedules order forward and backward passes; a stage is made on the meta device with its layers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from diloco.config import RunConfig
from diloco.layout import local
from island.config_mesh import MeshConfig
from island.model import Decoder, build_meta
from island.parallel.plan import Plan
from island.parallel.shard import DTYPES

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits and targets to the mean loss in nats per token, a scalar."""


def stage(run: RunConfig, plan: Plan, number: int) -> Decoder:
    """The decoder's stage `number`, on the meta device: it holds its layers, and the ends where it is one."""
    model = build_meta(run)
    assert isinstance(model, Decoder)
    own = {str(layer) for layer in plan.layers[number]}
    for name in [*model.layers]:
        if name not in own:
            del model.layers[name]
    if number:
        model.embed_tokens = None
    if number < len(plan.layers) - 1:
        model.norm = model.lm_head = None
    return model


class Stages(nn.Module):
    """The stages of one rank as one model, whose tensors have the names that they have in the whole decoder.

    An output that is tied to the embedding has the embedding's name, and is left out beside the embedding itself.

    Args:
        stages: the first may have the embedding, the last the output.
    """

    def __init__(self, stages: Sequence[Decoder]) -> None:
        super().__init__()
        first, last, tied = stages[0].embed_tokens, stages[-1].lm_head, stages[0].config.tie_embeddings
        self.embed_tokens = last if tied and first is None else first
        self.layers = nn.ModuleDict({name: block for stage in stages for name, block in stage.layers.items()})
        self.norm, self.lm_head = stages[-1].norm, None if tied else last
        ends = [end for end in (first, last) if end is not None]
        self.twice = [end.weight for end in ends] if tied and len(ends) == 1 else []
        """Parameters that another rank of the pipeline trains too."""


class Tied:
    """The embedding of a pipeline whose output is the same tensor: its first and its last stage both hold it.

    On two ranks, both train their copy with the sum of both gradients, and so hold the same bits. Where one rank has
    both stages, which FSDP shards apart, it trains the embedding, and the output's copy follows before each pass.

    Args:
        stages: what this rank holds.
        plan: who holds which.
        over: the ranks of this pipeline.
    """

    def __init__(self, stages: Sequence[Decoder], plan: Plan, over: DeviceMesh) -> None:
        self._embedding, self._output = stages[0].embed_tokens, stages[-1].lm_head
        held = [rank for rank, own in enumerate(plan.stages) if {0, len(plan.layers) - 1}.intersection(own)]
        self._group, self._peers = over.get_group(), [rank for rank in held if rank != over.get_local_rank()]

    @torch.no_grad()
    def follow(self) -> None:
        """Before a pass."""
        if self._embedding is not None and self._output is not None:
            if isinstance(self._output, FSDPModule):
                self._output.reshard()
            local(self._output.weight).copy_(local(self._embedding.weight))

    @torch.no_grad()
    def add_up(self) -> None:
        """Behind the last backward pass of a step. Collective among the ranks that hold the embedding."""
        if self._embedding is None and self._output is None:
            return
        own = self._embedding if self._embedding is not None else self._output
        assert own is not None
        gradient = local(_gradient(own))
        if self._embedding is not None and self._output is not None:
            gradient += local(_gradient(self._output))
            self._output.weight.grad = None
        elif gradient.numel():
            [peer] = self._peers
            other = torch.empty_like(gradient)
            swap = [(dist.isend, gradient), (dist.irecv, other)]
            pairs = [dist.P2POp(way, values, group=self._group, group_peer=peer) for way, values in swap]
            for work in dist.batch_isend_irecv(pairs):
                work.wait()
            gradient += other


def _gradient(module: nn.Module) -> Tensor:
    gradient = module.get_parameter("weight").grad
    assert gradient is not None
    return gradient


class Pipeline:
    """This rank's stages in a pipeline.

    Args:
        stages: what this rank holds.
        plan: who holds which.
        mesh: the schedule and the number of microbatches.
        over: the ranks of this pipeline.
        loss: of logits and targets; called where the last stage is.
        share: factor on the loss of a call to `train`, as part of the island's.
        device: where this rank computes.
    """

    def __init__(
        self,
        stages: Sequence[Decoder],
        plan: Plan,
        mesh: MeshConfig,
        over: DeviceMesh,
        loss: Loss,
        share: float,
        *,
        device: torch.device,
    ) -> None:
        self._stages, self._plan, self._mesh, self._loss = stages, plan, mesh, loss
        self._share, self._group, self._device = share / mesh.chunks, over.get_group(), device
        self._own = plan.stages[over.get_local_rank()]
        self._last = len(plan.layers) - 1
        self._tied = Tied(stages, plan, over) if stages[0].config.tie_embeddings else None
        self._made: dict[tuple[int, ...], PipelineScheduleSingle | PipelineScheduleMulti] = {}
        self._ends = self._last in self._own

    def train(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        self._follow()
        schedule, losses = self._schedule(*inputs.shape), list[Tensor]()
        ahead = (inputs,) if 0 in self._own else ()
        schedule.step(*ahead, target=targets if self._ends else None, losses=losses, return_outputs=False)
        if last and self._tied:
            self._tied.add_up()
        return self._told(torch.stack(losses).sum().detach() / self._share / self._mesh.chunks if losses else None)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The rows go through the stages at once, which may be more or fewer than in training."""
        self._follow()
        owner = {number: rank for rank, own in enumerate(self._plan.stages) for number in own}
        stream, value = inputs, None
        for number, part in zip(self._own, self._stages, strict=True):
            if number and number - 1 not in self._own:
                stream = torch.empty(self._stream(*inputs.shape), dtype=self._dtype, device=self._device)
                dist.recv(stream, group=self._group, group_src=owner[number - 1])
            stream = part(stream)
            if number == self._last:
                value = self._loss(stream, targets)
            elif number + 1 not in self._own:
                dist.send(stream.contiguous(), group=self._group, group_dst=owner[number + 1])
        return self._told(value)

    def _told(self, loss: Tensor | None) -> Tensor:
        """The loss as a mean over this pipeline's ranks, one of which knows it."""
        return torch.zeros((), device=self._device) if loss is None else loss * self._plan.pipeline

    def _follow(self) -> None:
        if self._tied:
            self._tied.follow()

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._mesh.param_dtype]

    def _stream(self, rows: int, length: int) -> tuple[int, int, int]:
        """Shape of the residual stream between two stages, of tokens [rows, length]."""
        return rows, length // (self._plan.tensor if self._mesh.sequence_parallel else 1), self._stages[0].config.dim

    def _shared(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._loss(logits, targets) * self._share

    def _schedule(self, rows: int, length: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """torch's schedule for a batch of this shape; shapes between stages are known, so none are sent."""
        if (rows, length) not in self._made:
            chunks = self._mesh.chunks
            made = [self._stage(number, rows // chunks, length) for number in self._own]
            name = self._mesh.pipeline_schedule
            self._made[rows, length] = (
                SINGLE[name](made[0], chunks, loss_fn=self._shared, scale_grads=False)
                if name in SINGLE
                else MULTI[name]([*made], chunks, loss_fn=self._shared, scale_grads=False)
            )
        return self._made[rows, length]

    def _stage(self, number: int, rows: int, length: int) -> PipelineStage:
        module = self._stages[self._own.index(number)]
        stream = torch.empty(self._stream(rows, length), dtype=self._dtype, device="meta", requires_grad=True)
        into = torch.empty(rows, length, dtype=torch.int64, device="meta") if not number else stream
        out = stream
        if number == self._last:
            width = module.config.vocab_size // (self._plan.tensor if self._mesh.loss_parallel else 1)
            out = torch.empty(rows, length, width, dtype=self._dtype, device="meta", requires_grad=True)
        return PipelineStage(
            module, number, self._last + 1, self._device, input_args=into, output_args=out, group=self._group
        )
