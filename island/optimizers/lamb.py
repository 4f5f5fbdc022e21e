"""LAMB (arXiv 1904.00962): Adam's direction, scaled per tensor by how large the tensor is.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd w
    w <- w - lr |w| / |r| r

The norms are of whole tensors, sharded or not: every rank adds up its parts, and one all-reduce brings them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.layout import local
from island.optimizers.shards import Shards, local_gradient


class Lamb(torch.optim.Optimizer):
    """LAMB with the trust ratio |w| / |r|; 1 where either norm is 0.

    Making it and `step` are collective over the island.

    Args:
        groups: each with `lr` and `weight_decay`.
        names: the parameters' names, the same on all ranks.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        names: Mapping[Tensor, str],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self._names = names
        self._shards = Shards({names[p]: p for group in self.param_groups for p in group["params"]})
        self._index = {name: i for i, name in enumerate(self._shards.names)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        device = self.param_groups[0]["params"][0].device
        squares = torch.zeros(len(self._index), 2, dtype=torch.float64, device=device)
        for parameter, group in self._with_gradient():
            self._update_moments(parameter, group)
            name = self._names[parameter]
            if self._shards.counts(name):
                for column, values in enumerate((local(parameter), self._direction(parameter, group))):
                    squares[self._index[name], column] = values.square().sum(dtype=torch.float64)
        norms = self._shards.total(squares).sqrt()
        ratios = torch.where((norms > 0).all(1), norms[:, 0] / norms[:, 1], 1.0).float()
        for parameter, group in self._with_gradient():
            step = self._direction(parameter, group).mul_(ratios[self._index[self._names[parameter]]])
            local(parameter).sub_(step, alpha=group["lr"])
        return loss

    def _with_gradient(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            yield from ((parameter, group) for parameter in group["params"] if parameter.grad is not None)

    def _update_moments(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradient = local_gradient(parameter)
        state["step"] += 1
        local(state["exp_avg"]).lerp_(gradient, 1 - beta1)
        local(state["exp_avg_sq"]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """r of this rank's part, a new tensor."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        t = state["step"].item()
        root = local(state["exp_avg_sq"]).sqrt().div_(math.sqrt(1 - beta2**t)).add_(group["eps"])
        direction: Tensor = local(state["exp_avg"]).div(1 - beta1**t).div_(root)
        return direction.add_(local(parameter), alpha=group["weight_decay"])
