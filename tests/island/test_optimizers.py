"""Every inner optimizer does what its paper's formula says, and is a torch optimizer like any other."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from diloco.config import InnerConfig, ModelConfig
from diloco.errors import ConfigError, EnvironmentFault
from island.optimizers import Muon, build
from island.optimizers.build import is_matrix, state_bytes
from island.optimizers.muon import COEFFICIENTS, orthogonal

NAMES = ["adamw", "sgd", "muon", "lamb", "torch.optim:NAdam"]


class Mixed(nn.Module):
    """A parameter of every kind that optimizers tell apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(7, 6)
        self.wide = nn.Linear(6, 10)
        self.tall = nn.Linear(10, 6, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 6, 4))
        self.norm = nn.RMSNorm(6)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.lm_head = nn.Linear(6, 7, bias=False)


def inner(name: str, **settings: object) -> InnerConfig:
    return InnerConfig.model_validate({"optimizer": name, "lr": 0.01, **settings})


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The gradient of a parameter: a function of its name and the step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step * 1000 + sum(name.encode())))


def give_gradients(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = gradient(name, parameter.shape, step)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, last: int = 3) -> None:
    for step in range(first, last):
        give_gradients(model, step)
        optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def history(model: nn.Module, name: str, steps: int = 3) -> tuple[np.ndarray, list[np.ndarray]]:
    """A parameter's first value and its gradients, in float64."""
    start, gradients = dict(model.named_parameters())[name].detach().double().numpy(), []
    for step in range(steps):
        give_gradients(model, step)
        given = dict(model.named_parameters())[name].grad
        assert given is not None
        gradients.append(given.double().numpy())
    return start, gradients


def by_adamw(value: np.ndarray, gradients: list[np.ndarray], lr: float, decay: float) -> np.ndarray:
    first = second = np.zeros_like(value)
    for t, gradient in enumerate(gradients, 1):
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        direction = (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.95**t)) + 1e-8)
        value = value * (1 - lr * decay) - lr * direction
    return value


def by_lamb(value: np.ndarray, gradients: list[np.ndarray], lr: float, decay: float) -> np.ndarray:
    first = second = np.zeros_like(value)
    for t, gradient in enumerate(gradients, 1):
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        direction = (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.95**t)) + 1e-8) + decay * value
        value = value - lr * np.sqrt((value**2).sum() / (direction**2).sum()) * direction
    return value


def by_muon(value: np.ndarray, gradients: list[np.ndarray], lr: float, decay: float) -> np.ndarray:
    buffer = np.zeros_like(value)
    a, b, c = COEFFICIENTS
    for gradient in gradients:
        buffer = 0.95 * buffer + 0.05 * gradient
        left, singular, right = np.linalg.svd(0.95 * buffer + 0.05 * gradient, full_matrices=False)
        singular = singular / np.linalg.norm(singular)
        for _ in range(5):
            singular = a * singular + b * singular**3 + c * singular**5
        value = value * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(value.shape)) * (left * singular) @ right
    return value


RULES: list[tuple[str, str, Callable[..., np.ndarray], float]] = [
    *(("adamw", name, by_adamw, 0.1) for name in ("wide.weight", "embed_tokens.weight", "experts")),
    *(("adamw", name, by_adamw, 0.0) for name in ("wide.bias", "norm.weight", "gain")),
    *(("lamb", name, by_lamb, 0.1) for name in ("wide.weight", "embed_tokens.weight", "experts")),
    *(("lamb", name, by_lamb, 0.0) for name in ("wide.bias", "norm.weight", "gain")),
    *(("muon", name, by_muon, 0.1) for name in ("wide.weight", "tall.weight")),
    *(("muon", name, by_adamw, 0.1) for name in ("embed_tokens.weight", "lm_head.weight")),
    *(("muon", name, by_adamw, 0.0) for name in ("wide.bias", "norm.weight", "gain")),
]


@pytest.mark.parametrize(("optimizer", "parameter", "rule", "decay"), RULES)
def test_three_steps_follow_the_formula(
    optimizer: str, parameter: str, rule: Callable[..., np.ndarray], decay: float
) -> None:
    start, gradients = history(Mixed(), parameter)
    model = Mixed()
    take_steps(model, build(model, inner(optimizer)))
    expected = torch.from_numpy(np.asarray(rule(start, gradients, 0.01, decay)))
    moved = dict(model.named_parameters())[parameter].detach().double()
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=2e-6)
    assert not torch.allclose(moved, torch.from_numpy(np.asarray(start)), atol=1e-4)


def test_sgd_is_that_of_torch() -> None:
    model, other = Mixed(), Mixed()
    take_steps(model, build(model, inner("sgd", weight_decay=0.0)))
    take_steps(other, torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.01))
    assert all(torch.equal(value, values(other)[name]) for name, value in values(model).items())


def test_the_experts_of_a_stack_are_matrices_of_their_own() -> None:
    start, gradients = history(Mixed(), "experts")
    model = Mixed()
    take_steps(model, build(model, inner("muon")))
    for expert in range(3):
        alone = by_muon(start[expert], [gradient[expert] for gradient in gradients], 0.01, 0.1)
        torch.testing.assert_close(
            model.experts[expert].detach().double(), torch.from_numpy(alone), rtol=1e-5, atol=2e-6
        )


def test_muon_agrees_with_torch_as_far_as_bfloat16_goes() -> None:
    """torch's takes 2-D parameters only, and iterates in bfloat16."""
    model, other = Mixed(), Mixed()
    take_steps(model, build(model, inner("muon")))
    theirs = torch.optim.Muon([other.wide.weight], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    take_steps(other, theirs)
    ours, first = model.wide.weight - Mixed().wide.weight, other.wide.weight - Mixed().wide.weight
    assert torch.cosine_similarity(ours.flatten(), first.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 5, 30), (3, 30, 5), (1, 1, 4), (1, 4, 1)])
def test_an_orthogonal_matrix_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-4
    result = orthogonal(matrices, 8)
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 0.6 and singular.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.linalg.vecdot(result.flatten(1), (left @ right).flatten(1)).min() > 0.6 * min(shape[1:])


def test_a_matrix_of_zeros_stays_where_it_is() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4), 5), torch.zeros(2, 3, 4))


def test_lamb_moves_a_tensor_of_zeros() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    take_steps(model, build(model, inner("lamb")), last=1)
    assert model.weight.abs().min() > 0.005


def test_muon_takes_hidden_matrices_and_leaves_the_rest() -> None:
    model = Mixed()
    optimizer = build(model, inner("muon", lr=0.01, matrix_lr=0.5))
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [({names[p] for p in g["params"]}, g["initial_lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert groups == [
        ({"wide.weight", "tall.weight", "experts"}, 0.5, 0.1),
        ({"embed_tokens.weight", "lm_head.weight"}, 0.01, 0.1),
        ({"wide.bias", "norm.weight", "gain"}, 0.01, 0.0),
    ]
    assert not is_matrix("conv.weight", 3, inner("muon"))
    assert not is_matrix("tall.weight", 2, inner("muon", muon_except=("tall*",)))


@pytest.mark.parametrize("name", NAMES)
def test_its_state_takes_the_bytes_that_are_told(name: str) -> None:
    model = Mixed()
    optimizer = build(model, inner(name))
    take_steps(model, optimizer, last=1)
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            moments = [value for value in optimizer.state[parameter].values() if value.shape == parameter.shape]
            counters = 2 if not parameter.ndim else 0  # a scalar's step count looks like a moment
            told = state_bytes(key, tuple(parameter.shape), inner(name))
            assert 0 <= sum(4 * moment.numel() for moment in moments) - told <= 4 * counters


@pytest.mark.parametrize("name", NAMES)
def test_its_state_survives_a_round_trip_to_the_bit(name: str) -> None:
    model = Mixed()
    optimizer = build(model, inner(name))
    take_steps(model, optimizer)
    twin = copy.deepcopy(model)
    again = build(twin, inner(name))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(model, optimizer, 3, 6)
    take_steps(twin, again, 3, 6)
    assert all(torch.equal(value, values(twin)[key]) for key, value in values(model).items())
    assert list(again.state_dict()["state"]) == list(optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", NAMES)
def test_its_state_goes_through_a_distributed_checkpoint(name: str) -> None:
    model = Mixed()
    optimizer = build(model, inner(name))
    take_steps(model, optimizer)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    twin = copy.deepcopy(model)
    again = build(twin, inner(name))
    set_optimizer_state_dict(twin, again, state)
    assert all(torch.equal(value, values(twin)[key]) for key, value in values(model).items())
    take_steps(model, optimizer, 3, 6)
    take_steps(twin, again, 3, 6)
    assert all(torch.equal(value, values(twin)[key]) for key, value in values(model).items())


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_without_a_gradient_is_left_alone(name: str) -> None:
    model = Mixed()
    optimizer, before = build(model, inner(name)), values(model)
    give_gradients(model, 0)
    model.tall.weight.grad = model.norm.weight.grad = None
    optimizer.step()
    moved = {key for key, value in values(model).items() if not torch.equal(value, before[key])}
    assert set(before) - moved == {"tall.weight", "norm.weight", "frozen.weight"}
    assert model.tall.weight not in optimizer.state


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_was_dropped_begins_again(name: str) -> None:
    model = Mixed()
    optimizer = build(model, inner(name))
    take_steps(model, optimizer)
    optimizer.state.clear()
    twin = copy.deepcopy(model)
    take_steps(model, optimizer)
    take_steps(twin, build(twin, inner(name)))
    assert all(torch.equal(value, values(twin)[key]) for key, value in values(model).items())


@pytest.mark.parametrize("name", NAMES)
def test_a_closure_gives_the_loss(name: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = build(model, inner(name))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    first = optimizer.step(closure)  # type: ignore[arg-type]
    assert isinstance(first, Tensor) and optimizer.step(closure) < first  # type: ignore[arg-type, operator]


@pytest.mark.parametrize("name", NAMES)
def test_a_small_decoder_learns(name: str) -> None:
    from island.model import Decoder, first_value, loss

    config = ModelConfig(vocab_size=17, dim=16, layers=2, ffn_dim=24, sequence_length=8)
    model = Decoder(config=config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(first_value(key, tuple(parameter.shape), config, 0))
    optimizer = build(model, inner(name, lr={"sgd": 0.3, "lamb": 0.1}.get(name, 0.01)))
    tokens = torch.arange(9).repeat(4, 1)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        value = loss(model(tokens[:, :-1]), tokens[:, 1:])
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.8 * losses[0]


def test_adamw_is_fused_here() -> None:
    assert all(group["fused"] for group in build(Mixed(), inner("adamw")).param_groups)


# -- classes of one's own -----------------------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """Takes no weight decay."""

    def __init__(self, params: Any, lr: float, scales: tuple[float, ...] = (1.0,)) -> None:
        super().__init__(params, {"lr": lr, "scales": scales})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * sum(group["scales"]))


def test_a_class_of_ones_own_gets_its_options() -> None:
    model = Mixed()
    optimizer = build(model, inner(f"{__name__}:Plain", options={"scales": [2.0, 3.0]}))
    assert type(optimizer).__name__ == "Plain"
    assert {group["scales"] for group in optimizer.param_groups} == {(2.0, 3.0)}
    assert {group["initial_lr"] for group in optimizer.param_groups} == {0.01}
    assert not any("weight_decay" in group for group in optimizer.param_groups)
    before = values(model)
    take_steps(model, optimizer, last=1)
    give_gradients(model, 0)
    assert model.gain.grad is not None
    torch.testing.assert_close(model.gain.detach(), before["gain"] - 0.05 * model.gain.grad)


def test_a_class_that_takes_weight_decay_gets_it_for_matrices() -> None:
    [matrices, others] = build(Mixed(), inner("torch.optim:NAdam", weight_decay=0.3)).param_groups
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    given = build(Mixed(), inner("torch.optim:NAdam", options={"weight_decay": 0.2}))
    assert {group["weight_decay"] for group in given.param_groups} == {0.2}


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("no_such_module:Adam", {}, EnvironmentFault, "No module named 'no_such_module'.*install"),
        ("torch.optim:NoSuch", {}, ConfigError, "torch.optim has no class NoSuch of torch.optim.Optimizer"),
        ("torch.nn:Linear", {}, ConfigError, "torch.nn has no class Linear of torch.optim.Optimizer"),
        ("torch.optim:Optimizer", {}, ConfigError, "does not take lr"),
        ("torch.optim:NAdam", {"speed": 3}, ConfigError, r"inner.options \['speed'\].*speed"),
        ("torch.optim:NAdam", {"lr": 0.1}, ConfigError, r"inner.options \['lr'\]"),
        ("torch.optim:NAdam", {"betas": [2.0, 0.9]}, ConfigError, "beta"),
    ],
)
def test_what_is_no_optimizer_is_refused(
    name: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(Mixed(), inner(name, options=options))


def test_matrices_that_are_left_out_leave_adamw_alone() -> None:
    model, other = Mixed(), Mixed()
    optimizer = build(model, inner("muon", muon_except=("*",)))
    assert isinstance(optimizer, Muon)
    take_steps(model, optimizer)
    take_steps(other, build(other, inner("adamw")))
    for key, value in values(model).items():
        torch.testing.assert_close(value, values(other)[key])
