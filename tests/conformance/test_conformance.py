"""The known answers hold through the pure cores alone, and through a real coordinator and real island processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conformance import cases, processes
from tests.conformance.cases import CASES, Case
from tests.loopback import Loopback

ROOT = Path(__file__).resolve().parents[2]


def close(values: tuple[float, ...]) -> object:
    """Equality within the tables' own precision."""
    return pytest.approx(values, rel=1e-5, abs=1e-5)


def by_cores(case: Case) -> tuple[Loopback, list[list[list[float]]]]:
    """Runs a case through the cores; returns rows[island][step][fragment]."""
    models = [case.model() for _ in case.gradients]
    loop = Loopback(case.config, models)
    rows = [[cases.weights(model)] for model in models]
    for _ in range(case.steps):
        for island, model in enumerate(models):
            case.inner_step(model, island)
        loop.edge([case.island_tokens(i) for i in range(len(models))])
        for island, model in enumerate(models):
            rows[island].append(cases.weights(model))
    return loop, rows


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cores_give_the_known_values(case: Case) -> None:
    loop, rows = by_cores(case)
    for (island, fragment), expected in case.rows.items():
        assert tuple(row[fragment] for row in rows[island]) == close(expected)
    for fragment, expected in case.globals.items():
        assert tuple(float(outer.anchor) for outer in loop.history[fragment][: len(expected)]) == close(expected)
    if case.fragments == 1 and not case.overlap and not case.tokens:
        assert tuple(float(outer.anchor) for outer in loop.history[0]) == close(cases.closed_form(case))


def test_momenta_are_the_known_values() -> None:
    a, b, c, _ = cases.NESTEROV
    assert float(by_cores(a)[0].outers[0].momentum) == pytest.approx(1.3756, rel=1e-5)
    assert float(by_cores(b)[0].outers[0].momentum) == pytest.approx(3.2520, rel=1e-5)
    loop = by_cores(c)[0]
    assert [float(o.momentum) for o in loop.outers] == pytest.approx([1.295545, 1.457635], rel=1e-5)
    assert [float(o.anchor) for o in loop.outers] == pytest.approx([-1.455975, -2.157354], rel=1e-5)


def test_streaming_closed_form() -> None:
    """Rows with overlap: pg from tau steps before the sync, committed and mixed at the sync."""
    for case in (c for c in cases.MOCKED if c.overlap):
        per_fragment, eta, g = case.every // case.fragments, case.inner_lr, case.gradients[0]
        for fragment in range(case.fragments):
            local, theta, sent, out = 1.0, 1.0, 0.0, [1.0]
            for step in range(1, case.steps + 1):
                local -= eta * g
                first = (fragment + 1) * per_fragment
                if step + case.overlap >= first and (step + case.overlap - first) % case.every == 0:
                    sent = theta - local
                if step >= first and (step - first) % case.every == 0:
                    theta -= case.outer_lr * sent
                    local = (1 - case.alpha) * theta + case.alpha * local
                out.append(local)
            assert case.rows[0, fragment] == close(tuple(out))


def check_linear(losses: list[list[float]], states: list[list[dict[str, object]]]) -> None:
    """The published values of the linear model's run."""
    assert losses[0][:3] == pytest.approx([1.0, 0.49, 0.2401], abs=1e-4)
    assert losses[0][3] == pytest.approx(0.2075, abs=1e-2)
    for island in (0, 1):
        for step in (0, 1):
            assert states[island][step]["anchors"] == {"weight": [2.0, 1.0], "bias": [1.0]}
        synced = states[island][2]
        assert synced["anchors"]["weight"] == pytest.approx([1.5345, 1.0494], abs=1e-3)
        assert synced["anchors"]["bias"] == pytest.approx([0.5839], abs=1e-3)
        assert synced["local"] == [synced["anchors"]["weight"], synced["anchors"]["bias"]]
        assert states[island][3]["anchors"] == synced["anchors"]


def test_linear_model_through_the_cores() -> None:
    models = [processes.linear_model() for _ in range(2)]
    loop = Loopback(processes.linear_config(), models)
    losses, states = [[], []], [[], []]
    for _ in range(4):
        for island, model in enumerate(models):
            losses[island].append(processes.linear_step(model, island))
        loop.edge([2, 2])
        for island, model in enumerate(models):
            anchors = {h.spec.name: h.anchor.flatten().tolist() for h in loop.replicas[island].held(0)}
            local = [p.detach().flatten().tolist() for p in model.parameters()]
            states[island].append({"local": local, "anchors": anchors})
    check_linear(losses, states)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, object]]]:
    """What three real islands saw of every run, each on a real coordinator."""
    folder = tmp_path_factory.mktemp("conformance")
    command = [sys.executable, "-m", "tests.conformance.processes"]
    host = subprocess.Popen([*command, "coordinators", str(folder)], cwd=ROOT)
    islands = []
    try:
        deadline = time.monotonic() + 60
        while not (folder / "addresses.json").exists():
            assert host.poll() is None and time.monotonic() < deadline, "the coordinators did not start"
            time.sleep(0.05)
        islands = [subprocess.Popen([*command, "island", str(i), str(folder)], cwd=ROOT) for i in range(3)]
        assert [process.wait(timeout=180) for process in islands] == [0, 0, 0]
        yield [json.loads((folder / f"island-{i}.json").read_text()) for i in range(3)]
    finally:
        for process in (host, *islands):
            process.kill()
            process.wait(timeout=10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_processes_give_the_known_values(case: Case, seen: list[dict[str, object]]) -> None:
    _, rows = by_cores(case)
    for (island, fragment), expected in case.rows.items():
        assert tuple(row[fragment] for row in seen[island][case.name]["rows"]) == close(expected)
    for fragment, expected in case.globals.items():
        for island in range(len(case.gradients)):
            versions = dict(row[fragment] for row in seen[island][case.name]["anchors"])
            assert tuple(versions[version] for version in range(len(expected))) == close(expected)
    for island in range(len(case.gradients)):
        assert seen[island][case.name]["rows"] == rows[island], "processes and cores differ in bits"


def test_linear_model_through_processes(seen: list[dict[str, object]]) -> None:
    runs = [seen[island][processes.LINEAR] for island in (0, 1)]
    check_linear([run["losses"] for run in runs], [run["states"] for run in runs])


def test_torch_says_the_same_of_one_island() -> None:
    """k = 1, outer SGD at lr 1, mu 0: the outer parameters are those of AdamW alone, to rounding."""
    torch.manual_seed(0)
    data = torch.randn(12, 8, 4)

    def build() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

    plain, model = build(), build()
    config = PLAIN_CONFIG
    loop = Loopback(config, [model])
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (plain, model)]
    for batch in data:
        for each, optimizer in pairs:
            optimizer.zero_grad()
            (each(batch) - batch).square().mean().backward()
            optimizer.step()
        loop.edge([8])
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


PLAIN_CONFIG = cases.RunConfig.model_validate(
    {"run": {"id": "plain", "steps": 12}, "sync": {"every_steps": 4}, "outer": {"lr": 1.0, "momentum": 0.0}}
)
