"""The island's connections to its coordinator: control and bulk apart, errors by their names, waits with a bound."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import torch
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from torch import Tensor

from diloco import allocator
from diloco.buffers import Buffers
from diloco.errors import (
    BY_NAME,
    CodecError,
    ConfigError,
    DeadlineExceeded,
    DilocoError,
    Expired,
    Overload,
    Refused,
    Unreachable,
)
from diloco.failpoints import failpoint
from diloco.framing import (
    CONTROL_LIMIT_BYTES,
    FRAME_BYTES,
    PROBE_CHUNK_BYTES,
    RETRY_AFTER,
    SERVICE,
    UPDATE_END_BYTES,
    Bytes,
    Collector,
    Placed,
    digest_of,
    read_update_end,
    split,
)
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from diloco.window import FIRST_BYTES, FIRST_LIMIT_BYTES, TELL_BYTES, Window
from island.lanes import GrpcCall, LaneCall, Lanes, Parts, Stream
from island.sockets import SocketCounter, Traffic
from island.spool import Spool
from island.throttle import Throttle
from island.tls import channel, short, unreachable
from island.turns import Turns

T = TypeVar("T")
M = TypeVar("M", bound=Message)
CONTROL_TIMEOUT_S = 20.0
COMMAND_TIMEOUT_S = 600.0
"""A command may take a snapshot."""
IDLE_S = 120.0
"""A bulk stream that moves no byte for so long is dead. One that does may take as long as it needs."""
AGAIN: tuple[type[DilocoError], ...] = (Unreachable, Overload)
"""What is worth another try. All else says that the same request would fail again."""
PUSH_AGAIN = (*AGAIN, DeadlineExceeded, Expired, CodecError)
"""A push that stalled, was damaged, or began beyond what the coordinator has kept, asks where to go on."""
FETCH_AGAIN = (*AGAIN, DeadlineExceeded, CodecError)
WINDOW_BYTES = 32 * 2**20
"""Most of a download that may be under way to this process: so much moves per round trip, 320 MB/s where that takes
100 ms."""
DAMAGED_TRIES = 3
"""A payload that is damaged so often is not damaged by the line."""

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.max_send_message_length", CONTROL_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # how long one try may take: handshakes of a slow line too
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class Link:
    """A connection to a coordinator at `HOST:PORT`.

    Args:
        address: where the coordinator listens.
        patience_s: how long to try again while nobody answers.
        say: takes a line for people when a wait is long.
        idle_s: how long a bulk stream may move no byte.
        bytes_per_s: cap on all bulk streams together, each way; 0 for none.
        tls: files to speak mutual TLS with; nothing is encrypted without.

    Raises:
        ConfigError: no such address can be.
        InputError: the TLS files are not what they should be.
    """

    def __init__(
        self,
        address: str,
        *,
        patience_s: float,
        say: Callable[[str], None],
        idle_s: float = IDLE_S,
        bytes_per_s: float = 0.0,
        tls: TLS | None = None,
    ) -> None:
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"the coordinator's address {address!r} is not HOST:PORT, for example 10.0.0.5:29400")
        allocator.keep(heap_bytes=allocator.TENSOR_BYTES)
        self.address, self._patience_s, self._say, self._idle_s = address, patience_s, say, idle_s
        self._tls = tls
        self.resumes = 0
        """Bulk streams that went on where an earlier one was cut."""
        self.resent_bytes = 0
        """Payload that was handed to lines that were cut, and sent again."""
        self._control, self._bulk = (channel(address, tls, _OPTIONS) for _ in range(2))
        self.buffers = Buffers(torch.uint8)
        """For payloads; whoever has one of a fetch may give it back."""
        self._window_bytes, self._limit_bytes = FIRST_BYTES, FIRST_LIMIT_BYTES
        """What the last push had under way, and was allowed to: the next one begins with it."""
        self._turns = Turns()
        self._up, self._down = Throttle(bytes_per_s), Throttle(bytes_per_s)
        self._counter = SocketCounter(int(port))
        self._lanes = Lanes(host, int(port), tls, idle_s, self._counter.sample)

    def sibling(self, address: str) -> Link:
        """A connection to another coordinator of the run, as patient as this one and under the same cap."""
        other = Link(address, patience_s=self._patience_s, say=self._say, idle_s=self._idle_s, tls=self._tls)
        other._up, other._down = self._up, self._down
        return other

    def close(self) -> None:
        """Closes the connections."""
        self._control.close()
        self._bulk.close()
        self._lanes.close()

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

    def explain(self, request: pb.ExplainRequest) -> pb.ExplainReply:
        """Why the run is as it is."""
        return self._retried(lambda: self._call("Explain", request, pb.ExplainReply))

    def command(self, request: pb.CommandRequest) -> pb.CommandReply:
        """Changes how the run goes on."""
        return self._retried(lambda: self._call("Command", request, pb.CommandReply, COMMAND_TIMEOUT_S))

    def health(self, service: str) -> health_pb2.HealthCheckResponse:
        """The health of the coordinator ("") or of one of its services."""
        request, kind = health_pb2.HealthCheckRequest(service=service), health_pb2.HealthCheckResponse
        return self._retried(lambda: self._call("Check", request, kind, service="grpc.health.v1.Health"))

    def probe(self, up_bytes: int, down_bytes: int, timeout_s: float) -> float:
        """Moves bytes without meaning to the coordinator and back, once; returns the seconds that took.

        Raises:
            DeadlineExceeded: it took longer than `timeout_s`.
            Overload: others try their lines.
        """
        chunk = os.urandom(PROBE_CHUNK_BYTES)

        def messages() -> Iterator[bytes]:
            yield pb.ProbeRequest(down_bytes=down_bytes).SerializeToString()
            yield from (chunk[: up_bytes - begin] for begin in range(0, up_bytes, len(chunk)))

        begin, answer = time.monotonic(), self._stream("Probe", messages())
        timer = threading.Timer(timeout_s, answer.cancel)
        timer.start()
        try:
            sent = pb.ProbeReply.FromString(bytes(next(answer))).up_bytes
            come = sum(len(message) for message in answer)
        except grpc.RpcError as error:
            if time.monotonic() - begin >= timeout_s:
                raise DeadlineExceeded(f"the line to {self.address} took longer than {timeout_s:g} s") from error
            raise self._translated(error) from error
        finally:
            timer.cancel()
            answer.close()
        if (sent, come) != (up_bytes, down_bytes):
            raise DilocoError(f"of {up_bytes} bytes {sent} came to {self.address}, and of {down_bytes} back {come}")
        return time.monotonic() - begin

    def _call(
        self,
        name: str,
        request: Message,
        kind: type[M],
        timeout_s: float = CONTROL_TIMEOUT_S,
        *,
        service: str = SERVICE,
    ) -> M:
        method = self._control.unary_unary(
            f"/{service}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        try:
            return cast(M, method(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise self._translated(error) from error

    # -- bulk -----------------------------------------------------------------------------------------------------

    def _stream(self, name: str, messages: Iterable[Parts]) -> Stream:
        """Calls a bulk method: over a lane, or over gRPC where there is none to be had."""
        lane = self._lanes.open()
        if lane:
            return LaneCall(self._lanes, lane, name, messages)
        return GrpcCall(self._bulk.stream_stream(f"/{SERVICE}/{name}", None, None), messages)

    def push(
        self,
        header: pb.PushHeader,
        parts: Callable[[], Iterable[Tensor]],
        chunk_bytes: int,
        *,
        resumed: bool = False,
    ) -> pb.Receipt:
        """Streams one rank's part; on a cut line, goes on at the first byte that the coordinator lacks.

        Args:
            header: its key and size; the first byte is filled in here.
            parts: the payload, piece by piece (uint8), the same each time it is asked for; may wait for what is still
                being made.
            chunk_bytes: largest payload of one message.
            resumed: some of it may have come already, as before a restart of the island: asks first.
        """
        sent = pb.PushHeader()
        sent.CopyFrom(header)
        pace, ask = _Pace(), resumed
        window = Window(chunk_bytes, self._window_bytes, self._limit_bytes)

        def attempt() -> pb.Receipt:
            nonlocal ask
            if ask:
                answer = self._call("Resume", sent, pb.Resumption, self._idle_s)
                same = (
                    answer.digest == digest_of(parts(), answer.have_bytes) if answer.digest else not answer.have_bytes
                )
                if answer.HasField("receipt") and (same or not answer.digest):
                    return answer.receipt
                # Of a part that is known with other bytes only the digest is sent: the coordinator refuses it.
                sent.first_byte = answer.have_bytes if same or answer.HasField("receipt") else 0
                self.resumes += sent.first_byte > 0
                self.resent_bytes += pace.resume(sent.first_byte)
            ask = True
            window.begin(sent.first_byte)
            receipt = self._push_once(
                sent, pace, window, split(parts(), lambda: window.chunk_bytes, sent.first_byte, ended=True)
            )
            self._window_bytes, self._limit_bytes = window.bytes, window.limit_bytes
            return receipt

        return self._retried(attempt, PUSH_AGAIN, pace)

    def _push_once(
        self, header: pb.PushHeader, pace: _Pace, window: Window, body: Iterable[tuple[Bytes, ...]]
    ) -> pb.Receipt:
        failure: list[DilocoError] = []
        changed, over = threading.Condition(), False

        def messages() -> Iterator[Parts]:
            yield header.SerializeToString()
            failpoint("push-begun")
            for message in body:
                wait()
                size = sum(map(len, message))
                self._up.take(size)
                count = max(0, size - FRAME_BYTES)
                with changed:
                    while not (over or window.admits(count)):
                        changed.wait(self._idle_s)
                    if over:
                        return
                    window.sent(count, time.monotonic())
                pace.hand(count)
                yield message
                failpoint("push-sending")
            done()
            failpoint("push-sent")

        receipt, call = None, None
        try:
            with self._turns.stream() as (wait, done):
                call = self._stream("Push", _noting(messages(), failure))
                with self._watched(call, pace):
                    for answer in call:
                        reply = pb.PushReply.FromString(bytes(answer))
                        with changed:
                            window.heard(reply.have_bytes, reply.window_bytes, time.monotonic())
                            changed.notify()
                        pace.move(reply.have_bytes)
                        receipt = reply.receipt if reply.HasField("receipt") else None
        except grpc.RpcError as error:
            raise (failure[0] if failure else self._translated(error, pace)) from error
        finally:
            with changed:
                over = True
                changed.notify()
            if call:
                call.close()
        if receipt is None:
            raise Unreachable(f"{self.address} ended a push without a receipt")
        return receipt

    def fetch(
        self,
        request: pb.FetchRequest,
        expected_bytes: int,
        spool: Path | None = None,
        follow: Callable[[Tensor, int], None] = lambda payload, have: None,
    ) -> tuple[pb.FetchHeader, Tensor]:
        """Streams one rank's part of an update or of anchors; on a cut line, goes on at the first missing byte.

        Where the rest is no longer kept at the same version, it begins again with the version that is.

        Args:
            request: what is asked for.
            expected_bytes: size of its pieces.
            spool: where anchors are kept while they come, so that another process can go on with them.
            follow: told with every chunk what the payload is and how many bytes of it are here.

        Returns:
            (header, payload uint8); the payload is empty where the outcome has no bytes.

        Raises:
            CodecError: damaged, short or too many bytes.
        """
        pace = _Pace()
        found = Spool.find(spool, expected_bytes) if spool else None
        held: list[tuple[pb.FetchHeader, Collector]] = [(found.header, found)] if found else []

        def attempt() -> tuple[pb.FetchHeader, Tensor]:
            return self._fetch_once(request, expected_bytes, held, pace, spool, follow)

        return self._retried(attempt, FETCH_AGAIN, pace)

    def _fetch_once(
        self,
        request: pb.FetchRequest,
        expected_bytes: int,
        held: list[tuple[pb.FetchHeader, Collector]],
        pace: _Pace,
        spool: Path | None,
        follow: Callable[[Tensor, int], None],
    ) -> tuple[pb.FetchHeader, Tensor]:
        """One stream. `held` is what earlier ones have brought, with its header; or empty."""
        ask = pb.FetchRequest()
        ask.CopyFrom(request)
        if held:
            ask.version, ask.first_byte = held[0][0].version, held[0][1].have
        progress: queue.SimpleQueue[int | None] = queue.SimpleQueue()

        def said() -> Iterator[bytes]:
            yield ask.SerializeToString()
            while (have := progress.get()) is not None:
                yield pb.FetchProgress(have_bytes=have, window_bytes=WINDOW_BYTES).SerializeToString()

        stream = self._stream("Fetch", said())
        try:
            with self._watched(stream, pace, request.wait_s):
                header = pb.FetchHeader.FromString(bytes(next(stream)))
                if header.total_bytes not in (0, expected_bytes):
                    stream.cancel()
                    raise Refused(f"expected {expected_bytes} bytes of the pieces, offered {header.total_bytes}")
                if header.first_byte and not (held and _same(header, held[0][0])):
                    stream.cancel()
                    self._forget(held, pace)
                    return self._fetch_once(request, expected_bytes, held, pace, spool, follow)
                if header.first_byte:
                    self.resumes += 1
                else:
                    self._forget(held, pace)
                    held.append((header, self._collector(header, spool)))
                (header, collector), ended, told = held[0], None, held[0][1].have
                stream.room = collector.room
                for message in stream:
                    self._down.take(len(message))
                    if len(message) == UPDATE_END_BYTES and not isinstance(message, Placed):
                        ended = read_update_end(message)
                        continue
                    collector.add(message)
                    follow(collector.payload, collector.have)
                    failpoint("fetch-receiving")
                    pace.move(collector.have)
                    if collector.have - told >= TELL_BYTES or not stream.more():
                        told = collector.have
                        progress.put(told)
                payload = collector.finish()
                if header.outcome == "committed":
                    if ended is None:
                        raise CodecError("the update ended before its digest")
                    header.digest = ended
                return header, payload
        except grpc.RpcError as error:
            raise self._translated(error, pace) from error
        finally:
            progress.put(None)
            stream.close()

    def _collector(self, header: pb.FetchHeader, spool: Path | None) -> Collector:
        if spool and header.outcome == "anchor" and header.total_bytes:
            return Spool.begin(spool, header)
        return Collector(header.total_bytes, self.buffers.take(header.total_bytes))

    def _forget(self, held: list[tuple[pb.FetchHeader, Collector]], pace: _Pace) -> None:
        """Begins again: what had come is of a version that is no longer kept."""
        pace.begin_again()
        self.resent_bytes += sum(collector.have for _, collector in held)
        held.clear()

    @contextmanager
    def _watched(self, call: Stream, pace: _Pace, extra_s: float = 0.0) -> Iterator[None]:
        """Cancels a call that moves no byte for the link's idle time, and `extra_s` before its first."""
        done, pace.moved_at, begin = threading.Event(), time.monotonic(), time.monotonic()
        pace.stalled = False

        def watch() -> None:
            while True:
                allowed = self._idle_s + (extra_s if pace.moved_at <= begin else 0.0)
                left = pace.moved_at + allowed - time.monotonic()
                if left <= 0:
                    pace.stalled = True
                    call.cancel()
                    return
                if done.wait(left):
                    return

        watcher = threading.Thread(target=watch, name="bulk watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()

    # -- errors ---------------------------------------------------------------------------------------------------

    def _retried(
        self, attempt: Callable[[], T], again: tuple[type[DilocoError], ...] = AGAIN, pace: _Pace | None = None
    ) -> T:
        """Tries again with growing, jittered pauses, within the link's patience since the last progress."""
        pace = pace or _Pace()
        since, pause, told, damaged = pace.since, 0.2, 0.0, 0
        while True:
            try:
                return attempt()
            except again as error:
                damaged += isinstance(error, CodecError)
                if damaged >= DAMAGED_TRIES:
                    raise
                if pace.since != since:
                    since, pause = pace.since, 0.2
                asked_s = error.retry_after_s if isinstance(error, Overload) else 0.0
                wait_s = max(asked_s * random.uniform(1.0, 1.5), pause * random.uniform(0.5, 1.0))
                now = time.monotonic()
                left = pace.since + self._patience_s - now
                if wait_s > left:
                    raise
                if now - told >= 5:
                    self._say(f"{error.message}; trying again for {left:.0f} s")
                    told = now
                time.sleep(wait_s)
                pause = min(pause * 1.6, 3.0)

    def _translated(self, error: Any, pace: _Pace | None = None) -> DilocoError:
        """The error that a failed call stands for."""
        if pace and pace.stalled:
            return Unreachable(f"the line to {self.address} moved no byte for {self._idle_s:g} s")
        metadata = dict(error.trailing_metadata() or ())
        kind = BY_NAME.get(metadata.get("diloco-error", ""))
        if kind is Overload:
            return Overload(error.details(), retry_after_s=int(metadata.get(RETRY_AFTER, 0)) / 1000)
        if kind:
            return kind(error.details())
        match error.code():
            case grpc.StatusCode.UNAVAILABLE:
                return unreachable(self.address, self._tls, error.details() or "")
            case grpc.StatusCode.CANCELLED:
                return Unreachable(f"the line to {self.address} was cut ({short(error.details())})")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded(f"the coordinator at {self.address} did not answer in time")
        return DilocoError(f"the coordinator at {self.address} failed: {error.code().name}: {error.details()}")


class _Pace:
    """How a transfer gets on. Patience counts from `since`: the last progress, or the beginning."""

    def __init__(self) -> None:
        self.since = self.moved_at = time.monotonic()
        self.stalled = False
        """Whether it has moved no byte for too long, and was cancelled."""
        self._handed = self._furthest = 0

    def hand(self, count: int) -> None:
        """The line is given so many bytes more."""
        self._handed += count

    def move(self, have: int) -> None:
        """The payload has come up to byte `have`. That is progress where it has never come so far."""
        self.moved_at = time.monotonic()
        if have > self._furthest:
            self._furthest, self.since = have, self.moved_at

    def begin_again(self) -> None:
        """From here on the first byte is progress again."""
        self._furthest = 0

    def resume(self, have: int) -> int:
        """The other side has `have` bytes; returns how many are sent again."""
        self.move(have)
        again, self._handed = max(0, self._handed - have), have
        return again


def _same(header: pb.FetchHeader, other: pb.FetchHeader) -> bool:
    """Whether two answers are of the same payload."""

    def payload(h: pb.FetchHeader) -> tuple[object, ...]:
        return h.outcome, h.version, h.digest, h.codec_id, h.codec_version, h.total_bytes

    return payload(header) == payload(other)


def _noting(messages: Iterable[Parts], failure: list[DilocoError]) -> Iterator[Parts]:
    """Passes messages on; keeps the error that ends them, since gRPC would replace it by one of its own."""
    try:
        yield from messages
    except DilocoError as error:
        failure.append(error)
        raise
