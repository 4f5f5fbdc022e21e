"""Tokens per second and MFU of an island, and how often it says so."""

from __future__ import annotations

import logging

import pytest
import torch

from diloco.config import ModelConfig
from island.model import Decoder, flops_per_token
from island.pace import Pace


class Clock:
    """Stands where it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_those_since_the_last_question() -> None:
    clock = Clock()
    pace = Pace(clock, flops=6_000, peak=3e6)
    clock.now += 10
    assert pace.so_far(1_000) == (100.0, pytest.approx(0.2))
    clock.now += 5
    assert pace.so_far(2_000) == (200.0, pytest.approx(0.4))


def test_without_a_peak_there_is_no_mfu() -> None:
    clock = Clock()
    pace = Pace(clock, flops=6_000)
    clock.now += 1
    assert pace.so_far(50) == (50.0, 0.0)


def test_what_is_counted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig()
    with caplog.at_level(logging.INFO), torch.device("meta"):
        pace = Pace.of(Decoder(config=config), config, torch.device("cpu"), 4, 2.5, Clock())
        Pace.of(Decoder(config=config), config, torch.device("cpu"), 4, 0.0, Clock())
    assert (pace.flops, pace.peak) == (flops_per_token(config), 1e13)
    assert f"{pace.flops:,} FLOP per trained token (6 N + 12 L H E T" in caplog.messages[0]
    assert caplog.messages[0].endswith("10 TFLOP/s at peak")
    assert caplog.messages[1].endswith("peak unknown, so no MFU: set metrics.peak_tflops")


def test_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    pace = Pace(clock)
    with caplog.at_level(logging.INFO):
        for step in range(25):
            pace.say(step, 100, 2.0, 1234.5, 0.417 if step else 0.0)
            clock.now += 1
    assert caplog.messages == [
        "step 0/100, loss 2.000, 1,234 tokens/s",
        "step 10/100, loss 2.000, 1,234 tokens/s, MFU 41.7 %",
        "step 20/100, loss 2.000, 1,234 tokens/s, MFU 41.7 %",
    ]
