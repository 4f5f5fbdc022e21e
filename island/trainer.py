"""The inner loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from diloco.config import RunConfig
from diloco.errors import DivergedError
from island.config import IslandConfig
from island.data import Batches, Packed, Stream
from island.group import Group
from island.metrics import Metrics
from island.model import loss as token_loss
from island.optimizers import build, learning_rate
from island.session import Session

log = logging.getLogger("diloco.island")
EVAL_BATCH = 32


@dataclass(kw_only=True)
class Trainer:
    """One rank's inner loop; with a `site` it takes part in a run, without one it trains alone.

    `stop` says whether this rank was asked to leave; all ranks then leave at the same step edge.
    """

    run: RunConfig
    island: IslandConfig
    model: nn.Module
    text: Packed | Stream
    batches: Batches
    device: torch.device
    metrics: Metrics
    site: Session | None
    stop: Callable[[], bool]

    def train(self) -> str:
        """Takes inner steps until the run's last one. Returns why it ended.

        Raises:
            DivergedError: the loss is not finite; with a site, also after it went back to its anchors.
        """
        group, inner, steps = Group(), self.run.inner, self.run.run.steps
        optimizer = build(self.model, inner)
        every = self.island.metrics.every_steps
        begun, evaluate = time.monotonic(), self.island.eval.every_steps
        if self.site:
            self.site.attach(optimizer, data=lambda: self.batches.together(group).to_json())
        tokens = step = 0
        while (step := self.site.at_step if self.site else step) < steps:
            if any(row[0] for row in group.numbers([self.stop()])):
                return "asked to stop"
            step += 1
            for parameters in optimizer.param_groups:
                parameters["lr"] = learning_rate(step, steps, inner)
            inputs, targets = (part.to(self.device, non_blocking=True) for part in self.batches.next())
            loss = token_loss(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if inner.clip_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), inner.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            tokens += inputs.numel()
            report = step % every == 0 or step == steps
            value = group.mean(loss.item()) if report else None
            if self.site:
                self.site.step(tokens=inputs.numel(), loss=value)
                if self.site.leaving:
                    return self.site.leaving
            if value is not None and self._finite(value, step):
                rate = tokens * group.size / (time.monotonic() - begun)
                self._report(step, value, rate, tokens * group.size)
                self.metrics.record("data", step=step, places=str(self.batches.together(group)))
            if evaluate and step % evaluate == 0:
                self._evaluate(step, tokens * group.size, group)
        return "finished"

    def _finite(self, loss: float, step: int) -> bool:
        """Whether the loss is worth a record. With a site, the site has gone back to its anchors where not."""
        if not math.isfinite(loss) and not self.site:
            raise DivergedError(f"the training loss is {loss} at inner step {step}: lower inner.lr", step=step)
        return math.isfinite(loss)

    def _report(self, step: int, loss: float, rate: float, tokens: int) -> None:
        traffic = self.site.report() if self.site else (0, 0)
        self.metrics.record(
            "train",
            step=step,
            loss=loss,
            tokens=tokens,
            tokens_per_second=rate,
            rounds=self.site.rounds if self.site else 0,
            rejoins=self.site.rejoins if self.site else 0,
            rollbacks=self.site.rollbacks if self.site else 0,
            bytes_up=traffic[0],
            bytes_down=traffic[1],
        )

    def _evaluate(self, step: int, tokens: int, group: Group) -> None:
        """Evaluates the outer parameters; without a run, the model's own."""
        within = self.site.outer_parameters() if self.site else nullcontext()
        loss = held_out_loss(self.model, self.text, self.island.eval.sequences, self.device, group, within)
        if self.site:
            self.site.tell(outer_loss=loss)
        self.metrics.record("eval", step=step, outer_loss=loss, tokens=tokens)


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    text: Packed | Stream,
    sequences: int,
    device: torch.device,
    group: Group,
    within: AbstractContextManager[object],
) -> float:
    """Mean loss in nats per token on held-out text, shared among the ranks of `group`. Collective.

    Args:
        sequences: held-out sequences in all.
        within: a context in which the model computes with the parameters that are meant.
    """
    inputs, targets = text.held_out(sequences)
    share = max(1, len(inputs) // group.size)
    mine = slice(group.rank * share % len(inputs), group.rank * share % len(inputs) + share)
    inputs, targets = inputs[mine], targets[mine]
    total, count = 0.0, 0
    with within:
        for start in range(0, len(inputs), EVAL_BATCH):
            batch = slice(start, start + EVAL_BATCH)
            loss = token_loss(model(inputs[batch].to(device)), targets[batch].to(device))
            total, count = total + loss.item() * targets[batch].numel(), count + targets[batch].numel()
    return group.mean(total / count)
