"""Entry points of the conformance tests' processes: one hosts coordinators, the others are islands.

python -m tests.conformance.processes coordinators FOLDER
python -m tests.conformance.processes island NUMBER FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from coordinator.cli import listen_on
from coordinator.files import REAL
from coordinator.run import Run
from coordinator.store import Store
from diloco.config import RunConfig
from island.session import Session, join
from tests.conformance import cases

LINEAR = "linear-model"
LINEAR_DATA = (
    (((0.0, 1.0), (1.0, 0.0)), ((1.0,), (2.0,))),
    (((1.0, 0.0), (0.0, 1.0)), ((2.0,), (3.0,))),
)


def linear_config() -> RunConfig:
    """Two islands, a linear model, H=3, outer Nesterov at lr 1."""
    return RunConfig.model_validate(
        {
            "run": {"id": LINEAR, "steps": 4},
            "sync": {"every_steps": 3},
            "outer": {"lr": 1.0, "momentum": 0.9},
            "rounds": {"start_islands": 2, "quorum": 2},
        }
    )


def linear_model() -> nn.Module:
    """W = [[2], [1]], b = [1], as torch's Linear holds them."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 1.0]]))
        model.bias.fill_(1.0)
    return model


def linear_step(model: nn.Module, island: int) -> float:
    """One step of SGD on the island's data; returns the loss before it."""
    x, y = (torch.tensor(part) for part in LINEAR_DATA[island])
    loss = nn.functional.mse_loss(model(x), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    return float(loss.detach())


def configs() -> dict[str, RunConfig]:
    """All runs of the conformance tests by name."""
    return {case.name: case.config for case in cases.CASES} | {LINEAR: linear_config()}


async def coordinators(folder: Path) -> None:
    """Serves every run on a port of its own until the process is ended."""
    addresses, servers = {}, []
    for name, config in configs().items():
        run = Run(config, Store(folder / name), time.monotonic)
        server, port = await listen_on(run, "127.0.0.1:0")
        servers.append(server)
        run.begin()
        addresses[name] = f"127.0.0.1:{port}"
    REAL.write(folder / "addresses.json", json.dumps(addresses).encode())
    await asyncio.Event().wait()


def island(number: int, folder: Path) -> None:
    """Takes part in every run that has an island of this number; writes what it saw."""
    addresses = json.loads((folder / "addresses.json").read_text())
    seen: dict[str, object] = {}
    for case in cases.CASES:
        if number < len(case.gradients):
            model = case.model()
            with join(model, None, addresses[case.name], island_id=case.islands[number]) as site:
                rows, anchors = [cases.weights(model)], [_anchors(site)]
                for _ in range(case.steps):
                    case.inner_step(model, number)
                    site.step(tokens=case.island_tokens(number))
                    rows.append(cases.weights(model))
                    anchors.append(_anchors(site))
            seen[case.name] = {"rows": rows, "anchors": anchors}
    if number < 2:
        seen[LINEAR] = _linear(number, addresses[LINEAR])
    REAL.write(folder / f"island-{number}.json", json.dumps(seen).encode())


def _anchors(site: Session) -> list[tuple[int, float]]:
    """(version, anchor) of each fragment."""
    replica = site.replica
    return [(replica.position[f.index].version, float(replica.held(f.index)[0].anchor)) for f in replica.fragments]


def _linear(number: int, address: str) -> dict[str, object]:
    model, losses, states = linear_model(), [], []
    with join(model, None, address, island_id=f"island-{number}") as site:
        for _ in range(4):
            losses.append(linear_step(model, number))
            site.step(tokens=2)
            anchors = {h.spec.name: h.anchor.flatten().tolist() for h in site.replica.held(0)}
            states.append({"local": [p.detach().flatten().tolist() for p in model.parameters()], "anchors": anchors})
    return {"losses": losses, "states": states}


def main() -> None:
    """Command line."""
    torch.set_num_threads(1)
    if sys.argv[1] == "coordinators":
        asyncio.run(coordinators(Path(sys.argv[2])))
    else:
        island(int(sys.argv[2]), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
