"""First values: by name and seed alone."""

from __future__ import annotations

import pytest
import torch

from island.model import Decoder, first_value
from island.model.init import first_part
from tests.island.model.shapes import SMALL


def test_first_values_do_not_depend_on_order_or_random_state() -> None:
    shapes = {name: tuple(value.shape) for name, value in Decoder(config=SMALL).named_parameters()}
    there = {name: first_value(name, shape, SMALL, 7) for name, shape in shapes.items()}
    torch.manual_seed(123)
    torch.rand(5)
    with torch.device("meta"):
        back = {name: first_value(name, shapes[name], SMALL, 7) for name in reversed(shapes)}
    for name, value in there.items():
        assert value.dtype == torch.float32
        assert value.device.type == "cpu"
        assert torch.equal(value, back[name])


def test_first_values_differ_by_name_and_seed() -> None:
    shape = (32, 32)
    value = first_value("layers.0.self_attn.q_proj.weight", shape, SMALL, 0)
    assert not torch.equal(value, first_value("layers.1.self_attn.q_proj.weight", shape, SMALL, 0))
    assert not torch.equal(value, first_value("layers.0.self_attn.q_proj.weight", shape, SMALL, 1))


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embed_tokens.weight", 0.02),
        ("layers.0.mlp.up_proj.weight", 0.02),
        ("layers.0.mlp.down_proj.weight", 0.01),
        ("layers.1.self_attn.o_proj.weight", 0.01),
    ],
)
def test_first_values_have_their_spread(name: str, std: float) -> None:
    value = first_value(name, (200, 200), SMALL, 0)  # 0.02 / sqrt(2 * 2 layers) is 0.01
    assert value.std().item() == pytest.approx(std, rel=0.03)
    assert abs(value.mean().item()) < std / 20


def test_norms_start_as_ones() -> None:
    assert torch.equal(first_value("norm.weight", (32,), SMALL, 0), torch.ones(32))


def test_an_expert_has_a_value_of_its_own_and_can_be_made_alone() -> None:
    name, shape = "layers.1.mlp.experts.down_proj", (4, 30, 50)
    whole = first_value(name, shape, SMALL, 3)
    assert whole.shape == shape
    assert whole.std().item() == pytest.approx(0.01, rel=0.05)  # it writes to the residual stream
    assert not torch.equal(whole[0], whole[1])
    for box in (
        (slice(1, 3), slice(0, 30), slice(0, 50)),
        (slice(0, 4), slice(5, 9), slice(10, 50)),
        (slice(2, 2),) * 3,
    ):
        assert torch.equal(first_part(name, shape, box, SMALL, 3), whole[box])
