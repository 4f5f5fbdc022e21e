"""Which codec each tensor of a run takes."""

from __future__ import annotations

import pytest

from diloco.codec import CODECS, by_name
from diloco.codec.policy import AUTO_ID, Policy, bits, choice, down_choice, up_choice
from diloco.config import WireConfig, load_run
from diloco.errors import ConfigError
from diloco.layout import Kind, TensorSpec

NAMED = ("layers.0.*.weight=int8", "layers.*=fp16", "layers.0.*=fp32")


@pytest.mark.parametrize(
    ("way", "overrides", "name", "shape", "kind", "codec"),
    [
        ("auto", (), "layers.3.attention.q.weight", (64, 64), "parameter", "int4"),
        ("auto", (), "layers.3.norm.weight", (64,), "parameter", "bf16"),
        ("auto", (), "scale", (), "parameter", "bf16"),
        ("auto", (), "statistics", (8, 8), "buffer", "bf16"),
        ("auto:topk", (), "h.0.w", (4, 4, 4), "parameter", "topk"),
        ("auto:topk", (), "tok_embeddings.weight", (256, 64), "parameter", "int4"),
        ("auto:int2", (), "lm_head.weight", (256, 64), "parameter", "int4"),
        ("auto:e3m0", (), "wte.weight", (256, 64), "parameter", "e3m0"),
        ("auto:int8", (), "wte.weight", (256, 64), "parameter", "int8"),
        ("auto:fp32", (), "norm", (256,), "parameter", "fp32"),
        ("auto:topk-32-int8", NAMED, "layers.0.q.weight", (64, 64), "parameter", "int8"),
        ("auto:topk", NAMED, "layers.1.q.weight", (64, 64), "parameter", "fp16"),
        ("auto:topk", NAMED, "layers.1.norm", (64,), "parameter", "fp16"),
        ("auto:topk", NAMED, "head", (64, 64), "parameter", "topk"),
        ("auto:topk", ("wte.*=int2",), "wte.weight", (64, 64), "parameter", "int2"),
        ("int2", NAMED, "wte.weight", (256, 64), "parameter", "int2"),
        ("int2", NAMED, "norm", (256,), "parameter", "int2"),
        ("int2", NAMED, "layers.0.norm", (256,), "parameter", "fp16"),
        ("int2", (), "norm", (256,), "parameter", "int2"),
    ],
)
def test_a_tensor_gets_the_codec_of_its_kind(
    way: str, overrides: tuple[str, ...], name: str, shape: tuple[int, ...], kind: Kind, codec: str
) -> None:
    assert choice(way, overrides).of(TensorSpec(name, shape, kind)) is CODECS[codec]


def test_a_choice_by_kind_has_an_id_of_its_own_and_feedback_where_a_codec_has_it() -> None:
    auto = choice("auto:int8")
    assert isinstance(auto, Policy)
    assert (auto.id, auto.version, auto.name) == (AUTO_ID, 1, "auto:int8")
    assert not auto.feedback
    assert choice("auto").feedback
    assert choice("fp32", ("x=topk",)).feedback
    assert choice("bf16") is CODECS["bf16"]


def test_each_way_is_chosen_apart() -> None:
    wire = WireConfig(up="auto:topk-coded", down="int8", down_overrides=("*norm*=fp32",))
    spec = TensorSpec("layers.0.norm", (8,))
    assert (up_choice(wire).of(spec).name, down_choice(wire).of(spec).name) == ("bf16", "fp32")


@pytest.mark.parametrize(
    "name",
    [
        *CODECS, "topk-1", "topk-4096", "topk-4097", "topk-0", "topk-128-coded", "topk-129-coded", "topk-12-int8-coded",
        "topk-fp32", "topk-04", "int3", "", "topk--coded", "TOPK",
    ],
)  # fmt: skip
def test_settings_take_the_names_that_there_are(name: str) -> None:
    """They are checked without torch, and so by a rule of their own."""
    try:
        by_name(name)
    except ConfigError:
        for key in ("wire.up", "wire.down"):
            with pytest.raises(ConfigError, match=rf"{key} \('{name}'\) is no codec: set it to auto"):
                load_run('[run]\nid = "r"', "run.toml", [f"{key}={name}"])
        for way in (f"auto:{name}", f"auto:{name}:"):
            with pytest.raises(ConfigError, match="is no codec"):
                load_run('[run]\nid = "r"', "run.toml", [f'wire.up="{way}"'])
    else:
        wire = load_run('[run]\nid = "r"', "run.toml", [f'wire.up="{name}"', f'wire.down="auto:{name}"']).value.wire
        assert up_choice(wire).name == name
        assert down_choice(wire).name == f"auto:{name}"


@pytest.mark.parametrize("override", ["x", "=int8", "x=", "x=int3", "x=auto"])
def test_an_override_that_names_no_tensor_or_codec_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"wire\.down_overrides \('.*'\) is not PATTERN=CODEC"):
        load_run('[run]\nid = "r"', "run.toml", [f'wire.down_overrides=["{override}"]'])


def test_bits_of_a_value() -> None:
    known = {"fp32": 32, "bf16": 16, "fp16": 16.03125, "int8": 8.0625, "int4": 4.0625, "e3m0": 4.03125, "int2": 2.0625}
    assert {name: bits(CODECS[name]) for name in known} == known
    assert bits(CODECS["topk"]) == (4 + 96 + 16) * 8 / 4096
    assert bits(CODECS["topk-coded"]) == (4 + 59 + 16) * 8 / 4096
