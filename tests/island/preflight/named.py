"""Code that a run may name."""

from __future__ import annotations

import torch
from torch import nn


class Optimizer(torch.optim.SGD):
    """An optimizer of one's own."""


def model() -> nn.Module:
    """A model of two fragments."""
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Embedding(256, 8), nn.Linear(8, 256, bias=False)])})


def broken() -> nn.Module:
    """Code with a fault."""
    raise ZeroDivisionError("a fault of the user's")
