"""The gRPC face of a run. Each method checks its request, asks the run, and answers; errors travel by name."""

from __future__ import annotations

import re
from typing import Any, cast, get_args

import grpc

from coordinator import rounds
from coordinator.answers import Context, answers, to_bytes
from coordinator.bulk import Bulk
from coordinator.facts import Standing
from coordinator.run import Run
from coordinator.state import Member
from coordinator.words import phase_reason, waiting_for
from diloco.errors import LayoutError, Malformed, RunMismatch
from diloco.framing import CONTROL_LIMIT_BYTES, PROTOCOL, SERVICE
from diloco.layout import Kind, Layout, TensorSpec
from diloco.settings import to_toml
from diloco.v1 import coordinator_pb2 as pb

ISLAND_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""It becomes part of file names."""

OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.max_send_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]


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
                method, request_deserializer=kind.FromString, response_serializer=to_bytes
            )
            for name, (method, kind) in control.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, {**methods, **Bulk(self._run).methods()})

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
        return self._state(newcomer=member.standing is Standing.JOINING)

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
                    waiting_for=waiting_for(run.state, f, now) if moving else "",
                )
            )
        return pb.RunState(
            phase=run.state.phase,
            reason=phase_reason(run.state),
            fragments=fragments,
            seeder=run.state.seeder,
            step=run.step if newcomer else 0,
        )

    def _island(self, member: Member) -> pb.IslandStatus:
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


def _spec(message: pb.TensorSpec) -> TensorSpec:
    if message.kind not in get_args(Kind) or any(n < 0 for n in message.shape):
        raise LayoutError(f"no tensor of a model: '{message.name}' is {message.kind} {list(message.shape)}")
    return TensorSpec(message.name, tuple(message.shape), cast(Kind, message.kind))
