"""The hook for torchtitan, on a stand-in that has exactly what torchtitan 0.3.0's Trainer has of what it uses.

torchtitan itself needs a GPU to be imported. The stand-in's `train` is the loop of torchtitan/trainer.py: it loads its
checkpoint, and then asks `should_continue_training` and calls `train_step` until one of them ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from coordinator.facts import Standing
from island.hooks.torchtitan import taking_part
from tests.island.beside import EVERY, STEPS, beside, config, digests, outer
from tests.support import serving

WIDTH, BATCH = 5, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH))


class Part(nn.Module):
    """Some modules of a model under their own names, as a pipeline stage has them."""

    def __init__(self, whole: nn.Sequential, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, whole.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


class Trainer:
    """Its stand-in, of one part or two."""

    def __init__(self, whole: nn.Sequential, parts: int = 1, steps: int = 100) -> None:
        self.model_parts: list[nn.Module] = [whole] if parts == 1 else [Part(whole, ("0", "1")), Part(whole, ("2",))]
        inner = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in self.model_parts]
        falling: list[LRScheduler] = [LambdaLR(one, lambda step: 1 - step / STEPS) for one in inner]
        self.optimizers, self.lr_schedulers = SimpleNamespace(optimizers=inner), SimpleNamespace(schedulers=falling)
        self.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=1, cp=1)
        self.ntokens_seen = self.step = 0
        self.steps = steps
        self.rates: list[float] = []

    def train(self) -> None:
        for part in self.model_parts:  # checkpointer.load
            nn.init.constant_(next(part.parameters()), 7.0)
        generator = torch.Generator().manual_seed(0)
        data = (torch.randn(BATCH, WIDTH, generator=generator) for _ in iter(int, 1))
        while self.should_continue_training():
            self.step += 1
            self.train_step(data)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        batch = next(data_iterator)
        self.ntokens_seen += len(batch)
        x = batch
        for part in self.model_parts:
            x = part(x)
        self.rates.append(self.optimizers.optimizers[0].param_groups[0]["lr"])
        (x - batch).square().mean().backward()
        for optimizer, scheduler in zip(self.optimizers.optimizers, self.lr_schedulers.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def should_continue_training(self) -> bool:
        return self.step < self.steps


@pytest.mark.parametrize("parts", [1, 2])
def test_torchtitan_and_a_plain_loop_end_with_the_same_bits(tmp_path: Path, parts: int) -> None:
    with serving(config(), tmp_path / "state") as host, beside(model(), host) as other:
        whole = model()
        trainer = Trainer(whole, parts)
        with taking_part(trainer, host.address, island_id="titan") as place:
            trainer.train()
            assert place.site
            assert place.site.digests() == other.result() == digests(host)
            assert (place.site.at_step, place.site.rounds, place.site.tokens) == (STEPS, 2, STEPS * BATCH)
            with place.site.outer_parameters():
                assert {n: p.tolist() for n, p in whole.named_parameters()} == {
                    n: p.tolist() for n, p in outer(host).items()
                }
        member = host.ask(lambda run: run.state.members["titan"])
    assert (member.standing, member.reason, trainer.step) == (Standing.LEFT, "finished", STEPS)
    assert trainer.should_continue_training(), "the Trainer is its own again"


def test_it_leaves_where_training_raises_and_a_late_one_follows_the_run(tmp_path: Path) -> None:
    with serving(config(1), tmp_path / "state") as host:
        trainer = Trainer(model(), steps=EVERY)
        with pytest.raises(RuntimeError, match="broken"), taking_part(trainer, host.address, island_id="titan"):
            trainer.train()
            raise RuntimeError("broken")
        assert host.ask(lambda run: run.state.members["titan"].reason) == "RuntimeError: broken"
        late = Trainer(model())
        with taking_part(late, host.address, island_id="titan"):
            late.train()
        assert late.rates == pytest.approx([0.1 * (1 - step / STEPS) for step in range(EVERY, STEPS)])
        over = Trainer(model())
        with taking_part(over, host.address, island_id="titan") as place:
            over.train()
            assert (over.rates, place.site and place.site.done) == ([], True)
