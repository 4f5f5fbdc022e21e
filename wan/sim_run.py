"""One simulated run: what its seed means, the network, and the adversary."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from coordinator import rounds
from coordinator.facts import Phase
from coordinator.fold import Outer
from coordinator.results import Outcome
from diloco.config import RunConfig, load_run
from diloco.errors import DilocoError
from diloco.feedback import Fate
from diloco.fragments import kept, partition
from diloco.layout import Layout, TensorSpec
from diloco.schedule import Schedule
from wan.sim_checker import Checker, Key, Violation
from wan.sim_coordinator import SimCoordinator
from wan.sim_disk import FREE_BYTES, Disk
from wan.sim_island import Shape, SimIsland, senders
from wan.sim_network import Network, Weather
from wan.sim_plants import PLANTS, Plant
from wan.sim_service import SimService
from wan.sim_wire import Answer, Reply, Request
from wan.sim_world import World, drive

CALM_S = 600.0
"""Virtual seconds within which a run must end once nothing disturbs it."""
QUIET_S = 5.0
"""How long no request has come before a run that is done counts as over: late copies must change nothing."""
MOST_EVENTS = 60_000
CHUNK = "chunk written"
"""The point after a chunk of a push."""
LAYOUT = Layout(
    [
        TensorSpec("layers.0.w", (4, 3)),
        TensorSpec("layers.1.b", (2,)),
        TensorSpec("layers.1.w", (3, 2)),
        TensorSpec("positions", (3,), "static"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How the run of a seed went."""

    seed: int
    violations: tuple[Violation, ...]
    trace: str
    """Digest of everything that happened, in order."""
    seconds: float
    """Virtual."""
    seen: tuple[tuple[str, int], ...]
    """How often something happened: points passed, refusals by their kind, and what islands went through."""


def one_of_two(seed: int) -> str:
    """Settings of a coordinator that may be one of two; drawn apart, so that a seed brings the same run otherwise."""
    rng = random.Random(f"coordinators {seed}")
    if rng.random() < 0.7:
        return ""
    return f'coordinators = ["here:1", "there:1"]\ncoordinator_index = {rng.randrange(2)}'


def configure(rng: random.Random, islands: int, run: str = "") -> RunConfig:
    """Settings of a run with two moving fragments and two to five rounds each.

    Where `run` says that the coordinator is one of two, the islands are as it sees them: they have its fragments alone.
    """
    quorum = rng.randint(1, islands)
    start = rng.randint(quorum, islands)
    deadline = rng.choice((8.0, 15.0, 25.0))
    return load_run(
        f"""
        [run]
        id = "sim"
        steps = {rng.choice((8, 8, 12, 20))}
        {run}
        [sync]
        strategy = "strided"
        fragments = 2
        every_steps = 4
        overlap_steps = {rng.randint(0, 3)}
        max_steps_without_coordinator = {rng.choice((0, 1, 3, 100))}
        alpha = {rng.choice((0.0, 0.5))}
        [merge]
        weights = "{rng.choice(("tokens", "uniform"))}"
        [wire]
        up = "{rng.choice(("fp32", "bf16", "int4", "auto:int2"))}"
        down = "{rng.choice(("fp32", "auto:topk", "int8"))}"
        chunk_bytes = 4096
        [rounds]
        start_islands = {start}
        quorum = {quorum}
        grace_s = {rng.choice((0.0, 2.0, 6.0))}
        deadline_s = {deadline}
        late = "{rng.choice(("drop", "discount", "hold"))}"
        late_rounds = {rng.randint(1, 3)}
        progress_s = 3.0
        lease_s = {rng.choice((5.0, 9.0))}
        [snapshot]
        every_rounds = {rng.randint(1, 3)}
        keep = {rng.randint(1, 3)}
        [limits]
        islands = {max(start, islands - rng.choice((0, 0, 1)))}
        streams = {rng.choice((2, 64, 64))}
        streams_per_island = {rng.choice((2, 16))}
        disk_bytes = {rng.choice((0, 6000))}
        retry_s = {rng.choice((0.5, 2.0))}
        """,
        "the simulator",
    ).value


class Simulation:
    """The run of one seed.

    Args:
        seed: says everything about it.
        plant: a fault to plant, one of `PLANTS`.
        say: is given a line for everything that happens.
    """

    def __init__(self, seed: int, plant: str = "", say: Callable[[str], None] | None = None) -> None:
        self.seed, self.world, self._say = seed, World(seed), say
        self._hash = xxhash.xxh3_64()
        rng = self.world.rng
        planted = PLANTS[plant] if plant else Plant()
        self._coordinator_kind, self._island_kind = planted.coordinator, planted.island
        self.shapes = [
            Shape(id=f"i{i}", ranks=rng.randint(1, 2), step_s=rng.uniform(0.3, 1.0), seed=rng.randrange(1000))
            for i in range(rng.randint(2, 3))
        ]
        self.config = configure(rng, len(self.shapes), one_of_two(seed))
        self.fragments = kept(partition(LAYOUT, self.config.sync), self.config.run)
        self.schedule = Schedule.kept(self.config)
        self.disk = Disk()
        ranks = {shape.id: senders(shape, self.fragments) for shape in self.shapes}
        self.chunk_bytes = rng.choice((8, 16))
        self.network = Network(self.world, lambda: self.coordinator, self.say)
        self.checker = Checker(self.config, self.fragments, self.disk, ranks)
        self.coordinator: SimService | None = None
        self.islands: dict[str, SimIsland] = {}
        self._lives: list[SimIsland] = []
        self.events = self.points = 0
        self.seen: Counter[str] = Counter()
        self._doom: set[int] = set()
        """Numbers of the points at which the coordinator is killed."""
        self._active = 0.0
        """When nothing goes wrong any more."""
        self._pauses = 0.0
        """Share of contributions after which the run is paused."""
        self._chunks, self._doom_chunks = 0, set[int]()
        """Chunks that were written, and after which of them it is killed."""

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Plays it to its end."""
        rng = self.world.rng
        self._start_coordinator()
        for shape in self.shapes:
            self.world.at(rng.uniform(0, 2), lambda s=shape: self._start_island(s))  # type: ignore[misc]
        active = rng.uniform(5, 35)
        self._plan(active)
        while not self.finished and self.world.now < active + CALM_S and self.events < MOST_EVENTS:
            if not self.world.step():
                break
            self.events += 1
            self.checker.now = self.world.now
            self.checker.each(self.coordinator)
            if len(self.checker.violations) > 20:
                break
        self.checker.end(self.coordinator, self.finished, self._standing())
        for owner in (self.coordinator, *self.islands.values()):
            if owner:
                owner.kill()
        for island in self._lives:
            self.seen["joined again in place"] += island.rejoins
            self.seen["applied late"] += island.late
        return Result(
            seed=self.seed,
            violations=tuple(self.checker.violations),
            trace=self._hash.hexdigest(),
            seconds=self.world.now,
            seen=tuple(sorted(self.seen.items())),
        )

    @property
    def finished(self) -> bool:
        """Whether all islands have left a run that is done, and no request has come for a while."""
        coordinator = self.coordinator
        return (
            self.world.now > self.network.last_request + QUIET_S
            and coordinator is not None
            and coordinator.state.phase is Phase.DONE
            and self.schedule.finished(coordinator.ended[: len(self.schedule.offsets)])
            and len(self.islands) == len(self.shapes)
            and all(island.finished for island in self.islands.values())
        )

    def _standing(self) -> str:
        state = self.coordinator.state if self.coordinator else None
        where = [(r.version, r.round, sorted(r.entries)) for r in state.rounds] if state else "no coordinator"
        steps = {i: (island.at_step, island.finished) for i, island in self.islands.items()}
        return f"phase {state.phase if state else '-'}, rounds {where}, islands {steps}"

    def say(self, text: str) -> None:
        """Notes something that happened."""
        line = f"{self.world.now:9.3f}  {text}"
        self._hash.update(line.encode())
        if self._say:
            self._say(line)

    # -- lives ------------------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self.say("the coordinator starts")
        base = self.world.rng.uniform(0, 1e5)
        try:
            self.coordinator = self._coordinator_kind(self.world, self.disk, self.config, base, self)
        except (DilocoError, KeyError) as error:
            self.checker.violate("I5", f"a coordinator cannot start: {error!r}")
            return
        self.coordinator.chunk_bytes = self.chunk_bytes
        self.coordinator.first_rows()

    def crash_coordinator(self, down_s: float) -> None:
        """Kills the coordinator; another starts after a while."""
        if self.coordinator is None:
            return
        self.say("the coordinator is killed")
        self.coordinator.kill()
        self.coordinator = None
        self.durable(self.disk.crash(self.world.rng))
        self.checker.crashed()
        if len(self.disk.snapshots) > 1 and self.world.rng.random() < 0.4:
            self.say("the newest snapshot is damaged")
            self.disk.snapshots.pop()
        self.world.at(down_s, self._start_coordinator)

    def _start_island(self, shape: Shape) -> None:
        self.say(f"{shape.id} starts")
        self.islands[shape.id] = self._island_kind(
            shape, self.world, self, self.config, LAYOUT, self.fragments, self.chunk_bytes
        )
        self._lives.append(self.islands[shape.id])

    def _crash_island(self, shape: Shape, down_s: float) -> None:
        island = self.islands.get(shape.id)
        if island is None or island.finished or not island.alive:
            return
        self.say(f"{shape.id} is killed")
        island.kill()
        self.world.at(down_s, lambda: self._start_island(shape))

    # -- the adversary ----------------------------------------------------------------------------------------------

    def _plan(self, active: float) -> None:
        """Decides what will go wrong, and that nothing does any more after `active` seconds."""
        rng, at = self.world.rng, self.world.at
        self.network.weather = Weather(
            loss=rng.choice((0.0, 0.0, 0.05, 0.2)),
            double=rng.choice((0.0, 0.1, 0.3)),
            corrupt=rng.choice((0.0, 0.0, 0.1)),
            poison=rng.choice((0.0, 0.0, 0.0, 0.1)),
            torn=rng.choice((0.0, 0.0, 0.05, 0.3)),
            cut=rng.choice((0.0, 0.0, 0.1, 0.4)),
            delay_s=rng.choice((0.02, 0.2, 1.0)),
        )
        self._active = active
        self._pauses = rng.choice((0.0, 0.0, 0.4))
        self._doom_chunks = {rng.randint(2, 60) for _ in range(rng.choice((0, 0, 1, 3)))}
        self._doom = {rng.randint(10, 400) for _ in range(rng.choice((0, 1, 2, 4)))}

        def incident() -> None:
            if self.world.now >= active:
                return
            shape, kind = rng.choice(self.shapes), rng.randrange(16)
            island = self.islands.get(shape.id)
            if kind == 0:
                self.crash_coordinator(rng.uniform(0.1, 5.0))
            elif kind in (1, 2):
                self._crash_island(shape, rng.uniform(0.2, 6.0))
            elif kind in (3, 14) and island:
                self.say(f"{shape.id} sleeps")
                island.asleep_until = self.world.now + rng.uniform(0.5, 2.5) * self.config.rounds.lease_s
            elif kind == 4:
                self.say(f"{shape.id} is cut off")
                self.network.cut.add(shape.id)
                at(rng.uniform(1.0, 12.0), lambda: self.network.cut.discard(shape.id))
            elif kind == 5 and island:
                self.say(f"{shape.id} is slow")
                island.slow = rng.uniform(2.0, 6.0)
            elif kind == 6 and self.coordinator:
                self.say("the coordinator's clock jumps")
                self.coordinator.base += rng.uniform(1.0, 20.0)
            elif kind in (8, 9):
                self.say("the disk fails")
                self.disk.failing = rng.choice(("no space left on device", "input/output error"))
                at(rng.uniform(0.5, 10.0), lambda: setattr(self.disk, "failing", ""))
            elif kind in (10, 15):
                self._pause()
            elif kind == 11:
                order = rounds.Drain if rng.random() < 0.5 else rounds.Kick
                self.command(order(island=shape.id, reason="an operator wants it"))
            elif kind == 12 and rng.random() < 0.5:
                self.command(rounds.Stop(reason="an operator wants it"))
            elif kind == 13:
                self.say("the disk is nearly full")
                self.disk.free_bytes = self.config.limits.disk_free_bytes + rng.randint(0, 60)
                at(rng.uniform(0.5, 10.0), lambda: setattr(self.disk, "free_bytes", FREE_BYTES))
            at(rng.uniform(0.5, 8.0), incident)

        def calm() -> None:
            self.say("nothing disturbs the run any more")
            self.network.weather, self._doom, self._doom_chunks, self.disk.failing = Weather(), set(), set(), ""
            self.disk.free_bytes, self._pauses = FREE_BYTES, 0.0
            resume()
            self.network.cut.clear()
            for island in self.islands.values():
                island.slow = 1.0

        def resume() -> None:
            if not self.coordinator or self.coordinator.state.paused:
                self.command(rounds.Resume(reason="an operator wants it"))
                at(1.0, resume)

        if rng.random() < 0.9:
            at(rng.uniform(0.5, 6.0), incident)
        at(active, calm)

    def _pause(self) -> None:
        """An operator pauses the run for a while."""
        rng = self.world.rng
        if self.world.now >= self._active:
            return
        self.command(rounds.Pause(reason="an operator wants it"))
        self.world.at(rng.uniform(1.0, 30.0), lambda: self.command(rounds.Resume(reason="an operator wants it")))

    def command(self, event: rounds.Event) -> None:
        """An operator has the coordinator take an event, if there is one."""
        if self.coordinator:
            self.say(f"an operator: {event}")
            self.world.spawn(drive(self.coordinator.take(event)), self.coordinator)

    # -- what islands see -------------------------------------------------------------------------------------------

    def send(self, island: str, request: Request, answer: Answer) -> Callable[[], None]:
        """Sends a request over the network."""
        return self.network.send(island, request, answer)

    def poison(self, island: str) -> str:
        """Whether an island's next contribution holds NaN, and whether the island sees it."""
        rng, share = self.world.rng, self.network.weather.poison
        return rng.choice(("sent", "seen")) if share and rng.random() < share else ""

    # -- watching ---------------------------------------------------------------------------------------------------

    def point(self, label: str) -> None:
        """The coordinator may be killed between two operations."""
        self.points += 1
        self.seen[label] += 1
        self._chunks += label == CHUNK
        if self.points in self._doom or (label == CHUNK and self._chunks in self._doom_chunks):
            self.say(f"point {self.points}: {label}")
            self.crash_coordinator(self.world.rng.uniform(0.1, 5.0))

    def durable(self, rows: list[tuple[str, dict[str, Any]]]) -> None:
        """Rows of the ledger cannot be lost any more."""
        self.checker.now = self.world.now
        for kind, body in rows:
            if kind == "accepted" and self.world.rng.random() < self._pauses:  # while a round is open
                self.world.at(0.1, self._pause)
            self.say(f"ledger: {kind} { {k: v for k, v in body.items() if k != 'pieces'} }")
            self.checker.row(kind, body)

    def restarted(self, coordinator: SimCoordinator) -> None:
        """A coordinator has taken up the disk."""
        self.checker.now = self.world.now
        self.checker.restarted(coordinator)

    def published(self, fragment: int, round_: int, outcome: Outcome) -> None:
        """Islands can hear of an outcome."""
        self.say(f"f{fragment} r{round_} is published: version {outcome.version}, {outcome.reason}")
        self.checker.published(fragment, round_, outcome)

    def stored(self, request: Request, have: int) -> None:
        """So many bytes of a push have come, from the first."""
        self.checker.stored(request, have)

    def resumed(self, request: Request, have: int) -> None:
        """A push is told where to go on."""
        self.seen["resumed"] += have > 0
        self.checker.resumed(request, have)

    def answered(self, request: Request, reply: Reply) -> None:
        """A reply is on its way."""
        self.checker.answered(request, reply)

    def refused(self, request: Request, error: DilocoError, changes: int) -> None:
        """A refusal is on its way."""
        self.seen[type(error).__name__] += 1
        self.say(f"{request.method} of {request.island} is refused: {error}")
        self.checker.refused(request, error, changes)

    def planted(self, outers: list[Outer]) -> None:
        """First parameters are written."""
        self.checker.planted(outers)

    def stopped(self) -> None:
        """A coordinator that was told to stop has nobody left to wait for: it ends, and is started again."""
        if self.coordinator:
            self.say("the coordinator ends")
            self.checker.crashed()
            self.coordinator.kill()
            self.coordinator = None
            self.world.at(self.world.rng.uniform(0.5, 4.0), self._start_coordinator)

    def reported(self, island: str, epoch: int, fragment: int, version: int, digest: int) -> None:
        """An island holds a version."""
        self.say(f"{island} holds f{fragment} version {version}")
        self.checker.reported(island, epoch, fragment, version, digest)

    def based(self, island: str, fragment: int, version: int, digest: int) -> None:
        """An island contributes from a version."""
        self.checker.based(island, fragment, version, digest)

    def settled(self, island: str, epoch: int, fragment: int, round_: int, rank: int, fate: Fate) -> None:
        """A rank settles what the codec dropped of a contribution."""
        self.checker.settled(Key(island, epoch, fragment, round_), rank, fate)

    def mismatched(self, island: str, fragment: int, version: int) -> None:
        """What an island has fetched is not what the coordinator named."""
        self.say(f"{island} has other bits of f{fragment} version {version} than the coordinator")
        self.checker.mismatched(island, fragment, version)

    def session_failed(self, island: str, error: DilocoError) -> None:
        """An island joins again."""
        self.seen["session failed"] += 1
        self.say(f"{island} gives up its session: {type(error).__name__}: {error}")
