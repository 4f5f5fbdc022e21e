"""The outer step."""

from __future__ import annotations

from torch import Tensor


def nesterov(gradient: Tensor, momentum: Tensor, *, lr: float, mu: float) -> Tensor:
    """One outer Nesterov step (DiLoCo, arXiv 2311.08105, algorithm 1; the same as `torch.optim.SGD(nesterov=True)`).

        m <- mu * m + g
        step = lr * (g + mu * m)          theta <- theta - step

    Args:
        gradient: g, the merged pseudo-gradient (anchor minus local: a descent direction), fp32.
        momentum: m, fp32 of the same shape; updated in place. Zeros before the first step.
        lr: outer learning rate.
        mu: outer momentum; 0 is plain SGD, and with `lr=1` federated averaging.

    Returns:
        The step to subtract from the anchor, fp32.
    """
    momentum.mul_(mu).add_(gradient)
    return gradient.add(momentum, alpha=mu).mul_(lr)
