"""A session in this process, on a real coordinator, beside an island driven by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from coordinator.store import UPDATES_KEPT
from diloco.config import RunConfig
from diloco.digest import show
from diloco.layout import Layout, TensorSpec
from island.session import join
from tests.support import serving, visit

LAYOUT = Layout([TensorSpec("weight", (3, 5))])


def config() -> RunConfig:
    """A sync at every step; a round ends with its first contribution."""
    return RunConfig.model_validate(
        {
            "run": {"id": "behind", "steps": 40},
            "sync": {"every_steps": 1},
            "rounds": {"start_islands": 1, "quorum": 1, "grace_s": 0.0},
        }
    )


def test_an_island_that_has_fallen_far_behind_takes_the_anchor_whole_and_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False)
    missed = UPDATES_KEPT + 2
    with (
        serving(config(), tmp_path) as host,
        visit(host.address, "quick", LAYOUT) as quick,
        join(model, host.address, island_id="slow") as site,
    ):
        quick.join()
        quick.beat(ready=True)
        [fragment] = host.run.fragments
        for round_ in range(missed):
            quick.push(fragment, torch.full((15,), 0.01), round=round_, base_version=round_, tokens=1)
            assert quick.fetch(fragment, round=round_)[0].outcome == "committed"
        with torch.no_grad():
            model.weight.add_(1.0)
        site.step(tokens=1)
        assert site.replica.position[0].round == missed
        assert site.digests() == [show(host.ask(lambda run: run.outers[0].digest))]
        assert torch.equal(model.weight, site.replica.held(0)[0].anchor)
        while site.replica.position[0].version == missed:
            with torch.no_grad():
                model.weight.sub_(0.1)
            site.step(tokens=1)
        assert site.replica.position[0].version == missed + 1
        assert site.digests() == [show(host.ask(lambda run: run.outers[0].digest))]
