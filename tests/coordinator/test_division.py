"""Shards of islands that are away: taken over, given back, and never read twice as far as the reading counts."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator import facts
from coordinator.division import checked, first
from coordinator.facts import Absent, Accepted, Entry, Fact, Released
from coordinator.recovery import Recovered, replay, state_row
from coordinator.rounds import Beat, Contributed, Joined, Kick
from coordinator.state import apply, begin
from diloco.config import load_run
from diloco.errors import ConfigError, Malformed, Refused
from diloco.shards import Place, assign
from tests.support import Play, configure

NAMES, COUNT, BOUND_S, LEASE_S = ("a", "b", "c"), 24, 50.0, 20.0
WEIGHTS = {"a": 1, "b": 2, "c": 1}
OWN = assign(COUNT, WEIGHTS)
SETTINGS = (
    *("rounds.quorum=1", "rounds.grace_s=1.0", f"rounds.lease_s={LEASE_S}", "run.steps=4000"),
    *(f"shards.count={COUNT}", 'shards.islands=["a","b:2","c"]', f"shards.take_over_after_s={BOUND_S}"),
)


@pytest.mark.parametrize("bound_s", [0.0, BOUND_S])
def test_nobody_waits_for_shards_that_nobody_holds(bound_s: float) -> None:
    config = configure(*SETTINGS[4:-1], f"shards.take_over_after_s={bound_s}").shards
    division = first(config, 1)
    assert [division.awaited(config, island) for island in (*NAMES, "stranger")] == [0, 0, 0, 0]


@dataclass(kw_only=True)
class Reader:
    """An island as its data sees it: what it reads, and what of that has yet to count."""

    epoch: int
    serial: int = 0
    at: dict[int, int] = field(default_factory=dict)
    """Visits of the shards that it reads."""
    given_up: dict[int, int] = field(default_factory=dict)
    uncounted: list[tuple[int, int]] = field(default_factory=list)
    told: tuple[int, tuple[str, ...]] = (0, ())
    round: int = -1
    """The last one that it contributed to."""

    def copy(self) -> Reader:
        return Reader(
            **{**vars(self), "at": {**self.at}, "given_up": {**self.given_up}, "uncounted": [*self.uncounted]}
        )


def text(places: dict[int, int]) -> tuple[str, ...]:
    return tuple(str(Place(shard=shard, visits=visits)) for shard, visits in places.items())


class World:
    """A run and readers that obey it, late; counts what they have read once it counts."""

    def __init__(self) -> None:
        self.play = Play(*SETTINGS, islands=NAMES)
        self.readers: dict[str, Reader] = {}
        self.kept: dict[str, tuple[Reader, int]] = {}
        self.beats: dict[str, Beat] = {}
        self.counted: set[tuple[int, int]] = set()
        for name in NAMES:
            self.readers[name] = Reader(epoch=self.play.epoch(name))
            self.beat(name)
            self.turn(name)

    @property
    def round(self) -> int:
        return self.play.state.rounds[0].round

    def beat(self, name: str) -> None:
        self.write(name)
        self.deliver(name)

    def write(self, name: str) -> None:
        """A heartbeat that is on its way."""
        if reader := self.readers.get(name):
            self.beats[name] = Beat(
                island=name, epoch=reader.epoch, ready=True, serial=reader.serial, places=text(reader.given_up)
            )

    def deliver(self, name: str) -> None:
        reader, beat = self.readers.get(name), self.beats.pop(name, None)
        if not beat:
            return
        try:
            self.play.take(beat)
        except Refused:
            if reader and reader.epoch == beat.epoch:
                self.join(name)
            return
        division = self.play.state.division
        if reader and reader.epoch == beat.epoch and division.serials[name] > reader.told[0]:
            reader.told = division.serials[name], tuple(division.told(name))

    def turn(self, name: str) -> None:
        reader, awaited = self.readers.get(name), self.play.state.division.awaited(self.play.state.shards, name)
        if not reader or reader.told[0] == reader.serial or (awaited and not reader.at):
            return
        known = reader.given_up | reader.at
        reader.serial, held = reader.told[0], [Place.parse(place) for place in reader.told[1]]
        reader.at = {place.shard: max(place.visits, known.get(place.shard, 0)) for place in held}
        reader.given_up = {shard: visits for shard, visits in known.items() if shard not in reader.at}

    def read(self, name: str) -> None:
        if reader := self.readers.get(name):
            for shard, visits in reader.at.items():
                reader.uncounted.append((shard, visits))
                reader.at[shard] = visits + 1

    def give(self, name: str) -> None:
        reader = self.readers.get(name)
        if not reader or reader.round == self.round:
            return
        entry = Entry(island=name, epoch=reader.epoch, tokens=1)
        try:
            self.play.take(
                Contributed(fragment=0, round=self.round, entry=entry, places=text(reader.given_up | reader.at))
            )
        except Refused:
            self.join(name)
            return
        if not any(isinstance(fact, Accepted) for fact in self.play.facts):  # it has, under another epoch
            reader.uncounted, reader.round = [], self.round
            return
        twice = self.counted.intersection(reader.uncounted)
        assert not twice, f"{name} has read what counts already: {twice}"
        self.counted.update(reader.uncounted)
        [accepted] = [fact for fact in self.play.facts if isinstance(fact, Accepted)]
        reader.uncounted, reader.round = [], accepted.round

    def join(self, name: str) -> None:
        """It comes back under a new epoch with its places, and what it had not contributed is lost."""
        old = self.readers.pop(name, None)
        self._join(name, Reader(epoch=0, at=old.at if old else {}))
        self.beat(name)

    def _join(self, name: str, reader: Reader) -> None:
        self.play.take(Joined(island=name))
        reader.epoch, reader.round = self.play.epoch(name), reader.round
        self.readers[name] = reader
        division = self.play.state.division
        reader.told = division.serials[name], tuple(division.told(name))
        if division.awaited(self.play.state.shards, name):
            reader.at, reader.told = {}, (0, ())  # it waits
        self.turn(name)

    def crash(self, name: str) -> None:
        self.readers.pop(name, None)
        self.beats.pop(name, None)

    def keep(self, name: str) -> None:
        if reader := self.readers.get(name):
            self.kept[name] = reader.copy(), self.round

    def resume(self, name: str) -> None:
        """A process that was killed goes on with its checkpoint, exactly where it may."""
        kept, round_ = self.kept.get(name, (None, -1))
        last = self.readers[name].round if name in self.readers else kept.round if kept else -1
        self.crash(name)
        if not kept or self.play.state.division.serials[name] != kept.serial or round_ != self.round:
            self._join(name, Reader(epoch=0))
        elif last == kept.round:
            resumed = kept.copy()
            self._join(name, resumed)
        self.beat(name)

    def leave(self, name: str) -> None:
        with suppress(Refused):
            self.play.leave(name)
        self.crash(name)

    def kick(self, name: str) -> None:
        with suppress(Refused):
            self.play.take(Kick(island=name, reason="out"))
        self.crash(name)

    def wait(self, name: str) -> None:
        self.play.tick({"a": 1.0, "b": 2.0, "c": 5.0}[name])

    def away(self, name: str) -> list[Fact]:
        """An island is not heard beyond the bound, while the others are; it may train on."""
        found = []
        for _ in range(8):
            found += self.play.tick(LEASE_S / 2)
            for other in set(NAMES) - {name}:
                self.beat(other)
        return found

    def check(self) -> None:
        division = self.play.state.division
        held = [s for of in (division.reads, division.owes) for shards in of.values() for s in shards]
        assert sorted(held) == list(range(COUNT))


OFTEN = ("beat", "beat", "write", "deliver", "turn", "turn", "read", "read", "give", "give", "give", "wait", "wait")
RARE = ("join", "join", "resume", "keep", "keep", "crash", "leave", "kick", "away", "away")
MOVES = (*OFTEN * 3, *RARE)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_counts_is_read_twice_whoever_comes_and_goes(seed: int) -> None:
    world, chance = World(), random.Random(seed)
    for _ in range(500):
        getattr(world, chance.choice(MOVES))(chance.choice(NAMES))
        world.check()
    assert len(world.counted) > 30
    for _ in range(3):  # once all are here and heard, each has its own again
        for name in NAMES:
            if name not in world.readers:
                world.join(name)
            world.beat(name)
            world.turn(name)
            world.beat(name)
    assert world.play.state.division.reads == OWN
    for name in NAMES:
        world.turn(name)
        assert tuple(sorted(world.readers[name].at)) == OWN[name]
        world.read(name)
        world.play.tick(6.0)
        world.give(name)


def test_a_lost_island_is_read_on_from_its_last_contribution_and_goes_on_behind_who_took_over() -> None:
    world = World()
    for _ in range(3):
        world.read("b")
    world.give("b")
    world.read("b")  # this never counts
    assert Absent(island="b", reason="its lease has been over for 50 s") in world.away("b")
    for name in ("a", "c"):
        world.turn(name)
        own, taken = set(OWN[name]), set(world.readers[name].at) - set(OWN[name])
        assert taken <= set(OWN["b"])
        assert {world.readers[name].at[shard] for shard in taken} == {3}
        assert {world.readers[name].at[shard] for shard in own} == {0}
        world.read(name)
    assert not set(world.readers["a"].at) & set(world.readers["c"].at)
    world.join("b")
    assert world.readers["b"].told[1] == (), "it waits for who reads its shards"
    for name in ("a", "c"):
        world.beat(name)
        world.turn(name)
        assert tuple(sorted(world.readers[name].at)) == OWN[name]
        world.beat(name)
        assert any(isinstance(fact, Released) for fact in world.play.facts)
    world.beat("b")
    world.turn("b")
    assert world.readers["b"].at == dict.fromkeys(OWN["b"], 4)


def test_who_has_never_come_is_taken_over_too_and_who_is_kicked_at_once() -> None:
    play = Play(*SETTINGS, islands=("a", "b"))
    for _ in range(6):
        for name in ("a", "b"):
            play.beat(name)
        facts_ = play.tick(9.0)
    assert facts_ == [Absent(island="c", reason="it has not come within 50 s")]
    assert play.state.division.reads == assign(COUNT, {"a": 1, "b": 2}) | {"c": ()}
    play.take(Kick(island="b", reason="for good"))
    assert play.tick(0.0) == [Absent(island="b", reason="for good")]
    assert play.state.division.reads == {"a": tuple(range(COUNT)), "b": (), "c": ()}
    play.take(Kick(island="a", reason="for good"))
    play.tick(0.0)
    assert len(play.state.division.reads["a"]) == COUNT, "where nobody is left, nobody takes over"


def test_the_division_outlives_the_coordinator_by_facts_and_by_their_state(tmp_path: Any) -> None:
    world = World()
    world.read("b")
    world.give("b")
    world.away("b")
    for name in ("a", "c"):
        world.turn(name)
    world.join("b")
    world.beat("a")
    state = world.play.state
    assert state.division.owes
    assert state.division.places
    config = configure(*SETTINGS)
    folded = begin(state.config, state.weights, state.schedule, state.shards)
    for fact in world.play.history:
        kind, body = facts.encode(fact)
        folded = apply(folded, facts.decode(kind, json.loads(json.dumps(body))), 0.0)
    assert folded.division == state.division
    kind, body = state_row(Recovered(state=state), [])
    fresh = replay([], config, tmp_path, lambda _: None)  # type: ignore[arg-type,return-value]
    from coordinator.recovery import _replay_state

    _replay_state(fresh, json.loads(json.dumps(body)))
    assert kind == "state"
    assert fresh.state.division == state.division


def test_places_that_cannot_be_are_refused() -> None:
    shards = Play(*SETTINGS).state.shards
    assert checked(["3@0:7", "11@1:2:3:4"], shards) == ("3@0:7", "11@1:2:3:4")
    assert checked(["3@0:7"], Play().state.shards) == (), "where nobody takes over they mean nothing"
    for places, says in (
        (["24@0:1"], "in none of the run.s 24 shards"),
        (["3@0"], "is no place in a shard"),
        (["3@0:" + "9" * 200], "in none of the run's"),
        (["1@0:0"] * 25, "25 places were sent"),
    ):
        with pytest.raises(Malformed, match=says):
            checked(places, shards)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["shards.take_over_after_s=5", "shards.count=4"], r"needs islands that take over: name them in shards\.isl"),
        (
            ["sync.strategy=strided", *SETTINGS[4:], 'run.coordinators=["a:1","b:2"]', "sync.fragments=2"],
            r"needs one coordinator that knows who is absent, and run\.coordinators names 2",
        ),
    ],
)
def test_settings_that_cannot_be(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_run('[run]\nid="x"\nsteps=2000', "the test", overrides)
