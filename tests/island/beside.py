"""An island with a plain loop, beside the one that a test is about."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import SGD

import island
from diloco.config import RunConfig
from diloco.digest import show
from tests.support import Serving

STEPS, EVERY = 6, 3
START_S = 120.0
"""Longest wait for the other island, whose ranks may have to import a library first."""


def config(islands: int = 2, **run: object) -> RunConfig:
    """Two syncs, each of all islands; what they bring is mixed by half, so that outer and inner parameters differ."""
    return RunConfig.model_validate(
        {
            "run": {"id": "hooks", "steps": STEPS},
            "sync": {"every_steps": EVERY, "alpha": 0.5},
            "rounds": {"start_islands": islands, "quorum": islands},
        }
        | run
    )


def plain(model: nn.Module, address: str) -> list[str]:
    """Moves a model's parameters to the end of the run; returns the digests."""
    optimizer = SGD(model.parameters(), lr=0.1)
    with island.join(model, optimizer, address, island_id="plain", start_timeout_s=START_S) as site:
        while not site.done:
            optimizer.zero_grad()
            torch.autograd.backward([p.square().sum() for p in model.parameters()])
            optimizer.step()
            site.step()
        return site.digests()


@contextmanager
def beside(model: nn.Module, host: Serving) -> Iterator[Future[list[str]]]:
    """The plain island on a thread; its digests, once the run is done."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(plain, model, host.address)


def outer(host: Serving) -> dict[str, torch.Tensor]:
    """The coordinator's outer parameters, by name."""
    fragments, outers = host.ask(lambda run: (run.fragments, [outer.anchor.clone() for outer in run.outers]))
    return {
        spec.name: outers[fragment.index][start : start + spec.numel].view(spec.shape)
        for fragment in fragments
        for spec, start in zip(fragment.specs, fragment.starts, strict=True)
    }


def digests(host: Serving) -> list[str]:
    """The coordinator's digests, as islands show them."""
    return host.ask(lambda run: [show(outer.digest) for outer in run.outers])
