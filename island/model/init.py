"""First values of our decoder's parameters, each a function of the run's seed and the parameter's name."""

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
    (GPT-2, section 2.3). Every matrix has a generator of its own, seeded by a hash of `seed` and `name` and, for
    stacked experts [experts, in, out], the expert's number: so its value depends neither on the number of ranks nor on
    the order in which they ask.
    """
    if len(shape) == 1:
        return torch.ones(shape, device="cpu", dtype=torch.float32)
    if len(shape) == 3:
        return torch.stack([first_value(f"{name}.{i}", shape[1:], config, seed) for i in range(shape[0])])
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big"))
    writes_residual = not {"o_proj", "down_proj"}.isdisjoint(name.split("."))
    std = INIT_STD / math.sqrt(2 * config.layers) if writes_residual else INIT_STD
    return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, std, generator=generator)


def first_part(name: str, shape: tuple[int, ...], slices: tuple[slice, ...], config: ModelConfig, seed: int) -> Tensor:
    """The part `slices` of `first_value`, for which no more than one expert is made whole at a time."""
    if len(shape) != 3:
        return first_value(name, shape, config, seed)[slices]
    experts, *within = slices
    parts = [first_value(f"{name}.{i}", shape[1:], config, seed)[tuple(within)] for i in range(shape[0])[experts]]
    return torch.stack(parts) if parts else torch.empty(shape)[slices]
