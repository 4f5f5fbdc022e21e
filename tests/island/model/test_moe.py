"""Experts: against a plain definition, balanced, and the same whatever computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diloco.config import ModelConfig
from island.model import loss, rebalance
from island.model.moe import Experts, MoE, Router, grouped, looped
from tests.island.model.shapes import MIXED, SHARED, filled, random_tokens

CONFIGS = {
    "softmax": MIXED,
    "softmax as it is": MIXED.model_copy(update={"normalize_scores": False}),
    "sigmoid and shared": SHARED,
    "one of many": SHARED.model_copy(update={"experts_per_token": 1}),
    "all": MIXED.model_copy(update={"experts_per_token": 6}),
}


def block(config: ModelConfig, scale: float = 5.0) -> MoE:
    moe = filled(config, scale=scale).layers["1"].mlp
    assert isinstance(moe, MoE)
    return moe


def hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def plainly(moe: MoE, x: Tensor) -> Tensor:
    """Token by token and expert by expert, as the papers write it."""
    config, out = moe.config, torch.zeros_like(x)
    for b, t in ((b, t) for b in range(x.shape[0]) for t in range(x.shape[1])):
        u = x[b, t]
        outputs = moe.gate.weight @ u
        scores = outputs.sigmoid() if config.scores == "sigmoid" else outputs.softmax(0)
        bias = moe.gate.e_score_correction_bias
        ranked = scores if bias is None else scores + bias
        chosen = ranked.argsort(descending=True)[: config.experts_per_token].tolist()
        total = sum(scores[i] for i in chosen) if config.normalize_scores else 1.0
        for i in chosen:
            gate, up, down = (w[i] for w in (moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj))
            out[b, t] += config.routed_scale * scores[i] / total * ((F.silu(u @ gate) * (u @ up)) @ down)
        if moe.shared_experts is not None:
            out[b, t] += moe.shared_experts(u)
    return out


@pytest.mark.parametrize("kind", CONFIGS)
def test_values_and_gradients_are_those_of_the_definition(kind: str) -> None:
    moe, x = block(CONFIGS[kind]), hidden(2, 7, 32).requires_grad_()
    assert moe.gate.e_score_correction_bias is not None
    moe.gate.e_score_correction_bias.copy_(0.3 * hidden(6))
    found = []
    for compute in (moe, lambda x: plainly(moe, x)):
        out = compute(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *moe.parameters()])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", [[5, 0, 9, 1], [0, 0, 16, 0], [15, 0, 0, 0], [0, 8, 8, 0], [1, 2, 3, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_the_loop(counts: list[int], dtype: torch.dtype) -> None:
    shapes = ((sum(counts), 16), (4, 16, 24), (4, 16, 24), (4, 24, 16))
    tensors = [hidden(*shape).to(dtype).requires_grad_() for shape in shapes]
    found = []
    for apply in (looped, grouped):
        out = apply(tensors[0], torch.tensor(counts), *tensors[1:])
        found.append((out, *torch.autograd.grad((out * hidden(*out.shape).to(dtype)).sum(), tensors)))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 0.5}
    for loop, group in zip(*found, strict=True):
        torch.testing.assert_close(group, loop, **tolerance)


def test_the_same_input_gives_the_same_bits() -> None:
    def once() -> list[Tensor]:
        moe = block(SHARED)
        out = moe(hidden(4, 16, 32))
        return [out, *torch.autograd.grad(out.sum(), list(moe.parameters()))]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_no_token_is_dropped_where_all_want_one_expert() -> None:
    moe = block(MIXED.model_copy(update={"experts_per_token": 1}))
    assert moe.gate.e_score_correction_bias is not None
    moe.gate.e_score_correction_bias[4] = 100.0
    x = hidden(3, 20, 32)
    torch.testing.assert_close(moe(x), plainly(moe, x), rtol=1e-4, atol=1e-5)
    assert moe.gate.load.tolist() == [0, 0, 0, 0, 60, 0]


def test_another_function_may_apply_the_experts() -> None:
    moe, seen = block(MIXED), []

    def exchange(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        seen.append((tuple(rows.shape), int(counts.sum())))
        out: Tensor = experts(rows, counts)
        return out

    expected = moe(hidden(2, 5, 32))
    moe.exchange = exchange
    assert torch.equal(moe(hidden(2, 5, 32)), expected)
    assert seen == [((20, 32), 20)]


def test_loads_are_counted_in_training_alone() -> None:
    moe, x = block(MIXED), hidden(2, 5, 32)
    with torch.no_grad():
        moe(x)
    moe.eval()(x)
    assert moe.gate.load.sum() == 0
    moe.train()(x)
    assert moe.gate.load.sum() == 2 * 5 * 2


def test_a_bias_moves_against_the_load_and_the_load_is_forgotten() -> None:
    model = filled(MIXED)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    routers[0].load.copy_(torch.tensor([4, 0, 2, 2, 1, 3]))
    uneven = rebalance(model)
    bias = routers[0].e_score_correction_bias
    assert bias is not None
    torch.testing.assert_close(bias, 1e-3 * torch.tensor([-1.0, 1.0, 0.0, 0.0, 1.0, -1.0]))
    assert uneven.tolist() == [2.0, 0.0]
    assert not any(router.load.any() for router in routers)
    assert rebalance(filled(MIXED.model_copy(update={"experts": 0}))).tolist() == []


def test_loads_of_all_ranks_move_a_bias() -> None:
    models = [filled(MIXED), filled(MIXED)]
    for rank, model in enumerate(models):
        model(random_tokens(4, 16).roll(rank, 0) if rank else random_tokens(2, 9))
    loads = [torch.stack([m.load for m in model.modules() if isinstance(m, Router)]) for model in models]
    for model in models:
        rebalance(model, lambda _: loads[0] + loads[1])
    first, second = (dict(model.named_buffers()) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(value.any() for value in first.values())


def trained(config: ModelConfig) -> list[float]:
    """How uneven the experts' loads are at every step, where all tokens want the same two at first."""
    model, tokens, uneven = filled(config), random_tokens(16, 17), []
    assert model.embed_tokens is not None
    with torch.no_grad():
        model.embed_tokens.weight.add_(0.1)
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.weight[0] += 0.05
            router.weight[1] += 0.03
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(80):
        loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        uneven.append(rebalance(model).max().item())
    return uneven


@pytest.mark.parametrize(
    "balance",
    [
        {"balance": "bias", "balance_rate": 0.01},
        {"balance": "bias", "balance_rate": 0.01, "scores": "sigmoid"},
        {"balance": "loss", "balance_factor": 0.05},
    ],
    ids=str,
)
def test_balancing_evens_out_the_loads(balance: dict[str, Any]) -> None:
    uneven = trained(MIXED.model_copy(update=balance))
    assert uneven[0] == 3.0  # two of six experts have it all
    assert sum(uneven[-10:]) / 10 < 1.5


def test_without_balancing_loads_stay_uneven() -> None:
    assert min(trained(MIXED.model_copy(update={"balance": "none"}))) > 1.5


def auxiliary_gradient(scale: float = 1.0, again: bool = False) -> Tensor:
    """The router's gradient through a final loss that is nothing, so that the auxiliary one is left."""
    moe = block(MIXED.model_copy(update={"balance": "loss", "balance_factor": 0.5}))
    moe.loss_scale = scale
    x = hidden(2, 5, 32).requires_grad_()
    run: Callable[..., Tensor] = (lambda x: checkpoint(moe, x, use_reentrant=False)) if again else moe
    (0.0 * run(x).sum()).backward()  # type: ignore[no-untyped-call]
    assert moe.gate.weight.grad is not None
    return moe.gate.weight.grad


def test_the_auxiliary_loss_needs_nothing_beside_the_output() -> None:
    moe = block(MIXED)
    x = hidden(2, 5, 32)
    scores, chosen = moe.gate(x.view(10, 32))
    share = torch.bincount(chosen.flatten(), minlength=6) / 20
    [expected] = torch.autograd.grad(0.5 * 6 * (share * scores.mean(0)).sum(), moe.gate.weight)
    torch.testing.assert_close(auxiliary_gradient(), expected)
    torch.testing.assert_close(auxiliary_gradient(scale=0.25), expected / 4)
    torch.testing.assert_close(auxiliary_gradient(again=True), expected)


def test_recomputation_leaves_values_and_balance_as_they_are() -> None:
    biases = []
    for again in (False, True):
        moe, x = block(SHARED), hidden(2, 9, 32).requires_grad_()
        out = checkpoint(moe, x, use_reentrant=False) if again else moe(x)
        out.sum().backward()
        rebalance(moe)
        bias = moe.gate.e_score_correction_bias
        assert bias is not None
        biases.append((out, x.grad, bias.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*biases, strict=True))


def test_scores_are_float32_whatever_the_rows_are() -> None:
    moe = block(SHARED).to(torch.bfloat16)
    x = hidden(2, 5, 32).to(torch.bfloat16)
    assert moe.gate(x.view(10, 32))[0].dtype == torch.float32
    assert moe(x).dtype == torch.bfloat16
