"""The simulated island: the real replicas and schedule of its ranks, and the session's steps as a process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from diloco.codec import CODECS
from diloco.codec.policy import down_choice, up_choice
from diloco.config import RunConfig
from diloco.digest import combine, digest
from diloco.errors import (
    DigestMismatch,
    DilocoError,
    Dismissed,
    DivergedError,
    Expired,
    Refused,
    StaleEpoch,
    Unreachable,
)
from diloco.feedback import Ending, Fate, agreed
from diloco.fragments import Fragment
from diloco.layout import Box, Layout, Piece
from diloco.replica import Held, Position, Replica
from diloco.schedule import Schedule, Send
from wan.sim_link import TIMEOUT_S, Outside, SimLink
from wan.sim_wire import Reply, Request
from wan.sim_world import Gate, Owner, Process, Work, World

WAIT_S = 2.0
"""How long a request waits at the coordinator for a round to end."""
OUTCOME_S = 100.0
"""How long it waits for a round to end, besides what the round may take."""
REJOINS = 5
"""Times an island joins again without a round completed in between."""
ROLLBACKS = 3
"""The so-manyth time in a row that training is not finite ends the session."""
SILENT_BEATS = 2
DIGEST_ATTEMPTS = 3
Key = tuple[int, int]
"""Fragment and round."""
Stand = tuple[int, int, int]
"""Version, rounds ended, and digest of a fragment."""


class AskedToLeave(DilocoError):
    """The coordinator has told the island to leave."""


class SimHeld(Held):
    """A piece whose digest is looked up where the same bits have been digested before: islands hold the same ones."""

    def digest(self) -> int:
        return _digest(self.anchor.numpy().tobytes(), self.start, self.spec.shape, self.box)


@lru_cache(maxsize=8192)
def _digest(data: bytes, start: int, shape: tuple[int, ...], box: Box) -> int:
    return digest(torch.frombuffer(bytearray(data), dtype=torch.float32).view(box.size), start, shape, box)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What an island is like."""

    id: str
    ranks: int
    step_s: float
    """Seconds of one inner step."""
    seed: int


class SimIsland(Owner):
    """One life of an island: it joins, trains to the end of the run, and leaves. Where the lease is lost it joins again
    in place; where its session fails it begins afresh.

    Args:
        shape: what it is like.
        world: time and chance.
        outside: the network and who watches.
        config, layout, fragments: the run.
        chunk_bytes: payload of one message of a stream.
    """

    link_kind: type[SimLink] = SimLink

    def __init__(
        self,
        shape: Shape,
        world: World,
        outside: Outside,
        config: RunConfig,
        layout: Layout,
        fragments: Sequence[Fragment],
        chunk_bytes: int,
    ) -> None:
        super().__init__()
        self.shape, self.world, self.outside = shape, world, outside
        self.config, self.layout, self.fragments = config, layout, fragments
        self.schedule = Schedule.kept(config)
        self.link = self.link_kind(shape.id, world, outside, chunk_bytes)
        self.finished = False
        self.slow = 1.0
        self.rejoins = self.late = 0
        """Times it joined again in place; outcomes that it applied after their sync step."""
        self._sessions = 0
        """Epochs begun: what belongs to an earlier one moves nothing any more."""
        self._afresh()
        world.spawn(self._live(), self)

    def _afresh(self) -> None:
        self.epoch = self.at_step = self.tokens = 0
        self.ready = False
        self.directive = ""
        self.fatal: Refused | None = None
        self.replicas = [self._replica(rank) for rank in range(self.shape.ranks)]
        self._adopted = [(0, 0)] * len(self.fragments)
        """(tokens, inner step) at which each fragment's anchor was adopted."""
        self._flights: dict[Key, list[Process]] = {}
        self._overdue: dict[Key, int] = {}
        self._silent_since: float | None = None
        self._rejoins_in_a_row = self._rollbacks_in_a_row = 0
        self._sending: dict[tuple[int, int], tuple[int, int]] = {}
        """By fragment and rank, epoch and round of the contribution that is in flight."""

    def _request(self, method: str, fragment: int = 0, rank: int = 0) -> Request:
        pieces = tuple(h.piece for h in self.replicas[rank].owned(fragment)) if method in ("update", "anchor") else ()
        return Request(
            method=method, island=self.shape.id, epoch=self.epoch, rank=rank, fragment=fragment, pieces=pieces
        )

    # -- life -------------------------------------------------------------------------------------------------------

    def _live(self) -> Work[None]:
        while not self.finished:
            self._afresh()
            try:
                self.finished = yield from self._session()
                if not self.finished:  # it was asked to leave; somebody starts it again
                    yield 1.0 + 4.0 * self.world.rng.random()
            except DilocoError as error:
                self.outside.session_failed(self.shape.id, error)
                for flight in [flight for flights in self._flights.values() for flight in flights]:
                    flight.cancel()
                self._sessions += 1
                yield 0.5 + self.world.rng.random()

    def _session(self) -> Work[bool]:
        """Whether it came to the end of the run."""
        try:
            yield from self._enter()
            while True:
                try:
                    yield from self._take_up()
                    yield from self._train()
                    break
                except StaleEpoch as error:
                    yield from self._rejoin(error)
        except AskedToLeave as asked:
            yield from self._leave(asked.message)
            return False
        yield from self._leave("finished")
        return True

    def _rejoin(self, error: StaleEpoch) -> Work[None]:
        """Joins again under a new epoch; what the old one has in flight moves no anchor any more."""
        while True:
            self._rejoins_in_a_row += 1
            if self._rejoins_in_a_row > REJOINS:
                raise error
            self.rejoins += 1
            self._flights.clear()
            self._overdue.clear()
            try:
                yield from self._enter()
            except StaleEpoch as again:
                error = again
                continue
            return

    def _enter(self) -> Work[None]:
        self._sessions += 1  # flights of the epoch before are abandoned
        reply = yield from self.link.call(Request(method="join", island=self.shape.id, layout=self.layout))
        self.epoch, self.ready, self.directive, self.fatal = reply.epoch, False, "", None
        self._silent_since = None
        for rank, replica in enumerate(self.replicas):
            for fragment, counted in enumerate(reply.contributed):
                sending = self._sending.pop((fragment, rank), None)
                if sending and replica.feedback and sending[1] >= counted.oldest:
                    fate = Fate.COUNTS if sending[1] in counted.rounds else Fate.DROPPED
                    self.outside.settled(self.shape.id, sending[0], fragment, sending[1], rank, fate)
            replica.rejoin(dict(enumerate(reply.contributed)))
        self.world.spawn(self._beats(self._sessions), self)

    def _leave(self, reason: str) -> Work[None]:
        with contextlib.suppress(Refused, Unreachable):  # it has left before, or the lease will tell
            yield from self.link.call(replace(self._request("leave"), reason=reason), patience_s=TIMEOUT_S)
        self._sessions += 1
        self._flights.clear()

    def _beats(self, session: int) -> Work[None]:
        while session == self._sessions:
            begun = self.world.now
            try:
                request = replace(self._request("beat"), step=self.at_step, ready=self.ready)
                reply = yield from self.link.call(request, patience_s=0.0)
                if session == self._sessions:
                    self.directive, self._silent_since = reply.directive, None
            except (StaleEpoch, Dismissed) as error:
                if session == self._sessions:
                    self.fatal = error
                return
            except Unreachable:
                if session == self._sessions and self._silent_since is None:
                    self._silent_since = begun
            except DilocoError:
                pass
            yield self.config.rounds.lease_s / 3

    @property
    def silent(self) -> bool:
        """Whether nobody answers: beats have failed for a while."""
        since = self._silent_since
        return since is not None and self.world.now - since > SILENT_BEATS * self.config.rounds.lease_s / 3

    def _poll(self) -> Work[Reply]:
        """How the run stands, for an island that waits for its start. Raises `AskedToLeave`."""
        self._check()
        state = yield from self.link.call(replace(self._request("beat"), step=self.at_step, ready=self.ready))
        if state.directive == "leave":
            raise AskedToLeave("asked to leave")
        return state

    def _check(self) -> None:
        if self.fatal:
            raise self.fatal
        errors = [flight.error for flights in self._flights.values() for flight in flights if flight.done]
        for error in errors:
            if isinstance(error, DilocoError) and not isinstance(error, Expired):
                raise error

    # -- joining ----------------------------------------------------------------------------------------------------

    def _take_up(self) -> Work[None]:
        """What `Session._take_up` does: the anchors, then the run's start."""
        state = yield from self._poll()
        while not state.positions:
            if state.seeder == self.shape.id:  # all of them, again where a coordinator that was killed forgot some
                for fragment in range(len(self.fragments)):
                    for rank in range(self.shape.ranks):
                        if self.replicas[rank].owned(fragment):
                            yield from self._seed(fragment, rank)
            yield 0.5
            state = yield from self._poll()
        for fragment, (version, round_, bits) in enumerate(state.positions):
            yield from self.take_up(fragment, (version, round_, bits))
        self._reset()
        self.ready = True
        state = yield from self._poll()
        while state.phase == "gathering":
            yield 0.5
            state = yield from self._poll()
        moving = [p.round for p in self.replicas[0].position[: len(self.schedule.offsets)]]
        self.at_step = self.schedule.position(moving, state.step)
        self._start_afresh()

    def take_up(self, fragment: int, stand: Stand) -> Work[None]:
        """Brings a fragment to where the run stands: by nothing, by the updates it lacks, or whole."""
        if not self._matches(fragment, stand):
            try:
                yield from self._catch_up(fragment, stand[1])
            except Expired:
                stand = yield from self._whole(fragment)
        yield from self._confirm(fragment, stand)

    def _catch_up(self, fragment: int, round_: int) -> Work[Reply | None]:
        """Moves the anchors of all ranks by the updates of ended rounds, until `round_` is the next."""
        last: Reply | None = None
        for rank, replica in enumerate(self.replicas):
            taken = replica.taken[fragment]
            if taken is None or taken > round_:
                raise Expired("the anchor is not one of the run's last: fetch anchors")
            for missed in range(taken, round_):
                last = yield from self._fetch_update(fragment, missed, rank, self._sessions)
        return last

    def _whole(self, fragment: int) -> Work[Stand]:
        """Fetches all pieces whole, then what some ranks lack to the newest version that any of them got."""
        found: list[Reply] = []
        for rank, replica in enumerate(self.replicas):
            owned, session = replica.owned(fragment), self._sessions
            size = sum(CODECS["fp32"].size(h.box.numel) for h in owned)
            reply, payload = yield from self.link.fetch(self._request("anchor", fragment, rank), size)
            self._guard(session)
            replica.load(owned, payload, CODECS["fp32"])
            replica.taken[fragment] = reply.round
            found.append(reply)
        newest = max(found, key=lambda reply: reply.round)
        yield from self._catch_up(fragment, newest.round)
        return newest.version, newest.round, newest.digest

    def _confirm(self, fragment: int, stand: Stand) -> Work[None]:
        """Compares a fragment with the coordinator's; fetches it whole where they differ."""
        for _ in range(DIGEST_ATTEMPTS + 1):
            if self._matches(fragment, stand):
                version, round_, bits = stand
                for replica in self.replicas:
                    replica.position[fragment], replica.taken[fragment] = Position(version, round_), round_
                self.outside.reported(self.shape.id, self.epoch, fragment, version, bits)
                return
            self.outside.mismatched(self.shape.id, fragment, stand[0])
            stand = yield from self._whole(fragment)
        raise DigestMismatch(f"fragment {fragment} keeps another digest than the coordinator's")

    def _seed(self, fragment: int, rank: int) -> Work[None]:
        """Sends a rank's part of the first parameters."""
        codec, owned = CODECS["fp32"], self.replicas[rank].owned(fragment)
        request = replace(
            self._request("push", fragment, rank),
            seed=True,
            pieces=tuple(h.piece for h in owned),
            codec=(codec.id, codec.version),
        )
        yield from self.link.push(request, torch.cat([h.anchor.view(-1).view(torch.uint8) for h in owned]))

    # -- training ---------------------------------------------------------------------------------------------------

    def _train(self) -> Work[None]:
        while self.at_step < self.config.run.steps:
            yield self.shape.step_s * self.slow * (0.9 + 0.2 * self.world.rng.random())
            self._inner_step()
            yield from self._edge()

    def _inner_step(self) -> None:
        self.at_step += 1
        self.tokens += 8
        shrink, shift = 0.97, 0.01 * ((self.shape.seed * 31 + self.at_step * 7) % 11 - 5)
        for replica in self.replicas:
            for fragment in range(len(self.fragments)):
                for held in replica.held(fragment):
                    held.local.mul_(shrink).add_(shift)

    def _edge(self) -> Work[None]:
        self._check()
        while self.directive == "pause":
            yield 0.5
            self._check()
        due = [a for a in self.schedule.due(self.at_step) if self._ahead(a.fragment, a.round)]
        for key in list(self._overdue):
            sends = any(isinstance(a, Send) and a.fragment == key[0] for a in due)
            yield from self._finish(key, may_go_on=not sends)
        for action in due:
            if self._ahead(action.fragment, action.round):
                if isinstance(action, Send):
                    self._send(action.fragment, action.round)
                else:
                    yield from self._apply(action.fragment, action.round)
        if self.directive == "leave":
            for key in list(self._flights):
                yield from self._finish(key, may_go_on=False)
            raise AskedToLeave("asked to leave")

    def _ahead(self, fragment: int, round_: int) -> bool:
        return round_ >= self.replicas[0].position[fragment].round

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send(self, fragment: int, round_: int) -> None:
        poison = self.outside.poison(self.shape.id)
        if poison == "seen":
            self._roll_back()
        else:
            version = self.replicas[0].position[fragment].version
            self.outside.based(self.shape.id, fragment, version, self._bits(fragment)[0])
        self._flights[fragment, round_] = [
            self.world.spawn(self._exchange(fragment, round_, rank, poison), self) for rank in range(self.shape.ranks)
        ]

    def _roll_back(self) -> None:
        """Sets all parameters back to the anchors."""
        self._rollbacks_in_a_row += 1
        if self._rollbacks_in_a_row >= ROLLBACKS:
            raise DivergedError("training is not finite, for the third time in a row")
        self._reset()
        for replica in self.replicas:
            replica.forget()
        self._sending.clear()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._adopted = [(self.tokens, self.at_step)] * len(self.fragments)

    def _reset(self) -> None:
        for fragment in range(len(self.fragments)):
            self._share(fragment)
            for replica in self.replicas:
                replica.mix(fragment, alpha=0.0)

    def _exchange(self, fragment: int, round_: int, rank: int, poison: str) -> Work[Reply]:
        """Contributes a rank's part, or declines; then waits for the round's outcome."""
        session, replica = self._sessions, self.replicas[rank]
        request = replace(self._request("push", fragment, rank), round=round_)
        if poison == "seen" and not rank:
            with contextlib.suppress(Refused):
                yield from self.link.call(replace(request, method="decline", reason="not finite"))
        elif poison != "seen" and (owned := replica.owned(fragment)):
            request = replace(
                request,
                version=replica.position[fragment].version,
                pieces=tuple(h.piece for h in owned),
                codec=(replica.up.id, replica.up.version),
                tokens=self.tokens - self._adopted[fragment][0],
                steps=self.at_step - self._adopted[fragment][1],
            )
            payload = self._payload(fragment, rank, round_, poison)
            self._sending[fragment, rank] = self.epoch, round_
            receipt = yield from self.link.push(request, payload)
            self._guard(session)
            replica.receipt(fragment, self.heard(receipt))
            self._rollbacks_in_a_row *= bool(receipt.dropped)
        return (yield from self._fetch_update(fragment, round_, rank, session))

    def heard(self, receipt: Reply) -> Fate:
        """What a receipt says of a contribution."""
        if receipt.dropped:
            return Fate.DROPPED
        return Fate.CARRIED if receipt.late else Fate.COUNTS

    def fates(self, fragment: int) -> list[Fate]:
        """What each rank takes for what becomes of a contribution: what all have heard together."""
        return [agreed(replica.fate(fragment) for replica in self.replicas)] * len(self.replicas)

    def _settle(self, fragment: int, ending: Ending) -> None:
        """Settles what the codec dropped of all ranks' parts of a contribution, if there is one."""
        for rank, (replica, fate) in enumerate(zip(self.replicas, self.fates(fragment), strict=True)):
            sending = self._sending.pop((fragment, rank), None)
            if replica.feedback and sending:
                self.outside.settled(self.shape.id, sending[0], fragment, sending[1], rank, fate)
            replica.receipt(fragment, fate)
            replica.end(fragment, ending)

    def _payload(self, fragment: int, rank: int, round_: int, poison: str) -> Tensor:
        replica = self.replicas[rank]
        payloads = replica.encode(fragment, replica.stage(fragment), round_)
        payload = torch.cat([*payloads, torch.empty(0, dtype=torch.uint8)])
        if poison == "sent" and payload.numel() and self.config.wire.up in ("fp32", "bf16"):
            payload.view(torch.float32 if self.config.wire.up == "fp32" else torch.bfloat16)[0] = torch.nan
        return payload

    # -- applying ---------------------------------------------------------------------------------------------------

    def _fetch_update(self, fragment: int, round_: int, rank: int, session: int) -> Work[Reply]:
        """Waits for a round to end and moves the anchors of a rank's pieces by its update."""
        replica = self.replicas[rank]
        owned, waited = replica.owned(fragment), 0.0
        bound = self.config.rounds.deadline_s + 2 * self.config.rounds.lease_s + OUTCOME_S
        request = replace(self._request("update", fragment, rank), round=round_, wait_s=WAIT_S)
        while True:
            reply, payload = yield from self.link.fetch(request, replica.update_size(owned))
            self._guard(session)
            if reply.outcome != "open":
                break
            waited += 0.0 if self.directive == "pause" else WAIT_S
            if waited > bound:
                raise Unreachable(f"round {round_} of fragment {fragment} has not ended in time")
        if reply.outcome == "committed":
            replica.decode(owned, payload)
        replica.taken[fragment] = round_ + 1
        return reply

    def _guard(self, session: int) -> None:
        """What an epoch that is over has in flight moves no anchor."""
        if session != self._sessions:
            raise StaleEpoch("the epoch is over")

    def _apply(self, fragment: int, round_: int) -> Work[None]:
        if (fragment, round_) not in self._flights:
            self.missed(fragment, round_)
        self._overdue[fragment, round_] = self.at_step
        yield from self._finish((fragment, round_), may_go_on=True)

    def missed(self, fragment: int, round_: int) -> None:
        """The island came in after the send step: it contributes now, or a round that all missed would never open."""
        self._send(fragment, round_)

    def _finish(self, key: Key, *, may_go_on: bool) -> Work[None]:
        """Waits for a round's outcome and applies it; trains on without where nobody answers, for a while."""
        flights = self._flights[key]
        waits_on = may_go_on and self._overdue.get(key, self.at_step) < self.at_step
        while not all(flight.done for flight in flights):
            self._check()
            if may_go_on and (self.silent or waits_on) and not self._at_bound():
                return
            waits_on = False
            waiting: Gate = next(flight for flight in flights if not flight.done).finished
            yield (waiting, 0.5)
        self._check()
        yield from self._adopt(key)

    def _at_bound(self) -> bool:
        first = min(self._overdue.values(), default=self.at_step)
        limit = self.config.sync.max_steps_without_coordinator
        return self.at_step >= self.config.run.steps or self.at_step - first >= limit

    def _adopt(self, key: Key) -> Work[None]:
        """Applies the outcome that all ranks have."""
        fragment, round_ = key
        flights = self._flights.pop(key)
        self.late += self._overdue.pop(key, self.at_step) < self.at_step
        if any(isinstance(flight.error, Expired) for flight in flights):
            self._settle(fragment, Ending.PASSED_OVER)
            yield from self._confirm(fragment, (yield from self._whole(fragment)))
            for replica in self.replicas:
                replica.mix(fragment, alpha=0.0)
            self._adopted[fragment] = (self.tokens, self.at_step)
            return
        replies: list[Reply] = [flight.value for flight in flights]
        if len({(r.outcome, r.version, r.digest) for r in replies}) > 1:
            raise DilocoError(f"ranks heard different outcomes of round {round_} of fragment {fragment}")
        self._rejoins_in_a_row = 0
        self._settle(fragment, Ending.COMMITTED if replies[0].outcome == "committed" else Ending.NOT_COMMITTED)
        if replies[0].outcome == "committed":
            yield from self._confirm(fragment, (replies[0].version, round_ + 1, replies[0].digest))
            for replica in self.replicas:
                replica.mix(fragment)
            self._adopted[fragment] = (self.tokens, self.at_step)
            return
        for replica in self.replicas:
            replica.position[fragment] = Position(replies[0].version, round_ + 1)

    # -- what all ranks hold ------------------------------------------------------------------------------------------

    def _share(self, fragment: int) -> None:
        """Gives every rank that holds a replicated piece its owner's anchor."""
        if len(self.replicas) == 1:
            return
        anchors = {h.piece: h.anchor for replica in self.replicas for h in replica.owned(fragment)}
        for replica in self.replicas:
            for held in replica.held(fragment):
                held.anchor.copy_(anchors[held.piece])

    def _bits(self, fragment: int) -> tuple[int, int]:
        """The fragment's digest over the island's anchors, and 0 where all replicas agree."""
        parts = [replica.digest_parts(fragment) for replica in self.replicas]
        return combine(*(owned for owned, _ in parts)), combine(*(check for _, check in parts))

    def _matches(self, fragment: int, stand: Stand) -> bool:
        self._share(fragment)
        return self._bits(fragment) == (stand[2], 0)

    def _replica(self, rank: int) -> Replica:
        wire = self.config.wire
        return Replica(
            rank=rank,
            fragments=self.fragments,
            held=hold(self.shape, rank, self.fragments),
            up=up_choice(wire),
            down=down_choice(wire),
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
