"""The learning rate is one pure function of the run's step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import InnerConfig
from island.optimizers import learning_rate, set_rates, shape


def inner(**settings: object) -> InnerConfig:
    return InnerConfig.model_validate({"min_lr_ratio": 0.0, "lr": 2.0, **settings})


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"schedule": "constant"}, {1: 1.0, 50: 1.0, 100: 1.0}),
        ({"schedule": "linear"}, {1: 0.99, 25: 0.75, 100: 0.0}),
        ({"schedule": "cosine"}, {50: 0.5, 75: 0.5 - math.sqrt(0.125), 100: 0.0}),
        ({"schedule": "wsd"}, {1: 1.0, 90: 1.0, 95: 0.5, 100: 0.0}),
        ({"schedule": "wsd", "decay_ratio": 0.5}, {50: 1.0, 75: 0.5, 100: 0.0}),
        ({"schedule": "wsd", "decay_steps": 40, "decay_ratio": 0.5}, {60: 1.0, 80: 0.5, 100: 0.0}),
        ({"schedule": "wsd", "decay_steps": 40, "decay_shape": "1-sqrt"}, {60: 1.0, 70: 0.5, 96: 1 - math.sqrt(0.9)}),
        ({"schedule": "wsd", "decay_ratio": 0.0}, {99: 1.0, 100: 1.0}),
        ({"schedule": "wsd", "decay_ratio": 1.0, "warmup_steps": 20}, {10: 0.5, 20: 1.0, 60: 0.5, 100: 0.0}),
        ({"schedule": "linear", "warmup_steps": 20}, {1: 0.05, 10: 0.5, 20: 1.0, 60: 0.5}),
        ({"schedule": "linear", "min_lr_ratio": 0.2}, {25: 0.8, 50: 0.6, 100: 0.2}),
        ({"schedule": "wsd", "min_lr_ratio": 0.2}, {90: 1.0, 95: 0.6, 100: 0.2}),
    ],
)
def test_a_schedule_is_what_it_says(settings: dict[str, object], shares: dict[int, float]) -> None:
    for step, share in shares.items():
        assert shape(step, 100, inner(**settings)) == pytest.approx(share, abs=1e-12)
        assert learning_rate(step, 100, inner(**settings)) == pytest.approx(2.0 * share, abs=1e-12)


@given(
    schedule=st.sampled_from(["constant", "cosine", "linear", "wsd"]),
    decay_shape=st.sampled_from(["linear", "1-sqrt"]),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    decay=st.integers(0, 80),
    ratio=st.floats(0, 1),
    floor=st.floats(0, 1),
)
def test_it_rises_once_and_then_falls_from_the_peak_to_the_floor(
    schedule: str, decay_shape: str, steps: int, warmup: int, decay: int, ratio: float, floor: float
) -> None:
    settings = inner(
        schedule=schedule,
        decay_shape=decay_shape,
        warmup_steps=warmup,
        decay_steps=decay,
        decay_ratio=ratio,
        min_lr_ratio=floor,
    )
    shares = [shape(step, steps, settings) for step in range(1, steps + 1)]
    rise, fall = shares[:warmup], shares[warmup:]
    assert rise == sorted(rise) and all(0 < share <= 1 for share in rise)
    assert all(a >= b - 1e-12 for a, b in pairwise(fall))
    assert all(floor - 1e-12 <= share <= 1 + 1e-12 for share in fall)


def test_each_group_follows_the_shape_from_its_own_peak() -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [first], "initial_lr": 0.5}, {"params": [second], "initial_lr": 3.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    for step in (50, 50, 100, 25):
        set_rates(optimizer, step, 100, inner(schedule="linear"))
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 * (1 - step / 100), 3.0 * (1 - step / 100)]
