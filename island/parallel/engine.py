"""What the trainer drives: the run's model on the island's mesh, forward and backward.

A loss is shared out: each rank computes its share of the island's mean, and gradients are added up. So the sum is the
gradient of the mean whatever the mesh, and nothing needs to know how often it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from diloco.config import RunConfig
from diloco.layout import local
from island.config_mesh import MemoryConfig, MeshConfig
from island.group import Group
from island.model import Decoder, allocate, build_meta, fill, rebalance
from island.model import loss as token_loss
from island.model.moe import MoE
from island.parallel.context import attend_over, place
from island.parallel.expert import share_out
from island.parallel.memory import kernel, save
from island.parallel.pipeline import Loss, Pipeline, Stages, stage
from island.parallel.plan import plan
from island.parallel.ranks import Ranks
from island.parallel.shard import shard
from island.parallel.tensor import cut, part_of_vocabulary


class Passes(Protocol):
    """Forward and backward passes over rows [b, T] of token ids, which are on this rank's device.

    Both return a scalar whose mean over the ranks that read the same rows is their loss.
    """

    def train(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        """Adds to the gradients; `last` before they are used."""
        ...

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Without gradients."""
        ...


class Whole:
    """Passes of a model that is not cut into stages.

    Args:
        share: factor on the loss of a call to `train`, as part of the island's.
    """

    def __init__(self, model: nn.Module, loss: Loss, share: float) -> None:
        self._model, self._loss, self._share = model, loss, share

    def train(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_all_reduce(last)
        loss = self._loss(self._model(inputs), targets)
        (loss * self._share).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss(self._model(inputs), targets)


class Engine:
    """One rank's part in the forward and backward passes of its island.

    Args:
        model: what the optimizer and a session see: this rank's tensors under their names.
        passes: computes the loss of rows and, in training, its gradients.
        device: where this rank computes.
        data: which share of a batch this rank reads, and of how many.
        context: which part of each sequence this rank has, and of how many.
        leads: whether this rank counts the tokens of its rows; where not, another reads the same.
        accumulate: parts of the rows that are computed one after the other.
        clip_norm: largest norm of all gradients together; 0 leaves them as they are.
        within: contexts in which passes are made.
        total: adds integers over the ranks that hold the same layers.
        twice: parameters that two stages of a pipeline hold, with the same gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: Passes,
        device: torch.device,
        *,
        data: tuple[int, int] = (0, 1),
        context: tuple[int, int] = (0, 1),
        leads: bool = True,
        accumulate: int = 1,
        clip_norm: float = 0.0,
        within: Callable[[], ExitStack] = ExitStack,
        total: Callable[[Tensor], Tensor] = lambda counts: counts,
        twice: Sequence[Tensor] = (),
    ) -> None:
        self.model, self.device, self.leads = model, device, leads
        self.data_rank, self.data_ranks = data
        self._passes, self._context, self._within, self._total = passes, context, within, total
        self._accumulate, self._clip_norm, self._twice = accumulate, clip_norm, twice

    @classmethod
    def around(
        cls,
        model: nn.Module,
        device: torch.device | None = None,
        run: RunConfig | None = None,
        group: Group | None = None,
    ) -> Engine:
        """An engine for a whole model, or for one in DistributedDataParallel, which averages gradients itself.

        Args:
            run: what is trained, with `group` where several ranks do; without, the engine only evaluates.
        """
        group = group or Group()
        return cls(
            model,
            Whole(model, _loss(run.model.z_loss if run else 0.0), 1.0),
            device or torch.device("cpu"),
            data=(group.rank, group.size),
            clip_norm=run.inner.clip_norm if run else 0.0,
            total=group.total,
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clipping, balancing. Gradients are then those of the island's whole batch. Collective.

        Args:
            inputs, targets: this rank's rows of token ids [b, T], int64, on any device.

        Returns:
            A scalar: its mean over all ranks of the island is the loss in nats per token.
        """
        parts = zip(self._here(inputs), self._here(targets), strict=True)
        with self._within():
            losses = [
                self._passes.train(x, y, last=number == self._accumulate) for number, (x, y) in enumerate(parts, 1)
            ]
        if self._clip_norm:
            clip(self.model, self._clip_norm, self._twice)
        rebalance(self.model, self._total)
        return torch.stack(losses).mean()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of this rank's rows without gradients; as `step` in all else. Collective."""
        with self._within():
            losses = [
                self._passes.evaluate(x, y) * len(x)
                for x, y in zip(self._here(inputs), self._here(targets), strict=True)
            ]
        return torch.stack(losses).sum() / len(inputs)

    def _here(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of the sequences, on its device, in the parts that are computed one by one."""
        part, parts = self._context
        return tokens.chunk(parts, dim=1)[part].to(self.device, non_blocking=True).chunk(self._accumulate)


def assemble(
    run: RunConfig,
    mesh: MeshConfig,
    memory: MemoryConfig,
    device: torch.device,
    *,
    document_end: int | None = None,
) -> Engine:
    """The run's model with its first values on the island's mesh. Collective.

    It is made on the meta device and each tensor's first value is made and cut alone, so no rank ever holds the model.

    Args:
        run: what is trained.
        mesh, memory: how.
        device: this rank's.
        document_end: the token that ends a document, where attention stays within documents; of our own decoder, on a
            mesh that cuts no sequences and no layers.

    Raises:
        ConfigError: the mesh does not fit the model.
        EnvironmentFault: this machine cannot do what `memory` asks for.
    """
    chosen = plan(mesh, memory, run.model)
    ranks, rank = Ranks(chosen, device), dist.get_rank()
    share = 1.0 / (chosen.summed * memory.accumulate)

    loss = _loss(run.model.z_loss, ranks.tensor if mesh.loss_parallel else None)

    def within() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(kernel(memory.attention))
        if mesh.loss_parallel:
            stack.enter_context(loss_parallel())
        return stack

    numbers = chosen.stages[ranks.pipeline.get_local_rank()]
    parts = [build_meta(run)] if chosen.pipeline == 1 else [stage(run, chosen, number) for number in numbers]
    for part in parts:
        if isinstance(part, Decoder):
            part.document_end = document_end
        apply(part, mesh, memory, ranks)
        for module in part.modules():
            if isinstance(module, MoE):
                module.loss_scale = share / mesh.chunks / chosen.tensor
    model, passes = parts[0], cast(Passes, Whole(parts[0], loss, share))
    if chosen.pipeline > 1:
        stages = [part for part in parts if isinstance(part, Decoder)]
        model = Stages(stages)
        passes = Pipeline(stages, chosen, mesh, ranks.pipeline, loss, share, device=device)
    fill(model, run)
    return Engine(
        model,
        passes,
        device,
        data=(chosen.data_rank(rank), chosen.data_ranks),
        context=(chosen.context_part(rank), chosen.context),
        leads=chosen.leads(rank),
        accumulate=memory.accumulate,
        clip_norm=run.inner.clip_norm,
        within=within,
        total=ranks.total,
        twice=model.twice if isinstance(model, Stages) else (),
    )


def _loss(z_loss: float, over: DeviceMesh | None = None) -> Loss:
    """The mean loss per token; without gradients, when it is evaluated, the cross-entropy alone.

    Args:
        over: the ranks that have parts of the vocabulary, where logits are only this rank's.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        whole = logits if over is None else part_of_vocabulary(logits, over)
        value = token_loss(whole, targets, z_loss if torch.is_grad_enabled() else 0.0)
        return value.to_local() if isinstance(value, DTensor) else value

    return loss


def apply(part: nn.Module, mesh: MeshConfig, memory: MemoryConfig, ranks: Ranks) -> None:
    """Puts a model on the meta device, or the stage of a pipeline, on the mesh, without values."""
    chosen = ranks.plan
    if isinstance(part, Decoder):
        if chosen.tensor > 1:
            cut(part, mesh, ranks.tensor)
        if chosen.expert > 1 or chosen.tensor > 1:
            share_out(part, ranks.expert)
        if chosen.context > 1:
            attend_over(part, mesh.context_method, ranks.context.get_group())
        if chosen.context > 1 or mesh.sequence_parallel:
            place(part, part=chosen.context_part(dist.get_rank()), split=chosen.tensor if mesh.sequence_parallel else 1)
    save(part, memory, ranks.device)
    shard(part, mesh, ranks)
    allocate(part, "cpu" if mesh.cpu_offload else ranks.device)


@torch.no_grad()
def clip(model: nn.Module, most: float, twice: Sequence[Tensor] = ()) -> Tensor:
    """Scales all gradients of an island so that their norm together is at most `most`. Collective.

    A gradient that several ranks hold counts once, also where ranks hold different tensors (pipeline, experts).

    Args:
        twice: parameters that two stages of a pipeline hold, with the same gradient.

    Returns:
        The norm before, a scalar.
    """
    found = {p: p.grad for p in model.parameters() if p.grad is not None}
    gradients = [local(gradient) for gradient in found.values()]
    each = torch.stack(torch._foreach_norm(gradients)).float().square()
    counts = [_copies(gradient) << any(p is other for other in twice) for p, gradient in found.items()]
    copies = torch.tensor(counts, dtype=torch.float32)
    total = (each / copies.to(each.device)).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _copies(gradient: Tensor) -> int:
    """Ranks of the island that hold the same part of a gradient."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    copies, mesh = 1, gradient.device_mesh
    for over, placement in enumerate(gradient.placements):
        copies *= mesh.size(over) if placement.is_replicate() else 1
    return copies
