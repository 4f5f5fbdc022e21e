"""Our decoder as transformers and other readers of its format know it: `config.json`, names and tensors.

dense                          LlamaForCausalLM
dense, QK-norm                 Qwen3ForCausalLM
experts, softmax, QK-norm      Qwen3MoeForCausalLM   without shared experts, routed_scale or balance = "bias"
experts, sigmoid               Glm4MoeForCausalLM    with shared experts and untied embeddings
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diloco.config import ModelConfig
from diloco.errors import InputError
from island.model.sources import shape_of

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj)")
_ONE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_BIAS = ".e_score_correction_bias"


def exported_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` with which transformers computes what `Decoder` does.

    transformers 5 reads `rope_parameters`; earlier versions and other readers of the format, `rope_theta`.

    A model of transformers has its own; one of a function has none, and the table is empty.

    Raises:
        InputError: no architecture there has these settings.
    """
    if config.source == "transformers":
        return dict(shape_of(config.name).to_dict())
    if not config.ours:
        return {}
    architecture, kind, more = _architecture(config)
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.sequence_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    } | more


def exported(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors by our names, as transformers' checkpoints hold them: experts apart, each weight [out, in].

    Tensors of another model keep their names.
    """
    if not config.ours:
        return {name: tensor.contiguous() for name, tensor in tensors.items()}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stacked = _STACKED.fullmatch(name)
        if stacked:
            for i, expert in enumerate(tensor):
                out[f"model.{stacked[1]}.{i}.{stacked[2]}.weight"] = expert.T.contiguous()
        else:
            out[name if name.startswith("lm_head.") else f"model.{name}"] = tensor.contiguous()
    if config.scores == "sigmoid" and config.balance != "bias":  # the format has a bias where we have none
        zero = torch.zeros(config.experts)
        routed = (layer for layer in range(config.layers) if config.routed(layer))
        out |= {f"model.layers.{layer}.mlp.gate{_BIAS}": zero.clone() for layer in routed}
    return out


def imported(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Inverse of `exported`.

    Raises:
        InputError: an expert of a block is missing.
    """
    if not config.ours:
        return dict(tensors)
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        ours, one = name.removeprefix("model."), _ONE.fullmatch(name.removeprefix("model."))
        if one:
            experts.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = tensor.T
        elif config.balance == "bias" or not ours.endswith(_BIAS):
            out[ours] = tensor
    for name, found in experts.items():
        if set(found) != set(range(config.experts)):
            raise InputError(f"'{name}' has {len(found)} experts of {config.experts}: the checkpoint is not whole")
        out[name] = torch.stack([found[i] for i in range(config.experts)])
    return out


def _architecture(config: ModelConfig) -> tuple[str, str, dict[str, Any]]:
    """Class, model type and the keys beside the common ones."""
    if not config.experts:
        if config.qk_norm:
            return "Qwen3ForCausalLM", "qwen3", {}
        return "LlamaForCausalLM", "llama", {"mlp_bias": False}
    routed = {
        "moe_intermediate_size": config.expert_dim,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_scores,
    }
    if config.scores == "softmax":
        wanted = {
            "model.qk_norm=true": config.qk_norm,
            "model.shared_experts=0": not config.shared_experts,
            "model.routed_scale=1.0": config.routed_scale == 1.0,
            "model.balance other than 'bias'": config.balance != "bias",
        }
        _refuse("Qwen3Moe", "model.scores='softmax'", wanted)
        dense = list(range(config.dense_layers))
        return "Qwen3MoeForCausalLM", "qwen3_moe", routed | {"num_experts": config.experts, "mlp_only_layers": dense}
    wanted = {
        "model.shared_experts": config.shared_experts > 0,
        "model.tie_embeddings=false": not config.tie_embeddings,
    }
    _refuse("Glm4Moe", "model.scores='sigmoid'", wanted)
    more = {
        "n_routed_experts": config.experts,
        "n_shared_experts": config.shared_experts,
        "routed_scaling_factor": config.routed_scale,
        "first_k_dense_replace": config.dense_layers,
        "use_qk_norm": config.qk_norm,
        "n_group": 1,
        "topk_group": 1,
    }
    return "Glm4MoeForCausalLM", "glm4_moe", routed | more


def _refuse(architecture: str, setting: str, wanted: Mapping[str, bool]) -> None:
    missing = [words for words, there in wanted.items() if not there]
    if missing:
        raise InputError(
            f"transformers has no architecture for this model: {setting} is read as {architecture}, which wants "
            f"{', '.join(missing)}. The parameters are in the coordinator's snapshot under our names"
        )
