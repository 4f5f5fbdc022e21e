"""The decoder: shapes, causality, names, its stages and its loss."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from diloco.config import ModelConfig
from island.config_mesh import MemoryConfig
from island.model import Decoder, allocate, loss
from island.model.decoder import apart, causal
from island.parallel.memory import save
from tests.island.model.shapes import GROUPED, NORMED, SHARED, SMALL, TIED, filled, random_tokens


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


END = 7


@pytest.mark.parametrize("config", [SMALL, NORMED, SHARED], ids=["plain", "qk-norm", "experts"])
@pytest.mark.parametrize("saving", ["none", "full", "selective"])
def test_packed_documents_have_the_loss_and_the_gradients_of_each_apart(config: ModelConfig, saving: str) -> None:
    def gradients(model: Decoder) -> list[Tensor]:
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    rows = random_tokens(2, 25)
    rows[rows == END] = END + 1
    borders = [[0, 5, 6, 17, 24], [0, 11, 24]]
    for row, edges in zip(rows, borders, strict=True):
        row[[edge - 1 for edge in edges[1:-1]]] = END
    packed, single = filled(config, scale=3.0), filled(config, scale=3.0)
    packed.document_end = END
    save(packed, MemoryConfig.model_validate({"activation_checkpointing": saving}), torch.device("cpu"))
    together = loss(packed(rows[:, :-1]), rows[:, 1:])
    together.backward()  # type: ignore[no-untyped-call]
    total = torch.zeros(())
    for row, edges in zip(rows, borders, strict=True):
        for first, end in pairwise(edges):
            value = loss(single(row[None, first:end]), row[None, first + 1 : end + 1])
            total = total + value * (end - first)
    (total / 48).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(together, total / 48, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(gradients(packed), gradients(single), rtol=1e-3, atol=2e-5)
    packed.document_end = None
    assert abs(loss(packed(rows[:, :-1]), rows[:, 1:]) - together) > 1e-3, "else the mask is not tried"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_documents_are_apart_in_compiled_blocks_too() -> None:
    rows, losses = random_tokens(2, 17), []
    for compiled in (False, True):
        model = filled(GROUPED, scale=3.0)
        model.document_end = int(rows[0, 5])
        save(model, MemoryConfig(compile=compiled), torch.device("cpu"))
        losses.append(loss(model(rows[:, :-1]), rows[:, 1:]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0.0)


def test_positions_begin_anew_behind_the_end_of_a_document() -> None:
    positions, seen = apart(torch.tensor([[1, END, END, 3, 4], [1, 2, 3, 4, END]]), END)
    assert positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert seen[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert seen[1, 0].equal(torch.ones(5, 5, dtype=torch.bool).tril())


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
    allocate(model, "cpu").to(torch.float64)
    assert model.lm_head is not None
    assert model.embed_tokens is not None
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("config", [NORMED, SHARED], ids=["dense", "experts"])
def test_stages_in_a_row_are_the_whole(config: ModelConfig) -> None:
    config = config.model_copy(update={"layers": 3})
    whole, first, last = filled(config, scale=5.0), filled(config, scale=5.0), filled(config, scale=5.0)
    first.norm = first.lm_head = last.embed_tokens = None
    del first.layers["1"], first.layers["2"], last.layers["0"]
    tokens = random_tokens(2, 9)
    hidden = first(tokens)
    assert hidden.shape == (2, 9, config.dim)
    assert torch.equal(last(hidden), whole(tokens))
    assert {*first.state_dict(), *last.state_dict()} == set(whole.state_dict())
    assert not set(first.state_dict()) & set(last.state_dict())


def test_positions_are_where_the_tokens_stand() -> None:
    model, tokens = filled(NORMED, scale=5.0), random_tokens(1, 8)
    assert torch.equal(model(tokens, torch.arange(8)), model(tokens))
    # attention sees only how far apart tokens are
    torch.testing.assert_close(model(tokens, torch.arange(100, 108)), model(tokens), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(model(tokens, 3 * torch.arange(8)), model(tokens), atol=1e-2)


def test_another_function_may_attend() -> None:
    model, seen = filled(GROUPED), []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return causal(q, k, v)

    expected = model(random_tokens(2, 5))
    for block in model.layers.values():
        block.self_attn.attend = attend
    assert torch.equal(model(random_tokens(2, 5)), expected)
    assert seen == [((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))] * 2


def test_queries_and_keys_of_a_head_are_normalised() -> None:
    model, sizes = filled(NORMED, scale=50.0), []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes.extend(part.square().mean(-1).flatten() for part in (q, k))
        return causal(q, k, v)

    for block in model.layers.values():
        block.self_attn.attend = attend
        for norm in (block.self_attn.q_norm, block.self_attn.k_norm):
            torch.nn.init.ones_(norm.weight)
    model(random_tokens(2, 5))
    torch.testing.assert_close(torch.cat(sizes), torch.ones(2 * 2 * 5 * (4 + 2)), rtol=1e-3, atol=1e-3)


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


def test_z_loss_draws_the_normaliser_towards_one() -> None:
    logits = torch.full((1, 3, 4), 2.0, requires_grad=True)
    targets = torch.zeros(1, 3, dtype=torch.int64)
    normaliser = math.log(4) + 2
    assert (loss(logits, targets, 0.1) - loss(logits, targets)).item() == pytest.approx(0.1 * normaliser**2, rel=1e-5)
    loss(logits, targets, 0.1).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    # cross-entropy leaves the sum of a token's logits; the z-loss lowers it
    torch.testing.assert_close(logits.grad.sum(-1), torch.full((1, 3), 2 * 0.1 * normaliser / 3))
