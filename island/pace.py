"""How fast an island trains: tokens per second, and what share of its devices' peak that is (MFU)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from diloco.config import ModelConfig
from island.model import flops_per_token, mfu, peak_flops

SAY_S = 10.0
"""Seconds between two lines of the log that say how far the island is."""

log = logging.getLogger("diloco.island")


@dataclass
class Pace:
    """Of one island; told the tokens of all its ranks.

    Args:
        clock: seconds on a monotonic clock.
        flops: floating-point operations of one trained token (`island.model.flops_per_token` says what they are).
        peak: FLOP/s of all devices of the island together; 0 where it is not known.
    """

    clock: Callable[[], float]
    flops: int = 0
    peak: float = 0.0
    _tokens: int = 0
    _at: float = field(init=False)
    _said: float = field(init=False)

    def __post_init__(self) -> None:
        self._at = self.clock()
        self._said = self._at - SAY_S

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: ModelConfig,
        device: torch.device,
        ranks: int,
        peak_tflops: float,
        clock: Callable[[], float],
    ) -> Pace:
        """Of a model on so many devices like this one, and says what is counted.

        Args:
            peak_tflops: of one device, in TFLOP/s; 0 takes that of a GPU that is known.
        """
        known = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        peak = ranks * (peak_tflops * 1e12 or known or 0.0)
        pace = cls(clock, flops_per_token(config, None if config.ours else model), peak)
        beside = f"{peak / 1e12:,.0f} TFLOP/s at peak" if peak else "peak unknown, so no MFU: set metrics.peak_tflops"
        log.info("%s FLOP per trained token (6 N + 12 L H E T, docs/models.md); %s", f"{pace.flops:,}", beside)
        return pace

    def so_far(self, tokens: int) -> tuple[float, float]:
        """Tokens per second since this was asked last, and the MFU, 0 where it is not known.

        Args:
            tokens: trained on so far.
        """
        now = self.clock()
        rate = (tokens - self._tokens) / max(now - self._at, 1e-9)
        self._tokens, self._at = tokens, now
        return rate, mfu(self.flops, rate, self.peak) if self.peak else 0.0

    def say(self, step: int, steps: int, loss: float, rate: float, share: float) -> None:
        """Logs how far the island is, now and then."""
        now = self.clock()
        if now - self._said >= SAY_S:
            self._said = now
            of_peak = f", MFU {100 * share:.1f} %" if share else ""
            log.info("step %d/%d, loss %.3f, %s tokens/s%s", step, steps, loss, f"{rate:,.0f}", of_peak)
