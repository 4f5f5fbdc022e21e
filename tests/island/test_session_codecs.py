"""Sessions on a real coordinator with lossy codecs: anchors stay the same bits, and what was dropped goes out later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from diloco.buffers import Buffers
from diloco.config import RunConfig
from diloco.digest import show
from diloco.errors import StaleEpoch
from diloco.feedback import Counted, Ending, Fate
from diloco.replica import Replica
from diloco.v1 import coordinator_pb2 as pb
from island.courier import Courier
from island.session import Session, join
from tests.diloco.test_replica import model as plain_model
from tests.diloco.test_replica import replica
from tests.support import serving

STEP = torch.linspace(-1, 1.1, 12 * 30).view(12, 30)


def config(up: str, down: str) -> RunConfig:
    """A sync at every step, of a run of one island."""
    return RunConfig.model_validate(
        {
            "run": {"id": "lossy", "steps": 60},
            "sync": {"every_steps": 1},
            "outer": {"lr": 1.0, "momentum": 0.0},
            "wire": {"up": up, "down": down},
            "rounds": {"start_islands": 1, "quorum": 1, "grace_s": 0.0},
        }
    )


@pytest.mark.parametrize(("up", "down"), [("int4", "int8"), ("e3m0", "e3m0"), ("topk", "fp16"), ("int2", "topk-128")])
def test_anchor_and_residuals_hold_all_that_was_trained(up: str, down: str, tmp_path: Path) -> None:
    """Every step moves the same way; what has not reached the anchor yet is in a residual of either side."""
    rounds = 25
    linear = nn.Linear(30, 12, bias=False)
    nn.init.zeros_(linear.weight)
    with serving(config(up, down), tmp_path) as host, join(linear, None, host.address, island_id="a") as site:
        while site.at_step < rounds:
            with torch.no_grad():
                linear.weight.sub_(STEP)
            site.step(tokens=1)
        assert site.replica.position[0].version == rounds
        assert site.digests() == [show(host.ask(lambda run: run.outers[0].digest))]
        assert torch.equal(linear.weight, site.replica.held(0)[0].anchor)
        outer = host.ask(lambda run: run.outers[0])
    assert site.replica.feedback is not None
    residual = site.replica.feedback[0].residual(0, 360)
    assert residual.norm() > 0
    assert torch.allclose(residual + outer.residual - outer.anchor, rounds * STEP.flatten(), atol=1e-3)


def test_training_that_is_not_finite_drops_residuals_and_joining_again_keeps_them(tmp_path: Path) -> None:
    linear = nn.Linear(30, 12, bias=False)
    with serving(config("int2", "fp32"), tmp_path) as host, join(linear, None, host.address, island_id="a") as site:
        assert site.replica.feedback is not None

        def step(by: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                linear.weight.sub_(by)
            site.step(tokens=1)
            assert site.replica.feedback is not None
            return site.replica.feedback[0].residual(0, 360).clone()

        before = step(STEP)
        assert before.norm() > 0
        site.courier.abandon()  # nothing more is done under this epoch: the next step finds the lease lost
        joined_again = step(STEP)
        assert site.rejoins == 1
        assert torch.equal(joined_again, before)
        assert step(STEP).norm() > 0
        assert step(torch.full((12, 30), torch.nan)).norm() == 0
        assert site.rollbacks == 1
        assert step(STEP).norm() > 0


def trained(linear: nn.Linear, site: Session, by: torch.Tensor = STEP) -> torch.Tensor:
    """The residual after one step."""
    with torch.no_grad():
        linear.weight.sub_(by)
    site.step(tokens=1)
    return residual_of(site)


def residual_of(site: Session) -> torch.Tensor:
    assert site.replica.feedback is not None
    return site.replica.feedback[0].residual(0, 360).clone()


def test_an_island_that_is_started_again_goes_on_with_its_residuals(tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    with serving(config("int2", "fp32"), tmp_path / "state") as host:
        linear = nn.Linear(30, 12, bias=False)
        with join(linear, None, host.address, island_id="a", spool_dir=spool) as site:
            before = trained(linear, site)
        assert before.norm() > 0
        linear = nn.Linear(30, 12, bias=False)
        with join(linear, None, host.address, island_id="a", spool_dir=spool) as site:
            assert torch.equal(residual_of(site), before)
            after = trained(linear, site)
            assert not torch.equal(after, before)
        with join(nn.Linear(30, 12, bias=False), None, host.address, island_id="b", spool_dir=spool) as site:
            assert residual_of(site).norm() == 0


@pytest.mark.parametrize("counted", [True, False])
def test_what_was_in_flight_at_the_end_of_a_process_is_settled_by_whether_it_counts(
    counted: bool, tmp_path: Path
) -> None:
    spool = str(tmp_path / "spool")
    with serving(config("int2", "fp32"), tmp_path / "state") as host:
        linear = nn.Linear(30, 12, bias=False)
        with join(linear, None, host.address, island_id="a", spool_dir=spool) as site:
            before = trained(linear, site)
            with torch.no_grad():
                linear.weight.sub_(STEP)
            if not counted:
                site.courier._link.push = lambda *_, **__: pb.Receipt()  # type: ignore[method-assign]
            site.courier.contribute(0, 1, 1, site.replica.stage(0), tokens=1, steps=1)
            assert site.replica.feedback is not None
            left = site.replica.feedback[0].keep().left[0]
        with join(nn.Linear(30, 12, bias=False), None, host.address, island_id="a", spool_dir=spool) as site:
            assert torch.equal(residual_of(site), left if counted else before)


def test_residuals_that_are_older_than_the_last_contribution_are_forgotten(tmp_path: Path) -> None:
    """As where the disk failed, or the island was started without its files in between."""
    with serving(config("int2", "fp32"), tmp_path / "state") as host:
        for spool, kept in (("one", False), ("two", False), ("one", False), ("one", True)):
            linear = nn.Linear(30, 12, bias=False)
            with join(linear, None, host.address, island_id="a", spool_dir=str(tmp_path / spool)) as site:
                assert bool(residual_of(site).norm()) == kept
                trained(linear, site)


# -- what receipts settle ----------------------------------------------------------------------------------------------


class Line:
    """A link that answers as it is told."""

    def __init__(self, receipt: pb.Receipt, outcome: str) -> None:
        self.receipt, self.outcome = receipt, outcome
        self.fails = False
        self.buffers = Buffers(torch.uint8)

    def push(self, *_: object, **__: object) -> pb.Receipt:
        if self.fails:
            raise StaleEpoch("the lease is over")
        return self.receipt

    def fetch(self, _: object, size: int, *__: object, **___: object) -> tuple[pb.FetchHeader, torch.Tensor]:
        payload = torch.zeros(size, dtype=torch.uint8)
        if self.outcome == "anchor":
            return pb.FetchHeader(outcome="anchor", codec_id=1, codec_version=1), payload
        return pb.FetchHeader(outcome=self.outcome, version=1), payload


def courier(line: Line) -> tuple[Courier, Replica]:
    """A rank whose embedding has moved, over a line."""
    values = plain_model()
    mine = replica(values, up="topk", alpha=0.5)
    values["embed"].sub_(torch.linspace(1, 2, 15).view(5, 3))
    return Courier(line, mine, pb.HeartbeatRequest(), config("topk", "fp32")), mine  # type: ignore[arg-type]


def kept(of: Replica) -> list[float]:
    assert of.feedback is not None
    return of.feedback[0].residual(0, 15).tolist()


def test_without_a_receipt_the_mass_stays() -> None:
    line = Line(pb.Receipt(), "committed")
    carrier, mine = courier(line)
    line.fails = True
    with pytest.raises(StaleEpoch):
        carrier.exchange(0, 0, 0, mine.stage(0), tokens=1, steps=1)
    carrier.abandon()
    mine.rejoin({0: Counted(0, 1, frozenset())})
    assert kept(mine) == [0.0] * 15
    mine.end(0, Ending.COMMITTED)
    assert kept(mine) == [0.0] * 15


def test_a_receipt_that_comes_under_an_old_epoch_settles_nothing_of_the_new_one() -> None:
    line = Line(pb.Receipt(), "committed")
    carrier, mine = courier(line)
    carrier.abandon()
    with pytest.raises(StaleEpoch):
        carrier.contribute(0, 0, 0, mine.stage(0), tokens=1, steps=1)
    heard: list[Fate] = []
    mine.receipt = lambda fragment, fate: heard.append(fate)  # type: ignore[method-assign]
    fresh = Courier(line, mine, pb.HeartbeatRequest(), config("topk", "fp32"))  # type: ignore[arg-type]
    line.push = lambda *_, **__: fresh.abandon() or pb.Receipt()  # type: ignore[method-assign, func-returns-value]
    fresh.contribute(0, 0, 0, mine.stage(0), tokens=1, steps=1)
    assert heard == []
