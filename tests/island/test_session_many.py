"""A session in this process on several coordinators: what one of them suffers, the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coordinator import rounds
from coordinator.facts import Standing
from diloco.config import RunConfig
from diloco.digest import show
from diloco.errors import DilocoError, Dismissed, RunMismatch, StaleEpoch
from diloco.replica import Arriving
from island.courier import Courier
from island.seat import REJOINS
from island.session import Session, join
from tests.processes import free_port, wait_until
from tests.support import Clock, Serving, serving

LEASE_S = 0.6
"""Beats come every 0.2 s of real time; leases run out only by the clocks of the test."""
STEPS = 24


def settings(addresses: list[str], index: int = 0, **sync: object) -> RunConfig:
    """Four fragments, one layer each; one of them syncs at every step."""
    return RunConfig.model_validate(
        {
            "run": {"id": "many", "steps": STEPS, "coordinators": addresses, "coordinator_index": index},
            "sync": {"every_steps": 4, "strategy": "strided", "fragments": 4, "alpha": 0.5} | sync,
            "wire": {"up": "int4", "down": "int8"},
            "merge": {"weights": "uniform"},
            "rounds": {"lease_s": LEASE_S, "deadline_s": 1000.0, "grace_s": 0.0},
        }
    )


class Site:
    """An island of one rank in this process, and its coordinators."""

    def __init__(self, count: int, folder: Path, stack: ExitStack, **sync: object) -> None:
        self._folder, self._stack, self._sync = folder, stack, sync
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.clocks = [Clock(1000.0) for _ in range(count)]
        self._lives = [stack.enter_context(ExitStack()) for _ in range(count)]
        self.hosts: list[Serving] = []
        for index in range(count):
            self.start(index)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._data = torch.Generator().manual_seed(1)

    def settings(self, index: int) -> RunConfig:
        return settings(self.addresses if len(self.addresses) > 1 else [], index, **self._sync)

    def start(self, index: int, config: RunConfig | None = None) -> None:
        """Starts a coordinator on what an earlier one has left."""
        host = self._lives[index].enter_context(
            serving(
                config or self.settings(index),
                self._folder / f"state-{index}",
                listen=self.addresses[index],
                clock=self.clocks[index],
                killed=True,
            )
        )
        self.hosts[index:] = [host, *self.hosts[index + 1 :]]

    def kill(self, index: int) -> None:
        self._lives[index].close()

    def join(self, at: int = 0, **limits: Any) -> Session:
        joined = join(self.model, self.optimizer, self.addresses[at], island_id="site", **limits)
        self.site = self._stack.enter_context(joined)
        return self.site

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.randn(4, 5, generator=self._data)
            self.optimizer.zero_grad()
            (self.model(batch) - batch).square().mean().backward()
            self.optimizer.step()
            self.site.step(tokens=4)

    def expire(self, index: int) -> None:
        """Lets every lease at one coordinator run out, and waits until the island has heard of it."""
        self.clocks[index].now += LEASE_S
        self.hosts[index].call(self.hosts[index].run.take(rounds.Tick()))
        heart = list(self.site._seats)[index].heart
        assert heart
        wait_until(lambda: heart.fatal, "the heart has heard of it")

    def versions(self) -> list[int]:
        """Of every fragment, at the coordinator that keeps it."""
        return [self.keeper(f).ask(lambda run, f=f: run.outers[f].version) for f in range(4)]

    def keeper(self, fragment: int) -> Serving:
        return self.hosts[fragment % len(self.hosts)]

    def check(self) -> None:
        """The island has the bits of each coordinator."""
        kept = [self.keeper(f).ask(lambda run, f=f: (run.outers[f].version, run.outers[f].digest)) for f in range(4)]
        assert self.site.digests() == [show(digest) for _, digest in kept]
        assert [p.version for p in self.site.replica.position] == [version for version, _ in kept]


def residuals(site: Session) -> list[torch.Tensor]:
    """What the codec dropped, of each piece of each fragment."""
    assert site.replica.feedback
    return [
        site.replica.feedback[f].residual(i, h.box.numel) for f in range(4) for i, h in enumerate(site.replica.owned(f))
    ]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:
        yield lambda count=2, **sync: Site(count, tmp_path / str(count), stack, **sync)


@pytest.mark.parametrize("at", [0, 1])
def test_two_coordinators_come_to_the_bits_of_one(at: int, begin: Callable[..., Site]) -> None:
    one, two = begin(1, overlap_steps=1), begin(2, overlap_steps=1)
    one.join()
    two.join(at)
    for it in (one, two):
        it.train(STEPS)
        it.check()
    each = [seat.link.traffic() for seat in two.site._seats]
    up, down = two.site.report()
    assert min(up - sum(t.sent for t in each), down - sum(t.received for t in each)) >= 0 < min(map(min, each))
    assert two.site.digests() == one.site.digests()
    assert two.versions() == one.versions() == [5, 6, 6, 6]
    for mine, theirs in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_coordinator_keeps_and_serves_its_own_fragments_alone(begin: Callable[..., Site]) -> None:
    it = begin()
    it.join()
    it.train(6)
    for index, host in enumerate(it.hosts):
        mine = [f for f in range(4) if f % 2 == index]
        held = host.ask(lambda run: [outer.anchor.numel() + outer.momentum.numel() for outer in run.outers])
        assert [f for f in range(4) if held[f]] == mine
        assert sorted({f for f, _ in host.ask(lambda run: list(run.outcomes))}) == mine


def test_rounds_go_on_where_the_other_coordinator_is_killed(begin: Callable[..., Site]) -> None:
    it = begin()
    site = it.join()
    it.train(3)
    it.kill(1)
    wait_until(lambda: site._listen().silent == (False, True), "the island knows")
    it.train(4)  # past the syncs of fragments 3, 0, 1, 2
    assert it.hosts[0].ask(lambda run: [o.version for o in run.outers]) == [2, 0, 2, 0]
    assert [p.version for p in site.replica.position] == [2, 1, 2, 0]
    it.start(1)
    wait_until(lambda: it.hosts[1].ask(lambda run: list(run.ended)) == [0, 2, 0, 1], "the rounds are committed")
    it.train(9)
    it.check()
    assert (site.rejoins, it.versions()) == (0, [4, 4, 4, 4])


def test_a_lease_lost_at_one_coordinator_is_taken_anew_there_alone(begin: Callable[..., Site]) -> None:
    it = begin(every_steps=8)
    site = it.join()
    it.train(10)
    before = [p.detach().clone() for p in it.model.parameters()]
    sent, kept = it.versions(), residuals(site)
    it.expire(1)
    records: list[dict[str, Any]] = []
    site.record = lambda kind, **values: records.append({"kind": kind, **values})
    momentum = {id(p): s["momentum_buffer"].clone() for p, s in it.optimizer.state.items()}
    for p in it.model.parameters():
        p.grad = None
    site.step(tokens=4)
    assert [seat.epoch for seat in site._seats] == [1, 2]
    assert site.at_step == 11, "no step is lost"
    [record] = records
    assert (record["kind"], record["coordinator"], record["epoch"]) == ("rejoin", 1, 2)
    for number, (parameter, old) in enumerate(zip(it.model.parameters(), before, strict=True)):
        layer = number // 2
        assert torch.equal(parameter, old) is (layer % 2 == 0), "the others are as they were"
        if layer % 2:
            anchors = {h.spec.name: h.anchor for h in site.replica.held(layer)}
            name = f"{layer}.{'bias' if number % 2 else 'weight'}"
            assert torch.equal(parameter, anchors[name])
    assert all(torch.equal(it.optimizer.state[p]["momentum_buffer"], momentum[id(p)]) for p in it.optimizer.state)
    assert all(map(torch.equal, residuals(site), kept)), "the receipts had come"
    assert any(values.count_nonzero() for values in kept)
    it.train(12)
    it.check()
    assert (sent, it.versions()) == ([2, 1, 1, 1], [3, 3, 3, 2])
    assert [it.hosts[i].ask(lambda run: run.state.members["site"].dropped) for i in (0, 1)] == [0, 0]


def test_leases_lost_at_both_coordinators_are_taken_anew_at_both(begin: Callable[..., Site]) -> None:
    it = begin()
    site = it.join()
    it.train(6)
    it.expire(0)
    it.expire(1)
    it.train(1)
    assert ([seat.epoch for seat in site._seats], site.rejoins) == ([2, 2], 1)
    it.train(8)
    it.check()


def test_an_anchor_that_is_mended_while_the_other_lease_is_lost_is_mended_all_the_same(
    begin: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = begin()
    site = it.join()
    it.train(4)
    apply, fetch, contribute = Arriving.apply, Courier.fetch_anchor, Courier.contribute
    damaged, sent = list[int](), list[tuple[int, int]]()

    def damaging(self: Arriving, payload: torch.Tensor) -> None:
        if not damaged:
            damaged.extend(f for f in range(4) if self._held[0] in site.replica.held(f))
            self._held[0].anchor.add_(1.0)
            self._held[0].moves += 1
        apply(self, payload)

    def losing(self: Courier, fragment: int) -> Any:
        if damaged == [fragment]:
            damaged.append(-1)
            it.expire(1)
        return fetch(self, fragment)

    def noting(self: Courier, fragment: int, round_: int, *rest: Any) -> None:
        sent.append((fragment, round_))
        contribute(self, fragment, round_, *rest)

    monkeypatch.setattr(Courier, "contribute", noting)
    monkeypatch.setattr(Arriving, "apply", damaging)
    monkeypatch.setattr(Courier, "fetch_anchor", losing)
    it.train(1)
    assert damaged == [0, -1]
    assert [seat.epoch for seat in site._seats] == [1, 2]
    it.train(STEPS - site.at_step)
    it.check()
    assert len(sent) == len(set(sent)) == 20, "nothing is contributed twice"
    assert it.versions() == [6, 6, 6, 6]


def test_a_lease_that_is_lost_again_and_again_ends_the_island(begin: Callable[..., Site]) -> None:
    it = begin()
    site = it.join()
    for _ in range(REJOINS):
        it.expire(1)
        site.at_step -= 1
        it.train(1)
    it.expire(1)
    with pytest.raises(StaleEpoch):
        it.train(1)
    assert [seat.epoch for seat in site._seats] == [1, 1 + REJOINS]


def test_what_one_coordinator_orders_holds_for_the_island(begin: Callable[..., Site]) -> None:
    it = begin()
    site = it.join()
    it.train(5)
    it.hosts[1].call(it.hosts[1].run.take(rounds.Drain(island="site", reason="maintenance")))
    wait_until(lambda: site._listen().directive == "leave", "the island has heard of it")
    it.train(1)
    assert (site.leaving, site.done) == ("maintenance", True)
    it.check()
    site.leave("finished")
    members = [host.ask(lambda run: run.state.members["site"]) for host in it.hosts]
    assert [(m.standing, m.reason) for m in members] == [(Standing.LEFT, "maintenance")] * 2


def test_a_lease_that_an_operator_ends_at_one_coordinator_ends_the_island(begin: Callable[..., Site]) -> None:
    it = begin()
    it.join()
    it.train(2)
    it.hosts[1].call(it.hosts[1].run.take(rounds.Kick(island="site", reason="broken")))
    wait_until(lambda: list(it.site._seats)[1].heart.fatal, "the heart has heard of it")  # type: ignore[union-attr]
    with pytest.raises(Dismissed, match="broken"):
        it.train(1)


def test_a_coordinator_that_lost_its_state_begins_with_the_anchors_of_the_island(begin: Callable[..., Site]) -> None:
    it = begin()
    site = it.join()
    it.train(7)
    it.kill(1)
    (it._folder / "state-1").rename(it._folder / "lost")
    before = site.digests()
    it.start(1)
    it.train(1)
    assert (site.rejoins, site.at_step) == (1, 1)
    assert site.digests() == before
    assert [p.version for p in site.replica.position] == [2, 0, 2, 0]
    it.train(STEPS - 1)
    it.check()
    assert it.versions() == [6, 6, 6, 6]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("order", r"run\.coordinators\[1\] is .*, where coordinator 0 answers: put the addresses in the order"),
        ("settings", "has other settings at .* start the coordinators with one run file"),
        ("run", "this coordinator serves run 'other'"),
    ],
)
def test_coordinators_that_do_not_serve_one_run_are_refused(
    wrong: str, message: str, begin: Callable[..., Site], tmp_path: Path
) -> None:
    it = begin()
    it.kill(1)
    if wrong == "order":
        config = it.settings(0)
    elif wrong == "settings":
        config = settings(it.addresses, 1, alpha=0.25)
    else:
        config = it.settings(1)
        config = config.model_copy(update={"run": config.run.model_copy(update={"id": "other"})})
    it._folder = tmp_path / "elsewhere"
    it.start(1, config)
    with pytest.raises(RunMismatch, match=message):
        it.join()
    standing = it.hosts[0].ask(lambda run: run.state.members["site"].standing)
    assert standing is Standing.LEFT, "the lease that it had is given back"


def test_a_coordinator_that_is_not_there_is_waited_for(begin: Callable[..., Site]) -> None:
    it = begin()
    it.kill(1)
    with pytest.raises(DilocoError, match=f"no coordinator answers at {it.addresses[1]}"):
        it.join(connect_timeout_s=0.3)
