"""The island's connections to its coordinator: control and bulk apart, errors by their names, waits with a bound."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message
from torch import Tensor

from diloco.errors import BY_NAME, ConfigError, DeadlineExceeded, DilocoError, Refused, Unreachable
from diloco.framing import CONTROL_LIMIT_BYTES, SERVICE, Collector, chunks
from diloco.v1 import coordinator_pb2 as pb
from island.sockets import SocketCounter, Traffic

T = TypeVar("T")
M = TypeVar("M", bound=Message)
CONTROL_TIMEOUT_S = 20.0
SLOWEST_BYTES_PER_S = 10_000
"""A bulk call may take its idle allowance plus its bytes at this rate."""
IDLE_S = 120.0

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.max_send_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class Link:
    """A connection to a coordinator at `HOST:PORT`.

    Args:
        address: where the coordinator listens.
        patience_s: how long to try again while nobody answers.
        say: takes a line for people when a wait is long.
    """

    def __init__(self, address: str, *, patience_s: float, say: Callable[[str], None]) -> None:
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"the coordinator's address {address!r} is not HOST:PORT, for example 10.0.0.5:29400")
        self.address, self._patience_s, self._say = address, patience_s, say
        self._control, self._bulk = (grpc.insecure_channel(address, options=_OPTIONS) for _ in range(2))
        self._counter = SocketCounter(int(port))
        self._push = self._bulk.stream_unary(f"/{SERVICE}/Push", None, pb.Receipt.FromString)
        self._fetch = self._bulk.unary_stream(f"/{SERVICE}/Fetch", pb.FetchRequest.SerializeToString, None)

    def close(self) -> None:
        """Closes the connections."""
        self._control.close()
        self._bulk.close()

    def traffic(self) -> Traffic:
        """Bytes this process has sent to and received from the coordinator, counted at its sockets."""
        return self._counter.sample()

    # -- control --------------------------------------------------------------------------------------------------

    def join(self, request: pb.JoinRequest, *, patient: bool = True) -> pb.JoinReply:
        """Enters the run; where `patient`, waits for a coordinator that is not there yet."""

        def enter() -> pb.JoinReply:
            return self._call("Join", request, pb.JoinReply)

        return self._retried(enter) if patient else enter()

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float = CONTROL_TIMEOUT_S) -> pb.RunState:
        """Renews the lease. Raises where nobody answers: the next heartbeat is the retry."""
        return self._call("Heartbeat", request, pb.RunState, timeout_s)

    def decline(self, request: pb.DeclineRequest) -> pb.Receipt:
        """Says that the island contributes nothing to a round."""
        return self._retried(lambda: self._call("Decline", request, pb.Receipt))

    def persist(self, patience_s: float) -> None:
        """Tries again for so long from now on while nobody answers."""
        self._patience_s = patience_s

    def leave(self, request: pb.LeaveRequest, timeout_s: float) -> None:
        """Leaves the run."""
        self._call("Leave", request, pb.LeaveReply, timeout_s)

    def status(self) -> pb.StatusReply:
        """How the run stands."""
        return self._retried(lambda: self._call("Status", pb.StatusRequest(), pb.StatusReply))

    def _call(self, name: str, request: Message, kind: type[M], timeout_s: float = CONTROL_TIMEOUT_S) -> M:
        method = self._control.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        try:
            return cast(M, method(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise self._translated(error) from error

    # -- bulk -----------------------------------------------------------------------------------------------------

    def push(self, header: pb.PushHeader, parts: Callable[[], Iterable[Tensor]], chunk_bytes: int) -> pb.Receipt:
        """Streams one rank's part; on a cut line, again from the start.

        Args:
            header: its key and size.
            parts: makes the payload, piece by piece (uint8), each time it is needed.
            chunk_bytes: payload of one message.
        """

        def messages() -> Iterator[bytes]:
            yield header.SerializeToString()
            yield from chunks(parts(), chunk_bytes)

        def attempt() -> pb.Receipt:
            failure: list[DilocoError] = []
            try:
                return cast(
                    pb.Receipt, self._push(_noting(messages(), failure), timeout=_bulk_timeout(header.total_bytes))
                )
            except grpc.RpcError as error:
                raise (failure[0] if failure else self._translated(error)) from error

        return self._retried(attempt)

    def fetch(self, request: pb.FetchRequest, expected_bytes: int) -> tuple[pb.FetchHeader, Tensor]:
        """Streams one rank's part of an update or of anchors; on a cut line, again from the start.

        Returns:
            (header, payload uint8); the payload is empty where the outcome has no bytes.

        Raises:
            CodecError: damaged, short or too many bytes.
        """

        def attempt() -> tuple[pb.FetchHeader, Tensor]:
            stream: Any = self._fetch(request, timeout=request.wait_s + _bulk_timeout(expected_bytes))
            try:
                header = pb.FetchHeader.FromString(next(stream))
                if header.total_bytes not in (0, expected_bytes):
                    stream.cancel()
                    raise Refused(f"expected {expected_bytes} bytes of the pieces, offered {header.total_bytes}")
                collector = Collector(header.total_bytes)
                for message in stream:
                    collector.add(message)
                return header, collector.finish()
            except grpc.RpcError as error:
                raise self._translated(error) from error

        return self._retried(attempt)

    # -- errors ---------------------------------------------------------------------------------------------------

    def _retried(self, attempt: Callable[[], T]) -> T:
        """Tries again with growing, jittered pauses while nobody answers, within the link's patience."""
        begin, pause, told = time.monotonic(), 0.2, 0.0
        while True:
            try:
                return attempt()
            except Unreachable as error:
                waited = time.monotonic() - begin
                if waited + pause > self._patience_s:
                    raise
                if waited - told >= 5 or not told:
                    left = self._patience_s - waited
                    self._say(f"{error.message}; trying again for {left:.0f} s")
                    told = max(waited, 0.001)
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 1.6, 3.0)

    def _translated(self, error: Any) -> DilocoError:
        """The error that a failed call stands for."""
        name = dict(error.trailing_metadata() or ()).get("diloco-error")
        if name in BY_NAME:
            return BY_NAME[name](error.details())
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return Unreachable(f"no coordinator answers at {self.address} ({_short(error.details())})")
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"the coordinator at {self.address} did not answer in time")
        return DilocoError(f"the coordinator at {self.address} failed: {error.code().name}: {error.details()}")


def _short(details: str | None) -> str:
    """The last and telling part of gRPC's nested connection errors."""
    return (details or "no details").rpartition(": ")[2].strip("] ") or "no details"


def _bulk_timeout(size: int) -> float:
    return IDLE_S + size / SLOWEST_BYTES_PER_S


def _noting(messages: Iterator[bytes], failure: list[DilocoError]) -> Iterator[bytes]:
    """Passes messages on; keeps the error that ends them, since gRPC would replace it by one of its own."""
    try:
        yield from messages
    except DilocoError as error:
        failure.append(error)
        raise
