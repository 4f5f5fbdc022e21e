"""The bulk methods: parts of contributions and first parameters come in, updates and anchors go out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc
import torch
import xxhash
from google.protobuf.message import DecodeError
from torch import Tensor

from coordinator.answers import Context, abort, answers, to_bytes
from coordinator.fold import Part
from coordinator.inbox import Stored, select
from coordinator.results import Outcome, Taken
from coordinator.run import Run
from coordinator.store import Spool, read_payload
from coordinator.words import waiting_for
from diloco.codec import CODECS, by_id
from diloco.errors import DilocoError, Malformed
from diloco.framing import chunks, pieces_from_proto
from diloco.layout import Piece
from diloco.v1 import coordinator_pb2 as pb

log = logging.getLogger("diloco.coordinator")
MAX_WAIT_S = 60.0


class Bulk:
    """The bulk methods of `diloco.v1.Coordinator` over one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def methods(self) -> dict[str, Any]:
        """gRPC method handlers by name."""
        return {
            "Push": grpc.stream_unary_rpc_method_handler(self.push, response_serializer=to_bytes),
            "Fetch": grpc.unary_stream_rpc_method_handler(self.fetch, request_deserializer=pb.FetchRequest.FromString),
        }

    @answers
    async def push(self, messages: AsyncIterator[bytes], context: Context) -> pb.Receipt:
        """Takes one rank's part of a contribution, or of the first parameters."""
        header = await self._push_header(messages)
        run = self._run
        key = header.island_id, header.fragment, header.round
        if not header.seed and run.expected(*key, header.base_version):
            return _receipt(await run.late(*_key(header), header.tokens))
        spool = Spool(run.store.inbox_path(f"{xxhash.xxh3_64_hexdigest(header.SerializeToString())}.partial"))
        try:
            async for message in messages:
                spool.add(message, header.total_bytes)
            return await self._received(header, spool)
        finally:
            spool.close()

    async def _received(self, header: pb.PushHeader, spool: Spool) -> pb.Receipt:
        """Takes a part whose bytes are all here."""
        run, key = self._run, (header.island_id, header.epoch)
        spool.check_complete(header.total_bytes)
        pieces = tuple(self._pieces(header.pieces, header.fragment))
        codec = by_id(header.codec_id, header.codec_version)
        part = Part(pieces=pieces, codec=codec, payload=read_payload(spool.path))
        if header.seed:
            duplicate = await run.seed(*key, header.rank, header.fragment, part, spool.digest)
            return pb.Receipt(duplicate=duplicate)
        dropped = await run.check(*key, header.fragment, header.round, part)
        if dropped:
            return pb.Receipt(dropped=dropped)
        name = f"f{header.fragment}-r{header.round}-{header.island_id}-e{header.epoch}-{header.rank}"

        def keep() -> Stored:
            path = spool.publish(run.store.inbox_path(f"{name}-{spool.digest}"))
            return Stored(pieces=pieces, codec=codec, path=path, digest=spool.digest)

        return _receipt(await run.contribute(_key(header), keep, header.tokens, header.steps))

    async def _push_header(self, messages: AsyncIterator[bytes]) -> pb.PushHeader:
        """Reads and checks a header, so that no more is received than can be meant."""
        run = self._run
        try:
            header = pb.PushHeader.FromString(await anext(aiter(messages)))
        except (DecodeError, StopAsyncIteration):
            raise Malformed("a push starts with a PushHeader") from None
        run.lease(header.run_id, header.island_id, header.epoch)
        limit = len(run.fragments) if header.seed else len(run.state.rounds)
        if header.fragment >= limit:
            raise Malformed(f"there is no fragment {header.fragment} to push; the run has {limit}")
        pieces = self._pieces(header.pieces, header.fragment)
        codec = by_id(header.codec_id, header.codec_version)
        expected = sum(codec.size(piece.box.numel) for piece in pieces)
        if header.total_bytes != expected:
            raise Malformed(f"{header.total_bytes} bytes announced; {codec.name} of these pieces takes {expected}")
        return header

    def _pieces(self, messages: Iterable[pb.Piece], fragment: int) -> list[Piece]:
        """The pieces of a request, which are boxes of the fragment's tensors and no more than it is."""
        run = self._run
        assert run.layout is not None
        pieces, chart = pieces_from_proto(messages, run.layout), run.fragments[fragment]
        foreign = next((piece.tensor for piece in pieces if piece.tensor not in chart.place), None)
        if foreign is not None:
            raise Malformed(f"tensor {foreign} is not part of fragment {fragment}")
        if sum(piece.box.numel for piece in pieces) > chart.numel:
            raise Malformed(f"the pieces are more than fragment {fragment} is")
        return pieces

    async def fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[bytes]:
        """Sends pieces of an update, or of anchors as they stand."""
        try:
            header, parts = await self._found(request)
            yield header.SerializeToString()
            for message in chunks(parts, self._run.config.wire.chunk_bytes):
                yield message
                await asyncio.sleep(0)
        except DilocoError as error:
            await abort(context, error)
        except OSError as error:
            log.exception("fetch failed")
            await abort(context, DilocoError(f"the coordinator cannot read this: {error}"))

    async def _found(self, request: pb.FetchRequest) -> tuple[pb.FetchHeader, Iterator[Tensor]]:
        run = self._run
        run.lease(request.run_id, request.island_id, request.epoch)
        if request.anchor:
            outer = run.anchor(request.fragment)
            payload, codec = outer.anchor.view(torch.uint8), CODECS["fp32"]
            ended = run.ended[request.fragment]
            header = pb.FetchHeader(outcome="anchor", version=outer.version, round=ended)
            digest = outer.digest
        else:
            wait_s = min(MAX_WAIT_S, max(0.0, request.wait_s))
            outcome = await run.outcome(request.fragment, request.round, wait_s)
            if outcome is None:
                reason = waiting_for(run.state, request.fragment, run.clock())
                return pb.FetchHeader(outcome="open", reason=reason), iter(())
            header = self._outcome_header(outcome)
            if outcome.update is None:
                return header, iter(())
            payload, codec, digest = (
                read_payload(outcome.update),
                CODECS[run.config.wire.down],
                outcome.digest,
            )
        pieces = self._pieces(request.pieces, request.fragment)
        parts = select(run.fragments[request.fragment], payload, pieces, codec)
        header.codec_id, header.codec_version = codec.id, codec.version
        header.digest = digest & (2**64 - 1)
        header.total_bytes = sum(part.numel() for part in parts)
        return header, iter(parts)

    def _outcome_header(self, outcome: Outcome) -> pb.FetchHeader:
        return pb.FetchHeader(
            outcome=outcome.ended,
            reason=outcome.reason,
            version=outcome.version,
            digest=outcome.digest & (2**64 - 1),
        )


def _key(header: pb.PushHeader) -> tuple[str, int, int, int, int]:
    """Island, epoch, rank, fragment and round of a push."""
    return header.island_id, header.epoch, header.rank, header.fragment, header.round


def _receipt(taken: Taken) -> pb.Receipt:
    return pb.Receipt(duplicate=taken.duplicate, dropped=taken.dropped, late=taken.late)
