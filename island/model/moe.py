"""A feed-forward block of experts: each token goes to a few of many, and none is dropped.

Shapes: N tokens, D width, X experts, k experts per token, F hidden width of an expert, M = N k rows.

The rows of one expert are brought together by a stable sort, so that the experts are a few large matrix products; the
results go back by the inverse permutation and are added in a fixed order. So the block is deterministic on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from diloco.config import ModelConfig

GROUP_ROWS = 8
"""The grouped product wants its groups to start at 16 bytes: 8 rows of bf16, where the weights' gradient is made."""


class MoE(nn.Module):
    """Routed experts, and shared ones that every token goes to (DeepSeekMoE, arXiv 2401.06066).

    `exchange` applies the experts to sorted rows; expert parallelism puts another function in its place, which moves
    the rows to where their experts are. `loss_scale` multiplies the gradient of the auxiliary loss, which does not pass
    through the loss: 1 / microbatches where gradients are added over microbatches.
    """

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.exchange: Callable[[Experts, Tensor, Tensor], Tensor] = here
        self.loss_scale = 1.0
        self.gate = Router(config=config)
        self.experts = Experts(config=config)
        shared = config.shared_experts * config.expert_dim
        self.shared_experts = SwiGLU(config.dim, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scores, chosen = self.gate(rows)  # [N, X] float32, [N, k]
        counts = torch.zeros_like(self.gate.load).scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        if self.training and torch.is_grad_enabled():
            self.gate.load += counts
            if self.config.balance == "loss":
                scores = self._auxiliary(scores, counts)
        weights = scores.gather(1, chosen)
        if self.config.normalize_scores:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        order = chosen.flatten().argsort(stable=True)
        copies = rows[:, None].expand(-1, chosen.shape[1], -1).flatten(0, 1)  # [M, D]
        mixed = self.exchange(self.experts, copies[order], counts)
        apart = mixed[order.argsort()].view(*chosen.shape, -1)  # [N, k, D]
        out = ((self.config.routed_scale * weights)[:, None].to(apart.dtype) @ apart).view(x.shape)
        return out if self.shared_experts is None else torch.add(out, self.shared_experts(x))

    def _auxiliary(self, scores: Tensor, counts: Tensor) -> Tensor:
        """The scores, whose gradient gains that of the loss factor * X * sum(f P), over this rank's tokens.

        f is the share of all choices that fell on an expert, P the mean of its score as a share of a token's scores
        (Switch Transformers, arXiv 2101.03961, equation 4).
        """
        shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
        weight = self.config.balance_factor * self.config.experts * self.loss_scale
        loss = weight * (counts / counts.sum() * shares).sum()
        out: Tensor = _AddLoss.apply(scores, loss)  # type: ignore[no-untyped-call]
        return out


class Router(nn.Module):
    """Scores of all experts and the choice of k for each token.

    Buffers: `e_score_correction_bias` [X], with `balance = "bias"`, is saved with the model and added to the scores for
    the choice alone; it moves in `rebalance`. `load` [X], int64, counts the tokens that each expert was given in
    training since then, and is not saved. Recomputation may count a layer's tokens twice: all of them alike.
    """

    load: Tensor
    e_score_correction_bias: Tensor | None

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        bias = torch.zeros(config.experts, dtype=torch.float32) if config.balance == "bias" else None
        self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [N, D] to scores [N, X], float32 whatever the rows are, and chosen experts [N, k], int64."""
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):  # tensor parallel: every rank has a part of its gradient
            weight = weight.to_local(grad_placements=(Partial(),))
        logits = F.linear(rows.float(), weight.float())
        scores = logits.sigmoid() if self.config.scores == "sigmoid" else logits.softmax(-1)
        bias = self.e_score_correction_bias
        ranked = scores.detach() if bias is None else scores.detach() + bias
        return scores, ranked.topk(self.config.experts_per_token, dim=-1).indices


class Experts(nn.Module):
    """SwiGLU experts, stacked: dimension 0 of each weight is the expert, by which expert parallelism shards."""

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        wide = (config.experts, config.dim, config.expert_dim)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.expert_dim, config.dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, D] in the order of their experts, of which each has `counts` [X held here], to results [M, D]."""
        weights = [
            w.to_local() if isinstance(w, DTensor) else w for w in (self.gate_proj, self.up_proj, self.down_proj)
        ]
        return (grouped if rows.is_cuda and rows.dtype == torch.bfloat16 else looped)(rows, counts, *weights)


class SwiGLU(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _AddLoss(torch.autograd.Function):
    """Passes a tensor on, and gives a loss the gradient 1 that it would have if it were added to the final one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return grads[0], torch.ones((), dtype=dtype, device=device)


def here(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Applies experts that are all on this rank."""
    out: Tensor = experts(rows, counts)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes differ from step to step
def looped(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Sorted rows [M, D] through experts one after the other; those without rows take part, with gradients of zero."""
    parts = torch.split(rows, counts.tolist())
    return torch.cat([(F.silu(x @ g) * (x @ u)) @ d for x, g, u, d in zip(parts, gate, up, down, strict=True)])


def grouped(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As `looped` in three grouped products, without waiting for the counts: each group is padded with zeros."""
    sizes = counts.add(GROUP_ROWS - 1).div(GROUP_ROWS, rounding_mode="floor") * GROUP_ROWS
    ends = sizes.cumsum(0)
    shift = (ends - sizes) - (counts.cumsum(0) - counts)  # how far an expert's rows move
    place = torch.arange(len(rows), device=rows.device)
    place = place + shift.repeat_interleave(counts, output_size=len(rows))
    room = len(rows) // GROUP_ROWS * GROUP_ROWS + (len(counts) + 1) * GROUP_ROWS
    padded = rows.new_zeros(room, rows.shape[1]).index_copy(0, place, rows)
    offsets = ends.to(torch.int32)
    hidden = F.silu(F.grouped_mm(padded, gate, offs=offsets)) * F.grouped_mm(padded, up, offs=offsets)
    return F.grouped_mm(hidden, down, offs=offsets)[place]


@torch.no_grad()
def rebalance(model: nn.Module, total: Callable[[Tensor], Tensor] = lambda loads: loads) -> Tensor:
    """Moves the biases of all routers by the loads since the last call, and forgets the loads. After each step.

    b <- b + balance_rate * sign(mean load - load) (arXiv 2408.15664, algorithm 1). The sign makes it the same whether
    tokens were counted once or twice.

    Args:
        model: of one rank; sharded and wrapped models keep their routers' buffers whole.
        total: adds the loads [routers, X], int64, over the ranks that saw other tokens. Collective among them.

    Returns:
        For each router, in the order of the layers, its largest load over the mean, float64 [routers]: 1 is even.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        return torch.ones(0, dtype=torch.float64)
    loads = total(torch.stack([router.load for router in routers])).double()
    mean = loads.mean(-1, keepdim=True)
    for router, move in zip(routers, (mean - loads).sign().float(), strict=True):
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias += router.config.balance_rate * move
        router.load.zero_()
    return loads.amax(-1) / mean.squeeze(-1).clamp(min=1)
