"""Pipeline parallel: each rank holds one or two stages of the layers, and microbatches travel through them.

torch's schedules order forward and backward passes; a stage is made on the meta device with its layers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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

    Args:
        stages: the first may have the embedding, the last the output.
    """

    def __init__(self, stages: Sequence[Decoder]) -> None:
        super().__init__()
        self.embed_tokens = stages[0].embed_tokens
        self.layers = nn.ModuleDict({name: block for stage in stages for name, block in stage.layers.items()})
        self.norm, self.lm_head = stages[-1].norm, stages[-1].lm_head


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
        self._made: dict[tuple[int, ...], PipelineScheduleSingle | PipelineScheduleMulti] = {}
        self._ends = self._last in self._own

    def train(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        schedule, losses = self._schedule(*inputs.shape), list[Tensor]()
        ahead = (inputs,) if 0 in self._own else ()
        schedule.step(*ahead, target=targets if self._ends else None, losses=losses, return_outputs=False)
        return self._told(torch.stack(losses).sum().detach() / self._share / self._mesh.chunks if losses else None)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The rows go through the stages at once, which may be more or fewer than in training."""
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
