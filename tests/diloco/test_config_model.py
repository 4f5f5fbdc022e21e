"""`[model]`: presets, and the rules between its settings."""

from __future__ import annotations

import pytest

from diloco.config import ModelConfig, load_run, to_toml
from diloco.config_model import MODEL_PRESETS
from diloco.errors import ConfigError

RUN = '[run]\nid = "a"\n'


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_a_preset_is_a_table_under_the_keys_that_are_given(preset: str) -> None:
    text = f'{RUN}[sync]\nbuffers = "average"\n[model]\npreset = "{preset}"\nsequence_length = 48\n'
    found = load_run(text, "run.toml", ["model.layers=7"])
    model = found.value.model
    expected = MODEL_PRESETS[preset] | {"preset": preset, "sequence_length": 48, "layers": 7}
    assert {key: getattr(model, key) for key in expected} == expected
    origins = {key: origin for key, _, origin in found.rows()}
    assert origins["model.dim"] == f"preset {preset}"
    assert (origins["model.layers"], origins["model.sequence_length"]) == ("--set", "run.toml")
    assert load_run(to_toml(found.value), "served").value == found.value


def test_a_preset_on_the_command_line_is_under_the_file() -> None:
    found = load_run(f"{RUN}[model]\nlayers = 5\n", "run.toml", ["model.preset=1b"]).value.model
    assert (found.dim, found.layers) == (2048, 5)


def test_options_come_back_as_they_were() -> None:
    options = {"depth": 3, "rate": 0.5, "name": "x", "on": True, "sizes": [1, 2], "inner": {"a": 1}}
    text = (
        f'{RUN}[model]\nsource = "m:f"\n[model.options]\ndepth = 3\nrate = 0.5\nname = "x"\non = true\nsizes = [1, 2]\n'
    )
    found = load_run(text + "inner = { a = 1 }\n", "run.toml").value
    assert found.model.options == options
    assert load_run(to_toml(found), "served").value == found


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ('preset = "9b"', "model.preset"),
        ('source = "elsewhere"', "model.source"),
        ('source = "transformers"', "set model.name to a repository"),
        ('name = "x"', "leave it out"),
        ("pretrained = true", "model.pretrained needs model.source='transformers'"),
        ("options = { a = 1 }", "set model.source='MODULE:FUNCTION'"),
        ('source = "m:f"\noptions = { "a-b" = 1 }', "model.options.a-b cannot be handed on"),
        ('source = "m:f"\noptions = { a = [{ b = 1 }] }', "model.options.a cannot be handed on"),
        ("heads = 3", "or model.head_dim"),
        ("head_dim = 3", "model.head_dim"),
        ("experts = 2\nexperts_per_token = 3", "set model.experts_per_token=2"),
        ("experts = 2\ndense_layers = 4", "set model.dense_layers=3 or less, or model.experts=0"),
        ("experts = 2", "set sync.buffers='average' or model.balance='loss'"),
    ],
)
def test_settings_that_do_not_fit_are_told(keys: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(f"{RUN}[model]\n{keys}\n", "run.toml")
    assert says in str(caught.value)


def test_heads_may_be_of_any_even_width() -> None:
    assert ModelConfig(dim=64, heads=3, kv_heads=3, head_dim=10).head_width == 10
    assert ModelConfig(dim=64, heads=4).head_width == 16
