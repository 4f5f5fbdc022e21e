"""Which codec suits which tensor."""

from __future__ import annotations

import pytest

from diloco.codec import CODECS
from diloco.codec.policy import Policy, bits, choose
from diloco.errors import ConfigError
from diloco.layout import Kind, TensorSpec

SPARSE = Policy(matrices="topk", embeddings="e3m0", overrides={"layers.0.*.weight": "int8", "layers.*": "fp16"})


@pytest.mark.parametrize(
    ("policy", "name", "shape", "kind", "codec"),
    [
        (Policy(), "layers.3.attention.q.weight", (64, 64), "parameter", "int4"),
        (Policy(), "layers.3.norm.weight", (64,), "parameter", "bf16"),
        (Policy(), "scale", (), "parameter", "bf16"),
        (Policy(), "statistics", (8, 8), "buffer", "bf16"),
        (Policy(matrices="topk"), "h.0.w", (4, 4, 4), "parameter", "topk"),
        (Policy(matrices="topk"), "tok_embeddings.weight", (256, 64), "parameter", "int4"),
        (Policy(matrices="topk", embedding_names=("out*",)), "tok_embeddings.weight", (9, 9), "parameter", "topk"),
        (SPARSE, "wte.weight", (256, 64), "parameter", "e3m0"),
        (SPARSE, "layers.0.q.weight", (64, 64), "parameter", "int8"),
        (SPARSE, "layers.1.q.weight", (64, 64), "parameter", "fp16"),
        (SPARSE, "layers.1.norm", (64,), "parameter", "fp16"),
        (SPARSE, "head", (64, 64), "parameter", "topk"),
    ],
)
def test_a_tensor_gets_the_codec_of_its_kind(
    policy: Policy, name: str, shape: tuple[int, ...], kind: Kind, codec: str
) -> None:
    assert choose(policy, TensorSpec(name, shape, kind)) is CODECS[codec]


@pytest.mark.parametrize("name", ["int2", "topk", "topk-int8"])
def test_embeddings_have_4_bits_at_least(name: str) -> None:
    with pytest.raises(ConfigError, match=f"embeddings in '{name}' would have .* below 4"):
        Policy(embeddings=name)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown codec 'int3'; known: fp32, bf16"):
        Policy(overrides={"x": "int3"})


def test_bits_of_a_value() -> None:
    known = {"fp32": 32, "bf16": 16, "fp16": 16.03125, "int8": 8.0625, "int4": 4.0625, "e3m0": 4.03125, "int2": 2.0625}
    assert {name: bits(CODECS[name]) for name in known} == known
    assert bits(CODECS["topk"]) == (4 + 96 + 16) * 8 / 4096
