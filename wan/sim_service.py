"""The synchronous twin of `coordinator/service.py` and `bulk.py`: requests of islands and of operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import xxhash
from torch import Tensor

from coordinator import rounds
from coordinator.facts import Entry, Standing
from coordinator.fold import Outer, Part
from coordinator.inbox import SeedBed, select
from coordinator.recovery import layout_row, part_row
from diloco.codec import CODECS, by_id
from diloco.errors import DilocoError, DivergedError, Expired, Malformed, Overload, StaleEpoch
from diloco.fragments import partition
from diloco.framing import Collector
from wan.sim_coordinator import Reply, Request, SimCoordinator
from wan.sim_world import MemoryStored, Process, Saved, Work


class SimService(SimCoordinator):
    """A coordinator that answers."""

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
                "decline": self._decline,
            }
            try:
                reply = yield from methods[request.method](request)
            except (DilocoError, OSError) as problem:
                refusal = problem if isinstance(problem, DilocoError) else Overload(f"cannot be stored: {problem}")
                self.watcher.refused(request, refusal, process.changes)
                answer(refusal)
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
        yield from self._to_its_end(self._turn.hold(self._enter(request)))
        return replace(self._status(request.island), epoch=self.state.members[request.island].epoch)

    def _enter(self, request: Request) -> Work[None]:
        layout = request.layout
        assert layout is not None
        first = self.layout is None

        def then() -> None:
            self.layout, self.fragments = layout, partition(layout, self.config.sync)

        yield from self._take(rounds.Joined(island=request.island), layout_row(layout) if first else None, then)

    def _beat(self, request: Request) -> Work[Reply]:
        self.lease(request)
        self.steps[request.island] = request.step
        yield from self.take(rounds.Beat(island=request.island, epoch=request.epoch, ready=request.ready))
        return self._status(request.island)

    def _leave(self, request: Request) -> Work[Reply]:
        self.lease(request)
        yield from self.take(rounds.Leaving(island=request.island, epoch=request.epoch, reason=request.reason))
        return Reply()

    def _decline(self, request: Request) -> Work[Reply]:
        self.lease(request)
        yield from self.take(self._spoiled(request, request.reason))
        return Reply(dropped=request.reason)

    def _status(self, island: str) -> Reply:
        newcomer = self.state.members[island].standing is Standing.JOINING
        active = [m.id for m in self.state.members.values() if m.awaited]
        step = max((self.steps.get(i, 0) for i in active), default=0)
        positions = tuple((o.version, e) for o, e in zip(self.outers, self.ended, strict=True))
        return Reply(
            phase=self.state.phase,
            step=step if newcomer else 0,
            positions=positions,
            seeder=self.state.seeder,
            directive=rounds.directive(self.state, island)[0],
        )

    def _push(self, request: Request) -> Work[Reply]:
        self.lease(request)
        fragment, round_ = request.fragment, request.round
        if request.seed:
            return (yield from self._seed(request))
        late = rounds.lateness(self.state, fragment, round_)
        version = rounds.base_version(self.state, fragment, round_)
        if version not in (None, request.version):
            raise Malformed(f"based on version {request.version}, and round {round_} continues from {version}")
        if late and rounds.reception(self.state, fragment, round_, request.island):
            reply: Reply = yield from self._to_its_end(self._turn.hold(self._late(request)))
            return reply
        yield from self.take(rounds.Progressed(fragment=fragment, round=round_, island=request.island))
        yield from self._point("upload under way")
        part = _part(request)
        try:
            part.check_finite()
        except DivergedError as error:
            yield from self.take(self._spoiled(request, error.message))
            return Reply(dropped=error.message)
        digest = _digest(part.payload)
        name = f"f{fragment}-r{round_}-{request.island}-e{request.epoch}-{request.rank}-{digest}"
        stored = MemoryStored(
            pieces=request.pieces, codec=part.codec, path=self.disk.file(name).path, digest=digest, disk=self.disk
        )
        return (yield from self.contribute(request, stored, part.payload))

    def contribute(self, request: Request, stored: MemoryStored, payload: Tensor) -> Work[Reply]:
        """Makes a part durable and takes it, as `Run.contribute` does."""
        reply: Reply = yield from self._to_its_end(self._kept(request, stored, payload))
        return reply

    def _kept(self, request: Request, stored: MemoryStored, payload: Tensor) -> Work[Reply]:
        yield from self._in_thread(self._worker, self._write_file(stored.path.name, payload))
        try:
            reply: Reply = yield from self._turn.hold(self._contribute(request, stored))
        except DilocoError:
            self._discard(stored)
            raise
        self._discard(stored)
        return reply

    def _discard(self, stored: MemoryStored) -> None:
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
        if inbound.check(rank, stored):
            return Reply(duplicate=True)

        def then() -> None:
            inbound.add(rank, stored)
            inbound.tokens, inbound.steps = tokens, request.steps

        row = part_row(island, epoch, rank, fragment, round_, stored, tokens, request.steps)
        if inbound.coverage.completed_by(stored.pieces):
            entry = Entry(island=island, epoch=epoch, tokens=tokens, steps=request.steps)
            yield from self._take(rounds.Contributed(fragment=fragment, round=round_, entry=entry), row, then)
        else:
            yield from self._record([row])
            then()
        return Reply()

    def _late(self, request: Request) -> Work[Reply]:
        island, fragment, round_ = request.island, request.fragment, request.round
        known = rounds.counted(self.state, fragment, round_, island) == request.epoch
        if known or self.inbox.knows(fragment, round_, island, request.epoch, request.rank):
            return Reply(duplicate=True)
        reason = rounds.reception(self.state, fragment, round_, island)
        entry = Entry(island=island, epoch=request.epoch, tokens=request.tokens)
        yield from self._take(rounds.Contributed(fragment=fragment, round=round_, entry=entry))
        return Reply(dropped=reason)

    def _spoiled(self, request: Request, reason: str) -> rounds.Spoiled:
        return rounds.Spoiled(
            fragment=request.fragment, round=request.round, island=request.island, epoch=request.epoch, reason=reason
        )

    def _seed(self, request: Request) -> Work[Reply]:
        """Takes one rank's part of the first parameters, as `Run.seed` does."""
        yield from self._point("upload under way")
        part = _part(request)
        bed = self.seedbed if self.seedbed and self.seedbed.epoch == request.epoch else None
        if self.state.seeded:
            if bed and bed.known(request.fragment, request.rank, _digest(part.payload)):
                return Reply(duplicate=True)
            raise StaleEpoch("the run has its first parameters already: fetch them")
        if self.state.seeder != request.island:
            raise Malformed(f"first parameters are to come from {self.state.seeder}")
        if bed is None:
            bed = self.seedbed = SeedBed(request.epoch, self.fragments)
        duplicate = bed.add(request.fragment, request.rank, part, _digest(part.payload))
        if bed is self.seedbed and bed.anchors:
            yield from self._to_its_end(self._turn.hold(self._plant(bed)))
        return Reply(duplicate=duplicate)

    def _plant(self, bed: SeedBed) -> Work[None]:
        if self.state.seeded:
            return
        outers = [Outer.first(f, anchor) for f, anchor in zip(self.fragments, bed.anchors, strict=True)]
        ended = [0] * len(outers)
        yield from self._point("first snapshot written")
        self.disk.check()
        self.disk.snapshots = [Saved(outers=tuple(outers), rounds=tuple(ended))]
        self.watcher.planted(outers)
        yield from self._point("first manifest written")
        yield from self._take(rounds.Seeded())
        self.outers, self.ended = outers, ended
        bed.clear()

    def _outcome(self, request: Request) -> Work[Reply]:
        self.lease(request)
        key = (request.fragment, request.round)
        until = self.world.now + request.wait_s
        while key not in self.outcomes:
            if request.round < self.ended[request.fragment]:
                raise Expired(f"the update of round {request.round} is no longer kept: fetch anchors")
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
        parts = list(select(self.fragments[request.fragment], payload, request.pieces, CODECS[codec]))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _part(request: Request) -> Part:
    """The part of a contribution, or of first parameters, that a request brings."""
    collector = Collector(request.total_bytes)
    for message in request.messages:
        collector.add(message)
    payload = collector.finish()
    return Part(pieces=request.pieces, codec=by_id(*request.codec), payload=payload)


def _digest(payload: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(payload.numpy().data)
