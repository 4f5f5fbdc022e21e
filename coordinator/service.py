"""The gRPC face of a run. Each method checks its request, asks the run, and answers; errors travel by name."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast, get_args

import grpc
import torch
import xxhash
from google.protobuf.message import DecodeError
from torch import Tensor

from coordinator import rounds
from coordinator.fold import Part
from coordinator.inbox import Stored, select
from coordinator.run import Outcome, Run
from coordinator.store import Spool, read_payload
from diloco.codec import CODECS, by_id
from diloco.errors import TABLE, DilocoError, LayoutError, Malformed, RunMismatch
from diloco.framing import CONTROL_LIMIT_BYTES, PROTOCOL, SERVICE, chunks, pieces_from_proto
from diloco.layout import Kind, Layout, Piece, TensorSpec
from diloco.settings import to_toml
from diloco.v1 import coordinator_pb2 as pb

log = logging.getLogger("diloco.coordinator")
P = ParamSpec("P")
R = TypeVar("R")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
MAX_WAIT_S = 60.0
REASON_LIMIT = 600
"""Longest reason that travels, in characters: gRPC bounds a call's metadata to 8 KiB, and one character may take 12."""
ISLAND_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""It becomes part of file names."""

OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.max_send_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]


async def abort(context: Context, error: DilocoError) -> None:
    """Ends a call with the error's status, message and class name."""
    context.set_trailing_metadata((("diloco-error", type(error).__name__),))
    await context.abort(getattr(grpc.StatusCode, TABLE[type(error)].grpc_status), error.message[:REASON_LIMIT])


def answers(
    method: Callable[Concatenate[Service, P], Awaitable[R]],
) -> Callable[Concatenate[Service, P], Coroutine[Any, Any, R]]:
    """Sends a method's foreseen errors to the caller, and its unforeseen ones to the log as well."""

    @wraps(method)
    async def wrapped(self: Service, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(self, *args, **kwargs)
        except DilocoError as error:
            await abort(cast(Context, args[-1]), error)
        except OSError as error:
            log.exception("%s failed", method.__name__)
            await abort(cast(Context, args[-1]), DilocoError(f"the coordinator cannot store this: {error}"))
        raise AssertionError("abort raises")

    return wrapped


class Service:
    """The methods of `diloco.v1.Coordinator` over one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """All methods, for `grpc.aio.Server.add_generic_rpc_handlers`."""
        control: dict[str, tuple[Any, Any]] = {
            "Join": (self.join, pb.JoinRequest),
            "Heartbeat": (self.heartbeat, pb.HeartbeatRequest),
            "Leave": (self.leave, pb.LeaveRequest),
            "Status": (self.status, pb.StatusRequest),
        }
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                method, request_deserializer=kind.FromString, response_serializer=kind_to_bytes
            )
            for name, (method, kind) in control.items()
        }
        methods["Push"] = grpc.stream_unary_rpc_method_handler(self.push, response_serializer=kind_to_bytes)
        methods["Fetch"] = grpc.unary_stream_rpc_method_handler(
            self.fetch, request_deserializer=pb.FetchRequest.FromString
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    # -- control --------------------------------------------------------------------------------------------------

    @answers
    async def join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        """Enters an island."""
        if not request.protocol_min <= PROTOCOL <= request.protocol_max:
            raise RunMismatch(
                f"the island speaks protocols {request.protocol_min} to {request.protocol_max}, "
                f"this coordinator {PROTOCOL}: install matching versions"
            )
        if not ISLAND_ID.fullmatch(request.island_id) or not request.ranks:
            raise Malformed(
                f"a join needs a number of ranks and an island id, 1 to 64 letters, digits, '.', '_' and '-', "
                f"not {request.island_id[:64]!r}"
            )
        layout = Layout(_spec(tensor) for tensor in request.tensors)
        if layout.digest != request.layout_digest:
            raise Malformed(f"the tensors have layout digest {layout.digest}, not {request.layout_digest}")
        epoch = await self._run.join(request.island_id, request.ranks, request.run_id, layout)
        return pb.JoinReply(
            run_id=self._run.config.run.id,
            epoch=epoch,
            config_toml=to_toml(self._run.config),
            state=self._state(),
        )

    @answers
    async def heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.RunState:
        """Renews a lease."""
        await self._beat(request)
        member = self._run.state.members[request.island_id]
        return self._state(newcomer=member.standing is rounds.Standing.JOINING)

    async def _beat(self, request: pb.HeartbeatRequest) -> None:
        self._run.lease(request.run_id, request.island_id, request.epoch)
        progress = self._run.progress[request.island_id]
        for name in ("step", "tokens", "tokens_per_second", "loss", "outer_loss", "bytes_up", "bytes_down"):
            setattr(progress, name, getattr(request, name))
        await self._run.take(rounds.Beat(island=request.island_id, epoch=request.epoch, ready=request.ready))

    @answers
    async def leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """Lets an island go."""
        if request.HasField("last"):
            await self._beat(request.last)
        self._run.lease(request.run_id, request.island_id, request.epoch)
        await self._run.take(rounds.Leaving(island=request.island_id, epoch=request.epoch, reason=request.reason))
        return pb.LeaveReply()

    @answers
    async def status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        """Everything an operator sees."""
        run = self._run
        return pb.StatusReply(
            run_id=run.config.run.id,
            state=self._state(),
            islands=[self._island(member) for member in sorted(run.state.members.values(), key=lambda m: m.id)],
            rounds_committed=run.totals.committed,
            rounds_skipped=run.totals.skipped,
            steps=run.config.run.steps,
            layout_digest=run.layout.digest if run.layout else "",
            parameters=run.layout.numel if run.layout else 0,
            config_toml=to_toml(run.config),
        )

    def _state(self, newcomer: bool = False) -> pb.RunState:
        run, now = self._run, self._run.clock()
        fragments = []
        for f in range(len(run.fragments)):
            moving = f < len(run.state.rounds)
            seeded = f < len(run.outers)
            fragments.append(
                pb.FragmentState(
                    fragment=f,
                    version=run.outers[f].version if seeded else 0,
                    round=run.ended[f] if seeded else 0,
                    digest=run.outers[f].digest & (2**64 - 1) if seeded else 0,
                    seeded=seeded,
                    waiting_for=rounds.waiting_for(run.state, f, now) if moving else "",
                )
            )
        return pb.RunState(
            phase=run.state.phase,
            reason=rounds.phase_reason(run.state),
            fragments=fragments,
            seeder=run.state.seeder,
            step=run.step if newcomer else 0,
        )

    def _island(self, member: rounds.Member) -> pb.IslandStatus:
        progress = self._run.progress[member.id]
        return pb.IslandStatus(
            id=member.id,
            state=member.standing,
            epoch=member.epoch,
            ranks=member.ranks,
            progress=pb.HeartbeatRequest(
                step=progress.step,
                tokens=progress.tokens,
                tokens_per_second=progress.tokens_per_second,
                loss=progress.loss,
                outer_loss=progress.outer_loss,
                bytes_up=progress.bytes_up,
                bytes_down=progress.bytes_down,
                ready=member.ready,
            ),
            contributions=member.contributions,
            dropped=member.dropped,
            reason=member.reason,
        )

    # -- bulk -----------------------------------------------------------------------------------------------------

    @answers
    async def push(self, messages: AsyncIterator[bytes], context: Context) -> pb.Receipt:
        """Takes one rank's part of a contribution, or of the first parameters."""
        header = await self._push_header(messages)
        run = self._run
        if not header.seed:
            dropped = run.expected(header.fragment, header.round, header.base_version)
            if dropped:
                if run.knows(header.island_id, header.epoch, header.rank, header.fragment, header.round):
                    return pb.Receipt(duplicate=True)  # the receipt was lost on its way
                await run.take(self._late(header))
                return pb.Receipt(dropped=dropped)
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

        duplicate, dropped = await run.contribute(*key, header.rank, header.fragment, header.round, keep, header.tokens)
        return pb.Receipt(duplicate=duplicate, dropped=dropped)

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

    def _late(self, header: pb.PushHeader) -> rounds.Contributed:
        entry = rounds.Entry(island=header.island_id, epoch=header.epoch, tokens=header.tokens)
        return rounds.Contributed(fragment=header.fragment, round=header.round, entry=entry)

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
                reason = rounds.waiting_for(run.state, request.fragment, run.clock())
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
            outcome="committed" if outcome.committed else "skipped",
            reason=outcome.reason,
            version=outcome.version,
            digest=outcome.digest & (2**64 - 1),
        )


def _spec(message: pb.TensorSpec) -> TensorSpec:
    if message.kind not in get_args(Kind) or any(n < 0 for n in message.shape):
        raise LayoutError(f"no tensor of a model: '{message.name}' is {message.kind} {list(message.shape)}")
    return TensorSpec(message.name, tuple(message.shape), cast(Kind, message.kind))


def kind_to_bytes(message: Any) -> bytes:
    """Serializes any protobuf message."""
    return cast(bytes, message.SerializeToString())
