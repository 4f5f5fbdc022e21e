"""The gRPC face of a run. Each method checks its request, asks the run, and answers; errors travel by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast, get_args

import grpc

from coordinator import rounds
from coordinator.admission import LARGEST_WINDOW_BYTES
from coordinator.answers import Context, answers, to_bytes
from coordinator.bulk import Bulk
from coordinator.desk import Desk, plain
from coordinator.division import checked
from coordinator.facts import Standing
from coordinator.gate import Gate
from coordinator.health import Health
from coordinator.probe import Probe
from coordinator.run import Run
from coordinator.views import contributed, run_state
from diloco.errors import LayoutError, Malformed, RunMismatch
from diloco.framing import CONTROL_LIMIT_BYTES, PROTOCOL
from diloco.layout import Kind, Layout, TensorSpec
from diloco.settings import to_toml
from diloco.v1 import coordinator_pb2 as pb

ISLAND_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""It becomes part of file names."""

WINDOW_BYTES = LARGEST_WINDOW_BYTES
"""What gRPC lets a stream send that nobody here has read: not to be in the way. Senders keep within `limits`
(`Admission.window_bytes`); left to itself gRPC takes 16 MiB and more of each."""

OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.max_send_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.experimental.tcp_max_read_chunk_size", 256 * 1024),
]


class Service:
    """The methods of `diloco.v1.Coordinator` over one run; those of operators and of bulk have their own rooms."""

    def __init__(self, run: Run, health: Health, gate: Gate, origin: Callable[[str], str]) -> None:
        self._run, self._gate, self._desk = run, gate, Desk(run, health, origin)

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """The handlers of all methods by name."""
        control: dict[str, tuple[Any, Any]] = {
            "Join": (self.join, pb.JoinRequest),
            "Heartbeat": (self.heartbeat, pb.HeartbeatRequest),
            "Leave": (self.leave, pb.LeaveRequest),
            "Decline": (self.decline, pb.DeclineRequest),
            **self._desk.methods(),
        }
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                method, request_deserializer=kind.FromString, response_serializer=to_bytes
            )
            for name, (method, kind) in control.items()
        }
        methods |= Bulk(self._run).methods() | Probe(self._run.admission).methods()
        return self._gate.guard(methods)

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
        epoch = await self._run.join(request.island_id, request.ranks, request.run_id, layout, resumes=request.resumes)
        return pb.JoinReply(
            run_id=self._run.config.run.id,
            epoch=epoch,
            config_toml=to_toml(self._run.config),
            state=run_state(self._run, request.island_id),
            contributed=contributed(self._run, request.island_id),
        )

    @answers
    async def heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.RunState:
        """Renews a lease."""
        await self._beat(request)
        member = self._run.state.members[request.island_id]
        newcomer = member.standing is Standing.JOINING
        return run_state(self._run, member.id, newcomer=newcomer, serial=request.serial)

    async def _beat(self, request: pb.HeartbeatRequest) -> None:
        self._run.lease(request.run_id, request.island_id, request.epoch)
        progress = self._run.progress[request.island_id]
        for name in ("step", "tokens", "tokens_per_second", "loss", "outer_loss", "mfu", "bytes_up", "bytes_down"):
            setattr(progress, name, getattr(request, name))
        await self._run.take(
            rounds.Beat(
                island=request.island_id,
                epoch=request.epoch,
                ready=request.ready,
                serial=request.serial,
                places=checked(request.places, self._run.config.shards),
            )
        )

    @answers
    async def leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """Lets an island go."""
        if request.HasField("last"):
            await self._beat(request.last)
        self._run.lease(request.run_id, request.island_id, request.epoch)
        await self._run.take(rounds.Leaving(island=request.island_id, epoch=request.epoch, reason=request.reason))
        return pb.LeaveReply()

    @answers
    async def decline(self, request: pb.DeclineRequest, context: Context) -> pb.Receipt:
        """Takes the news that an island contributes nothing to a round."""
        run, island, fragment = self._run, request.island_id, request.fragment
        run.lease(request.run_id, island, request.epoch)
        if fragment >= len(run.state.rounds):
            raise Malformed(f"there is no fragment {fragment} with rounds; the run has {len(run.state.rounds)}")
        run.here(fragment)
        late = rounds.lateness(run.state, fragment, request.round)
        if late:
            return pb.Receipt(dropped=late)
        if rounds.counted(run.state, fragment, request.round, island) is not None:
            return pb.Receipt(dropped=f"{island} has already contributed to round {request.round}")
        known = run.state.rounds[fragment].refused.get(island, "")
        reason = known or plain(request.reason) or "it gave no reason"
        event = rounds.Spoiled(
            fragment=fragment, round=request.round, island=island, epoch=request.epoch, reason=reason
        )
        await run.take(event)
        return pb.Receipt(duplicate=bool(known), dropped=reason)


def _spec(message: pb.TensorSpec) -> TensorSpec:
    if message.kind not in get_args(Kind) or any(n < 0 for n in message.shape):
        raise LayoutError(f"no tensor of a model: '{message.name}' is {message.kind} {list(message.shape)}")
    return TensorSpec(message.name, tuple(message.shape), cast(Kind, message.kind))
