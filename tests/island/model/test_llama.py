"""Our decoder and transformers': the same logits from an exported folder, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.errors import InputError
from island.model import exported, exported_config, imported
from tests.island.model.shapes import GROUPED, MIXED, NORMED, SHARED, SMALL, TIED, filled, random_tokens
from wan.checkpoint import Checkpoint, export, load

SOFTMAX = MIXED.model_copy(update={"balance": "loss"})
KINDS = {
    "plain": (SMALL, "LlamaForCausalLM"),
    "grouped": (GROUPED, "LlamaForCausalLM"),
    "tied": (TIED, "LlamaForCausalLM"),
    "wide heads": (TIED.model_copy(update={"head_dim": 6}), "LlamaForCausalLM"),
    "normed": (NORMED, "Qwen3ForCausalLM"),
    "softmax": (SOFTMAX, "Qwen3MoeForCausalLM"),
    "softmax as it is": (SOFTMAX.model_copy(update={"normalize_scores": False}), "Qwen3MoeForCausalLM"),
    "sigmoid": (SHARED, "Glm4MoeForCausalLM"),
    "sigmoid without bias": (SHARED.model_copy(update={"balance": "loss", "qk_norm": False}), "Glm4MoeForCausalLM"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, architecture = KINDS[kind]
    ours = filled(config, scale=5.0).eval()  # larger weights than the first ones, so that attention is not uniform
    generator = torch.Generator().manual_seed(2)
    for buffer in ours.buffers():
        if buffer.is_floating_point():  # a bias that changes the choice
            buffer.normal_(0.0, 0.2, generator=generator)
    tensors = ours.state_dict()
    if config.tie_embeddings:
        del tensors["lm_head.weight"]
    export(Checkpoint(model=config, tensors=tensors, versions=(1,)), tmp_path / "out")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == architecture
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.rope_parameters["rope_theta"] == config.rope_theta
    tokens = random_tokens(2, config.sequence_length)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(load(tmp_path / "out").built()(tokens), ours(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_back(kind: str) -> None:
    config, _ = KINDS[kind]
    ours = filled(config).state_dict()
    back = imported(exported(ours, config), config)
    assert set(back) == set(ours)
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_names_are_those_of_the_format() -> None:
    names = set(exported(filled(SHARED).state_dict(), SHARED))
    assert {"model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"} <= names
    assert "model.layers.1.mlp.experts.5.gate_proj.weight" in names
    assert "model.layers.2.mlp.gate.e_score_correction_bias" in names


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"qk_norm": False}, "model.qk_norm=true"),
        ({"shared_experts": 1}, "model.shared_experts=0"),
        ({"routed_scale": 2.0}, "model.routed_scale=1.0"),
        ({"balance": "bias"}, "model.balance other than 'bias'"),
        ({"scores": "sigmoid"}, "Glm4Moe, which wants model.shared_experts"),
        ({"scores": "sigmoid", "shared_experts": 1, "tie_embeddings": True}, "model.tie_embeddings=false"),
    ],
)
def test_what_transformers_has_no_name_for_is_refused(change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        exported_config(SOFTMAX.model_copy(update=change))


def test_a_missing_expert_is_told() -> None:
    tensors = exported(filled(SOFTMAX).state_dict(), SOFTMAX)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts\.up_proj' has 5 experts of 6"):
        imported(tensors, SOFTMAX)
