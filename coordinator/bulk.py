"""The bulk methods: parts of contributions and first parameters come in, updates and anchors go out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import grpc
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from coordinator.answers import Context, answers, to_bytes
from coordinator.calls import Call, streams
from coordinator.division import checked
from coordinator.flow import Flow, Heard
from coordinator.fold import Part
from coordinator.inbox import Stored, codecs_of, part_size, select
from coordinator.intake import Place
from coordinator.results import Taken
from coordinator.run import Run
from coordinator.scan import Scan
from coordinator.updates import Update
from coordinator.upload import RETRY_S, Slot, Stream, Upload
from coordinator.words import waiting_for
from diloco.codec import CODECS, Choice, Codec
from diloco.errors import (
    CodecError,
    Conflict,
    DilocoError,
    Expired,
    Malformed,
    Overload,
    StaleEpoch,
)
from diloco.failpoints import failpoint
from diloco.framing import Bytes, pieces_from_proto, read_end, split, update_end
from diloco.layout import Piece
from diloco.v1 import coordinator_pb2 as pb
from diloco.window import Window

log = logging.getLogger("diloco.coordinator")
MAX_WAIT_S = 60.0
PROGRESS_S = 1.0
"""How often a stream that brings bytes says so, and looks whether they still count."""


class _Push(NamedTuple):
    """A push as its header announces it."""

    header: pb.PushHeader
    pieces: tuple[Piece, ...]
    codecs: tuple[Codec, ...]
    places: tuple[str, ...]

    @property
    def slot(self) -> Slot:
        header = self.header
        round_ = 0 if header.seed else header.round
        return Slot(header.fragment, round_, header.island_id, header.rank, header.seed)

    @property
    def place(self) -> Place:
        header = self.header
        return Place(header.island_id, header.epoch, header.rank, header.fragment, header.round)


class Bulk:
    """The bulk methods of `diloco.v1.Coordinator` over one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._free_bytes = self._sampled_free()

    def _sampled_free(self) -> Callable[[], int]:
        store = self._run.store
        return sampled(lambda: store.files.free_bytes(store.root))

    def methods(self) -> dict[str, Any]:
        """gRPC method handlers by name."""
        return {
            "Push": streams(self.push),
            "Fetch": streams(self.fetch),
            "Resume": grpc.unary_unary_rpc_method_handler(
                self.resume, request_deserializer=pb.PushHeader.FromString, response_serializer=to_bytes
            ),
        }

    # -- contributions and first parameters --------------------------------------------------------------------------

    @answers
    async def resume(self, header: pb.PushHeader, context: Context) -> pb.Resumption:
        """Says where a push goes on, or that nothing more is to be sent."""
        push, uploads = self._announced(header), self._run.uploads
        taken = await self._settled(push)
        if taken:
            return pb.Resumption(have_bytes=header.total_bytes, digest=taken.digest, receipt=_receipt(taken))
        upload = uploads.find(push.slot, header.total_bytes)
        have, digest = await uploads.run(push.slot, upload.look) if upload else (0, "")
        return pb.Resumption(have_bytes=have, digest=digest)

    @answers
    async def push(self, call: Call) -> None:
        """Takes one rank's part of a contribution, or of the first parameters."""
        messages = call.messages()
        try:
            header = pb.PushHeader.FromString(bytes(await anext(messages)))
        except (DecodeError, StopAsyncIteration):
            raise Malformed("a push starts with a PushHeader") from None
        push = self._announced(header)
        failpoint("push-announced")
        taken = await self._settled(push)
        if taken and (not taken.digest or header.first_byte == header.total_bytes):
            await self._compare(push, taken, messages)
            await _conclude(call, push, _receipt(taken))
        else:
            await self._take(push, call)

    async def _compare(self, push: _Push, taken: Taken, messages: AsyncIterator[Bytes]) -> None:
        """Raises `Conflict` where a part that is known has another digest than its sender has now."""
        if taken.digest:
            end = await anext(messages, b"")
            digest = read_end(end)
            if digest != taken.digest:
                rank = push.header.rank
                raise Conflict(f"rank {rank} has sent {taken.digest} before and sends {digest} now")

    async def _take(self, push: _Push, call: Call) -> None:
        """Takes a part that is not known, or whose sender does not know that."""
        run, header = self._run, push.header
        await run.uploads.supersede(push.slot)
        with run.admission.stream(header.island_id):
            await self._room(push)
            await run.uploads.supersede(push.slot)  # another may have begun meanwhile
            upload, stream = run.uploads.begin(push.slot, header.total_bytes)
            try:
                receipt = await self._receive(push, upload, stream, call)
                await _conclude(call, push, receipt)
                await self._clear(push, upload)
            except asyncio.CancelledError:
                if not stream.superseded:
                    raise
                stream.task.uncancel()
                raise Overload("a newer stream of the same part has taken over", retry_after_s=RETRY_S) from None
            except (DilocoError, OSError) as error:
                # Half a payload is good as far as it came; a whole one is not, unless only its lease is over.
                if isinstance(error, OSError) or (upload.whole and not isinstance(error, StaleEpoch)):
                    await run.uploads.drop(upload)
                raise
            finally:
                run.uploads.end(upload)

    async def _room(self, push: _Push) -> None:
        """Raises `Overload` where the payload does not fit on the disk, and has room made for the next try."""
        run, total = self._run, push.header.total_bytes

        def check() -> None:
            begun = run.uploads.find(push.slot, total)
            run.admission.room(
                0 if begun else total,
                kept_bytes=run.store.kept_bytes + run.uploads.reserved_bytes,
                coming_bytes=run.uploads.coming_bytes,
                free_bytes=self._free_bytes(),
            )

        try:
            check()
        except Overload:
            try:
                if not run.store.files.spared_bytes:
                    raise
                await run.in_worker(run.store.files.drop_spares)
                self._free_bytes = self._sampled_free()
                check()
            except Overload:
                run.make_room()
                raise

    async def _receive(self, push: _Push, upload: Upload, stream: Stream, call: Call) -> pb.Receipt:
        """Takes what is missing of a payload, then what it is."""
        run, header = self._run, push.header
        have = await run.uploads.run(push.slot, upload.open)
        if header.first_byte > have:
            raise Expired(f"{have} bytes of this push are here, not {header.first_byte}: ask Resume, and go on there")
        scan = Scan(push.pieces, push.codecs)
        upload.watch = None if header.seed else scan.look  # first parameters are looked at as they are placed
        taken = await self._pour(push, upload, call)
        if taken:
            return _receipt(taken)
        upload.check_complete()
        run.lease(header.run_id, header.island_id, header.epoch)
        stream.storing = True
        return await self._received(push, upload, scan)

    async def _clear(self, push: _Push, upload: Upload) -> None:
        """Removes what is left of an upload whose sender has its receipt, and of others that are over."""
        run = self._run
        if not push.header.seed or run.state.seeded:
            try:
                await run.uploads.drop(upload)
                await run.uploads.prune(run.intake.over)
            except OSError as error:
                log.warning("what is left of an upload cannot be removed: %s", error)

    async def _pour(self, push: _Push, upload: Upload, call: Call) -> Taken | None:
        """Has a payload flow in, and says from time to time that some of it has come; returns what becomes of one that
        does not count any more."""
        flow, seen = Flow(upload, lambda: self._run.admission.window_bytes), upload.have
        pouring = asyncio.ensure_future(call.pour(flow.take))
        coming = asyncio.ensure_future(flow.came.wait())
        try:
            await asyncio.wait((pouring, coming), return_when=asyncio.FIRST_COMPLETED)
            while True:
                if upload.have > seen and not push.header.seed:
                    seen = upload.have
                    await self._run.intake.progressed(push.place)
                    taken = await self._settled(push)
                    if taken and taken.dropped:
                        return taken
                if pouring.done():
                    break
                await asyncio.wait((pouring,), timeout=PROGRESS_S)
            await pouring
        finally:
            flow.stop()
            pouring.cancel()
            coming.cancel()
            await asyncio.wait((pouring,))  # it sends nothing any more, as a call sends one thing at a time
        return None

    async def _received(self, push: _Push, upload: Upload, scan: Scan) -> pb.Receipt:
        """Takes a part whose bytes are all here."""
        run, header, pieces, codecs = self._run, push.header, push.pieces, push.codecs
        place, digest = push.place, upload.digest
        part = Part(pieces=pieces, codecs=codecs, payload=upload.payload)
        if header.seed:
            known = await run.intake.seed(*place[:4], part, digest)
            return pb.Receipt(duplicate=known)
        dropped = await run.intake.check(place, part, scan)
        if dropped:
            return pb.Receipt(dropped=dropped)
        name = f"f{place.fragment}-r{place.round}-{place.island}-e{place.epoch}-{place.rank}-{digest}"

        def keep() -> Stored:
            path = upload.publish(run.store.inbox_path(name))
            files = run.store.files
            return Stored(pieces=pieces, codecs=codecs, path=path, digest=digest, files=files, checked=True)

        return _receipt(await run.intake.contribute(place, keep, header.tokens, header.steps, push.places))

    def _announced(self, header: pb.PushHeader) -> _Push:
        """Checks a header, so that no more is received than can be meant."""
        run = self._run
        run.lease(header.run_id, header.island_id, header.epoch)
        limit = len(run.fragments) if header.seed else len(run.state.rounds)
        if header.fragment >= limit:
            raise Malformed(f"there is no fragment {header.fragment} to push; the run has {limit}")
        pieces = self._pieces(header.pieces, header.fragment)
        choice: Choice = CODECS["fp32"] if header.seed else run.up
        if (header.codec_id, header.codec_version) != (choice.id, choice.version):
            what = "first parameters" if header.seed else "this run's contributions"
            raise CodecError(
                f"{what} are coded as {choice.name} (id {choice.id}, version {choice.version}), "
                f"not as id {header.codec_id} version {header.codec_version}"
            )
        codecs = codecs_of(run.fragments[header.fragment], pieces, choice)
        expected = sum(codec.size(piece.box.numel) for piece, codec in zip(pieces, codecs, strict=True))
        if header.total_bytes != expected:
            raise Malformed(f"{header.total_bytes} bytes announced; {choice.name} of these pieces takes {expected}")
        return _Push(header, tuple(pieces), codecs, checked(header.places, run.config.shards))

    async def _settled(self, push: _Push) -> Taken | None:
        """What becomes of a part that need not be sent: it does not count, or is known if it has the same digest.

        Raises:
            Conflict, Malformed, StaleEpoch: it must not be sent.
        """
        intake, header = self._run.intake, push.header
        if header.seed:
            known = intake.seed_known(*push.place[:4])
            return Taken(duplicate=True, digest=known) if known else None
        return await intake.settled(push.place, header.base_version, push.pieces)

    def _pieces(self, messages: Iterable[pb.Piece], fragment: int) -> list[Piece]:
        """The pieces of a request, which are boxes of the fragment's tensors and no more than it is."""
        run = self._run
        run.here(fragment)
        assert run.layout is not None
        pieces, chart = pieces_from_proto(messages, run.layout), run.fragments[fragment]
        foreign = next((piece.tensor for piece in pieces if piece.tensor not in chart.place), None)
        if foreign is not None:
            raise Malformed(f"tensor {foreign} is not part of fragment {fragment}")
        if sum(piece.box.numel for piece in pieces) > chart.numel:
            raise Malformed(f"the pieces are more than fragment {fragment} is")
        return pieces

    # -- updates and anchors ------------------------------------------------------------------------------------------

    @answers
    async def fetch(self, call: Call) -> None:
        """Sends pieces of an update, or of anchors as they stand."""
        messages = call.messages()
        try:
            request = pb.FetchRequest.FromString(bytes(await anext(messages)))
        except (DecodeError, StopAsyncIteration):
            raise Malformed("a fetch starts with a FetchRequest") from None
        header, parts = await self._found(request)
        run = self._run
        with run.admission.stream(request.island_id), run.store.reading(request.fragment, request.round):
            await call.write(header.SerializeToString())
            end = min(header.total_bytes, header.first_byte + (request.length_bytes or header.total_bytes))
            progress = run.progress[request.island_id]
            window = Window(run.config.wire.chunk_bytes, progress.window_bytes)
            window.begin(header.first_byte)
            async with Heard(window, messages) as heard:
                fed = _failing(split(parts, lambda: window.chunk_bytes, header.first_byte, end))
                while count := await call.feed(fed, heard.admits):
                    await heard.room(count)
            if header.total_bytes:
                progress.window_bytes = window.bytes
            if header.outcome == "committed":
                await call.write(update_end(await self._digest(request)))

    async def _digest(self, request: pb.FetchRequest) -> int:
        """The digest that an update leads to, once the ledger has it."""
        outcome = await self._run.outcome(request.fragment, request.round, MAX_WAIT_S)
        if outcome is None:
            raise Overload("the round is not published yet: ask again", retry_after_s=RETRY_S)
        return outcome.digest

    async def _found(self, request: pb.FetchRequest) -> tuple[pb.FetchHeader, Iterator[Tensor]]:
        """The header and the whole payload of an answer."""
        run, fragment = self._run, request.fragment
        run.lease(request.run_id, request.island_id, request.epoch)
        first_byte = request.first_byte
        if request.anchor:
            pin = await run.anchor(fragment, request.version if request.first_byte else None)
            if pin.version != request.version:
                first_byte = 0
            digest = pin.digest & (2**64 - 1)
            header = pb.FetchHeader(outcome="anchor", version=pin.version, round=pin.ended, digest=digest)
            payload, reach = pin.anchor.view(torch.uint8), _at_once
            choice: Choice = CODECS["fp32"]
        else:
            wait_s = min(MAX_WAIT_S, max(0.0, request.wait_s))
            found = await run.update(fragment, request.round, wait_s)
            if found is None:
                reason = waiting_for(run.state, fragment, run.clock())
                return pb.FetchHeader(outcome="open", reason=reason), iter(())
            choice = run.down
            if isinstance(found, Update):
                header = pb.FetchHeader(outcome="committed", reason=found.reason, version=found.version)
                payload, reach = found.payload, found.reach
            else:
                header = pb.FetchHeader(outcome=found.ended, reason=found.reason, version=found.version)
                if found.update is None:
                    return header, iter(())
                try:
                    payload, reach = run.store.files.map(found.update), _at_once
                except OSError as error:
                    raise DilocoError(f"the coordinator cannot read this: {error}") from error
        pieces = self._pieces(request.pieces, fragment)
        header.codec_id, header.codec_version = choice.id, choice.version
        header.total_bytes = part_size(run.fragments[fragment], pieces, choice)
        if first_byte > header.total_bytes:
            raise Malformed(f"the payload has {header.total_bytes} bytes, and it is asked for from byte {first_byte}")
        header.first_byte = first_byte
        return header, select(run.fragments[fragment], payload, pieces, choice, reach)


def _at_once(byte: int) -> None:
    """The payload is there."""


def _failing(messages: Iterator[tuple[Bytes, ...]]) -> Iterator[tuple[Bytes, ...]]:
    """Messages, with a step at which a test may kill the process behind each."""
    for message in messages:
        yield message
        failpoint("fetch-chunk")


def sampled(look: Callable[[], int], every_s: float = 1.0) -> Callable[[], int]:
    """A figure that is looked up again no more than every `every_s` seconds."""
    last = (-every_s, 0)

    def figure() -> int:
        nonlocal last
        now = time.monotonic()
        if now - last[0] >= every_s:
            last = now, look()
        return last[1]

    return figure


async def _conclude(call: Call, push: _Push, receipt: pb.Receipt) -> None:
    await call.conclude(pb.PushReply(have_bytes=push.header.total_bytes, receipt=receipt).SerializeToString())


def _receipt(taken: Taken) -> pb.Receipt:
    return pb.Receipt(duplicate=taken.duplicate, dropped=taken.dropped, late=taken.late)
