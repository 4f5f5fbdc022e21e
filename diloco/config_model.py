"""`[model]`: the model that the islands of a run train."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from diloco.settings import Positive, Settings


class ModelConfig(Settings):
    vocab_size: Positive = 256
    """Tokens in the vocabulary; 256 is bytes."""
    dim: Positive = 64
    """Width of the residual stream. Without `head_dim`, a multiple of `heads`, with an even quotient."""
    layers: Positive = 4
    """Transformer blocks."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive = 4
    """Key and value heads (grouped-query attention). Divides `heads`."""
    head_dim: Annotated[int, Field(ge=0, multiple_of=2)] = 0
    """Width of a head; even, as RoPE turns pairs. 0 takes `dim / heads`."""
    ffn_dim: Positive = 176
    """Hidden width of the SwiGLU feed-forward block."""
    sequence_length: Annotated[int, Field(ge=2)] = 64
    """Tokens of one training sequence, and the longest context the model sees."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output projection is the embedding matrix. Tied, it is one tensor in the layout."""

    @property
    def head_width(self) -> int:
        """Width of a head, E."""
        return self.head_dim or self.dim // self.heads

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        if not self.head_dim and (self.dim % self.heads or (self.dim // self.heads) % 2):
            raise ValueError(
                f"model.dim ({self.dim}) must be an even multiple of model.heads ({self.heads}): "
                f"set model.dim={self.heads * 2 * max(1, self.dim // (2 * self.heads))}, or model.head_dim"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads ({self.kv_heads}) must divide model.heads ({self.heads}): "
                f"set model.kv_heads={math.gcd(self.kv_heads, self.heads)}"
            )
        return self
