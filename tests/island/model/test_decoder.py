"""The decoder, its first values, and its agreement with transformers' Llama."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from diloco.config import ModelConfig
from diloco.errors import InputError
from island.model import (
    Decoder,
    first_value,
    flops_per_token,
    generate,
    llama_name,
    loss,
    our_name,
    to_llama,
)

SMALL = ModelConfig(
    vocab_size=61, dim=32, layers=2, heads=4, kv_heads=4, ffn_dim=48, sequence_length=16, rope_theta=500.0
)
GROUPED = SMALL.model_copy(update={"kv_heads": 2})
TIED = GROUPED.model_copy(update={"tie_embeddings": True})


def filled(config: ModelConfig, seed: int = 0, scale: float = 1.0) -> Decoder:
    """A model on the CPU, by way of the meta device, with its first values times `scale`."""
    with torch.device("meta"):
        model = Decoder(config=config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(scale * first_value(name, tuple(parameter.shape), config, seed))
    return model


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def test_forward_gives_logits_for_every_token() -> None:
    logits = filled(GROUPED)(random_tokens(3, 7))
    assert logits.shape == (3, 7, 61)
    assert logits.dtype == torch.float32


def test_logits_do_not_depend_on_later_tokens() -> None:
    model, tokens = filled(GROUPED, scale=5.0), random_tokens(1, 10)
    changed = tokens.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % SMALL.vocab_size
    torch.testing.assert_close(model(tokens)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(tokens)[:, 6:], model(changed)[:, 6:])


def test_meta_model_has_only_parameters() -> None:
    with torch.device("meta"):
        model = Decoder(config=GROUPED)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    assert len(model.layers) == GROUPED.layers


def test_parameters_have_the_names_of_transformers() -> None:
    layer = {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    expected = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    expected |= {"embed_tokens.weight", "norm.weight"}
    assert {name for name, _ in Decoder(config=TIED).named_parameters()} == expected
    assert {name for name, _ in Decoder(config=SMALL).named_parameters()} == expected | {"lm_head.weight"}


def test_tied_weights_are_one_parameter_on_every_device() -> None:
    with torch.device("meta"):
        model = Decoder(config=TIED)
    assert model.lm_head.weight is model.embed_tokens.weight
    model.to_empty(device="cpu").to(torch.float64)
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("config", [SMALL, GROUPED, TIED], ids=["plain", "grouped", "tied"])
def test_logits_equal_those_of_transformers(config: ModelConfig) -> None:
    transformers = pytest.importorskip("transformers")
    ours = filled(config, scale=5.0)  # larger weights than the first ones, so that attention is not uniform
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(to_llama(config))).eval()
    theirs.load_state_dict({llama_name(name): value for name, value in ours.state_dict().items()})
    assert theirs.config.rope_parameters["rope_theta"] == config.rope_theta
    tokens = random_tokens(2, config.sequence_length)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert {our_name(name) for name, _ in theirs.named_parameters()} == {name for name, _ in ours.named_parameters()}


def test_names_map_back() -> None:
    for name in Decoder(config=SMALL).state_dict():
        assert our_name(llama_name(name)) == name
    assert llama_name("norm.weight") == "model.norm.weight"
    assert llama_name("lm_head.weight") == "lm_head.weight"


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


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    tokens = random_tokens(4, 17)
    value = loss(filled(SMALL)(tokens[:, :-1]), tokens[:, 1:])
    assert value.item() == pytest.approx(math.log(61), abs=0.05)


def test_loss_is_the_mean_over_tokens_in_float32() -> None:
    logits = torch.zeros(1, 2, 2, dtype=torch.bfloat16)
    logits[0, 1, 0] = math.log(3)
    value = loss(logits, torch.tensor([[0, 1]]))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx((math.log(2) + math.log(4)) / 2, abs=5e-3)


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


class Recorder(nn.Module):
    """Always says the last token plus one; keeps the lengths it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens.shape[1])
        assert not torch.is_grad_enabled()
        return 100.0 * torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()


def test_generate_slides_its_context() -> None:
    model = Recorder()
    text = generate(model, torch.tensor([7, 8]), length=5, temperature=1.0, seed=0, context=4)
    assert text.tolist() == [7, 8, 9, 0, 1, 2, 3]
    assert text.dtype == torch.int64
    assert model.seen == [2, 3, 4, 4, 4]


def test_generate_follows_its_seed() -> None:
    model, prompt = filled(SMALL), random_tokens(3)
    torch.manual_seed(0)
    first = generate(model, prompt, length=12, temperature=1.0, seed=5, context=8)
    torch.manual_seed(1)
    assert torch.equal(first, generate(model, prompt, length=12, temperature=1.0, seed=5, context=8))
    assert not torch.equal(first, generate(model, prompt, length=12, temperature=1.0, seed=6, context=8))


def test_generate_at_temperature_zero_takes_the_most_likely() -> None:
    model, prompt = filled(SMALL), random_tokens(3)
    text = generate(model, prompt, length=1, temperature=0.0, seed=0, context=8)
    assert text[-1] == model(prompt[None])[0, -1].argmax()


def test_generate_refuses_an_empty_prompt() -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        generate(filled(SMALL), torch.tensor([], dtype=torch.int64), 1, 1.0, 0, 8)
