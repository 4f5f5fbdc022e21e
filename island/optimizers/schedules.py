"""The learning rate as a function of the run's step.

A parameter group carries its peak as `initial_lr`, the key that torch's own schedulers use; the schedule is one shape
for all groups. An island that starts again, or joins late, takes the shape at the run's step: the warm-up comes once.
"""

from __future__ import annotations

import math

import torch

from diloco.config_inner import InnerConfig


def shape(step: int, steps: int, inner: InnerConfig) -> float:
    """The learning rate of inner step `step` (1..steps) of the run, as a share of its peak.

    Linear warm-up from 0, then the schedule between 1 and `inner.min_lr_ratio`.
    """
    if step <= inner.warmup_steps:
        return step / inner.warmup_steps
    share = (step - inner.warmup_steps) / max(1, steps - inner.warmup_steps)
    match inner.schedule:
        case "constant":
            height = 1.0
        case "linear":
            height = 1.0 - share
        case "cosine":
            height = 0.5 * (1.0 + math.cos(math.pi * share))
        case "wsd":
            height = _stable_then_down(step, steps, inner)
    return inner.min_lr_ratio + (1.0 - inner.min_lr_ratio) * height


def _stable_then_down(step: int, steps: int, inner: InnerConfig) -> float:
    """1, and over the run's last steps down to 0 (arXiv 2404.06395; the root's shape is arXiv 2405.18392's)."""
    begin = max(inner.warmup_steps, steps - (inner.decay_steps or round(inner.decay_ratio * steps)))
    share = max(0.0, (step - begin) / max(1, steps - begin))
    return 1.0 - (math.sqrt(share) if inner.decay_shape == "1-sqrt" else share)


def learning_rate(step: int, steps: int, inner: InnerConfig) -> float:
    """The learning rate of inner step `step` (1..steps) of the run where the peak is `inner.lr`."""
    return inner.lr * shape(step, steps, inner)


def set_rates(optimizer: torch.optim.Optimizer, step: int, steps: int, inner: InnerConfig) -> None:
    """Gives every group its peak times the shape at inner step `step` (1..steps) of the run."""
    share = shape(step, steps, inner)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share
