"""What a trained token costs in floating-point operations, and what share of a device's that is (MFU)."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from diloco.config import ModelConfig

PEAK_TFLOPS = {
    "A100": 312.0,
    "A40": 149.7,
    "A10": 125.0,
    "L4": 121.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
    "H100": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
    "GB200": 2500.0,
    "MI300X": 1307.4,
}
"""bf16 matrix products of one device with fp32 accumulation, dense (half of a figure "with sparsity"), in TFLOP/s, from
the makers' data sheets. `H100` is the SXM module."""


def flops_per_token(config: ModelConfig, model: nn.Module | None = None) -> int:
    """Floating-point operations of one trained token, forward and backward: 6 N + 12 L H E T.

    N counts the weights of the matrix products that a token passes: all but norms and the embedding lookup, with the
    output projection whether tied or not, and of a block of experts the router, the token's experts and the shared
    ones. The second term is attention's two products over the whole sequence, without a discount for causality (PaLM,
    arXiv 2204.02311, appendix B). Recomputation is not counted, so an MFU from it is no hardware utilisation.

    Args:
        config: the run's `[model]`.
        model: needed where that is not our decoder. Then N is its matrices but embedding lookups, experts by the share
            that `num_experts_per_tok` states, and attention is counted where its `config` states layers and heads.

    Raises:
        ValueError: there is no model, and the config does not describe one.
    """
    if config.ours:
        return 6 * active_weights(config) + _attention(
            config.layers, config.heads * config.head_width, config.sequence_length
        )
    if model is None:
        raise ValueError(f"the operations of model.source='{config.source}' are counted on the model itself")
    shape: Any = getattr(model, "config", None)
    layers, heads = getattr(shape, "num_hidden_layers", 0), getattr(shape, "num_attention_heads", 0)
    weights = round(6 * _foreign_weights(model, shape))
    if not layers or not heads:
        return weights
    width = heads * (getattr(shape, "head_dim", None) or shape.hidden_size // heads)
    return weights + _attention(layers, width, config.sequence_length)


def active_weights(config: ModelConfig) -> int:
    """Weights of our decoder's matrix products that one token passes, N."""
    dim, heads = config.dim, 2 * (config.heads + config.kv_heads) * config.head_width
    experts = config.experts_per_token + config.shared_experts
    routed = sum(config.routed(layer) for layer in range(config.layers))
    dense = 3 * dim * config.ffn_dim * (config.layers - routed)
    mixed = (dim * config.experts + 3 * dim * config.expert_dim * experts) * routed
    return config.layers * dim * heads + dense + mixed + config.vocab_size * dim


def parameters(config: ModelConfig) -> int:
    """Parameters of our decoder, norms and all experts included; tied ones once."""
    dim, routed = config.dim, sum(config.routed(layer) for layer in range(config.layers))
    asleep = 3 * dim * config.expert_dim * (config.experts - config.experts_per_token) * routed
    norms = dim * (2 * config.layers + 1) + config.layers * 2 * config.head_width * config.qk_norm
    return active_weights(config) + asleep + norms + (not config.tie_embeddings) * config.vocab_size * dim


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its name, as `torch.cuda.get_device_name` has it; None where it is not known."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    fits = [name for name in PEAK_TFLOPS if words.issuperset(name.split())]
    return PEAK_TFLOPS[max(fits, key=len)] * 1e12 if fits else None


def mfu(flops_per_token: int, tokens_per_s: float, peak: float) -> float:
    """Model FLOP/s utilisation: the share of `peak` FLOP/s, of all devices together, that training a model makes."""
    return flops_per_token * tokens_per_s / peak


def _attention(layers: int, width: int, length: int) -> int:
    return 12 * layers * width * length


def _foreign_weights(model: nn.Module, shape: Any) -> float:
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    experts = getattr(shape, "num_local_experts", None) or getattr(shape, "num_experts", None)
    share = getattr(shape, "num_experts_per_tok", 0) / experts if experts else 1.0
    return sum(
        p.numel() * (share if ".experts." in name else 1.0)
        for name, p in model.named_parameters()
        if p.dim() > 1 and (id(p) not in looked_up or id(p) in multiplied)
    )
