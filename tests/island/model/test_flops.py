"""What a token costs, and how large the named shapes are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.config import ModelConfig
from diloco.config_model import MODEL_PRESETS, PresetName
from island.model import Decoder, flops_per_token, mfu, peak_flops
from island.model.flops import PEAK_TFLOPS, active_weights, parameters
from tests.island.model.shapes import GROUPED, MIXED, SHARED, TIED


def test_flops_of_a_hand_counted_model() -> None:
    config = ModelConfig(vocab_size=10, dim=8, layers=3, heads=2, kv_heads=1, ffn_dim=12, sequence_length=16)
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12  # q and o, k and v, SwiGLU: 480
    assert flops_per_token(config) == 6 * (3 * layer + 10 * 8) + 12 * 3 * 8 * 16
    assert flops_per_token(config.model_copy(update={"tie_embeddings": True})) == flops_per_token(config)


def test_flops_count_the_weights_of_the_model() -> None:
    matrices = sum(p.numel() for p in Decoder(config=GROUPED).parameters() if p.dim() == 2)
    embedding = GROUPED.vocab_size * GROUPED.dim
    attention = 12 * GROUPED.layers * GROUPED.dim * GROUPED.sequence_length
    assert flops_per_token(GROUPED) == 6 * (matrices - embedding) + attention


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("tiny", 234_048, 217_088),
        ("60m", 59_041_920, 59_035_648),
        ("150m", 150_148_992, 150_126_592),
        ("400m", 388_929_024, 388_890_624),
        ("1b", 1_235_814_400, 1_235_746_816),
        ("7b", 6_738_415_616, 6_607_077_376),
        ("10b", 10_211_381_248, 9_685_696_512),
        ("70b", 70_553_706_496, 69_501_714_432),
        ("405b", 405_853_388_800, 403_747_897_344),
        ("deepseek-v3", 674_836_083_712, 40_434_401_280),
    ],
)
def test_a_preset_is_as_large_as_its_name(preset: PresetName, total: int, active: int) -> None:
    config = ModelConfig(preset=preset)
    with torch.device("meta"):
        model = Decoder(config=config)
    assert sum(p.numel() for p in model.parameters()) == parameters(config) == total
    assert active_weights(config) == active


def test_every_preset_is_counted() -> None:
    [counted] = [mark for mark in test_a_preset_is_as_large_as_its_name.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert [row[0] for row in counted.args[1]] == list(MODEL_PRESETS)


@pytest.mark.parametrize("config", [GROUPED, TIED, MIXED, SHARED], ids=["dense", "tied", "softmax", "sigmoid"])
def test_parameters_are_those_of_the_model(config: ModelConfig) -> None:
    assert sum(p.numel() for p in Decoder(config=config).parameters()) == parameters(config)


def test_a_token_pays_for_its_own_experts() -> None:
    expert = 3 * 32 * 20
    more = SHARED.model_copy(update={"experts_per_token": 3})
    assert flops_per_token(more) - flops_per_token(SHARED) == 6 * 2 * expert  # two of three blocks have experts
    wider = SHARED.model_copy(update={"experts": 7})
    assert flops_per_token(wider) - flops_per_token(SHARED) == 6 * 2 * 32  # a row of each router


def test_another_model_is_counted_as_ours_is() -> None:
    transformers = pytest.importorskip("transformers")
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = transformers.LlamaConfig(**dict(zip(keys, (61, 32, 48, 2, 4), strict=True)), num_key_value_heads=2)
    theirs = GROUPED.model_copy(update={"source": "transformers", "name": "x"})
    assert flops_per_token(theirs, transformers.LlamaForCausalLM(shape)) == flops_per_token(GROUPED)
    function = GROUPED.model_copy(update={"source": "a:b"})
    assert flops_per_token(function, torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))) == 6 * 36
    with pytest.raises(ValueError, match="counted on the model itself"):
        flops_per_token(function)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_device_is_known_by_its_name(name: str, tera: float) -> None:
    assert peak_flops(name) == tera * 1e12


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops("NVIDIA Q1000") is None
    assert peak_flops("cpu") is None


def test_mfu_is_a_share_of_the_peak() -> None:
    assert mfu(6 * 10**9, 50_000, 1e15) == pytest.approx(0.3)


def test_the_page_has_these_figures() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    for name in MODEL_PRESETS:
        config = ModelConfig.model_validate({"preset": name})
        row = f"| {parameters(config):,} | {active_weights(config):,} | {flops_per_token(config):.3e} | "
        assert f"| `{name}` {row}{config.sequence_length} |" in page
    assert all(f"| {name} | {tera:g} |" in page for name, tera in PEAK_TFLOPS.items())
