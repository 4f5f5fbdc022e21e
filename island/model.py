"""The model: a Llama-style decoder whose weights are those of transformers' `LlamaForCausalLM`, name by name.

Shapes: B batch, T time, V vocabulary, D width, H query heads, K key and value heads, E = D / H head width.

There are no buffers: all that a forward pass needs is a parameter or follows from the config, so a model made
on the meta device is complete once its parameters have been filled from `first_value` or a checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.config import ModelConfig
from diloco.errors import InputError

INIT_STD = 0.02


class Decoder(nn.Module):
    """Pre-norm decoder: RMSNorm, RoPE, grouped-query attention and SwiGLU (Llama 2, arXiv 2307.09288).

    `layers` holds the blocks, the units to shard. With `tie_embeddings`, `lm_head.weight` is
    `embed_tokens.weight`: one parameter, which `named_parameters` lists under its first name.
    """

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config=config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._tie()

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] (int64) to the logits of the next token [B, T, V], in the dtype of the weights."""
        x = self.embed_tokens(tokens)
        cos, sin = rotary(tokens.shape[1], self.config, x)
        for block in self.layers:
            x = block(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """As in torch, which would give every name a tensor of its own: tied weights stay one."""
        super().to_empty(device=device, recurse=recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream [B, T, D] and added back to it."""

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config=config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config=config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share a key and value head (arXiv 2305.13245)."""

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.grouped = config.heads != config.kv_heads
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        q = rotate(self.q_proj(x).unflatten(-1, heads).transpose(1, 2), cos, sin)  # [B, H, T, E]
        k = rotate(self.k_proj(x).unflatten(-1, heads).transpose(1, 2), cos, sin)  # [B, K, T, E]
        v = self.v_proj(x).unflatten(-1, heads).transpose(1, 2)  # [B, K, T, E]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, *, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rotary(length: int, config: ModelConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, E] of the rotary angles of positions 0 to `length` - 1 (RoPE, arXiv 2104.09864).

    Computed in float32; returned on the device and in the dtype of `like`. Both halves of a head hold the
    same angles, as transformers lays them out, so that weights map without a permutation.
    """
    head_dim = config.dim // config.heads
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / config.rope_theta**exponents).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + E/2) of the last dimension of [B, heads, T, E] by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


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


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per token in nats, float32, of logits [B, T, V] against token ids [B, T]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def flops_per_token(config: ModelConfig) -> int:
    """Floating-point operations of one trained token, forward and backward: 6 N + 12 L D T.

    N counts the weights of the matrix products: all but norms and the embedding lookup, with the output
    projection whether tied or not. The second term is attention's two products over the whole sequence,
    without a discount for causality (PaLM, arXiv 2204.02311, appendix B).
    """
    dim, kv_dim = config.dim, config.dim // config.heads * config.kv_heads
    per_layer = 2 * dim * dim + 2 * dim * kv_dim + 3 * dim * config.ffn_dim
    weights = config.layers * per_layer + config.vocab_size * dim
    return 6 * weights + 12 * config.layers * dim * config.sequence_length


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, length: int, temperature: float, seed: int, context: int) -> Tensor:
    """Continues `prompt` by `length` sampled tokens.

    Args:
        model: token ids [1, T] to logits [1, T, V].
        prompt: token ids [T], int64, at least one, on the model's device.
        length: tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the sampling. The same arguments give the same tokens.
        context: the model sees at most this many of the last tokens.

    Returns:
        Token ids [T + length]: the prompt and its continuation.

    Raises:
        InputError: the prompt is empty.
    """
    if not len(prompt):
        raise InputError("the prompt is empty: give at least one token to continue from")
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = prompt
    for _ in range(length):
        logits = model(tokens[None, -context:])[0, -1].float().cpu()
        if temperature > 0:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, chosen.to(tokens.device)))
    return tokens


def to_llama(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` with which transformers' `LlamaForCausalLM` computes what `Decoder` does.

    transformers 5 reads `rope_parameters`; earlier versions and other readers of the format, `rope_theta`.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.dim // config.heads,
        "max_position_embeddings": config.sequence_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def llama_name(name: str) -> str:
    """The name that `LlamaForCausalLM` gives to our parameter `name`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def our_name(name: str) -> str:
    """Our name of the parameter that `LlamaForCausalLM` calls `name`; inverse of `llama_name`."""
    return name.removeprefix("model.")
