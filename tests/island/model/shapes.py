"""Small models and tokens for them."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.config import ModelConfig, RunConfig, RunSection
from island.model import Decoder, allocate, fill

SMALL = ModelConfig(
    vocab_size=61, dim=32, layers=2, heads=4, kv_heads=4, ffn_dim=48, sequence_length=16, rope_theta=500.0
)
GROUPED = SMALL.model_copy(update={"kv_heads": 2})
TIED = GROUPED.model_copy(update={"tie_embeddings": True})
NORMED = GROUPED.model_copy(update={"qk_norm": True, "head_dim": 12})
MIXED = GROUPED.model_copy(
    update={"experts": 6, "experts_per_token": 2, "expert_dim": 20, "layers": 3, "dense_layers": 1, "qk_norm": True}
)
SHARED = MIXED.model_copy(update={"scores": "sigmoid", "shared_experts": 2, "routed_scale": 2.5})


def run_of(config: ModelConfig, seed: int = 0) -> RunConfig:
    """A run that trains this model."""
    return RunConfig.model_construct(run=RunSection(id="run", seed=seed), model=config)


def filled(config: ModelConfig, seed: int = 0, scale: float = 1.0) -> Decoder:
    """A model on the CPU, by way of the meta device, with its first values times `scale`."""
    with torch.device("meta"):
        model = Decoder(config=config)
    allocate(model, "cpu")
    fill(model, run_of(config, seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def random_tokens(*shape: int) -> Tensor:
    """Token ids below those models' vocabulary."""
    return torch.randint(0, SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(1))
