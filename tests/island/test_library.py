"""`island.join` in loops that are not ours: what it takes, what it refuses, and what it does to the learning rate."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR

import island
from diloco.errors import InputError, LayoutError, Unreachable
from island.following import Following
from island.joining import _as_id, check
from tests.island.beside import EVERY, STEPS, beside, config, digests, outer
from tests.processes import free_port
from tests.support import serving

ROOT = Path(__file__).resolve().parents[2]
WIDTH, BATCH = 6, 4


def model() -> nn.Module:
    """The same first parameters every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH))


def inner_step(net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    net(torch.ones(BATCH, WIDTH)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "kind", ["ddp", pytest.param("compiled-ddp", marks=pytest.mark.slow), "device-ddp", "fsdp", "no-cpu"]
)
def test_two_ranks_and_one_end_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    out, port = tmp_path / "seen", str(free_port())
    with serving(config(), tmp_path / "state") as host, beside(model(), host) as other:
        ranks = []
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            env = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, "-m", "tests.island.plain_rank", host.address, kind, str(out)]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=env))
        try:
            assert [rank.wait(120) for rank in ranks] == [0, 0]
        finally:
            for process in ranks:
                process.kill()
                process.wait(timeout=10)
        seen = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
        assert [rank["digests"] for rank in seen] == [other.result(), digests(host)]
    assert [(rank["step"], rank["tokens"]) for rank in seen] == [(STEPS, STEPS), (STEPS, 0)], "a step counts once"


def test_anchors_are_on_the_cpu_or_the_device() -> None:
    net = model()
    with pytest.raises(InputError, match=r"anchors='gpu' is no place for them: say 'cpu' or 'device'"):
        island.join(net, None, "127.0.0.1:1", anchors="gpu")  # type: ignore[arg-type]


def test_an_island_that_names_nothing_has_its_hosts_name_and_weighs_by_steps(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with serving(config(1), tmp_path) as host, island.join(net, optimizer, host.address) as site:
        assert site.island_id == _as_id(socket.gethostname())
        while not site.done:
            inner_step(net, optimizer)
            site.step()
        with site.outer_parameters():
            assert all(torch.equal(p, outer(host)[n]) for n, p in net.named_parameters())
        assert not torch.equal(net[0].weight, outer(host)["0.weight"])  # type: ignore[index]
        site.take_outer()
        assert all(torch.equal(p, outer(host)[n]) for n, p in net.named_parameters())
        assert (site.rounds, site.tokens) == (2, STEPS)


@pytest.mark.parametrize(
    ("name", "found"),
    [("gpu-7.site.example", "gpu-7.site.example"), ("-a b", "a-b"), ("", "island"), ("x" * 90, "x" * 64)],
)
def test_a_host_name_makes_an_id(name: str, found: str) -> None:
    assert _as_id(name) == found


def test_several_optimizers_are_forgotten_together_where_training_is_not_finite(tmp_path: Path) -> None:
    net = model()
    both = [torch.optim.AdamW(net[i].parameters(), lr=0.1) for i in (0, 2)]  # type: ignore[index]
    with serving(config(1), tmp_path) as host, island.join(net, both, host.address, island_id="a") as site:
        inner_step(net, *both)
        site.step()
        assert all(optimizer.state for optimizer in both)
        with torch.no_grad():
            net[0].weight.fill_(float("nan"))  # type: ignore[index]
        site.step(loss=float("nan"))
        assert (site.rollbacks, [len(optimizer.state) for optimizer in both]) == (1, [0, 0])
        assert all(p.isfinite().all() for p in net.parameters())


def test_a_gradient_scaler_that_skips_a_step_costs_nothing_but_that(tmp_path: Path) -> None:
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    with serving(config(1), tmp_path) as host, island.join(net, optimizer, host.address, island_id="a") as site:
        while not site.done:
            before = net[0].weight.clone()  # type: ignore[index]
            scaler.scale(net(torch.ones(BATCH, WIDTH)).square().mean()).backward()
            if site.at_step == 1:
                net[0].weight.grad.fill_(float("inf"))  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(before, net[0].weight) == (site.at_step == 1)  # type: ignore[index]
            site.step()
        assert (site.rounds, site.rollbacks, scaler.get_scale()) == (2, 0, 1.0)


# -- learning rates -----------------------------------------------------------------------------------------------


def schedules(optimizer: torch.optim.Optimizer) -> list[torch.optim.lr_scheduler.LRScheduler]:
    warm = SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 5)], milestones=[3]
    )
    return [warm]


def one_by_one(steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    [scheduler] = schedules(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_a_schedule_is_taken_to_any_step_forwards_and_back() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    follow, rates = Following(schedules(optimizer)), one_by_one(9)
    for step in (0, 1, 5, 8, 2, 2, 7):
        follow(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[step]), step


@pytest.mark.parametrize("own_steps", [False, True])
def test_a_schedule_follows_the_run_whoever_steps_it(tmp_path: Path, own_steps: bool) -> None:
    with serving(config(1), tmp_path) as host:
        rates = []
        for until in (EVERY, STEPS):  # the second time it comes in at the run's third step
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            scheduler = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
            with island.join(net, optimizer, host.address, island_id="a", scheduler=scheduler) as site:
                while site.at_step < until:
                    rates.append(optimizer.param_groups[0]["lr"])
                    inner_step(net, optimizer)
                    if own_steps:
                        scheduler.step()
                    site.step()
        assert rates == pytest.approx([0.1 * (1 - step / STEPS) for step in range(STEPS)])


def test_a_schedule_of_a_metric_is_refused() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(InputError, match="islands would go apart: use a schedule of the step"):
        island.join(model(), None, "127.0.0.1:1", scheduler=ReduceLROnPlateau(optimizer))


# -- what is refused ----------------------------------------------------------------------------------------------


def test_parameters_of_few_bits_are_refused_with_what_to_do() -> None:
    net = model()
    net[2].to(torch.bfloat16)  # type: ignore[index]
    with pytest.raises(LayoutError, match=r"'2.weight' is torch.bfloat16, .*model.float\(\).*torch.autocast"):
        check(net, [])


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    stale = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(InputError, match="SGD is in the model: make the optimizer after the model is moved, wrapped"):
        check(model(), [stale])
    net = model()
    check(net, [torch.optim.SGD(net.parameters(), lr=0.1)])


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine"])
def test_wrappers_that_hide_parameters_are_refused(name: str) -> None:
    wrapper = type("Own", (type(name, (nn.Module,), {}),), {})()
    wrapper.add_module("module", model())
    with pytest.raises(LayoutError, match=r"this model is wrapped in .*: (shard|run|use)"):
        check(wrapper, [])


def test_a_coordinator_that_is_not_there_is_said_within_the_bound() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
        island.join(model(), None, f"127.0.0.1:{free_port()}", connect_timeout_s=0.5)
