"""A scripted island: a plain training loop on a tiny model, the same bits each time."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco import failpoints
from island.config_checkpoint import CheckpointConfig
from island.session import join

WIDTH = 64


def train(name: str, address: str, folder: str, options: str) -> None:
    """Trains to the end of the run; then writes how that went to `<folder>/<name>.json`.

    Args:
        name: the island's id; its first parameters and its data follow from it.
        address: of the coordinator.
        folder: for the result.
        options: JSON; `step_s`, how long an inner step takes; `nan_at`, the step before which a parameter becomes NaN;
            `checkpoint_every`, the steps between two checkpoints, 0 for none.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    setting = os.environ.get(failpoints.VARIABLE, "")
    failpoints.arm(failpoints.trap(setting, lambda which: os.kill(os.getpid(), signal.Signals[which])))
    given: dict[str, Any] = json.loads(options)
    torch.set_num_threads(1)
    seed = sum(map(ord, name))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    every = given.get("checkpoint_every", 0)
    checkpoint = CheckpointConfig(url=f"{folder}/checkpoints" if every else "", every_steps=max(1, every))
    limits = {"connect_timeout_s": 20.0, "start_timeout_s": 20.0}
    with join(model, optimizer, address, island_id=name, checkpoint=checkpoint, **limits) as site:
        while not site.done:
            batch = torch.randn(4, WIDTH)
            loss = (model(batch) - batch).square().mean()
            model.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                if site.at_step == given.get("nan_at"):
                    next(iter(model.parameters())).fill_(torch.nan)
            time.sleep(given.get("step_s", 0.0))
            site.step(tokens=4, loss=loss.item())
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
