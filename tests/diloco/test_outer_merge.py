"""The outer step is torch's Nesterov SGD on the mean of pseudo-gradients, and the mean has one order."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import Weighting
from diloco.merge import shares, weight
from diloco.outer import nesterov

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)

tokens = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 10**12), min_size=1, max_size=8)


# -- outer step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (0.4, 0.5), (1.0, 0.0), (0.05, 0.99)])
def test_it_is_torchs_nesterov_over_many_steps(lr: float, mu: float) -> None:
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    momentum = torch.zeros_like(theta)
    parameter = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=mu > 0)
    for _ in range(100):
        parameter.grad = torch.randn(4, 3, dtype=torch.float64, generator=generator)
        theta = theta - nesterov(parameter.grad.clone(), momentum, lr=lr, mu=mu)
        optimizer.step()
        torch.testing.assert_close(theta, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_without_momentum_it_is_plain_sgd() -> None:
    gradient, momentum = torch.tensor([0.5, -2.0]), torch.zeros(2)
    for _ in range(3):
        assert torch.equal(nesterov(gradient, momentum, lr=0.25, mu=0.0), torch.tensor([0.125, -0.5]))


def test_with_lr_one_and_no_momentum_it_is_federated_averaging() -> None:
    anchor, locals_ = torch.tensor([4.0, 8.0]), [torch.tensor([1.0, 6.0]), torch.tensor([3.0, 2.0])]
    mean = sum((0.5 * (anchor - local) for local in locals_), torch.zeros(2))
    assert torch.equal(anchor - nesterov(mean, torch.zeros(2), lr=1.0, mu=0.0), torch.tensor([2.0, 4.0]))


def test_two_steps_by_hand() -> None:
    momentum = torch.zeros(1)
    first = nesterov(torch.tensor([1.0]), momentum, lr=0.5, mu=0.5)
    assert (first.item(), momentum.item()) == (0.75, 1.0)
    second = nesterov(torch.tensor([2.0]), momentum, lr=0.5, mu=0.5)
    assert (second.item(), momentum.item()) == (1.625, 2.5)


def test_only_the_momentum_changes_in_place() -> None:
    gradient, momentum = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 4.0])
    step = nesterov(gradient, momentum, lr=0.5, mu=0.5)
    assert gradient.tolist() == [1.0, 2.0]
    assert momentum.tolist() == [3.0, 4.0]
    assert step.dtype == torch.float32
    assert len({t.data_ptr() for t in (gradient, momentum, step)}) == 3


@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("start", [3.0, -3.0])
def test_the_sign_goes_downhill(start: float, mu: float) -> None:
    anchor, momentum = torch.tensor([start]), torch.zeros(1)
    distances = [abs(start)]
    for _ in range(300):
        local = anchor - 0.1 * anchor
        anchor = anchor - nesterov(anchor - local, momentum, lr=0.7, mu=mu)
        distances.append(abs(anchor.item()))
    assert distances[1] < distances[0]
    assert distances[-1] < 1e-5 * distances[0]


# -- merge ----------------------------------------------------------------------------------------------------------


def weighed(counts: dict[str, int], policy: Weighting) -> dict[str, int]:
    """What contributions with these tokens weigh, each of a whole period."""
    return {island: weight(policy, tokens=count, steps=4, period=4) for island, count in counts.items()}


def mean(pseudo_gradients: dict[str, Tensor], counts: dict[str, int], policy: Weighting) -> Tensor:
    """The weighted mean, added up in the order of the shares."""
    total = torch.zeros_like(next(iter(pseudo_gradients.values())))
    for island, share in shares(weighed(counts, policy)).items():
        total.add_(pseudo_gradients[island], alpha=share)
    return total


@given(tokens, st.sampled_from(["tokens", "uniform"]))
@PROPERTY
def test_shares_sum_to_one_in_the_order_of_islands(counts: dict[str, int], policy: Weighting) -> None:
    found = shares(weighed(counts, policy))
    assert list(found) == sorted(counts)
    assert math.isclose(sum(found.values()), 1.0, rel_tol=1e-12)
    assert all(0 <= share <= 1 for share in found.values())


@given(tokens, st.sampled_from(["tokens", "uniform"]), st.randoms(use_true_random=False))
@PROPERTY
def test_the_order_of_arrival_changes_no_bit(
    counts: dict[str, int], policy: Weighting, shuffler: random.Random
) -> None:
    arrived = list(counts.items())
    shuffler.shuffle(arrived)
    generator = torch.Generator().manual_seed(0)
    values = {island: torch.randn(5, generator=generator) for island in counts}
    assert list(shares(weighed(dict(arrived), policy)).items()) == list(shares(weighed(counts, policy)).items())
    assert torch.equal(mean(values, dict(arrived), policy), mean(values, counts, policy))


@given(tokens.filter(lambda counts: any(counts.values())))
@PROPERTY
def test_shares_go_by_tokens(counts: dict[str, int]) -> None:
    total = sum(counts.values())
    assert shares(counts) == {island: count / total for island, count in counts.items()}


@given(tokens)
@PROPERTY
def test_uniform_shares_do_not_look_at_tokens(counts: dict[str, int]) -> None:
    assert shares(weighed(counts, "uniform")) == dict.fromkeys(counts, 1 / len(counts))


@given(tokens)
@PROPERTY
def test_where_nobody_counted_tokens_all_weigh_the_same(counts: dict[str, int]) -> None:
    assert shares(dict.fromkeys(counts, 0)) == dict.fromkeys(counts, 1 / len(counts))


def test_who_trained_nothing_weighs_nothing() -> None:
    assert shares({"b": 0, "a": 5}) == {"a": 1.0, "b": 0.0}


def test_the_divisor_is_what_has_arrived() -> None:
    assert shares({"b": 3}) == {"b": 1.0}


def test_by_hand() -> None:
    values = {"a": torch.tensor([0.2]), "b": torch.tensor([0.6])}
    counts = {"b": 3, "a": 1}
    assert shares(counts) == {"a": 0.25, "b": 0.75}
    assert mean(values, counts, "tokens").item() == pytest.approx(0.5)
    assert mean(values, counts, "uniform").item() == pytest.approx(0.4)


@pytest.mark.parametrize(("steps", "expected"), [(0, 10), (3, 3), (10, 10), (25, 10)])
def test_uniform_weights_are_whole_for_who_trained_a_whole_period(steps: int, expected: int) -> None:
    assert weight("uniform", tokens=999, steps=steps, period=10) == expected
    assert weight("tokens", tokens=999, steps=steps, period=10) == 999
