"""The inner optimizer and its learning rate, which follows the run's step."""

from __future__ import annotations

import math

import torch
from torch import nn

from diloco.config import InnerConfig


def build(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    """The run's inner optimizer. Weight decay applies to matrices, not to norms."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": inner.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if inner.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=inner.lr)
    return torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas)


def learning_rate(step: int, steps: int, inner: InnerConfig) -> float:
    """The learning rate of inner step `step` (1..steps) of the run: linear warm-up, then the schedule's shape."""
    if step <= inner.warmup_steps:
        return inner.lr * step / inner.warmup_steps
    share = (step - inner.warmup_steps) / max(1, steps - inner.warmup_steps)
    match inner.schedule:
        case "constant":
            shape = 1.0
        case "linear":
            shape = 1.0 - share
        case "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * share))
    return inner.lr * (inner.min_lr_ratio + (1.0 - inner.min_lr_ratio) * shape)
