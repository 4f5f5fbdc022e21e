"""An island takes over the shards of one that is lost, gives them back, and goes on with them from its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coordinator.facts import Standing
from diloco.config import RunConfig, load_run
from diloco.errors import ConfigError
from diloco.layout import Layout, TensorSpec, named_tensors
from diloco.shards import Place, assign
from island.config_checkpoint import CheckpointConfig
from island.data import Batches, Cursor
from island.data.shards import first_cursor
from island.group import Group
from island.holding import Holding
from island.session import join
from tests.island.data.support import numbered, settings, starts
from tests.support import Rig, Visitor, draw

SHARDS, BATCH = 6, 6
TEXT = numbered(spans=40)
OWN = assign(SHARDS, {"a": 1, "b": 1})
SIZE = TEXT.train_sequences // SHARDS


def config() -> RunConfig:
    overrides = [f"shards.count={SHARDS}", 'shards.islands=["a","b"]', "shards.take_over_after_s=20"]
    overrides += ["rounds.lease_s=30", "rounds.grace_s=0", "rounds.quorum=1", "sync.every_steps=4"]
    return load_run('[run]\nid = "kept"\nsteps = 200\n', "the test", overrides).value


class Reading:
    """An island `a` of this process: a small model, a session, and its data; ends like one that is killed."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        keep = CheckpointConfig(url=str(folder), every_steps=1, asynchronous=False)
        self.site = join(self.model, self.optimizer, rig.address, island_id="a", run_id="kept", checkpoint=keep)
        self.holding = Holding(self.site, rig.run.config, Group())
        kept = self.site.kept("data")
        cursor = self.holding.first(Cursor.from_json(kept) if kept else None)
        assert cursor
        data = settings(batch_sequences=BATCH)
        self.batches = Batches(TEXT, cursor, shards=SHARDS, seed=7, data=data)
        self.site.places = lambda: self.holding.places(self.batches)
        self.site.attach(data=lambda: self.batches.cursor.to_json(), holding=self.holding.to_json)

    def hear(self) -> None:
        heart = self.site.heart
        assert heart
        heart.poll()

    def step(self) -> list[int]:
        """One inner step, as the trainer takes it; returns where its sequences begin."""
        if self.holding.heard():
            self.holding.turn(self.batches)
        rows = starts(self.batches.next())
        self.optimizer.zero_grad()
        self.model(torch.ones(4) * rows[0] * 1e-4).square().sum().backward()
        self.optimizer.step()
        self.site.step(tokens=1)
        self.hear()
        return rows

    @property
    def at(self) -> dict[int, int]:
        return {place.shard: place.epoch * SIZE + place.visits for place in self.batches.cursor.places}

    def kill(self) -> None:
        for seat in self.site._seats:
            if seat.heart:
                seat.heart.end()
            seat.courier.abandon()
            seat.link.close()
            seat.pool.shutdown(wait=True, cancel_futures=True)


class Scene:
    """A run of `a`, and of `b` that contributes once, stands at visit 5 then, and is lost."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.rig = Rig(config(), folder / "state", stack)
        self.a = Reading(self.rig, folder / "kept")
        stack.callback(lambda: self.a.kill())
        layout = Layout(TensorSpec(n, tuple(t.shape), kind) for n, t, kind in named_tensors(self.a.model))
        self.b: Visitor = self.rig.visitor("b", layout)
        reply = self.b.join()
        assert reply.state.shards_awaited == 0
        assert list(reply.state.shards) == [str(Place(shard=shard)) for shard in OWN["b"]]
        self.b.beat(ready=True, serial=reply.state.serial)
        [fragment] = self.rig.run.fragments
        places = [str(Place(shard=shard, visits=5)) for shard in OWN["b"]]
        self.b.push(fragment, draw(fragment, 1), tokens=1, steps=4, places=places)
        for _ in range(4):
            self.a.step()

    def lose_b(self) -> None:
        for _ in range(6):
            self.rig.tick(10.0)
            self.a.hear()
        assert self.rig.run.state.members["b"].standing is Standing.LOST
        assert self.rig.run.state.division.absent == ("b",)

    def again(self) -> Reading:
        self.a.kill()
        self.a = Reading(self.rig, self.folder / "kept")
        return self.a


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, stack)


def sequences(shard: int, first: int, count: int) -> list[int]:
    """Where the sequences begin that a shard visits."""
    cursor = Cursor(places=(Place(shard=shard, visits=first),))
    return starts(Batches(TEXT, cursor, shards=SHARDS, seed=7, data=settings(batch_sequences=count)).next())


def test_shards_are_taken_over_where_they_stood_and_given_back_where_they_stand(scene: Scene) -> None:
    a, each = scene.a, BATCH // len(OWN["a"])
    assert a.at == dict.fromkeys(OWN["a"], 4 * each)
    scene.lose_b()
    before = a.at
    rows = a.step()
    assert a.at == {shard: before.get(shard, 5) + 1 for shard in range(SHARDS)}
    assert sorted(rows) == sorted(sequences(s, before.get(s, 5), 1)[0] for s in range(SHARDS))
    a.step()
    reply = scene.b.join()
    assert reply.state.shards_awaited == len(OWN["b"])
    assert "waiting for 3 shards that other islands still read" in reply.state.reason
    assert not reply.state.shards
    a.hear()
    a.step()
    assert set(a.at) == set(OWN["a"])
    state = scene.b.beat(ready=True)
    assert state.shards_awaited == 0
    assert list(state.shards) == [str(Place(shard=shard, visits=7)) for shard in OWN["b"]]
    assert not scene.b.beat(ready=True, serial=state.serial).shards, "it need not be told again"


def test_an_island_resumes_with_what_it_has_taken_over(scene: Scene) -> None:
    scene.lose_b()
    scene.a.step()
    rows, at = scene.a.step(), scene.a.at
    again = scene.again()
    assert again.site.keeping.exact
    assert again.at == at
    follow = again.step()
    assert sorted(follow) == sorted(sequences(shard, visits, 1)[0] for shard, visits in at.items())
    assert not set(follow) & set(rows)


def test_what_was_given_up_and_not_yet_said_is_said_after_a_restart(scene: Scene) -> None:
    scene.lose_b()
    scene.a.step()
    scene.b.join()
    scene.a.hear()
    heart = scene.a.site.heart
    assert heart
    heart.end()
    heart.poll = lambda: scene.rig.run  # type: ignore[assignment,method-assign,return-value]  # its last words are lost
    scene.a.step()
    again = scene.again()
    assert again.site.keeping.exact
    again.hear()
    state = scene.b.beat(ready=True)
    assert list(state.shards) == [str(Place(shard=shard, visits=6)) for shard in OWN["b"]]


def test_an_island_whose_shards_were_divided_anew_does_not_repeat_its_steps(scene: Scene, caplog: Any) -> None:
    scene.lose_b()
    scene.a.step()
    scene.b.join()  # its shards are due to it while a is killed
    caplog.set_level("INFO", logger="diloco.island")
    again = scene.again()
    assert not again.site.keeping.exact
    assert "its shards have been divided anew" in caplog.text
    assert set(again.at) == set(OWN["a"])


def test_nobody_takes_over_by_hand_where_the_coordinator_says_who_does() -> None:
    with pytest.raises(ConfigError, match=r"data\.take_over is set, and in this run the coordinator says"):
        first_cursor(config().shards, settings(take_over=("1",)), "a", 0)
