"""What tests of several rooms share: a clock to turn, settings in a line, coordinators that serve in this process."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from coordinator import rounds
from coordinator.cli import listen_on
from coordinator.facts import Accepted, Entry, Fact, Phase, Planted
from coordinator.files import Files
from coordinator.fold import Outer, Part, fold
from coordinator.front import Front
from coordinator.gate import Gate
from coordinator.health import Health
from coordinator.rounds import Beat, Contributed, Event, Joined, Leaving, Seeded, Spoiled, Tick
from coordinator.run import Run
from coordinator.state import begin
from coordinator.store import Store
from coordinator.tls import server as server_credentials
from diloco.codec import CODECS, Codec
from diloco.config import RunConfig, load_run
from diloco.errors import Refused
from diloco.fragments import Fragment
from diloco.framing import PROTOCOL, piece_to_proto
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.schedule import Schedule
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link
from tests.processes import wait_until

T = TypeVar("T")
BOUND_S = 30.0
"""Longest any test waits for what should happen at once."""

MODEL = Layout(
    [
        TensorSpec("embed.weight", (6, 4)),
        TensorSpec("layers.0.w", (5, 3)),
        TensorSpec("layers.0.mean", (3,), "buffer"),
        TensorSpec("layers.1.w", (4, 2, 3)),
        TensorSpec("layers.1.scale", ()),
        TensorSpec("positions", (7,), "static"),
    ]
)
"""A model with a tensor of every kind: two moving fragments under `configure`, and a static one."""


class Clock:
    """Seconds that only the test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def configure(*overrides: str, run_id: str = "test") -> RunConfig:
    """Settings of a run with two fragments (H=4, at steps 2 and 4), three rounds each; `overrides` are KEY=VALUE."""
    text = f'[run]\nid = "{run_id}"\nsteps = 12\n[sync]\nstrategy = "strided"\nfragments = 2\nevery_steps = 4\n'
    return load_run(text + 'buffers = "average"\n', "the test", overrides).value


# -- rounds -------------------------------------------------------------------------------------------------------

LEASE_S, GRACE_S, DEADLINE_S = 1000.0, 10.0, 60.0
"""A lease that outlasts the rounds, so that only the tests that mean to lose one do."""


class Play:
    """A run whose islands and clock the test moves."""

    def __init__(self, *overrides: str, islands: Sequence[str] = ()) -> None:
        config = configure(
            f"rounds.lease_s={LEASE_S}",
            f"rounds.grace_s={GRACE_S}",
            f"rounds.deadline_s={DEADLINE_S}",
            f"rounds.start_islands={max(1, len(islands))}",
            *overrides,
        )
        self.state = begin(config.rounds, config.merge.weights, Schedule.of(config), config.shards)
        self.clock = Clock(100.0)
        self.facts: list[Fact] = []
        """All facts that followed from the last event."""
        self.history: list[Fact] = []
        """All facts since the start."""
        if islands:
            for island in islands:
                self.join(island)
            self.take(Seeded())
            for island in islands:
                self.beat(island)
            assert self.state.phase is Phase.RUNNING

    def take(self, event: Event) -> list[Fact]:
        """Takes an event; returns the facts other than that it was accepted."""
        self.state, self.facts = rounds.step(self.state, event, self.clock())
        self.history += self.facts
        return [fact for fact in self.facts if not isinstance(fact, Accepted | Planted)]

    def epoch(self, island: str) -> int:
        return self.state.members[island].epoch

    def join(self, island: str) -> list[Fact]:
        return self.take(Joined(island=island))

    def beat(self, island: str, ready: bool = True) -> list[Fact]:
        return self.take(Beat(island=island, epoch=self.epoch(island), ready=ready))

    def leave(self, island: str) -> list[Fact]:
        return self.take(Leaving(island=island, epoch=self.epoch(island), reason="done here"))

    def give(self, island: str, tokens: int = 100, fragment: int = 0, round_: int | None = None) -> list[Fact]:
        """The island contributes, to the open round if no other is named."""
        number = self.state.rounds[fragment].round if round_ is None else round_
        entry = Entry(island=island, epoch=self.epoch(island), tokens=tokens)
        return self.take(Contributed(fragment=fragment, round=number, entry=entry))

    def spoil(self, island: str, fragment: int = 0, round_: int | None = None) -> list[Fact]:
        number = self.state.rounds[fragment].round if round_ is None else round_
        epoch = self.epoch(island)
        return self.take(Spoiled(fragment=fragment, round=number, island=island, epoch=epoch, reason="not finite"))

    def tick(self, seconds: float) -> list[Fact]:
        self.clock.now += seconds
        return self.take(Tick())

    def refuses(self, kind: type[Refused], event: Event, match: str) -> None:
        """`event` is refused, and the state is the same object, with the same content."""
        before = copy.deepcopy(self.state)
        with pytest.raises(kind, match=match):
            self.take(event)
        assert self.state == before


# -- payloads -----------------------------------------------------------------------------------------------------


def whole(fragment: Fragment) -> list[Piece]:
    """The pieces of a single rank: every tensor of a fragment."""
    return [Piece(t, Box.whole(spec.shape)) for t, spec in zip(fragment.tensors, fragment.specs, strict=True)]


def tiles(shape: Sequence[int], chance: random.Random) -> list[Box]:
    """Cuts a tensor into boxes at random places, empty ones among them, in random order."""
    boxes = [Box.whole(shape)]
    for _ in range(chance.randrange(5) if shape else 0):
        box = boxes.pop(chance.randrange(len(boxes)))
        dim = chance.randrange(len(shape))
        first = chance.randint(0, box.size[dim])
        for start, size in ((0, first), (first, box.size[dim] - first)):
            offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
            boxes.append(Box(offset, (*box.size[:dim], size, *box.size[dim + 1 :])))
    chance.shuffle(boxes)
    return boxes


def deal(fragment: Fragment, ranks: int, chance: random.Random) -> list[list[Piece]]:
    """Cuts a fragment into pieces and deals them to ranks at random."""
    hands: list[list[Piece]] = [[] for _ in range(ranks)]
    for tensor, spec in zip(fragment.tensors, fragment.specs, strict=True):
        for box in tiles(spec.shape, chance):
            chance.choice(hands).append(Piece(tensor, box))
    return hands


def payload(fragment: Fragment, values: Tensor, pieces: Sequence[Piece], codec: Codec = CODECS["fp32"]) -> Tensor:
    """Encodes the pieces of a fragment's flat values (fp32 [fragment.numel]), in their order."""
    out = []
    for piece in pieces:
        where = fragment.place[piece.tensor]
        spec, start = fragment.specs[where], fragment.starts[where]
        box = values[start : start + spec.numel].view(spec.shape)[piece.box.slices].reshape(-1)
        out.append(torch.empty(codec.size(piece.box.numel), dtype=torch.uint8))
        codec.encode(box, out[-1])
    return torch.cat(out) if out else torch.empty(0, dtype=torch.uint8)


def part(
    fragment: Fragment, values: Tensor, pieces: Sequence[Piece] | None = None, codec: Codec = CODECS["fp32"]
) -> Part:
    """One rank's part of a contribution of `values` (fp32 [fragment.numel]); all of it without `pieces`."""
    pieces = whole(fragment) if pieces is None else pieces
    return Part(pieces=pieces, codecs=[codec] * len(pieces), payload=payload(fragment, values, pieces, codec))


def draw(fragment: Fragment, seed: int) -> Tensor:
    """Values of a fragment (fp32 [fragment.numel]): the same ones for a seed, different ones for every fragment."""
    return torch.randn(fragment.numel, generator=torch.Generator().manual_seed(1000 * fragment.index + seed))


def floats(payload: Tensor, codec: Codec = CODECS["fp32"]) -> Tensor:
    """Decodes the payload of a codec that codes every value by itself (fp32, flat)."""
    out = torch.empty(payload.numel() // codec.size(1))
    codec.decode(payload, out)
    return out


# -- coordinators ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A coordinator that serves in this process, on the loop of a thread that all of them share."""

    address: str
    run: Run
    health: Health
    gate: Gate
    front: Front

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the coordinator's loop."""
        return _on_loop(work)

    def ask(self, question: Callable[[Run], T]) -> T:
        """What a function of the run returns, asked between two events."""

        async def answer() -> T:
            return question(self.run)

        return _on_loop(answer())


@contextmanager
def serving(
    config: RunConfig,
    folder: Path,
    *,
    listen: str = "127.0.0.1:0",
    clock: Callable[[], float] = time.monotonic,
    killed: bool = False,
    files: Files | None = None,
    tls: TLS | None = None,
) -> Iterator[Serving]:
    """A coordinator over a state folder, until the end of the block; then it stops as on SIGTERM, or as if `killed`.

    Raises:
        DilocoError: what made the run fail meanwhile.
    """
    store = Store(folder, files, config.limits.disk_bytes)
    try:

        async def begin() -> tuple[Run, Health, Gate, Front, int]:
            run = Run(config, store, clock)
            health, gate = Health(run, clock), Gate()
            front, port = await listen_on(run, listen, health, gate, server_credentials(tls))
            run.begin()
            return run, health, gate, front, port

        run, health, gate, front, port = _on_loop(begin())

        async def end() -> None:
            await front.stop(grace=None)
            if killed:
                await _drop(run)
                return
            await run.finish()
            if run.failed.done():
                run.failed.result()

        try:
            address = f"{listen.rpartition(':')[0]}:{port}"
            yield Serving(address=address, run=run, health=health, gate=gate, front=front)
        finally:
            _on_loop(end())
    finally:
        store.close()


async def _drop(run: Run) -> None:
    """Ends a run's threads and tasks, and nothing more: what it has not made durable is gone."""
    for task in run._tasks:
        task.cancel()
    await asyncio.gather(*run._tasks, return_exceptions=True)
    async with run._turn:
        run._keeper.close()
        run._worker.shutdown()
        run._scribe.shutdown()
    if run.failed.done():
        run.failed.exception()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """A loop on a thread of its own. There is one for good, because grpc.aio shares its poller among all loops."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coordinators", daemon=True).start()
    return loop


def _on_loop(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(BOUND_S)


@dataclass(kw_only=True)
class Visitor:
    """An island as the protocol sees it, every call made by hand."""

    link: Link
    layout: Layout
    identity: pb.HeartbeatRequest
    chunk_bytes: int = 2**20

    def join(self, **fields: Any) -> pb.JoinReply:
        """Enters the run; `fields` overwrite those of an honest request."""
        honest: dict[str, Any] = {
            "protocol_min": PROTOCOL,
            "protocol_max": PROTOCOL,
            "island_id": self.identity.island_id,
            "ranks": 1,
            "tensors": [pb.TensorSpec(name=s.name, shape=s.shape, kind=s.kind) for s in self.layout.tensors],
            "layout_digest": self.layout.digest,
        }
        reply = self.link.join(pb.JoinRequest(**{**honest, **fields}))
        self.identity.run_id, self.identity.epoch = reply.run_id, reply.epoch
        return reply

    def beat(self, **progress: Any) -> pb.RunState:
        """Sends a heartbeat."""
        beat = pb.HeartbeatRequest(**progress)
        beat.MergeFrom(self.identity)
        return self.link.heartbeat(beat)

    def leave(self, reason: str, **progress: Any) -> None:
        """Leaves the run with a last heartbeat."""
        last = pb.HeartbeatRequest(**self.key(), **progress)
        self.link.leave(pb.LeaveRequest(**self.key(), reason=reason, last=last), BOUND_S)

    def header(
        self, fragment: int, pieces: Sequence[Piece], codec: Codec = CODECS["fp32"], /, **fields: Any
    ) -> pb.PushHeader:
        """The header of a push; `fields` overwrite those of an honest one."""
        honest: dict[str, Any] = {
            **self.key(),
            "fragment": fragment,
            "codec_id": codec.id,
            "codec_version": codec.version,
            "pieces": [piece_to_proto(piece) for piece in pieces],
            "total_bytes": sum(codec.size(piece.box.numel) for piece in pieces),
        }
        return pb.PushHeader(**{**honest, **fields})

    def push(
        self, fragment: Fragment, values: Tensor, pieces: Sequence[Piece] | None = None, /, **fields: Any
    ) -> pb.Receipt:
        """Sends one rank's part of `values` (fp32 [fragment.numel]) and returns the receipt."""
        sent = part(fragment, values, pieces)
        header = self.header(fragment.index, sent.pieces, **fields)
        return self.link.push(header, lambda: [sent.payload], self.chunk_bytes)

    def fetch(
        self, fragment: Fragment, pieces: Sequence[Piece] | None = None, codec: Codec = CODECS["fp32"], /, **fields: Any
    ) -> tuple[pb.FetchHeader, Tensor]:
        """Fetches pieces of an update, or of anchors with `anchor=True`: (header, payload)."""
        pieces = whole(fragment) if pieces is None else pieces
        request = pb.FetchRequest(
            **{
                **self.key(),
                "fragment": fragment.index,
                "pieces": [piece_to_proto(piece) for piece in pieces],
                "wait_s": BOUND_S,
                **fields,
            }
        )
        return self.link.fetch(request, sum(codec.size(piece.box.numel) for piece in pieces))

    def key(self) -> dict[str, Any]:
        """Run, island and epoch: the fields that every request has."""
        return {name: getattr(self.identity, name) for name in ("run_id", "island_id", "epoch")}


@contextmanager
def visit(
    address: str, island: str, layout: Layout = MODEL, *, patience_s: float = BOUND_S, tls: TLS | None = None
) -> Iterator[Visitor]:
    """An island's connection to a coordinator; it has yet to join."""
    link = Link(address, patience_s=patience_s, say=lambda _: None, tls=tls)
    try:
        yield Visitor(link=link, layout=layout, identity=pb.HeartbeatRequest(island_id=island))
    finally:
        link.close()


def wait_quiet(served: Serving) -> None:
    """Returns once no call is under way: all that they took is given back."""

    def quiet() -> bool:
        return served.ask(lambda run: not run.admission.streams and not served.gate.under_way)

    wait_until(quiet, "every call has ended", BOUND_S)


class Rig:
    """A coordinator under a clock that the test turns, and islands that visit it; until the stack is closed."""

    def __init__(
        self, config: RunConfig, folder: Path, stack: ExitStack, *, killed: bool = False, files: Files | None = None
    ) -> None:
        self.clock = Clock(1000.0)
        self.patience_s = BOUND_S
        """How long visitors try again what a full or failing coordinator refuses."""
        self._stack = stack
        self.served = stack.enter_context(serving(config, folder, clock=self.clock, killed=killed, files=files))
        self.address, self.run = self.served.address, self.served.run

    def visitor(self, island: str, layout: Layout = MODEL) -> Visitor:
        """An island that has yet to join."""
        return self._stack.enter_context(visit(self.address, island, layout, patience_s=self.patience_s))

    def island(self, island: str) -> Visitor:
        """An island that has joined."""
        visitor = self.visitor(island)
        visitor.join()
        return visitor

    def started(self, *islands: str) -> list[Visitor]:
        """Islands of a run that has started from the first one's parameters, `draw(fragment, 0)`."""
        visitors = [self.island(island) for island in islands]
        for fragment in (f for f in self.run.fragments if not f.elsewhere):
            visitors[0].push(fragment, draw(fragment, 0), seed=True)
        wait_quiet(self.served)
        phases = [visitor.beat(ready=True).phase for visitor in visitors]
        assert phases[-1] == "running"
        return visitors

    def known(self, island: str, epoch: int) -> Visitor:
        """An island that has joined an earlier coordinator of the run."""
        visitor = self.visitor(island)
        visitor.identity.run_id, visitor.identity.epoch = self.run.config.run.id, epoch
        return visitor

    def tick(self, seconds: float) -> None:
        """Lets time pass."""
        self.clock.now += seconds
        self.served.call(self.run.take(Tick()))

    def inbox(self) -> list[str]:
        """Names of the files of contributions."""
        return sorted(path.name for path in (self.run.store.root / "inbox").iterdir())


def folded(fragment: Fragment, outer: Outer, *arguments: Any) -> tuple[Outer, Tensor]:
    """What `fold` gives, with `outer` left as it is."""
    return fold(fragment, outer.copy(), *arguments)
