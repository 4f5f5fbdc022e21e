"""A scripted island: a plain training loop on a tiny model, the same bits each time."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco import failpoints
from diloco.config import load_run
from island.config_checkpoint import CheckpointConfig
from island.model import allocate, build_meta, fill, loss
from island.session import join

WIDTH = 64
Task = tuple[nn.Module, Callable[[], Tensor]]
"""A model, and what gives its loss on the next batch."""


def tiny() -> Task:
    """A model that is soon trained."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def lose() -> Tensor:
        batch = torch.randn(4, WIDTH)
        return (model(batch) - batch).square().mean()

    return model, lose


def of_run(path: str) -> Task:
    """The model of a run, with other first values than its own, as other islands must fetch them."""
    run = load_run(Path(path).read_text(), path).value
    model = allocate(build_meta(run), "cpu")
    fill(model, run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))

    def lose() -> Tensor:
        tokens = torch.randint(run.model.vocab_size, (2, run.model.sequence_length + 1))
        return loss(model(tokens[:, :-1]), tokens[:, 1:])

    return model, lose


def train(name: str, address: str, folder: str, options: str) -> None:
    """Trains to the end of the run; then writes how that went to `<folder>/<name>.json`.

    Args:
        name: the island's id; its first parameters and its data follow from it.
        address: of the coordinator.
        folder: for the result.
        options: JSON; `step_s`, how long an inner step takes; `nan_at`, the step before which a parameter becomes NaN;
            `checkpoint_every`, the steps between two checkpoints, 0 for none; `run`, the file of the run whose model is
            trained, in place of a tiny one.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    setting = os.environ.get(failpoints.VARIABLE, "")
    failpoints.arm(failpoints.trap(setting, lambda which: os.kill(os.getpid(), signal.Signals[which])))
    given: dict[str, Any] = json.loads(options)
    torch.set_num_threads(1)
    seed = sum(map(ord, name))
    torch.manual_seed(seed)
    model, lose = of_run(given["run"]) if "run" in given else tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    every = given.get("checkpoint_every", 0)
    checkpoint = CheckpointConfig(url=f"{folder}/checkpoints" if every else "", every_steps=max(1, every))
    limits = {"connect_timeout_s": 20.0, "start_timeout_s": 20.0}
    with join(model, optimizer, address, island_id=name, checkpoint=checkpoint, **limits) as site:
        while not site.done:
            lost = lose()
            model.zero_grad()
            lost.backward()
            optimizer.step()
            with torch.no_grad():
                if site.at_step == given.get("nan_at"):
                    next(iter(model.parameters())).fill_(torch.nan)
            time.sleep(given.get("step_s", 0.0))
            site.step(tokens=4, loss=lost.item())
        result = {
            "digests": site.digests(),
            "versions": [position.version for position in site.replica.position],
            "epoch": site.epoch,
            "rejoins": site.rejoins,
            "exact": site.keeping.exact,
            "rollbacks": site.rollbacks,
            "pid": os.getpid(),
        }
        (Path(folder) / f"{name}.json").write_text(json.dumps(result))
