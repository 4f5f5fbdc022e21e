"""What an island holds that has joined a run in which no sync is due: its anchors, and nothing else of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import tensors
from diloco.config import RunConfig
from island.config_mesh import AnchorPolicy
from island.session import Session, join
from tests.support import serving

ANCHORS, COORDINATOR = 4, 12
"""Bytes per parameter: of the island's anchors, and of the coordinator's anchors, momentum and residual (it is in this
process too)."""
SMALL = 1024
"""Bytes that an edge may take for a moment: the numbers on which ranks confer."""


class Loop:
    """A plain loop, bare until it has a site."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.site: Session | None = None

    def step(self) -> None:
        inputs = torch.randn(32, 64)
        nn.functional.mse_loss(self.model(inputs), inputs).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.site:
            self.site.step(tokens=32)

    def measure(self) -> tuple[int, int]:
        """Bytes of tensors between steps, and what a step takes beyond them at its peak."""
        self.step()
        return tensors.held(), tensors.peak(self.step)


def test_bytes_are_counted_once_while_they_are_held() -> None:
    before = tensors.held()
    matrix = torch.empty(256, 256)
    rows = [matrix[0], matrix[1].detach(), nn.Parameter(matrix)]
    assert tensors.held() - before == matrix.nbytes
    assert tensors.peak(lambda: torch.empty(1000).add(torch.empty(1000))) == 12_000
    assert tensors.peak(lambda: [torch.empty(1000).numel() for _ in range(9)]) == 4000
    del matrix, rows
    assert tensors.held() == before


@pytest.mark.parametrize("anchors", ["cpu", "device"])
def test_an_island_holds_its_anchors_beyond_a_bare_loop(anchors: AnchorPolicy, tmp_path: Path) -> None:
    run = RunConfig.model_validate(
        {
            "run": {"id": "held", "steps": 1000},
            "sync": {"every_steps": 500, "fragments": 2, "strategy": "strided"},
            "rounds": {"start_islands": 1},
        }
    )
    loop = Loop()
    held, peak = loop.measure()
    parameters = sum(p.numel() for p in loop.model.parameters())
    with (
        serving(run, tmp_path) as host,
        join(loop.model, loop.optimizer, host.address, island_id="a", anchors=anchors) as site,
    ):
        loop.site = site
        joined, joined_peak = loop.measure()
    assert joined - held == (ANCHORS + COORDINATOR) * parameters
    assert joined_peak - peak <= SMALL
