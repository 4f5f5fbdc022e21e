"""A session in this process, on a real coordinator, beside an island driven by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from coordinator.facts import Standing
from coordinator.rounds import Drain, Stop
from coordinator.store import UPDATES_KEPT
from diloco.config import RunConfig
from diloco.digest import show
from diloco.layout import Layout, TensorSpec
from island.session import join
from tests.processes import wait_until
from tests.support import BOUND_S, serving, visit

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
        join(model, None, host.address, island_id="slow") as site,
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


@pytest.mark.parametrize("order", [Drain(island="a", reason="maintenance"), Stop(reason="maintenance")])
def test_an_island_that_waits_for_the_start_leaves_when_it_is_told_to(tmp_path: Path, order: Drain | Stop) -> None:
    settings = config().model_copy(update={"rounds": config().rounds.model_copy(update={"start_islands": 2})})
    with serving(settings, tmp_path) as host, ThreadPoolExecutor() as pool:
        waiting = pool.submit(join, nn.Linear(5, 3, bias=False), None, host.address, island_id="a")
        wait_until(lambda: host.ask(lambda run: run.state.seeded), "the island waits for another")
        host.call(host.run.take(order))
        with waiting.result(BOUND_S) as site:
            assert (site.leaving, site.done, site.at_step) == ("maintenance", True, 0)
        member = host.ask(lambda run: run.state.members["a"])
    assert (member.standing, member.reason) == (Standing.LEFT, "maintenance")
