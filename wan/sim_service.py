"""The synchronous twin of `coordinator/service.py` and `bulk.py`: requests of islands, and their streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coordinator import rounds
from coordinator.anchors import Pinned
from coordinator.facts import Standing
from coordinator.fold import Part
from coordinator.inbox import Stored, codecs_of, select
from coordinator.intake import Place
from coordinator.recovery import layout_row
from coordinator.results import Taken
from coordinator.upload import RETRY_S, Slot
from diloco.codec import CODECS, Choice
from diloco.errors import Conflict, DilocoError, Expired, Malformed, Overload, StaleEpoch
from diloco.feedback import Counted
from diloco.fragments import kept, partition
from diloco.framing import chunks, read_end
from wan.sim_coordinator import SimCoordinator
from wan.sim_disk import MemoryStored
from wan.sim_stream import SimUpload, Stream, Superseded
from wan.sim_wire import Answer, Line, Reply, Request, Served
from wan.sim_world import Process, Work, drive

if TYPE_CHECKING:
    from coordinator.intake import Intake

PROGRESS_S = 1.0
SEND_S = 0.05
"""Longest that sending one chunk takes."""


class SimService(SimCoordinator):
    """A coordinator that answers."""

    chunk_bytes = 16
    """Payload of one message; set by the simulation."""

    # -- requests ---------------------------------------------------------------------------------------------------

    def serve(self, request: Request, answer: Answer, line: Line) -> Process:
        """Handles one request; `answer` is given the reply and what follows it, or the refusal."""

        def handled() -> Work[None]:
            methods: dict[str, Callable[[Request], Work[Reply]]] = {
                "join": self._join,
                "beat": self._beat,
                "leave": self._leave,
                "resume": self._resume,
                "push": partial(self._push, line=line),
                "update": self._update_of,
                "anchor": self._anchor,
                "decline": self._decline,
            }
            try:
                reply = yield from methods[request.method](request)
            except (DilocoError, OSError) as problem:
                refusal = problem if isinstance(problem, DilocoError) else _unstored(problem)
                self.watcher.refused(request, refusal, process.changes)
                answer(refusal)
                return
            yield from self.point("before the reply")
            self.watcher.answered(request, reply)
            answer(reply)
            yield from self.point("after the reply")

        process = self.world.spawn(handled(), self)
        self.served[process] = Served(request=request, moved_at=self.world.now)
        return process

    def lease(self, request: Request) -> None:
        """Raises unless the request comes under a lease that holds."""
        rounds.member_of(self.state, request.island, request.epoch)

    def _join(self, request: Request) -> Work[Reply]:
        yield from drive(self.in_turn(lambda: self._enter(request)))
        state, island = self.state, request.island
        known = [(rounds.contributed(state, f, island), current.round) for f, current in enumerate(state.rounds)]
        return replace(
            self._status(island),
            epoch=state.members[island].epoch,
            contributed=tuple(Counted(oldest, open_, frozenset(counted)) for (oldest, counted), open_ in known),
        )

    async def _enter(self, request: Request) -> None:
        layout = request.layout
        assert layout is not None
        self.admission.lease(request.island, [m.id for m in self.state.members.values() if m.present])
        first = self.layout is None

        def then() -> None:
            self.layout, self.fragments = layout, kept(partition(layout, self.config.sync), self.config.run)

        await self.take_in_turn(rounds.Joined(island=request.island), layout_row(layout) if first else None, then)

    def _beat(self, request: Request) -> Work[Reply]:
        self.lease(request)
        self.steps[request.island] = request.step
        yield from drive(self.take(rounds.Beat(island=request.island, epoch=request.epoch, ready=request.ready)))
        return self._status(request.island)

    def _leave(self, request: Request) -> Work[Reply]:
        self.lease(request)
        event = rounds.Leaving(island=request.island, epoch=request.epoch, reason=request.reason)
        yield from drive(self.take(event))
        return Reply()

    def _decline(self, request: Request) -> Work[Reply]:
        self.lease(request)
        event = rounds.Spoiled(
            fragment=request.fragment,
            round=request.round,
            island=request.island,
            epoch=request.epoch,
            reason=request.reason,
        )
        yield from drive(self.take(event))
        return Reply(dropped=request.reason)

    def _status(self, island: str) -> Reply:
        newcomer = self.state.members[island].standing is Standing.JOINING
        active = [m.id for m in self.state.members.values() if m.awaited]
        step = max((self.steps.get(i, 0) for i in active), default=0)
        positions = tuple((o.version, e, o.digest) for o, e in zip(self.outers, self.ended, strict=True))
        return Reply(
            phase=self.state.phase,
            step=step if newcomer else 0,
            positions=positions,
            seeder=self.state.seeder,
            directive=rounds.directive(self.state, island)[0],
        )

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _resume(self, request: Request) -> Work[Reply]:
        self._announced(request)
        taken = yield from self._settled(request)
        if taken:
            receipt = _receipt(taken)
            return replace(receipt, settled=True, have_bytes=request.total_bytes, have_digest=taken.digest)
        upload = self.uploads.find(slot_of(request), request.total_bytes)
        have = upload.open() if upload else 0
        self.watcher.resumed(request, have)
        return Reply(have_bytes=have, have_digest=upload.digest if upload else "")

    def _push(self, request: Request, line: Line) -> Work[Reply]:
        """Takes one rank's part of a contribution, or of the first parameters, as `Bulk.push` does."""
        self._announced(request)
        taken = yield from self._settled(request)
        if taken and (not taken.digest or request.first_byte == request.total_bytes):
            digest = read_end((yield from line.take()) or b"") if taken.digest else ""
            if digest != taken.digest:
                raise Conflict(f"rank {request.rank} has sent {taken.digest} before and sends {digest} now")
            return _receipt(taken)
        slot, process = slot_of(request), self.world.current
        yield from self.uploads.supersede(slot)
        with self.admission.stream(request.island):
            begun = self.uploads.find(slot, request.total_bytes)
            self.admission.room(
                0 if begun else request.total_bytes,
                kept_bytes=self.disk.kept_bytes + self.uploads.reserved_bytes,
                coming_bytes=self.uploads.coming_bytes,
                free_bytes=self.disk.free_bytes,
            )
            assert process is not None
            upload, stream = self.uploads.begin(slot, request.total_bytes, process)
            try:
                return (yield from self._receive(request, upload, stream, line))
            except Superseded:
                raise
            except (DilocoError, OSError) as error:
                if isinstance(error, OSError) or (upload.whole and not isinstance(error, StaleEpoch)):
                    self.uploads.drop(upload)
                raise
            finally:
                if self.alive:
                    self.uploads.end(upload)

    def _receive(self, request: Request, upload: SimUpload, stream: Stream, line: Line) -> Work[Reply]:
        have, told, mine = upload.open(), -PROGRESS_S, self.served[stream.process]
        if request.first_byte:
            self.watcher.stored(request, have)
        if request.first_byte > have:
            raise Expired(f"{have} bytes of this push are here, not {request.first_byte}: ask Resume, and go on there")
        while (message := (yield from line.take())) is not None:
            moved = upload.add(message)
            mine.moved_at = now = self.world.now
            if moved:
                self.watcher.stored(request, upload.have)
            yield from self.point("chunk written")
            if moved and not request.seed and now - told >= PROGRESS_S:
                told = now
                yield from drive(self.intake.progressed(place_of(request)))
                taken = yield from self._settled(request)
                if taken and taken.dropped:
                    self.uploads.drop(upload)
                    return _receipt(taken)
        upload.check_complete()
        self.lease(request)
        stream.storing = True
        reply = yield from self.received(request, upload)
        if not request.seed or self.state.seeded:
            self.uploads.drop(upload)
            self.uploads.prune(self.intake.over)
        return reply

    def received(self, request: Request, upload: SimUpload) -> Work[Reply]:
        """Takes a part whose bytes are all here, as `Bulk._received` does."""
        place, payload, intake = place_of(request), upload.payload, self.intake_for(request)
        digest = upload.digest
        choice: Choice = CODECS["fp32"] if request.seed else self.up
        codecs = codecs_of(self.fragments[request.fragment], request.pieces, choice)
        part = Part(pieces=request.pieces, codecs=codecs, payload=payload)
        if request.seed:
            known = yield from drive(intake.seed(*place[:4], part, digest))
            return Reply(duplicate=known)
        dropped = yield from drive(intake.check(place, part))
        if dropped:
            return Reply(dropped=dropped)
        path = self.disk.file(
            f"f{place.fragment}-r{place.round}-{place.island}-e{place.epoch}-{place.rank}-{digest}"
        ).path
        stored = MemoryStored(pieces=request.pieces, codecs=codecs, path=path, digest=digest, disk=self.disk)

        def keep() -> Work[Stored]:
            yield from self.write_file(path.name, payload)
            upload.discard()
            return stored

        taken = yield from drive(intake.contribute(place, keep, request.tokens, request.steps))  # type: ignore[arg-type]
        return _receipt(taken)

    def intake_for(self, request: Request) -> Intake:
        """Who takes what a request brings."""
        return self.intake

    def _announced(self, request: Request) -> None:
        self.lease(request)
        if request.fragment >= (len(self.fragments) if request.seed else len(self.state.rounds)):
            raise Malformed(f"there is no fragment {request.fragment} to push")

    def _settled(self, request: Request) -> Work[Taken | None]:
        place, intake = place_of(request), self.intake_for(request)
        if request.seed:
            known = intake.seed_known(*place[:4])
            return Taken(duplicate=True, digest=known) if known else None
        return (yield from drive(intake.settled(place, request.version, request.pieces)))

    # -- what goes out ------------------------------------------------------------------------------------------------

    def _update_of(self, request: Request) -> Work[Reply]:
        self.lease(request)
        key = (request.fragment, request.round)
        until = self.world.now + request.wait_s
        while key not in self.outcomes:
            if self.ended and request.round < self.ended[request.fragment]:
                raise Expired(f"the update of round {request.round} is no longer kept: fetch anchors")
            if self.world.now >= until:
                return Reply(outcome="open")
            yield (self.changed, until - self.world.now)
        outcome = self.outcomes[key]
        reply = Reply(outcome=outcome.ended, version=outcome.version, digest=outcome.digest)
        if outcome.update is None:
            return reply
        payload = self.disk.files[outcome.update.name]
        return (yield from self.sent(request, reply, payload, self.down, request.first_byte))

    def _anchor(self, request: Request) -> Work[Reply]:
        self.lease(request)
        pin, first_byte = yield from self.pinned(request)
        reply = Reply(outcome="anchor", version=pin.version, round=pin.ended, digest=pin.digest)
        return (yield from self.sent(request, reply, pin.anchor.view(torch.uint8), CODECS["fp32"], first_byte))

    def pinned(self, request: Request) -> Work[tuple[Pinned, int]]:
        """The anchor that a request means, and the byte from which it is sent."""
        fragment, asked = request.fragment, request.version if request.first_byte else None
        pin = self.anchors.find(fragment, asked, self.outers[fragment].version)
        if pin is None:
            outer, ended = yield from self.still(fragment)
            pin = Pinned(version=outer.version, ended=ended, digest=outer.digest, anchor=outer.anchor)
            self.anchors.keep(fragment, pin)
        return pin, request.first_byte if pin.version == request.version else 0

    def sent(self, request: Request, reply: Reply, payload: Tensor, choice: Choice, first: int) -> Work[Reply]:
        """A header with the chunks of its payload, from byte `first`."""
        parts = list(select(self.fragments[request.fragment], payload, request.pieces, choice))
        total = sum(part.numel() for part in parts)
        if first > total:
            raise Malformed(f"the payload has {total} bytes, and it is asked for from byte {first}")
        messages = tuple(chunks(parts, self.chunk_bytes, first))
        with self.admission.stream(request.island):
            yield self.world.rng.random() * SEND_S * len(messages)
        return replace(reply, total_bytes=total, first_byte=first, messages=messages)


def slot_of(request: Request) -> Slot:
    """What a push's bytes are known by."""
    round_ = 0 if request.seed else request.round
    return Slot(request.fragment, round_, request.island, request.rank, request.seed)


def place_of(request: Request) -> Place:
    """Where a push belongs."""
    return Place(request.island, request.epoch, request.rank, request.fragment, request.round)


def _receipt(taken: Taken) -> Reply:
    return Reply(duplicate=taken.duplicate, dropped=taken.dropped, late=taken.late)


def _unstored(problem: OSError) -> DilocoError:
    return Overload(f"cannot be stored: {problem}", retry_after_s=RETRY_S)
