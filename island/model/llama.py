"""Our decoder as transformers reads it: `config.json` and the names of its parameters."""

from __future__ import annotations

from typing import Any

from diloco.config import ModelConfig


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
        "head_dim": config.head_width,
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
