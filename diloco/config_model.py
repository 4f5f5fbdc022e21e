"""`[model]`: the model that the islands of a run train, and the shapes that have a name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from diloco.settings import NonNegative, Positive, Settings, Table

PresetName = Literal["", "tiny", "60m", "150m", "400m", "1b", "7b", "10b", "70b", "405b", "deepseek-v3"]


def _shape(vocab_size: int, dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, **more: object) -> Table:
    names = ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim")
    return dict(zip(names, (vocab_size, dim, layers, heads, kv_heads, ffn_dim), strict=True)) | more


_LLAMA3 = {"rope_theta": 500_000.0, "sequence_length": 8192}

MODEL_PRESETS: dict[str, Table] = {
    "tiny": _shape(256, 64, 4, 4, 4, 176, sequence_length=64),
    "60m": _shape(32_000, 896, 3, 16, 16, 2400, head_dim=64, sequence_length=1024, tie_embeddings=True),
    "150m": _shape(32_000, 896, 12, 16, 16, 2400, head_dim=64, sequence_length=1024, tie_embeddings=True),
    "400m": _shape(32_000, 1536, 12, 12, 12, 4096, sequence_length=1024, tie_embeddings=True),
    "1b": _shape(128_256, 2048, 16, 32, 8, 8192, tie_embeddings=True, **_LLAMA3),
    "7b": _shape(32_000, 4096, 32, 32, 32, 11_008, sequence_length=4096),
    "10b": _shape(128_256, 4096, 42, 32, 8, 14_336, **_LLAMA3),
    "70b": _shape(128_256, 8192, 80, 64, 8, 28_672, **_LLAMA3),
    "405b": _shape(128_256, 16_384, 126, 128, 8, 53_248, **_LLAMA3),
    "deepseek-v3": _shape(
        *(129_280, 7168, 61, 128, 8, 18_432),
        head_dim=128,
        sequence_length=4096,
        norm_eps=1e-6,
        experts=256,
        experts_per_token=8,
        shared_experts=1,
        expert_dim=2048,
        dense_layers=3,
        scores="sigmoid",
        routed_scale=2.5,
        balance="bias",
    ),
}
"""`model.preset`. 60m, 150m and 400m are those of DiLoCo (arXiv 2311.08105, table 1), with SwiGLU blocks that have the
parameters of the paper's; 1b is Llama 3.2 1B, 7b Llama 2 7B, 10b INTELLECT-1 (arXiv 2412.01152), 70b and 405b Llama 3
(arXiv 2407.21783); deepseek-v3 has the depth, width and experts of DeepSeek-V3 (arXiv 2412.19437) with grouped-query
attention where that has latent attention."""


class ModelConfig(Settings):
    preset: PresetName = ""
    """A shape with a name; the other keys change it. `docs/models.md` says how large each is."""
    source: Annotated[str, Field(pattern=r"^(decoder|transformers|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "decoder"
    """What makes the model. `decoder`: ours, by the keys below. `transformers`: the causal language model that `name`
    names. `MODULE:FUNCTION`: what that function returns, a `torch.nn.Module` from token ids [B, T] to logits [B, T, V];
    the module must be importable at every island. Of the keys below, the last two hold only `vocab_size`,
    `sequence_length` and `z_loss`."""
    name: str = ""
    """With `transformers`: a repository, a folder, or a `config.json`."""
    pretrained: bool = False
    """With `transformers`: whether training starts from the weights there rather than from the run's seed."""
    options: dict[str, Any] = Field(default={})
    """With `MODULE:FUNCTION`: its keyword arguments."""
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
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before they are turned (QK-norm); steadies large learning
    rates (arXiv 2501.18512)."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the square of the log of the softmax's denominator in the training loss (arXiv 2501.18512: 1e-4)."""
    experts: NonNegative = 0
    """Routed experts of a block's feed-forward part (mixture of experts); 0: it is dense."""
    experts_per_token: Positive = 2
    """Experts that each token goes to."""
    shared_experts: NonNegative = 0
    """Experts that every token goes to besides; they are one SwiGLU block of that many times `expert_dim`."""
    expert_dim: Positive = 64
    """Hidden width of one expert."""
    dense_layers: NonNegative = 0
    """The first blocks, which stay dense (DeepSeek-V3: 3)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's outputs become scores: over all experts together, or each for itself (DeepSeek-V3)."""
    normalize_scores: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    routed_scale: Annotated[float, Field(gt=0)] = 1.0
    """What the routed experts' sum is multiplied by (DeepSeek-V3: 2.5)."""
    balance: Literal["none", "bias", "loss"] = "bias"
    """How experts are kept equally busy. `bias`: after each inner step an expert's bias in the choice, and only there,
    moves up where it had fewer tokens than the mean and down where more (arXiv 2408.15664); needs
    `sync.buffers = "average"`. `loss`: an auxiliary loss (arXiv 2101.03961)."""
    balance_rate: Annotated[float, Field(gt=0)] = 1e-3
    """How far a bias moves in a step."""
    balance_factor: Annotated[float, Field(gt=0)] = 1e-2
    """Weight of the auxiliary loss."""

    @property
    def head_width(self) -> int:
        """Width of a head, E."""
        return self.head_dim or self.dim // self.heads

    @property
    def ours(self) -> bool:
        """Whether the model is this project's decoder."""
        return self.source == "decoder"

    def routed(self, layer: int) -> bool:
        """Whether a block has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        """Lays the keys that are given over those of the preset."""
        known = MODEL_PRESETS.get(str(values.get("preset"))) if isinstance(values, Mapping) else None
        return {**known, **values} if known else values

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
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"model.experts_per_token ({self.experts_per_token}) is above model.experts ({self.experts}): "
                f"set model.experts_per_token={self.experts}"
            )
        if self.experts and self.dense_layers >= self.layers:
            raise ValueError(
                f"model.dense_layers ({self.dense_layers}) leaves none of model.layers ({self.layers}) to "
                f"model.experts: set model.dense_layers={self.layers - 1} or less, or model.experts=0"
            )
        return self

    @model_validator(mode="after")
    def _source_fits(self) -> ModelConfig:
        transformers = self.source == "transformers"
        if transformers != bool(self.name):
            raise ValueError(
                f"model.name ('{self.name}') is what model.source='transformers' makes, and that alone: "
                + ("set model.name to a repository, a folder or a config.json" if transformers else "leave it out")
            )
        if self.pretrained and not transformers:
            raise ValueError(f"model.pretrained needs model.source='transformers', not '{self.source}'")
        if self.options and ":" not in self.source:
            raise ValueError(f"model.options go to a function: set model.source='MODULE:FUNCTION', not '{self.source}'")
        odd = [
            key for key, value in self.options.items() if not (key.isidentifier() and key.isascii() and _plain(value))
        ]
        if odd:
            raise ValueError(
                f"model.options.{odd[0]} cannot be handed on: name it as a Python argument, and give it a string, "
                "boolean, number or table, or an array of the first three"
            )
        return self


def _plain(value: object) -> bool:
    """Whether a value is one that TOML brings back as it was."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and key.isidentifier() and _plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(not isinstance(inner, Mapping) and _plain(inner) for inner in value)
    return isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
