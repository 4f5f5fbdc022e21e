"""First values of our decoder's parameters."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from diloco.config import ModelConfig

INIT_STD = 0.02


def first_value(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The whole initial value of one parameter: float32, on the CPU, a function of the arguments alone.

    Norms are ones. Matrices are normal with standard deviation 0.02; those that write to the residual stream
    (`o_proj`, `down_proj`) with 0.02 / sqrt(2 * layers), so that its variance does not grow with depth
    (GPT-2, section 2.3). Every parameter has a generator of its own, seeded by a hash of `seed` and `name`,
    so its value depends neither on the number of ranks nor on the order in which they ask.
    """
    if len(shape) == 1:
        return torch.ones(shape, device="cpu", dtype=torch.float32)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big"))
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = INIT_STD / math.sqrt(2 * config.layers) if writes_residual else INIT_STD
    return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, std, generator=generator)
