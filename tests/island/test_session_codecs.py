"""Sessions on a real coordinator with lossy codecs: anchors stay the same bits, and what was dropped goes out later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from diloco.codec import CODECS
from diloco.config import RunConfig
from diloco.digest import show
from diloco.errors import StaleEpoch
from diloco.feedback import Ending, Fate
from diloco.replica import Replica
from diloco.v1 import coordinator_pb2 as pb
from island.courier import Courier
from island.session import join
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
    with serving(config(up, down), tmp_path) as host, join(linear, host.address, island_id="a") as site:
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
    with serving(config("int2", "fp32"), tmp_path) as host, join(linear, host.address, island_id="a") as site:
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


# -- what receipts settle ----------------------------------------------------------------------------------------------


class Line:
    """A link that answers as it is told."""

    def __init__(self, receipt: pb.Receipt, outcome: str) -> None:
        self.receipt, self.outcome = receipt, outcome
        self.fails = False

    def push(self, *_: object, **__: object) -> pb.Receipt:
        if self.fails:
            raise StaleEpoch("the lease is over")
        return self.receipt

    def fetch(self, _: object, size: int, *__: object) -> tuple[pb.FetchHeader, torch.Tensor]:
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


MOVED = torch.linspace(1, 2, 15)
LEFT = [*MOVED.tolist()[:14], 0.0]


@pytest.mark.parametrize(
    ("receipt", "outcome", "expected"),
    [
        (pb.Receipt(), "committed", LEFT),
        (pb.Receipt(duplicate=True), "committed", LEFT),
        (pb.Receipt(late="counts in round 3"), "committed", LEFT),
        (pb.Receipt(late="counts in round 3"), "skipped", [x - m for x, m in zip(LEFT, MOVED.tolist(), strict=True)]),
        (pb.Receipt(dropped="late"), "committed", (MOVED / 2).tolist()),
        (pb.Receipt(dropped="late"), "skipped", [0.0] * 15),
        (pb.Receipt(), "skipped", [0.0] * 15),
        (pb.Receipt(), "aborted", [0.0] * 15),
    ],
)
def test_a_receipt_and_an_outcome_settle_a_residual(receipt: pb.Receipt, outcome: str, expected: list[float]) -> None:
    carrier, mine = courier(Line(receipt, outcome))
    carrier.exchange(0, 0, 0, mine.stage(0), tokens=1, steps=1)
    assert kept(mine) == pytest.approx(expected, abs=0.01)
    assert carrier.accepted == (not receipt.dropped)


def test_without_a_receipt_the_mass_stays() -> None:
    line = Line(pb.Receipt(), "committed")
    carrier, mine = courier(line)
    line.fails = True
    with pytest.raises(StaleEpoch):
        carrier.exchange(0, 0, 0, mine.stage(0), tokens=1, steps=1)
    carrier.abandon()
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


def test_an_anchor_that_is_fetched_whole_settles_what_was_in_flight() -> None:
    carrier, mine = courier(Line(pb.Receipt(), "anchor"))
    carrier.contribute(0, 0, 0, mine.stage(0), tokens=1, steps=1)
    carrier.fetch_anchor(0)
    assert kept(mine) == pytest.approx(LEFT, abs=0.01)
    assert mine.up is CODECS["topk"]
