"""An island that is killed and started again ends with the bits of one that was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.config import RunConfig
from diloco.digest import show
from island.config_checkpoint import CheckpointConfig
from island.config_mesh import AnchorPolicy
from island.session import Session, join
from tests.processes import free_port
from tests.support import Serving, serving

STEPS = 24
WIDTH = 6


def config(**sections: dict[str, Any]) -> RunConfig:
    settings: dict[str, Any] = {
        "run": {"id": "kept", "steps": STEPS},
        "sync": {"every_steps": 4},
        "outer": {"lr": 0.7, "momentum": 0.9},
        "rounds": {"start_islands": 1, "quorum": 1, "grace_s": 0.0, "lease_s": 60.0},
    }
    return RunConfig.model_validate(
        {name: settings.get(name, {}) | sections.get(name, {}) for name in settings | sections}
    )


OVERLAP = {"sync": {"every_steps": 4, "overlap_steps": 2}}
TWO = {"sync": {"strategy": "strided", "fragments": 2, "every_steps": 4, "overlap_steps": 3}}
FEEDBACK = {"wire": {"up": "int4", "down": "int8"}}
SPARSE = {"wire": {"up": "topk-4", "down": "int4", "feedback_decay": 0.9}}
RUNS: dict[str, dict[str, Any]] = {
    "barrier": {},
    "overlap": OVERLAP,
    "two fragments": TWO,
    "feedback": FEEDBACK,
    "feedback in flight": OVERLAP | FEEDBACK,
    "sparse in flight, two fragments": TWO | SPARSE,
    "two coordinators": TWO | FEEDBACK,
}


class Net(nn.Module):
    """Two blocks, a frozen layer and a buffer of the island's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.frozen(x)


class Island:
    """A process of an island, in this one: what it has is its own, and ends with the block."""

    def __init__(
        self, address: str, folder: Path, island_id: str = "a", anchors: AnchorPolicy = "cpu", **settings: Any
    ) -> None:
        torch.manual_seed(7)
        self.model = Net()
        checkpoint = CheckpointConfig(url=str(folder), **{"every_steps": 1, **settings})
        self.site: Session = join(
            self.model, None, address, island_id=island_id, run_id="kept", checkpoint=checkpoint, anchors=anchors
        )
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.02)
        self.read: int = self.site.kept("read") or 0
        self.site.attach(self.optimizer, read=lambda: self.read)

    def train(self, until: Callable[[Session], bool] = lambda _: False) -> None:
        """Trains to the end of the run, or until something holds at a step edge."""
        site = self.site
        while not site.done and not until(site):
            self.read += 1
            batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(self.read))
            batch = batch + 0.1 * torch.rand(())  # of the random state that all share
            loss = (self.model(batch) - batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            site.step(tokens=3, loss=loss.item())

    def __enter__(self) -> Island:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Nothing of it is done any more, and nobody hears of that."""
        for seat in self.site._seats:
            if seat.heart:
                seat.heart.end()
            seat.courier.abandon()
            seat.link.close()
            seat.pool.shutdown(wait=True, cancel_futures=True)

    def bits(self) -> dict[str, Any]:
        """All that makes what it does from here on."""
        feedback = self.site.replica.feedback or ()
        return {
            "digests": self.site.digests(),
            "model": {name: value.tolist() for name, value in self.model.state_dict().items()},
            "moments": [{k: v.tolist() for k, v in state.items()} for state in self.optimizer.state.values()],
            "residuals": [[v.tolist() for v in f.keep().residuals.values()] for f in feedback],
            "read": self.read,
            "random": torch.get_rng_state().tolist(),
            "tokens": self.site.tokens,
            "rounds": self.site.rounds,
            "positions": self.site.replica.position,
            "step": self.site.at_step,
        }


@contextmanager
def run(name: str, folder: Path, **sections: dict[str, Any]) -> Iterator[Serving]:
    settings = RUNS[name] | sections
    if name != "two coordinators":
        with serving(config(**settings), folder) as host:
            yield host
        return
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with ExitStack() as stack:
        hosts = []
        for index, address in enumerate(addresses):
            where = {"run": {"id": "kept", "steps": STEPS, "coordinators": addresses, "coordinator_index": index}}
            served = serving(config(**(settings | where)), folder / str(index), listen=address)
            hosts.append(stack.enter_context(served))
        yield hosts[0]


_UNDISTURBED: dict[str, dict[str, Any]] = {}


def undisturbed(name: str, folder: Path) -> dict[str, Any]:
    """The end of a run in which nobody is killed, and nothing is kept."""
    if name not in _UNDISTURBED:
        none = folder / "none"
        with run(name, folder / "undisturbed") as host, Island(host.address, none, every_steps=1000) as island:
            island.train()
            _UNDISTURBED[name] = island.bits()
    return _UNDISTURBED[name]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    ("kept", "killed"),
    [
        (6, 6),
        (7, 14),
        *(
            pytest.param(*steps, marks=pytest.mark.slow)
            for steps in ((1, 1), (3, 3), (5, 11), (8, 8), (10, 21), (11, 24))
        ),
    ],
)
def test_an_island_that_is_killed_ends_with_the_same_bits(tmp_path: Path, name: str, kept: int, killed: int) -> None:
    """The checkpoint is of step `kept`, and it is killed at `killed`: some rounds have ended since then."""
    with run(name, tmp_path / "state") as host:
        with Island(host.address, tmp_path / "kept", every_steps=kept) as first:
            first.train(lambda site: site.at_step == kept)
            first.site.keeping.settle()
            first.site.keeping.checkpoints = None
            first.train(lambda site: site.at_step == killed)
        with Island(host.address, tmp_path / "kept", every_steps=1000) as second:
            assert (second.site.keeping.exact, second.site.at_step) == (True, kept)
            second.train()
            assert second.site.rejoins == 0
            assert second.bits() == undisturbed(name, tmp_path)


@pytest.mark.parametrize("name", ["barrier", "feedback in flight", "sparse in flight, two fragments"])
@pytest.mark.parametrize("places", [("device", "device"), ("device", "cpu"), ("cpu", "device")])
def test_where_anchors_are_changes_no_bit_also_where_a_restart_changes_it(
    tmp_path: Path, name: str, places: tuple[AnchorPolicy, AnchorPolicy]
) -> None:
    """What it is held against has its anchors on the CPU. With overlap, a contribution is in flight at step 7."""
    before, after = places
    with run(name, tmp_path / "state") as host:
        with Island(host.address, tmp_path / "kept", anchors=before, every_steps=7) as first:
            train_to(first, 7)
            first.site.keeping.settle()
            first.site.keeping.checkpoints = None
            train_to(first, 14)
        with Island(host.address, tmp_path / "kept", anchors=after, every_steps=1000) as second:
            assert second.site.replica.on_device == (after == "device")
            assert (second.site.keeping.exact, second.site.at_step) == (True, 7)
            second.train()
            assert second.site.rejoins == 0
            assert second.bits() == undisturbed(name, tmp_path)


def train_to(island: Island, step: int) -> None:
    island.train(lambda site: site.at_step >= step)


def moments(island: Island) -> list[list[float]]:
    return [state["exp_avg"].flatten().tolist() for state in island.optimizer.state.values()]


def is_at_the_anchors(island: Island) -> bool:
    replica = island.site.replica
    return all(torch.equal(h.local, h.anchor) for f in range(len(replica.fragments)) for h in replica.held(f))


@pytest.mark.parametrize("resume", ["exact", "anchor", "none"])
def test_where_the_run_has_gone_on_without_it_the_inner_state_is_kept_all_the_same(tmp_path: Path, resume: str) -> None:
    with run("overlap", tmp_path / "state") as host:
        with Island(host.address, tmp_path / "kept", every_steps=5) as first:
            train_to(first, 5)
            first.site.keeping.settle()
            inner = moments(first)
            first.site.leave("for a while")
        with Island(host.address, tmp_path / "other", island_id="b") as other:
            train_to(other, 16)
            other.site.leave("that is enough")
        with Island(host.address, tmp_path / "kept", resume=resume) as second:
            assert not second.site.keeping.exact
            assert second.site.at_step >= 15
            assert is_at_the_anchors(second)
            assert second.read == (0 if resume == "none" else 5)
            assert (moments(second) == inner) == (resume != "none")
            second.train()
            assert second.site.digests() == [show(outer.digest) for outer in host.ask(lambda run: run.outers)]


def test_where_the_run_goes_on_while_it_repeats_its_steps_it_joins_again(tmp_path: Path) -> None:
    with run("barrier", tmp_path / "state") as host:
        with Island(host.address, tmp_path / "kept", every_steps=5) as first:
            train_to(first, 5)
            first.site.keeping.settle()
            first.site.leave("for a while")
        with Island(host.address, tmp_path / "kept") as second:
            assert (second.site.keeping.exact, second.site.at_step) == (True, 5)
            with Island(host.address, tmp_path / "other", island_id="b") as other:
                train_to(other, 12)
                other.site.leave("that is enough")
            train_to(second, 8)
            assert second.site.rejoins == 1
            assert second.site.at_step >= 12
            second.train()
            assert second.site.digests() == [show(outer.digest) for outer in host.ask(lambda run: run.outers)]


def test_where_an_outcome_is_no_longer_kept_it_begins_with_the_anchors(tmp_path: Path) -> None:
    with run("barrier", tmp_path / "state", sync={"every_steps": 1}) as host:
        with Island(host.address, tmp_path / "kept", every_steps=2) as first:
            train_to(first, 2)
            first.site.keeping.settle()
            first.site.keeping.checkpoints = None
            train_to(first, 20)
        with Island(host.address, tmp_path / "kept") as second:
            assert (second.site.keeping.exact, second.site.at_step, second.read) == (False, 20, 2)


def test_a_coordinator_that_has_lost_the_run_is_no_place_to_go_on_exactly(tmp_path: Path) -> None:
    with run("barrier", tmp_path / "state") as host, Island(host.address, tmp_path / "kept", every_steps=5) as first:
        train_to(first, 5)
        first.site.keeping.settle()
    with run("barrier", tmp_path / "empty") as host, Island(host.address, tmp_path / "kept") as second:
        assert (second.site.keeping.exact, second.site.at_step, second.read) == (False, 0, 5)
        assert is_at_the_anchors(second)


def test_an_anchor_that_is_not_the_coordinator_s_is_replaced(tmp_path: Path) -> None:
    with run("barrier", tmp_path / "state") as host:
        with Island(host.address, tmp_path / "kept", every_steps=5) as first:
            train_to(first, 4)
            first.site.replica.held(0)[0].anchor.view(-1)[0] += 1.0
            train_to(first, 5)
            first.site.keeping.settle()
        with Island(host.address, tmp_path / "kept") as second:
            assert (second.site.keeping.exact, second.site.at_step) == (False, 4)
            assert second.site.digests()[0] == show(host.ask(lambda run: run.outers[0].digest))


def test_nothing_is_kept_without_a_url(tmp_path: Path) -> None:
    with run("barrier", tmp_path / "state") as host:
        for _ in range(2):
            with join(Net(), None, host.address, island_id="a", checkpoint=CheckpointConfig()) as site:
                site.step(tokens=1)
                assert site.keeping.checkpoints is None
                assert site.kept("read") is None
