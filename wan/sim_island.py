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
from diloco.errors import CodecError, DilocoError, Dismissed, Expired, Overload, Refused, StaleEpoch, Unreachable
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


class AskedToLeave(DilocoError):
    """The coordinator has told the island to leave."""


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

    def poison(self, island: str) -> str:
        """Whether the island's next contribution holds NaN: "" (no), "sent" (as it is) or "seen" (and declined)."""

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
        self.directive = ""
        self.fatal: Refused | None = None
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
            elif not isinstance(found[0], CodecError | Overload):
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
                if not self.finished:  # it was asked to leave; somebody starts it again
                    yield 1.0 + 4.0 * self.world.rng.random()
            except DilocoError as error:
                self.outside.session_failed(self.shape.id, error)
                for flight in itertools.chain(*self._flights.values()):
                    flight.cancel()
                self._flights.clear()
                yield 0.5 + self.world.rng.random()
        self._sessions += 1

    def _session(self, number: int) -> Work[None]:
        self.ready, self.directive, self.fatal, self.tokens = False, "", None, 0
        reply = yield from self.call(Request(method="join", island=self.shape.id, layout=self.layout))
        self.epoch = reply.epoch
        self.replicas = [self._replica(rank) for rank in range(self.shape.ranks)]
        self.world.spawn(self._beats(number), self)
        try:
            yield from self._take_up()
        except AskedToLeave as asked:
            yield from self._leave(asked.message)
            return
        while self.at_step < self.config.run.steps:
            if (yield from self._held()):
                yield from self._leave("asked to leave")
                return
            yield self.shape.step_s * self.slow * (0.9 + 0.2 * self.world.rng.random())
            self._train()
            yield from self._edge()
        yield from self._leave("finished")
        self.finished = True

    def _held(self) -> Work[bool]:
        """Holds while the run is paused; says whether the island is to leave."""
        while self.directive == "pause":
            self._check()
            yield 0.5
        return self.directive == "leave"

    def _leave(self, reason: str) -> Work[None]:
        with contextlib.suppress(Refused, Unreachable):  # it has left before, or the lease will tell
            yield from self.call(replace(self._request("leave"), reason=reason), patience_s=TIMEOUT_S)
        self._sessions += 1
        for flight in itertools.chain(*self._flights.values()):
            flight.cancel()
        self._flights.clear()

    def _beats(self, session: int) -> Work[None]:
        while session == self._sessions:
            try:
                request = replace(self._request("beat"), step=self.at_step, ready=self.ready)
                reply = yield from self.call(request, patience_s=0.0)
                if session == self._sessions:
                    self.directive = reply.directive
            except (StaleEpoch, Dismissed) as error:
                if session == self._sessions:
                    self.fatal = error
                return
            except DilocoError:
                pass
            yield self.config.rounds.lease_s / 3

    def _poll(self) -> Work[Reply]:
        """How the run stands, for an island that waits for its start. Raises `AskedToLeave`."""
        self._check()
        state = yield from self.call(replace(self._request("beat"), step=self.at_step, ready=self.ready))
        if state.directive == "leave":
            raise AskedToLeave("asked to leave")
        return state

    def _check(self) -> None:
        if self.fatal:
            raise self.fatal

    def _take_up(self) -> Work[None]:
        """What `Session._take_up` does: anchors, then the updates that some ranks lack, then the run's start."""
        self.at_step = 0
        ranks = range(self.shape.ranks)
        state = yield from self._poll()
        while not state.positions:
            if state.seeder == self.shape.id:  # all of them, again where a coordinator that was killed forgot some
                for fragment in range(len(self.fragments)):
                    for rank in ranks:
                        if self.replicas[rank].owned(fragment):
                            yield from self.call(self._first_parameters(fragment, rank))
            yield 0.5
            state = yield from self._poll()
        for fragment in range(len(self.fragments)):
            yield from self._adopt_anchors(fragment)
        self.ready = True
        state = yield from self._poll()
        while state.phase == "gathering":
            yield 0.5
            state = yield from self._poll()
        moving = [p.round for p in self.replicas[0].position[: len(self.schedule.offsets)]]
        ahead = min((self.schedule.sync_step(p, r) for p, r in enumerate(moving)), default=0)
        self.at_step = min(max(self.schedule.position(moving), state.step), ahead - 1)
        self._adopted = [(0, self.at_step)] * len(self.fragments)

    def _adopt_anchors(self, fragment: int) -> Work[None]:
        """Fetches a fragment whole, and the updates that some ranks lack, and brings it into training."""
        ranks, found = range(self.shape.ranks), []
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
        self._share(fragment)
        for replica in self.replicas:
            replica.mix(fragment, alpha=0.0)
        self._report(fragment)
        self._adopted[fragment] = (self.tokens, self.at_step)

    def _first_parameters(self, fragment: int, rank: int) -> Request:
        codec, owned = CODECS["fp32"], self.replicas[rank].owned(fragment)
        parts = [h.anchor.view(-1).view(torch.uint8) for h in owned]
        return replace(
            self._request("push", fragment, rank),
            seed=True,
            pieces=tuple(h.piece for h in owned),
            codec=(codec.id, codec.version),
            messages=tuple(chunks(parts, self.config.wire.chunk_bytes)),
            total_bytes=sum(part.numel() for part in parts),
        )

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
        if poison == "seen":
            self._roll_back()
        self._flights[fragment, round_] = [
            self.world.spawn(self._exchange(self._contribution(fragment, round_, rank, poison)), self)
            for rank in range(self.shape.ranks)
        ]

    def _roll_back(self) -> None:
        """Sets all parameters back to the anchors."""
        for replica in self.replicas:
            for fragment in range(len(self.fragments)):
                replica.mix(fragment, alpha=0.0)
        self._adopted = [(self.tokens, self.at_step)] * len(self.fragments)

    def _missed(self, fragment: int, round_: int) -> None:
        """The island came in after the send step: it contributes now, or a round that all missed would never open."""
        self._send(fragment, round_)

    def _contribution(self, fragment: int, round_: int, rank: int, poison: str) -> Request:
        replica = self.replicas[rank]
        if poison == "seen":
            return replace(self._request("decline", fragment, rank), round=round_, reason="not finite")
        payload = torch.cat([*replica.encode(fragment, replica.stage(fragment)), torch.empty(0, dtype=torch.uint8)])
        if poison == "sent" and payload.numel():
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
        if contribution.pieces or contribution.method == "decline":
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
        expired = False
        for flight in flights:
            try:
                reply = yield from flight.result()
            except Expired:
                expired = True
            else:
                replies += [reply]
        if expired:
            yield from self._adopt_anchors(fragment)
            return
        if len({(r.outcome, r.version, r.digest) for r in replies}) > 1:
            raise DilocoError(f"ranks heard different outcomes of round {round_} of fragment {fragment}")
        for replica in self.replicas:
            replica.position[fragment] = Position(replies[0].version, round_ + 1)
        if replies[0].outcome == "committed":
            self._share(fragment)
            self._report(fragment)
            for replica in self.replicas:
                replica.mix(fragment)
            self._adopted[fragment] = (self.tokens, self.at_step)

    def _share(self, fragment: int) -> None:
        """Gives every rank that holds a replicated piece its owner's anchor."""
        anchors = {h.piece: h.anchor for replica in self.replicas for h in replica.owned(fragment)}
        for replica in self.replicas:
            for held in replica.held(fragment):
                held.anchor.copy_(anchors[held.piece])

    def _report(self, fragment: int) -> None:
        parts = [replica.digest_parts(fragment) for replica in self.replicas]
        found = combine(*(owned for owned, _ in parts))
        if combine(*(check for _, check in parts)):
            raise DilocoError(f"replicas of fragment {fragment} differ within {self.shape.id}")
        version = self.replicas[0].position[fragment].version
        self.outside.reported(self.shape.id, self.epoch, fragment, version, found)

    def _replica(self, rank: int) -> Replica:
        wire = self.config.wire
        return Replica(
            rank=rank,
            fragments=self.fragments,
            held=hold(self.shape, rank, self.fragments),
            up=CODECS[wire.up],
            down=CODECS[wire.down],
            alpha=self.config.sync.alpha,
        )


def hold(shape: Shape, rank: int, fragments: Sequence[Fragment]) -> list[Held]:
    """What a rank of an island holds: matrices are cut by rows, vectors are held by all, as with tensor parallelism."""
    held: list[Held] = []
    for fragment in fragments:
        for tensor, spec, start in zip(fragment.tensors, fragment.specs, fragment.starts, strict=True):
            rows, ranks = spec.shape[0], tuple(range(shape.ranks))
            replicated = len(spec.shape) == 1 or len(ranks) == 1
            cut = [0, (rows + shape.seed % 2) // 2, rows]
            first, last = (0, rows) if replicated else (cut[rank], cut[rank + 1])
            turn = tensor % len(ranks)
            owners = (*ranks[turn:], *ranks[:turn]) if replicated else (rank,)
            size = (last - first, *spec.shape[1:])
            piece = Piece(tensor, Box((first, *(0,) * (len(spec.shape) - 1)), size))
            local = torch.linspace(-1.0, 1.0, piece.box.numel).add(0.1 * shape.seed).view(size)
            held.append(SimHeld(piece=piece, spec=spec, start=start, local=local, owners=owners))
    return held


def senders(shape: Shape, fragments: Sequence[Fragment]) -> list[int]:
    """How many ranks of an island own a part of each fragment."""
    counts = [0] * len(fragments)
    for rank in range(shape.ranks):
        owned = {h.piece.tensor for h in hold(shape, rank, fragments) if h.owners[0] == rank}
        for fragment in fragments:
            counts[fragment.index] += not owned.isdisjoint(fragment.tensors)
    return counts
