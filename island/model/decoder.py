"""The model: a Llama-style decoder whose weights are those of transformers' `LlamaForCausalLM`, name by name.

Shapes: B batch, T time, V vocabulary, D width, H query heads, K key and value heads, E = D / H head width.

All that a forward pass needs is a parameter or follows from the config, but for the biases of routers (`moe.py`), so
a model made on the meta device is complete once it has been filled from `first_value` or a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.config import ModelConfig
from island.model.moe import MoE, SwiGLU

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, H, T, E], keys and values [B, K, T, E] to the mixed values [B, H, T, E]."""


class Decoder(nn.Module):
    """Pre-norm decoder: RMSNorm, RoPE, grouped-query attention and SwiGLU (Llama 2, arXiv 2307.09288).

    `layers` holds the blocks, the units to shard, by their number, so that a block keeps its name where a pipeline
    stage has only some. A stage may set `embed_tokens`, or `norm` and `lm_head`, to None: what comes in, or goes out,
    is then the residual stream [B, T, D]. With `tie_embeddings`, `lm_head.weight` is `embed_tokens.weight`: one
    parameter, which `named_parameters` lists under its first name.
    """

    embed_tokens: nn.Embedding | None
    norm: nn.RMSNorm | None
    lm_head: nn.Linear | None

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.document_end: int | None = None
        """The token that ends a document, where nothing is to look across documents; None where everything may."""
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(i, config=config) for i in range(config.layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token ids [B, T] (int64) to the logits of the next token [B, T, V], in the dtype of the weights.

        `positions` [T] (int64) are those of the tokens in their sequence; without, 0 to T - 1. With `document_end` they
        begin anew with each document.
        """
        x = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        seen: tuple[Tensor, ...] = ()
        if self.document_end is not None:
            positions, mask = apart(tokens, self.document_end)
            seen = (mask,)
        elif positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = rotary(positions, self.config, x)
        for block in self.layers.values():
            x = block(x, cos, sin, *seen)
        x = x if self.norm is None else self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream [B, T, D] and added back to it."""

    def __init__(self, layer: int, *, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config=config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MoE(config=config) if config.routed(layer) else SwiGLU(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share a key and value head (arXiv 2305.13245).

    With `qk_norm`, queries and keys of each head are normalised first (arXiv 2302.05442, as Qwen3 does it).

    `attend` mixes the values; context parallelism puts another function in its place.
    """

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.attend: Attend = causal
        self.q_proj = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        heads = (-1, self.head_dim)
        q, k, v = (project(x).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, heads, T, E]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = self.attend(q, k, v) if seen is None else causal(q, k, v, seen)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def causal(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Each position of [B, H, T, E] attends to itself and those before it, or to those that `seen` says."""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=gqa)


def apart(tokens: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of packed documents are, and what each of them sees.

    Args:
        tokens: token ids [B, T]. A document goes up to the token `end`, which is its last.

    Returns:
        Positions [B, T] (int64) of the tokens in their documents, from 0; and bool [B, 1, T, T], whether a position
        (the third dimension) attends to another one (the last): one of its document, itself or before it.
    """
    ends = tokens == end
    document = ends.cumsum(1) - ends.long()
    at = torch.arange(tokens.shape[1], device=tokens.device)
    first = F.pad(ends[:, :-1], (1, 0), value=True)
    began = torch.where(first, at, 0).cummax(1).values
    same = document[:, None, :, None] == document[:, None, None, :]
    return at - began, same & (at[:, None] >= at)


def rotary(positions: Tensor, config: ModelConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, E] of the rotary angles of `positions` [T], or [B, 1, T, E] of [B, T] (RoPE, arXiv
    2104.09864).

    Computed in float32; returned on the device and in the dtype of `like`. Both halves of a head hold the
    same angles, as transformers lays them out, so that weights map without a permutation.
    """
    exponents = torch.arange(0, config.head_width, 2, device=like.device, dtype=torch.float32) / config.head_width
    turns = positions.to(like.device, torch.float32)[..., None] * (1.0 / config.rope_theta**exponents)
    angles = torch.cat((turns, turns), dim=-1)
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + E/2) of the last dimension of [B, heads, T, E] by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Mean cross-entropy per token in nats, float32, of logits [B, T, V] against token ids [B, T].

    `z_loss` times the mean of log(Z)^2 is added, Z the sum of a token's exponentiated logits: it keeps them from
    drifting (PaLM, arXiv 2204.02311, section 5; Streaming DiLoCo, arXiv 2501.18512, takes 1e-4).
    """
    flat = logits.float().flatten(0, 1)
    value = F.cross_entropy(flat, targets.flatten())
    return value + z_loss * flat.logsumexp(-1).square().mean() if z_loss else value
