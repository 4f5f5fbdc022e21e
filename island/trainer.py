"""The inner loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from diloco.config import RunConfig
from diloco.errors import DivergedError
from island.config import IslandConfig
from island.data import Batches, Packed, Stream
from island.group import Group
from island.holding import Holding
from island.metrics import Metrics
from island.optimizers import build, set_rates
from island.pace import Pace
from island.parallel import Engine
from island.session import Session

log = logging.getLogger("diloco.island")
EVAL_BATCH = 32
ASKED, FINISHED = "asked to stop", "finished"


@dataclass(kw_only=True)
class Trainer:
    """One rank's inner loop; with a `site` it takes part in a run, without one it trains alone.

    `stop` says whether this rank was asked to leave; all ranks then leave at the same step edge.
    """

    run: RunConfig
    island: IslandConfig
    engine: Engine
    text: Packed | Stream
    batches: Batches
    metrics: Metrics
    site: Session | None
    holding: Holding | None = None
    pace: Pace
    stop: Callable[[], bool]

    def train(self) -> str:
        """Takes inner steps until the run's last one. Returns why it ended.

        Raises:
            DivergedError: the loss is not finite; with a site, also after it went back to its anchors.
        """
        group, inner, steps, engine = Group(), self.run.inner, self.run.run.steps, self.engine
        optimizer = build(engine.model, inner)
        every = self.island.metrics.every_steps
        evaluate = self.island.eval.every_steps
        self._attach(optimizer, group)
        tokens = step = 0
        while (step := self.site.at_step if self.site else step) < steps:
            rows = group.numbers([self.stop(), self.holding.heard() if self.holding else 0])
            if any(row[0] for row in rows):
                return ASKED
            if self.holding and rows[0][1]:
                self.holding.turn(self.batches)
            step += 1
            set_rates(optimizer, step, steps, inner)
            inputs, targets = self.batches.next()
            loss = engine.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
            tokens += inputs.numel()
            report = step % every == 0 or step == steps
            value = group.mean(loss.item()) if report else None
            if self.site:
                self.site.step(tokens=inputs.numel() if engine.leads else 0, loss=value)
                if self.site.leaving:
                    return self.site.leaving
            if value is not None and self._finite(value, step):
                self._report(step, value, tokens * engine.data_ranks)
                self.metrics.record("data", step=step, places=str(self.batches.together(group)))
            if evaluate and step % evaluate == 0:
                self._evaluate(step, tokens * engine.data_ranks, group)
        return FINISHED

    def _attach(self, optimizer: torch.optim.Optimizer, group: Group) -> None:
        """Has the site keep what this loop has a state of, and tell where it stands in its data."""
        if not self.site:
            return
        kept: dict[str, Callable[[], Any]] = {"data": lambda: self.batches.together(group).to_json()}
        holding = self.holding
        if holding and holding.on:
            kept["holding"] = holding.to_json
            self.site.places = lambda: holding.places(self.batches)
        self.site.attach(optimizer, **kept)

    def _finite(self, loss: float, step: int) -> bool:
        """Whether the loss is worth a record. With a site, the site has gone back to its anchors where not."""
        if not math.isfinite(loss) and not self.site:
            raise DivergedError(f"the training loss is {loss} at inner step {step}: lower inner.lr", step=step)
        return math.isfinite(loss)

    def _report(self, step: int, loss: float, tokens: int) -> None:
        traffic = self.site.report() if self.site else (0, 0)
        rate, share = self.pace.so_far(tokens)
        self.pace.say(step, self.run.run.steps, loss, rate, share)
        if self.site:
            self.site.tell(mfu=share)
        self.metrics.record(
            "train",
            step=step,
            loss=loss,
            tokens=tokens,
            tokens_per_second=rate,
            mfu=share,
            rounds=self.site.rounds if self.site else 0,
            rejoins=self.site.rejoins if self.site else 0,
            rollbacks=self.site.rollbacks if self.site else 0,
            bytes_up=traffic[0],
            bytes_down=traffic[1],
        )

    def _evaluate(self, step: int, tokens: int, group: Group) -> None:
        """Evaluates the outer parameters; without a run, the model's own."""
        within = self.site.outer_parameters() if self.site else nullcontext()
        loss = held_out_loss(self.engine, self.text, self.island.eval.sequences, group, within)
        if self.site:
            self.site.tell(outer_loss=loss)
        self.metrics.record("eval", step=step, outer_loss=loss, tokens=tokens)


def held_out_loss(
    engine: Engine,
    text: Packed | Stream,
    sequences: int,
    group: Group,
    within: AbstractContextManager[object],
) -> float:
    """Mean loss in nats per token on held-out text, shared among the ranks of `group`. Collective.

    Args:
        sequences: held-out sequences in all.
        within: a context in which the model computes with the parameters that are meant.
    """
    inputs, targets = text.held_out(sequences)
    share = max(1, len(inputs) // engine.data_ranks)
    first = engine.data_rank * share % len(inputs)
    inputs, targets = inputs[first : first + share], targets[first : first + share]
    total, count = 0.0, 0
    with within:
        for start in range(0, len(inputs), EVAL_BATCH):
            batch = slice(start, start + EVAL_BATCH)
            rows = len(targets[batch])
            total, count = total + engine.evaluate(inputs[batch], targets[batch]).item() * rows, count + rows
    return group.mean(total / count)
