"""The run's model, made and filled."""

from __future__ import annotations

import torch
from torch import nn

from diloco.config import RunConfig
from diloco.layout import box_of, canonical_name, local
from island.model.decoder import Decoder
from island.model.init import first_value


def build_meta(run: RunConfig) -> nn.Module:
    """The run's model on the meta device: whole, float32, without values."""
    with torch.device("meta"):
        return Decoder(config=run.model)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks in order: the units to shard, to checkpoint and to compile."""
    assert isinstance(model, Decoder)
    return list(model.layers.values())


@torch.no_grad()
def fill(model: nn.Module, run: RunConfig) -> None:
    """Gives every parameter this rank holds its first value, which depends on the run's seed and its name alone.

    The model may be sharded, wrapped, or a stage of a pipeline: each tensor is made and cut alone.
    """
    for raw, parameter in model.named_parameters():
        name = canonical_name(raw)
        value = first_value(name, tuple(parameter.shape), run.model, run.run.seed)
        local(parameter).copy_(value[box_of(parameter, name).slices])
