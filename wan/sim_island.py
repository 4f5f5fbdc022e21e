"""The simulated island: the real replicas and schedule of its ranks, and the session's steps as a process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch

from diloco.codec import CODECS
from diloco.config import RunConfig
from diloco.digest import combine, digest
from diloco.errors import CodecError, DilocoError, StaleEpoch, Unreachable
from diloco.fragments import Fragment
from diloco.framing import chunks
from diloco.layout import Box, Layout, Piece
from diloco.replica import Held, Position, Replica
from diloco.schedule import Schedule, Send
from wan.sim_coordinator import Reply, Request
from wan.sim_world import Gate, Owner, Process, Work, World

TIMEOUT_S = 4.0
"""How long an island waits for a reply before it sends the request again."""
WAIT_S = 2.0
PATIENCE_S = 60.0
"""How long it goes on sending one request; then its session fails and it joins anew."""
OUTCOME_S = 100.0
"""How long it waits for a round to end, besides what the round may take."""


class SimHeld(Held):
    """A piece whose digest is looked up where the same bits have been digested before: islands hold the same ones."""

    def digest(self) -> int:
        return _digest(self.anchor.numpy().tobytes(), self.start, self.spec.shape, self.box)


@lru_cache(maxsize=2048)
def _digest(data: bytes, start: int, shape: tuple[int, ...], box: Box) -> int:
    return digest(torch.frombuffer(bytearray(data), dtype=torch.float32).view(box.size), start, shape, box)


class Outside(Protocol):
    """What an island sees of the world beyond it: the network, and who watches."""

    def send(self, island: str, request: Request, answer: Callable[[Reply | DilocoError], None]) -> Callable[[], None]:
        """Sends a request; `answer` is called for every reply that arrives. What it returns hangs up."""

    def poison(self, island: str) -> bool:
        """Whether the island's next contribution is to be full of NaN."""

    def reported(self, island: str, epoch: int, fragment: int, version: int, digest: int) -> None:
        """The island holds a version."""

    def session_failed(self, island: str, error: DilocoError) -> None:
        """The island gives up its session and joins again."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What an island is like."""

    id: str
    ranks: int
    step_s: float
    """Seconds of one inner step."""
    seed: int


class SimIsland(Owner):
    """One life of an island: it joins, trains to the end of the run, joins again where its session fails, and leaves.

    Args:
        shape: what it is like.
        world: time and chance.
        outside: the network and who watches.
        config, layout, fragments: the run.
    """

    def __init__(
        self,
        shape: Shape,
        world: World,
        outside: Outside,
        config: RunConfig,
        layout: Layout,
        fragments: Sequence[Fragment],
    ) -> None:
        super().__init__()
        self.shape, self.world, self.outside = shape, world, outside
        self.config, self.layout, self.fragments = config, layout, fragments
        self.schedule = Schedule.of(config)
        self.finished = False
        self.slow = 1.0
        self.epoch = self.at_step = self.tokens = 0
        self.ready = False
        self.fatal: StaleEpoch | None = None
        self.replicas: list[Replica] = []
        self._adopted = [(0, 0)] * len(fragments)
        """(tokens, inner step) at which each fragment's anchor was adopted."""
        self._flights: dict[tuple[int, int], list[Process]] = {}
        self._sessions = 0
        world.spawn(self._live(), self)

    # -- the wire ---------------------------------------------------------------------------------------------------

    def call(self, request: Request, *, patience_s: float = PATIENCE_S) -> Work[Reply]:
        """Sends a request, again and again until a reply comes.

        Raises:
            Unreachable: none came in time.
            DilocoError: what the coordinator refused it with.
        """
        until = self.world.now + patience_s
        while True:
            gate, found = Gate(), list[Reply | DilocoError]()

            def answer(reply: Reply | DilocoError, found: list[Reply | DilocoError] = found, gate: Gate = gate) -> None:
                found.append(reply)
                gate.open()

            hang_up = self.outside.send(self.shape.id, request, answer)
            yield (gate, request.wait_s + TIMEOUT_S)
            if not found:
                hang_up()
            elif isinstance(found[0], Reply):
                return found[0]
            elif not isinstance(found[0], CodecError):
                raise found[0]
            if self.world.now > until:
                raise Unreachable("nobody answers")
            yield 0.2 + self.world.rng.random() * 0.3

    def _request(self, method: str, fragment: int = 0, rank: int = 0) -> Request:
        pieces = tuple(h.piece for h in self.replicas[rank].owned(fragment)) if method in ("update", "anchor") else ()
        return Request(
            method=method, island=self.shape.id, epoch=self.epoch, rank=rank, fragment=fragment, pieces=pieces
        )

    # -- life -------------------------------------------------------------------------------------------------------

    def _live(self) -> Work[None]:
        while not self.finished:
            self._sessions += 1
            try:
                yield from self._session(self._sessions)
            except DilocoError as error:
                self.outside.session_failed(self.shape.id, error)
                for flight in itertools.chain(*self._flights.values()):
                    flight.cancel()
                self._flights.clear()
                yield 0.5 + self.world.rng.random()
        self._sessions += 1

    def _session(self, number: int) -> Work[None]:
        self.ready, self.fatal, self.tokens = False, None, 0
        reply = yield from self.call(Request(method="join", island=self.shape.id))
        self.epoch = reply.epoch
        self.replicas = [self._replica(rank) for rank in range(self.shape.ranks)]
        self.world.spawn(self._beats(number), self)
        yield from self._take_up()
        while self.at_step < self.config.run.steps:
            yield self.shape.step_s * self.slow * (0.9 + 0.2 * self.world.rng.random())
            self._train()
            yield from self._edge()
        with contextlib.suppress(StaleEpoch, Unreachable):  # it has left before, or the lease will tell
            yield from self.call(self._request("leave"), patience_s=TIMEOUT_S)
        self.finished = True

    def _beats(self, session: int) -> Work[None]:
        while session == self._sessions:
            try:
                request = replace(self._request("beat"), step=self.at_step, ready=self.ready)
                yield from self.call(request, patience_s=0.0)
            except StaleEpoch as error:
                if session == self._sessions:
                    self.fatal = error
                return
            except DilocoError:
                pass
            yield self.config.rounds.lease_s / 3

    def _poll(self) -> Work[Reply]:
        self._check()
        return (yield from self.call(replace(self._request("beat"), step=self.at_step, ready=self.ready)))

    def _check(self) -> None:
        if self.fatal:
            raise self.fatal

    def _take_up(self) -> Work[None]:
        """What `Session._take_up` does: anchors, then the updates that some ranks lack, then the run's start."""
        self.at_step = 0
        ranks = range(self.shape.ranks)
        for fragment in range(len(self.fragments)):
            found = []
            for rank in ranks:
                reply = yield from self.call(self._request("anchor", fragment, rank))
                replica = self.replicas[rank]
                replica.load(replica.owned(fragment), reply.payload, CODECS["fp32"])
                found.append((reply.version, reply.round))
            newest = max(round_ for _, round_ in found)
            for rank in ranks:
                version, round_ = found[rank]
                while round_ < newest:
                    reply = yield from self._fetch_update(fragment, round_, rank)
                    version, round_ = reply.version, round_ + 1
                self.replicas[rank].position[fragment] = Position(version, round_)
                self.replicas[rank].mix(fragment, alpha=0.0)
            self._report(fragment)
        self.ready = True
        state = yield from self._poll()
        while state.phase == "gathering":
            yield 0.5
            state = yield from self._poll()
        moving = [p.round for p in self.replicas[0].position[: len(self.schedule.offsets)]]
        ahead = min((self.schedule.sync_step(p, r) for p, r in enumerate(moving)), default=0)
        self.at_step = min(max(self.schedule.position(moving), state.step), ahead - 1)
        self._adopted = [(0, self.at_step)] * len(self.fragments)

    # -- training ---------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self.at_step += 1
        self.tokens += 8
        shrink, shift = 0.97, 0.01 * ((self.shape.seed * 31 + self.at_step * 7) % 11 - 5)
        for replica in self.replicas:
            for fragment in range(len(self.fragments)):
                for held in replica.held(fragment):
                    held.local.mul_(shrink).add_(shift)

    def _edge(self) -> Work[None]:
        self._check()
        for action in self.schedule.due(self.at_step):
            if action.round < self.replicas[0].position[action.fragment].round:
                continue
            if isinstance(action, Send):
                self._send(action.fragment, action.round)
            else:
                yield from self._apply(action.fragment, action.round)

    def _send(self, fragment: int, round_: int) -> None:
        poison = self.outside.poison(self.shape.id)
        self._flights[fragment, round_] = [
            self.world.spawn(self._exchange(self._contribution(fragment, round_, rank, poison)), self)
            for rank in range(self.shape.ranks)
        ]

    def _missed(self, fragment: int, round_: int) -> None:
        """The island came in after the send step: it contributes now, or a round that all missed would never open."""
        self._send(fragment, round_)

    def _contribution(self, fragment: int, round_: int, rank: int, poison: bool) -> Request:
        replica = self.replicas[rank]
        payload = torch.cat(list(replica.encode(fragment, replica.stage(fragment))))
        if poison and rank == 0:
            payload.view(torch.float32 if self.config.wire.up == "fp32" else torch.bfloat16)[0] = torch.nan
        return replace(
            self._request("push", fragment, rank),
            round=round_,
            version=replica.position[fragment].version,
            pieces=tuple(h.piece for h in replica.owned(fragment)),
            codec=(replica.up.id, replica.up.version),
            messages=tuple(chunks([payload], self.config.wire.chunk_bytes)),
            total_bytes=payload.numel(),
            tokens=self.tokens - self._adopted[fragment][0],
            steps=self.at_step - self._adopted[fragment][1],
        )

    def _exchange(self, contribution: Request) -> Work[Reply]:
        yield from self.call(contribution)
        return (yield from self._fetch_update(contribution.fragment, contribution.round, contribution.rank))

    def _fetch_update(self, fragment: int, round_: int, rank: int) -> Work[Reply]:
        until = self.world.now + self.config.rounds.deadline_s + 2 * self.config.rounds.lease_s + OUTCOME_S
        request = replace(self._request("update", fragment, rank), round=round_, wait_s=WAIT_S)
        while True:
            reply = yield from self.call(request)
            if reply.outcome != "open":
                break
            if self.world.now > until:
                raise Unreachable(f"round {round_} of fragment {fragment} has not ended in time")
        if reply.outcome == "committed":
            replica = self.replicas[rank]
            replica.decode(replica.owned(fragment), reply.payload)
        return reply

    def _apply(self, fragment: int, round_: int) -> Work[None]:
        if (fragment, round_) not in self._flights:
            self._missed(fragment, round_)
        flights = self._flights.pop((fragment, round_))
        replies: list[Reply] = []
        for flight in flights:
            reply = yield from flight.result()
            replies += [reply]
        if len({(r.outcome, r.version, r.digest) for r in replies}) > 1:
            raise DilocoError(f"ranks heard different outcomes of round {round_} of fragment {fragment}")
        for replica in self.replicas:
            replica.position[fragment] = Position(replies[0].version, round_ + 1)
        if replies[0].outcome == "committed":
            self._report(fragment)
            for replica in self.replicas:
                replica.mix(fragment)
            self._adopted[fragment] = (self.tokens, self.at_step)

    def _report(self, fragment: int) -> None:
        found = combine(*(replica.digest_parts(fragment)[0] for replica in self.replicas))
        version = self.replicas[0].position[fragment].version
        self.outside.reported(self.shape.id, self.epoch, fragment, version, found)

    def _replica(self, rank: int) -> Replica:
        held = []
        for fragment in self.fragments:
            for tensor, spec, start in zip(fragment.tensors, fragment.specs, fragment.starts, strict=True):
                rows = spec.shape[0]
                cut = [0, rows] if self.shape.ranks == 1 else [0, (rows + self.shape.seed % 2) // 2, rows]
                size = (cut[rank + 1] - cut[rank], *spec.shape[1:])
                piece = Piece(tensor, Box((cut[rank], *(0,) * (len(spec.shape) - 1)), size))
                local = torch.zeros(size)
                held.append(SimHeld(piece=piece, spec=spec, start=start, local=local, owners=(rank,)))
        wire = self.config.wire
        return Replica(
            rank=rank,
            fragments=self.fragments,
            held=held,
            up=CODECS[wire.up],
            down=CODECS[wire.down],
            alpha=self.config.sync.alpha,
        )
