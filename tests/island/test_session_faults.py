"""What a session in this process does when things fail: real coordinators, a clock that the test turns."""

from __future__ import annotations

import logging
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coordinator import rounds
from coordinator.store import UPDATES_KEPT
from diloco.codec import Codec
from diloco.config import InnerConfig, RunConfig
from diloco.digest import show
from diloco.errors import (
    DigestMismatch,
    Dismissed,
    DivergedError,
    ExitCode,
    RunMismatch,
    StaleEpoch,
    Unreachable,
    exit_code,
)
from diloco.layout import Layout, TensorSpec
from diloco.replica import Held, Replica
from diloco.v1 import coordinator_pb2 as pb
from island.lease import Lease
from island.link import Link
from island.optimizers import build
from island.restarts import FINAL
from island.seat import REJOINS
from island.session import Session, join
from tests.processes import free_port, wait_until
from tests.support import Clock, Serving, Visitor, serving, visit

LAYOUT = Layout([TensorSpec("weight", (3, 5))])
LEASE_S = 0.6
"""Beats come every 0.2 s of real time; leases run out only by the clock of the test."""
BOUND_S = 60.0


def config(every_steps: int, *, islands: int = 1, grace_s: float = 0.0, **sync: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"id": "faults", "steps": 400},
            "sync": {"every_steps": every_steps, **sync},
            "rounds": {
                "start_islands": islands,
                "quorum": islands,
                "grace_s": grace_s,
                "lease_s": LEASE_S,
                "deadline_s": 1000.0,
            },
        }
    )


class Site:
    """An island of one rank in this process, and coordinators that come and go at one address."""

    def __init__(self, settings: RunConfig, folder: Path, stack: ExitStack) -> None:
        self.settings, self.folder, self._stack = settings, folder / "state", stack
        self._listen = f"127.0.0.1:{free_port()}"
        self._life = ExitStack()
        stack.callback(lambda: self._life.close())
        self.clock = Clock(1000.0)
        self.model = nn.Linear(5, 3, bias=False)
        nn.init.constant_(self.model.weight, 1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.sent: list[tuple[int, int, int]] = []
        """(round, tokens, steps) of every contribution."""
        self.start()

    def start(self) -> None:
        """Starts a coordinator on what an earlier one has left."""
        self.host: Serving = self._life.enter_context(
            serving(self.settings, self.folder, listen=self._listen, clock=self.clock, killed=True)
        )

    def kill(self) -> None:
        """Kills the coordinator."""
        self._life.close()

    def join(self, **limits: float) -> Session:
        """Has the island join; it leaves at the end of the test."""
        joined = join(self.model, self.optimizer, self._listen, island_id="site", **limits)  # type: ignore[arg-type]
        self.site = self._stack.enter_context(joined)
        self.watch()
        return self.site

    def watch(self) -> None:
        """Notes what is sent under the present epoch."""
        courier, contribute = self.site.courier, self.site.courier.contribute

        def noting(fragment: int, round_: int, base: int, staged: Any, tokens: int, steps: int, *rest: Any) -> None:
            self.sent.append((round_, tokens, steps))
            contribute(fragment, round_, base, staged, tokens, steps, *rest)

        courier.contribute = noting  # type: ignore[method-assign]

    def train(self, steps: int, loss: float | None = None) -> None:
        """Takes inner steps: every weight goes down a little, and so much by the optimizer."""
        for _ in range(steps):
            self.model.weight.grad = torch.ones_like(self.model.weight)
            self.optimizer.step()
            self.site.step(tokens=10, loss=loss)

    @contextmanager
    def training(self, steps: int) -> Iterator[threading.Thread]:
        """Takes inner steps on a thread, which has ended well at the end of the block."""
        thread = threading.Thread(target=self.train, args=(steps,), daemon=True)
        thread.start()
        yield thread
        thread.join(BOUND_S)
        assert not thread.is_alive()

    def visitor(self, name: str) -> Visitor:
        """Another island, every call made by hand, which has joined and is ready."""
        visitor = self._stack.enter_context(visit(self._listen, name, LAYOUT))
        visitor.join()
        visitor.beat(ready=True)
        return visitor

    def expire(self) -> None:
        """Lets every lease run out."""
        self.clock.now += LEASE_S
        self.host.call(self.host.run.take(rounds.Tick()))

    def commit(self, visitor: Visitor, *numbers: int) -> None:
        """Commits rounds with nothing but a visitor's contributions."""
        [fragment] = self.host.run.fragments
        for round_ in numbers:
            visitor.push(fragment, torch.full((15,), 0.01), round=round_, base_version=round_, tokens=1)
            assert visitor.fetch(fragment, round=round_)[0].outcome == "committed"

    def check(self, version: int) -> None:
        """The island and the coordinator are at a version, with the same bits."""
        assert self.site.replica.position[0].version == version
        assert self.host.ask(lambda run: run.outers[0].version) == version
        assert self.site.digests() == [show(self.host.ask(lambda run: run.outers[0].digest))]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[RunConfig], Site]]:
    with ExitStack() as stack:
        yield lambda settings: Site(settings, tmp_path, stack)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str | int]:
    """What is fetched: the number of a round, or "anchor"."""
    seen: list[str | int] = []
    fetch = Link.fetch

    def noting(self: Link, request: pb.FetchRequest, size: int, *spool: Path | None, **more: Any) -> Any:
        seen.append("anchor" if request.anchor else request.round)
        return fetch(self, request, size, *spool, **more)

    monkeypatch.setattr(Link, "fetch", noting)
    return seen


def silent(site: Session) -> bool:
    assert site.heart
    return site.heart.silent


# -- nobody answers -----------------------------------------------------------------------------------------------


def test_an_island_trains_on_without_a_coordinator_and_applies_the_outcome_late(
    begin: Callable[[RunConfig], Site], caplog: pytest.LogCaptureFixture
) -> None:
    it = begin(config(10, max_steps_without_coordinator=6, alpha=0.5))
    site = it.join()
    it.train(9)
    it.kill()
    wait_until(lambda: silent(site), "the heart knows")
    it.train(4)
    assert (site.at_step, site.rounds) == (13, 0)
    it.start()
    wait_until(lambda: it.host.run.ended == [1], "the round is committed")
    it.train(3)
    assert (site.at_step, site.rounds) == (16, 1)
    it.check(1)
    [late] = [r.args[2] for r in caplog.records if "steps after its sync" in r.msg]  # type: ignore[index]
    assert 4 <= late <= 6
    it.train(4)
    it.check(2)
    assert it.sent == [(0, 100, 10), (1, 10 * (10 - late), 10 - late)]
    assert site.rejoins == 0


@pytest.mark.parametrize(
    ("every_steps", "bound", "pauses_at"),
    [(4, 0, 4), (4, 2, 6), (4, 500, 8)],
    ids=["at the sync step", "at the bound", "where the next contribution is due"],
)
def test_an_island_pauses_where_it_may_not_train_on(
    every_steps: int,
    bound: int,
    pauses_at: int,
    begin: Callable[[RunConfig], Site],
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = begin(config(every_steps, max_steps_without_coordinator=bound))
    site = it.join()
    it.train(3)
    it.kill()
    wait_until(lambda: silent(site), "the heart knows")
    with it.training(6):
        wait_until(lambda: f"pausing at step {pauses_at} " in caplog.text, "the island pauses")
        assert (site.at_step, site.rounds) == (pauses_at, 0)
        it.start()
    assert site.at_step == 9
    it.check(2)


def test_a_silent_coordinator_is_given_up_in_the_end(begin: Callable[[RunConfig], Site]) -> None:
    it = begin(config(4, max_steps_without_coordinator=0))
    it.join(reconnect_timeout_s=0.5)
    it.train(3)
    it.kill()
    with pytest.raises(Unreachable) as caught:
        it.train(1)
    assert exit_code(caught.value) == ExitCode.UNREACHABLE
    it.start()


@pytest.mark.parametrize("name", ["adamw", "muon", "lamb"])
def test_syncs_leave_the_inner_optimizer_alone_and_a_rollback_empties_it(
    name: str, begin: Callable[[RunConfig], Site]
) -> None:
    it = begin(config(2, overlap_steps=1))
    it.optimizer = build(it.model, InnerConfig(optimizer=name))
    site = it.join()
    it.train(1)
    [state] = it.optimizer.state.values()
    moments = {key: value.data_ptr() for key, value in state.items()}
    it.train(8)
    assert site.replica.position[0].version > 2
    [now] = it.optimizer.state.values()
    assert {key: value.data_ptr() for key, value in now.items()} == moments
    if name == "muon":
        torch.testing.assert_close(now["momentum_buffer"], torch.full((3, 5), 1 - 0.95**9))
    else:
        assert now["step"] == 9
        torch.testing.assert_close(now["exp_avg"], torch.full((3, 5), 1 - 0.9**9))
    it.train(1, loss=math.nan)
    assert site.rollbacks == 1 and not it.optimizer.state


# -- the lease is lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [0, 3, UPDATES_KEPT, UPDATES_KEPT + 1])
def test_a_lost_lease_is_taken_again_and_only_what_was_missed_is_fetched(
    missed: int, begin: Callable[[RunConfig], Site], fetched: list[str | int]
) -> None:
    it = begin(config(1))
    site = it.join()
    it.train(2)
    it.check(2)
    records: list[tuple[str, dict[str, object]]] = []
    site.record = lambda kind, **values: records.append((kind, values))
    it.expire()
    it.commit(it.visitor("quick"), *range(2, 2 + missed))
    wait_until(lambda: site.heart and site.heart.fatal, "the heart has heard of it")
    fetched.clear()
    it.train(1)
    whole = missed > UPDATES_KEPT
    mine = [what for what in fetched if what != 2] if whole else fetched
    assert mine == (["anchor"] if whole else list(range(2, 2 + missed)))
    it.check(2 + missed)
    assert torch.equal(it.model.weight, site.replica.held(0)[0].anchor)
    assert it.optimizer.state, "the state of the inner optimizer is kept"
    assert site.at_step == 2 + missed
    assert (site.rejoins, [kind for kind, _ in records]) == (1, ["rejoin"])
    it.watch()
    it.train(1)
    it.check(3 + missed)
    assert it.sent[-1] == (2 + missed, 10, 1), "what was trained before is in no contribution"


def test_an_update_that_has_moved_the_anchors_already_is_not_fetched_again(
    begin: Callable[[RunConfig], Site], fetched: list[str | int]
) -> None:
    it = begin(config(4, overlap_steps=2))
    site = it.join()
    it.train(2)
    wait_until(lambda: site.flights[0, 0].done(), "the update is here, and not applied")
    it.expire()
    it.commit(it.visitor("quick"), 1)
    wait_until(lambda: site.heart and site.heart.fatal, "the heart has heard of it")
    fetched.clear()
    it.train(1)
    assert fetched == [1]
    it.check(2)


def test_a_lease_lost_in_a_wait_for_a_round_is_taken_again(begin: Callable[[RunConfig], Site]) -> None:
    it = begin(config(1, islands=2))
    slow = it.visitor("slow")
    [fragment] = it.host.run.fragments
    slow.push(fragment, torch.ones(15), seed=True)
    site = it.join()
    with it.training(1):
        wait_until(lambda: len(it.host.run.state.rounds[0].entries) == 1, "the island waits for the other")
        it.expire()
    assert (site.rejoins, site.epoch, site.at_step) == (1, 3, 0)
    again = it.visitor("slow")
    again.push(fragment, torch.zeros(15), round=0, base_version=0, tokens=1)
    it.train(1)
    it.check(1)
    assert it.host.ask(lambda run: run.state.members["site"].contributions) == 1, "what it sent twice counts once"


def test_a_lease_that_is_lost_again_and_again_ends_the_island(
    begin: Callable[[RunConfig], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = begin(config(10))
    site = it.join()
    enter = Lease.enter_again

    def taken_away(self: Lease) -> pb.JoinReply:
        reply = enter(self)
        it.expire()
        return reply

    monkeypatch.setattr(Lease, "enter_again", taken_away)
    it.expire()
    wait_until(lambda: site.heart and site.heart.fatal, "the heart has heard of it")
    with pytest.raises(StaleEpoch):
        it.train(1)
    assert site.rejoins == REJOINS
    assert site.epoch == 1 + REJOINS


@pytest.mark.parametrize("lost", ["some of it", "all of it", "all of it, and other settings"])
def test_a_coordinator_that_has_lost_what_it_knew_is_joined_again(
    lost: str, begin: Callable[[RunConfig], Site], tmp_path: Path
) -> None:
    it = begin(config(2, max_steps_without_coordinator=0))
    site = it.join()
    it.train(2)
    it.kill()
    shutil.copytree(it.folder, tmp_path / "backup")
    it.start()
    it.train(4)
    it.check(3)
    it.kill()
    it.folder = tmp_path / ("backup" if lost == "some of it" else "empty")
    if lost.endswith("settings"):
        it.settings = config(4)
    it.start()
    before = site.digests()
    if lost.endswith("settings"):
        wait_until(lambda: site.heart and site.heart.fatal, "the heart has heard of it")
        with pytest.raises(RunMismatch, match="has other settings"):
            it.train(2)
        return
    it.train(2)
    assert site.rejoins == 1
    it.check(1 if lost == "some of it" else 0)
    assert (site.digests() == before) is (lost == "all of it"), "an empty one begins with what the island has"
    it.train(2)
    assert it.host.ask(lambda run: run.outers[0].version) == (2 if lost == "some of it" else 1)


def test_an_update_of_a_lost_epoch_moves_no_anchor(begin: Callable[[RunConfig], Site]) -> None:
    it = begin(config(1))
    site = it.join()
    old = site.courier
    it.commit(it.visitor("quick"), 0)
    old.abandon()
    before = site.digests()
    with pytest.raises(StaleEpoch, match="is over"):
        old.fetch_update(0, 0)
    assert site.digests() == before


# -- other bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 100])
def test_an_anchor_that_arrives_with_other_bits_is_fetched_again_when_joining(
    times: int, begin: Callable[[RunConfig], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = begin(config(1))
    load, loads = Replica.load, []

    def damaging(self: Replica, held: list[Held], payload: torch.Tensor, codec: Codec) -> None:
        load(self, held, payload, codec)
        loads.append(held)
        if len(loads) <= times:
            held[0].anchor[0, 0] += 1

    monkeypatch.setattr(Replica, "load", damaging)
    first = it._stack.enter_context(visit(it._listen, "first", LAYOUT))
    first.join()
    first.push(it.host.run.fragments[0], torch.full((15,), 0.5), seed=True)
    if times > 3:
        with pytest.raises(DigestMismatch):
            it.join()
        assert it.host.ask(lambda run: run.state.members["site"].standing) is rounds.Standing.LEFT
        return
    it.join()
    it.check(0)
    assert len(loads) == 2
    assert torch.equal(it.model.weight, torch.full((3, 5), 0.5))


# -- NaN ----------------------------------------------------------------------------------------------------------


def test_an_island_with_nan_sits_a_round_out_and_goes_on_from_the_anchors(
    begin: Callable[[RunConfig], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = begin(config(2, grace_s=500.0))
    site = it.join()
    other = it.visitor("other")
    [fragment] = it.host.run.fragments
    other.push(fragment, torch.full((15,), 0.25), round=0, base_version=0, tokens=1)
    assert it.host.run.ended == [0]
    it.train(1)
    with torch.no_grad():
        it.model.weight[1, 2] = math.nan
    it.train(1)
    assert (site.rollbacks, site.rounds) == (1, 1)
    it.check(1)
    assert torch.isfinite(it.model.weight).all()
    assert not it.optimizer.state
    assert it.sent == []
    other.push(fragment, torch.full((15,), 0.25), round=1, base_version=1, tokens=1)
    it.train(2)
    it.check(2)
    assert it.sent == [(1, 20, 2)]
    assert it.host.ask(lambda run: run.state.members["site"].contributions) == 1


def test_a_loss_that_is_not_finite_takes_the_island_back_and_three_in_a_row_end_it(
    begin: Callable[[RunConfig], Site],
) -> None:
    it = begin(config(4))
    site = it.join()
    it.train(1)
    it.train(1, loss=math.inf)
    assert torch.equal(it.model.weight, torch.ones(3, 5))
    assert not it.optimizer.state
    it.train(1, loss=2.0)
    it.train(1, loss=3.0)
    assert it.sent == [(0, 20, 2)], "only what was trained since counts"
    it.check(1)
    for _ in range(2):
        it.train(1, loss=math.nan)
    assert site.rollbacks == 3
    with pytest.raises(DivergedError, match="the training loss is nan at inner step 7"):
        it.train(1, loss=math.nan)


# -- directives ---------------------------------------------------------------------------------------------------


class Orders:
    """What heartbeats are answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directive = self.reason = ""
        self.error: Exception | None = None
        self.beats = 0
        heartbeat = Link.heartbeat

        def ordering(link: Link, request: pb.HeartbeatRequest, *timeout_s: float) -> pb.RunState:
            state = heartbeat(link, request, *timeout_s)
            self.beats += 1
            if self.error:
                raise self.error
            state.directive, state.directive_reason = self.directive, self.reason
            return state

        monkeypatch.setattr(Link, "heartbeat", ordering)

    def until_heard(self) -> None:
        """Waits for two more beats, so that one began after now."""
        before = self.beats
        wait_until(lambda: self.beats >= before + 2, "two more heartbeats")


def test_an_island_pauses_while_it_is_told_to(
    begin: Callable[[RunConfig], Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    orders = Orders(monkeypatch)
    it = begin(config(10))
    site = it.join()
    orders.directive = "pause"
    orders.until_heard()
    with it.training(3):
        wait_until(lambda: "has this island pause at step 1" in caplog.text, "the island pauses")
        orders.until_heard()
        assert site.at_step == 1
        it.expire()  # also there it notices that its lease is lost
        wait_until(lambda: site.rejoins == 1, "the island has joined again")
        orders.directive = ""
    assert site.at_step >= 2


def test_an_island_that_is_told_to_leave_applies_what_is_in_flight_and_says_why(
    begin: Callable[[RunConfig], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Orders(monkeypatch)
    it = begin(config(10, overlap_steps=4))
    site = it.join()
    it.train(6)
    orders.directive, orders.reason = "leave", "this site is needed elsewhere"
    orders.until_heard()
    it.train(1)
    assert (site.leaving, site.done, site.rounds) == ("this site is needed elsewhere", True, 1)
    it.check(1)
    it.train(20)
    assert (site.at_step, it.sent) == (7, [(0, 60, 6)])
    site.leave("finished")
    member = it.host.ask(lambda run: run.state.members["site"])
    assert (member.standing, member.reason) == (rounds.Standing.LEFT, "this site is needed elsewhere")


def test_an_island_that_is_dismissed_ends_for_good(
    begin: Callable[[RunConfig], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Orders(monkeypatch)
    it = begin(config(10))
    site = it.join()
    orders.error = Dismissed("the operator has ended the lease of island 'site'")
    wait_until(lambda: site.heart and site.heart.fatal, "the heart has heard of it")
    with pytest.raises(Dismissed) as caught:
        it.train(1)
    assert exit_code(caught.value) in FINAL


# -- the rest -----------------------------------------------------------------------------------------------------


def test_a_join_that_is_interrupted_is_taken_back(
    begin: Callable[[RunConfig], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = begin(config(10))

    def terminated(*_: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("island.lease.load_run", terminated)
    with pytest.raises(SystemExit):
        it.join()
    member = it.host.ask(lambda run: run.state.members["site"])
    assert (member.standing, member.reason) == (rounds.Standing.LEFT, "asked to stop")


def test_a_newcomer_says_for_how_long_it_has_trained(begin: Callable[[RunConfig], Site]) -> None:
    it = begin(config(10))
    first = it._stack.enter_context(visit(it._listen, "first", LAYOUT))
    first.join()
    first.push(it.host.run.fragments[0], torch.zeros(15), seed=True)
    first.beat(ready=True, step=0)
    it.commit(first, 0)
    first.beat(ready=True, step=15)
    site = it.join()
    assert site.at_step == 15
    it.train(5)
    assert it.sent == [(1, 50, 5)]


def test_nothing_is_decided_by_the_clock_on_the_wall() -> None:
    """It stamps what people read: metrics, events.jsonl, what a command prints. Certificates end by it, and preflight
    compares it with the coordinator's."""
    root = Path(__file__).parents[2]
    files = [path for room in ("island", "coordinator", "diloco") for path in (root / room).rglob("*.py")]
    found = {path.name for path in files if re.search(r"time\.time\b|datetime|\btime_ns", path.read_text())}
    assert found == {"metrics.py", "store.py", "cli.py", "tls.py", "desk.py", "network.py"}


def test_the_log_of_a_session_speaks_at_warning(begin: Callable[[RunConfig], Site], caplog: Any) -> None:
    """People see why an island is not where they expect it, whatever the level of the rest."""
    it = begin(config(1))
    site = it.join()
    it.expire()
    wait_until(lambda: site.heart and site.heart.fatal, "the heart has heard of it")
    it.train(1)
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert any(line.startswith("the lease of epoch 1 is lost (") for line in lines)
    assert any(line.startswith("joined again: epoch 2, from step") for line in lines)
