"""The synchronous twin of `coordinator/run.py` and `service.py` for the simulator: the same steps, one yield apart.

Every point where the real coordinator waits for a disk or lets others run is a `_point`: there a crash may fall, and
other requests interleave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from coordinator import facts, recovery, rounds
from coordinator.facts import Aborted, Carried, Committed, Ended, Entry, Fact, Skipped, Standing
from coordinator.fold import Outer, Part, fold
from coordinator.inbox import select
from coordinator.recovery import folded_row, part_row
from coordinator.results import Outcome
from coordinator.state import State, revive
from coordinator.store import UPDATES_KEPT
from diloco.codec import CODECS, by_id
from diloco.config import RunConfig
from diloco.errors import CodecError, DilocoError, DivergedError, Malformed
from diloco.fragments import Fragment
from diloco.framing import unchunk
from diloco.layout import Box, Piece
from wan.sim_world import Disk, Gate, Lock, MemoryStored, Owner, Process, Saved, Work, World

ROOT = Path("disk")
TICK_S = 1.0
IO_S = 0.02
"""Longest that one operation of the disk takes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an island sends: a method's name and its arguments."""

    method: str
    island: str
    epoch: int = 0
    rank: int = 0
    fragment: int = 0
    round: int = 0
    version: int = 0
    pieces: tuple[Piece, ...] = ()
    codec: tuple[int, int] = (0, 0)
    messages: tuple[bytes, ...] = ()
    total_bytes: int = 0
    tokens: int = 0
    steps: int = 0
    step: int = 0
    ready: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the coordinator answers."""

    epoch: int = 0
    phase: str = ""
    step: int = 0
    positions: tuple[tuple[int, int], ...] = ()
    """(version, rounds ended) of each fragment."""
    dropped: str = ""
    duplicate: bool = False
    outcome: str = ""
    version: int = 0
    round: int = 0
    digest: int = 0
    payload: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Watcher(Protocol):
    """Who is told what the coordinator does: the checker, and the adversary."""

    def point(self, label: str) -> None:
        """The coordinator is between two operations; it may be killed now."""

    def durable(self, rows: list[tuple[str, dict[str, Any]]]) -> None:
        """Rows of the ledger cannot be lost any more."""

    def restarted(self, coordinator: SimCoordinator) -> None:
        """A coordinator has taken up the disk."""

    def published(self, fragment: int, round_: int, outcome: Outcome) -> None:
        """Islands can hear of an outcome."""

    def answered(self, request: Request, reply: Reply) -> None:
        """A reply is on its way."""

    def refused(self, request: Request, error: DilocoError, changes: int) -> None:
        """A refusal is on its way; the request made so many changes."""

    def ticked(self, coordinator: SimCoordinator) -> None:
        """A tick has been taken."""


class SimCoordinator(Owner):
    """One life of the coordinator.

    Args:
        world: time and chance.
        disk: what outlives it.
        config: the run's settings.
        base: what its monotonic clock shows at the world's time 0.
        watcher: who is told what happens.
    """

    def __init__(self, world: World, disk: Disk, config: RunConfig, base: float, watcher: Watcher) -> None:
        super().__init__()
        self.world, self.disk, self.config, self.base, self.watcher = world, disk, config, base, watcher
        self.began = world.now
        found = recovery.replay(disk.rows(), config, ROOT, self.locate)
        snapshot = disk.snapshots[-1]
        found.over(snapshot.outers, snapshot.rounds)
        self.state = revive(found.state, self.clock())
        self.fragments: tuple[Fragment, ...] = found.fragments
        self.layout = found.layout
        self.outers: list[Outer] = found.outers
        self.ended: list[int] = found.ended
        self.steps: dict[str, int] = {}
        self.outcomes = {
            (past.fragment, past.round): Outcome(past.ended, past.reason, past.version, past.digest, path)
            for past in found.past()
            if (path := self._update(past)) is None or path.name in disk.files
        }
        self.inbox = found.inbox
        self.changed = Gate()
        self.down = CODECS[config.wire.down]
        self.unsaved = 0
        self._ends: list[Ended] = list(found.pending)
        self._ended_more = Gate()
        self._turn, self._worker, self._scribe = Lock(), Lock(), Lock()
        for name in [n for n in disk.files if n.startswith("f") and not self.inbox.holds(disk.file(n).path)]:
            disk.file(name).unlink()
        watcher.restarted(self)
        for work in (self._ticks(), self._end_rounds()):
            world.spawn(work, self)

    def _update(self, past: recovery.Past) -> Path | None:
        return self.disk.file(f"update-{past.fragment}-{past.round}").path if past.ended == "committed" else None

    def clock(self) -> float:
        """Seconds on this life's monotonic clock."""
        return self.world.now + self.base

    def locate(self, body: dict[str, Any]) -> MemoryStored:
        """The stored bytes that a `part` row speaks of."""
        return MemoryStored(
            pieces=tuple(Piece(t, Box(tuple(offset), tuple(size))) for t, offset, size in body["pieces"]),
            codec=by_id(*body["codec"]),
            path=self.disk.file(body["file"]).path,
            digest=body["digest"],
            disk=self.disk,
        )

    # -- time, disk and threads -------------------------------------------------------------------------------------

    def _point(self, label: str) -> Work[None]:
        self.watcher.point(label)
        yield self.world.rng.random() * IO_S

    def _in_thread(self, thread: Lock, work: Work[Any]) -> Work[Any]:
        """Waits for work of a thread, which goes on where the waiting ends early."""
        return self.world.spawn(thread.hold(work), self, inherit=True).result()

    def _to_its_end(self, work: Work[Any]) -> Work[Any]:
        """Waits for work that a caller who hangs up does not end."""
        return self.world.spawn(work, self, inherit=True).result()

    def _count(self) -> None:
        if self.world.current:
            self.world.current.root.changes += 1

    def _record(self, rows: list[tuple[str, dict[str, Any]]]) -> Work[None]:
        self._count()
        yield from self._in_thread(self._scribe, self._write_rows(rows))

    def _write_rows(self, rows: list[tuple[str, dict[str, Any]]]) -> Work[None]:
        yield from self._point("before the ledger")
        self.disk.append(rows)
        yield from self._point("ledger written")
        self.watcher.durable(self.disk.commit())
        yield from self._point("ledger synced")

    def _write_file(self, name: str, data: Tensor) -> Work[None]:
        self.disk.write(name, data)
        yield from self._point("file written")
        self.disk.sync(name)
        yield from self._point("file synced")

    # -- events and decisions ---------------------------------------------------------------------------------------

    def take(self, event: rounds.Event) -> Work[None]:
        """Takes one event, as `Run.take` does."""
        yield from self._to_its_end(self._turn.hold(self._take(event)))

    def find(self, event: rounds.Event) -> tuple[State, list[Fact]]:
        """The pure core's answer to an event."""
        return rounds.step(self.state, event, self.clock())

    def _take(self, event: rounds.Event) -> Work[None]:
        state, found = self.find(event)
        if found:
            yield from self._record([facts.encode(fact) for fact in found])
        self._adopt(state, found)

    def _adopt(self, state: State, found: list[Fact]) -> None:
        self.state = state
        self._count()
        for fact in found:
            if isinstance(fact, Ended):
                self._ends.append(fact)
            if isinstance(fact, Skipped | Aborted):
                self.inbox.close(fact.fragment, fact.round, keep_partial=self.config.rounds.late != "drop")
            if isinstance(fact, Carried):
                self.inbox.carry(fact.fragment, fact.round, fact.entry.island, fact.into)
        if found:
            self._ended_more.open()
            self.changed.open()

    def _ticks(self) -> Work[None]:
        for fragment in range(len(self.state.rounds)):
            yield from self._turn.hold(self._accept_whole(fragment))
        while True:
            yield TICK_S
            yield from self.take(rounds.Tick())
            self.watcher.ticked(self)

    def _end_rounds(self) -> Work[None]:
        while True:
            while not self._ends:
                yield self._ended_more
            decision = self._ends.pop(0)
            if isinstance(decision, Committed):
                yield from self._fold(decision)
            else:
                outer = self.outers[decision.fragment]
                ended = "skipped" if isinstance(decision, Skipped) else "aborted"
                self._publish(decision, Outcome(ended, decision.reason, outer.version, outer.digest, None))
            self.changed.open()

    def compute(self, decision: Committed) -> tuple[Outer, Tensor]:
        """What a committed round comes to."""
        key, outer = (decision.fragment, decision.round), self.outers[decision.fragment]
        parts = {island: [stored.part() for stored in self.inbox.parts(*key, island)] for island in decision.shares}
        chart = self.fragments[decision.fragment]
        return fold(chart, outer, parts, decision.shares, self.config.outer, self.down)

    def _fold(self, decision: Committed) -> Work[None]:
        fragment, round_ = decision.fragment, decision.round
        name = f"update-{fragment}-{round_}"

        def work() -> Work[Outer]:
            new, update = self.compute(decision)
            yield from self._point("fold done")
            yield from self._write_file(name, update)
            self.disk.file(f"update-{fragment}-{round_ - UPDATES_KEPT}").unlink()
            return new

        new = yield from self._in_thread(self._worker, work())
        yield from self._record([folded_row(fragment, round_, new)])
        self.outers[fragment] = new
        self.unsaved += 1
        path = self.disk.file(name).path
        self._publish(decision, Outcome("committed", decision.reason, new.version, new.digest, path))
        self.changed.open()
        if self.unsaved >= self.config.snapshot.every_rounds:
            yield from self._in_thread(self._worker, self._save())

    def _publish(self, decision: Ended, outcome: Outcome) -> None:
        self.outcomes[decision.fragment, decision.round] = outcome
        self.ended[decision.fragment] = decision.round + 1
        self.outcomes.pop((decision.fragment, decision.round - UPDATES_KEPT), None)
        self.watcher.published(decision.fragment, decision.round, outcome)

    def _save(self) -> Work[None]:
        self.unsaved = 0
        saved = Saved(outers=tuple(self.outers), rounds=tuple(self.ended))
        yield from self._point("snapshot written")
        self.disk.snapshots = [*self.disk.snapshots, saved][-self.config.snapshot.keep :]
        yield from self._point("manifest written")
        late = 0 if self.config.rounds.late == "drop" else self.config.rounds.late_rounds
        for fragment, needed in enumerate(self.disk.snapshots[0].rounds):
            self.inbox.forget(fragment, before=needed - late)

    # -- requests ---------------------------------------------------------------------------------------------------

    def serve(self, request: Request, answer: Callable[[Reply | DilocoError], None]) -> Process:
        """Handles one request; `answer` is given the reply or the refusal."""

        def handled() -> Work[None]:
            methods = {
                "join": self._join,
                "beat": self._beat,
                "leave": self._leave,
                "push": self._push,
                "update": self._outcome,
                "anchor": self._anchor,
            }
            try:
                reply = yield from methods[request.method](request)
            except DilocoError as error:
                self.watcher.refused(request, error, process.changes)
                answer(error)
                return
            yield from self._point("before the reply")
            self.watcher.answered(request, reply)
            answer(reply)
            yield from self._point("after the reply")

        process = self.world.spawn(handled(), self)
        return process

    def lease(self, request: Request) -> None:
        """Raises unless the request comes under a lease that holds."""
        rounds.member_of(self.state, request.island, request.epoch)

    def _join(self, request: Request) -> Work[Reply]:
        yield from self.take(rounds.Joined(island=request.island))
        return replace(self._status(request.island), epoch=self.state.members[request.island].epoch)

    def _beat(self, request: Request) -> Work[Reply]:
        self.lease(request)
        self.steps[request.island] = request.step
        yield from self.take(rounds.Beat(island=request.island, epoch=request.epoch, ready=request.ready))
        return self._status(request.island)

    def _leave(self, request: Request) -> Work[Reply]:
        self.lease(request)
        yield from self.take(rounds.Leaving(island=request.island, epoch=request.epoch, reason="finished"))
        return Reply()

    def _status(self, island: str) -> Reply:
        newcomer = self.state.members[island].standing is Standing.JOINING
        active = [m.id for m in self.state.members.values() if m.awaited]
        step = max((self.steps.get(i, 0) for i in active), default=0)
        positions = tuple((o.version, e) for o, e in zip(self.outers, self.ended, strict=True))
        return Reply(phase=self.state.phase, step=step if newcomer else 0, positions=positions)

    def _push(self, request: Request) -> Work[Reply]:
        self.lease(request)
        fragment, round_ = request.fragment, request.round
        late = rounds.lateness(self.state, fragment, round_)
        version = rounds.base_version(self.state, fragment, round_)
        if version not in (None, request.version):
            raise Malformed(f"based on version {request.version}, and round {round_} continues from {version}")
        if late and rounds.reception(self.state, fragment, round_, request.island):
            reply: Reply = yield from self._to_its_end(self._turn.hold(self._late(request)))
            return reply
        yield from self._point("upload under way")
        payload = torch.frombuffer(bytearray(b"".join(unchunk(m) for m in request.messages)), dtype=torch.uint8)
        if payload.numel() != request.total_bytes:
            raise CodecError("bytes are missing")
        part = Part(pieces=request.pieces, codec=by_id(*request.codec), payload=payload)
        try:
            part.check_finite()
        except DivergedError as error:
            spoiled = rounds.Spoiled(
                fragment=fragment, round=round_, island=request.island, epoch=request.epoch, reason=error.message
            )
            yield from self.take(spoiled)
            return Reply(dropped=error.message)
        digest = xxhash.xxh3_128_hexdigest(payload.numpy().data)
        name = f"f{fragment}-r{round_}-{request.island}-e{request.epoch}-{request.rank}-{digest}"
        stored = MemoryStored(
            pieces=request.pieces, codec=part.codec, path=self.disk.file(name).path, digest=digest, disk=self.disk
        )
        return (yield from self.contribute(request, stored, payload))

    def contribute(self, request: Request, stored: MemoryStored, payload: Tensor) -> Work[Reply]:
        """Makes a part durable and takes it, as `Run.contribute` does."""
        reply: Reply = yield from self._to_its_end(self._kept(request, stored, payload))
        return reply

    def _kept(self, request: Request, stored: MemoryStored, payload: Tensor) -> Work[Reply]:
        yield from self._in_thread(self._worker, self._write_file(stored.path.name, payload))
        try:
            return (yield from self._turn.hold(self._contribute(request, stored)))
        finally:
            if self.alive and not self.inbox.holds(stored.path):
                stored.path.unlink(missing_ok=True)

    def _contribute(self, request: Request, stored: MemoryStored) -> Work[Reply]:
        self.lease(request)
        island, epoch, rank = request.island, request.epoch, request.rank
        fragment, round_, tokens = request.fragment, request.round, request.tokens
        late = rounds.lateness(self.state, fragment, round_)
        if late and rounds.reception(self.state, fragment, round_, island):
            return (yield from self._late(request))
        refused = self.state.rounds[fragment].refused
        if not late and island in refused:
            return Reply(dropped=refused[island])
        accepted = rounds.counted(self.state, fragment, round_, island) is not None
        inbound = self.inbox.inbound(self.fragments[fragment], round_, island, epoch, accepted=accepted)
        if inbound is None:
            return Reply(dropped=f"{island} has already contributed to round {round_} under another epoch")
        duplicate = inbound.check(rank, stored)
        if not duplicate:
            yield from self._record([part_row(island, epoch, rank, fragment, round_, stored, tokens, request.steps)])
            inbound.add(rank, stored)
            inbound.tokens, inbound.steps = tokens, request.steps
        yield from self._accept_whole(fragment)
        return Reply(duplicate=duplicate)

    def _late(self, request: Request) -> Work[Reply]:
        island, fragment, round_ = request.island, request.fragment, request.round
        known = rounds.counted(self.state, fragment, round_, island) == request.epoch
        if known or self.inbox.knows(fragment, round_, island, request.epoch, request.rank):
            return Reply(duplicate=True)
        reason = rounds.reception(self.state, fragment, round_, island)
        entry = Entry(island=island, epoch=request.epoch, tokens=request.tokens)
        yield from self._take(rounds.Contributed(fragment=fragment, round=round_, entry=entry))
        return Reply(dropped=reason)

    def _accept_whole(self, fragment: int) -> Work[None]:
        for round_, island, inbound in list(self.inbox.whole(fragment)):
            member, current = self.state.members[island], self.state.rounds[fragment]
            held = member.present and member.epoch == inbound.epoch
            known = rounds.counted(self.state, fragment, round_, island) is not None
            if not held or known or (round_ == current.round and island in current.refused):
                continue
            entry = Entry(island=island, epoch=inbound.epoch, tokens=inbound.tokens, steps=inbound.steps)
            yield from self._take(rounds.Contributed(fragment=fragment, round=round_, entry=entry))
            if rounds.counted(self.state, fragment, round_, island) is None:
                self.inbox.drop(fragment, round_, island)

    def _outcome(self, request: Request) -> Work[Reply]:
        self.lease(request)
        key = (request.fragment, request.round)
        until = self.world.now + request.wait_s
        while key not in self.outcomes:
            if request.round < self.ended[request.fragment]:
                raise DilocoError(f"the update of round {request.round} is no longer kept: fetch anchors")
            if self.world.now >= until:
                return Reply(outcome="open")
            yield (self.changed, until - self.world.now)
        outcome = self.outcomes[key]
        reply = Reply(outcome=outcome.ended, version=outcome.version, digest=outcome.digest)
        if outcome.update is None:
            return reply
        payload = self.disk.files[outcome.update.name]
        return replace(reply, payload=self._selected(request, payload, self.down.name))

    def _anchor(self, request: Request) -> Work[Reply]:
        self.lease(request)
        outer, ended = self.outers[request.fragment], self.ended[request.fragment]
        payload = self._selected(request, outer.anchor.view(torch.uint8), "fp32")
        yield 0.0
        return Reply(outcome="anchor", version=outer.version, round=ended, digest=outer.digest, payload=payload)

    def _selected(self, request: Request, payload: Tensor, codec: str) -> Tensor:
        parts = select(self.fragments[request.fragment], payload, request.pieces, CODECS[codec])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
