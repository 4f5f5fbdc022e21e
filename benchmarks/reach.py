"""Transport over a link of the user's own: one machine listens, another connects and measures.

The listening side has a coordinator at its port, and a bare gRPC server of raw bytes at the next one. What connects is
an island: it joins, contributes and fetches through its session, in turns with bare streams of as many bytes.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from benchmarks.processes import coordinator
from benchmarks.record import Record
from benchmarks.site import WIDTH, Layer
from coordinator.tls import server as server_credentials
from diloco.errors import ConfigError, EnvironmentFault, RunMismatch, Unreachable
from diloco.replica import Position
from diloco.tls import TLS
from island.session import Session, join
from island.tls import channel

MESSAGE = bytes(2**20)
TURNS = 4
"""The first warms up."""
LOOK_S = 10.0
RUN = """
[run]
id = "bench"
steps = 1000000
[sync]
every_steps = 1
[rounds]
lease_s = 600.0
[snapshot]
every_rounds = 1000000
"""


def listen(address: str, tls: TLS | None, say: Callable[[str], None]) -> None:
    """Serves those who connect, until it is interrupted.

    Raises:
        EnvironmentFault: the port, or the next one, cannot be listened on.
    """
    name, port = _split(address)
    with TemporaryDirectory(prefix="diloco-transport-") as folder, ExitStack() as stack:
        stack.enter_context(coordinator(Path(folder), RUN, listen=address, tls=tls))
        stack.enter_context(_bare(f"{name}:{port + 1}", tls))
        say(f"listening on {name}:{port} and {name}:{port + 1}, until Ctrl-C; on the other machine:")
        say(f"diloco bench transport --connect THIS_MACHINE:{port}" + (" --tls-cert ..." if tls else ""))
        while True:
            signal.pause()


def connect(address: str, elements: int, tls: TLS | None) -> Iterator[Record]:
    """Yields what contributions and anchors of `elements` fp32 values bring over the link, beside bare streams.

    Raises:
        Unreachable: nobody listens there.
    """
    name, port = _split(address)
    rows = max(1, elements // WIDTH)
    bytes_, model = rows * WIDTH * 4, Layer(rows)
    with channel(f"{name}:{port + 1}", tls, [("grpc.use_local_subchannel_pool", 1)]) as bare:
        try:
            grpc.channel_ready_future(bare).result(LOOK_S)
        except grpc.FutureTimeoutError as error:
            raise Unreachable(
                f"nobody answers at {name}:{port + 1}: start `diloco bench transport --listen 0.0.0.0:{port}` there, "
                "and let both ports through"
            ) from error
        up, down = bare.stream_unary("/bench/Up", None, None), bare.unary_stream("/bench/Down", None, None)
        count = -(-bytes_ // len(MESSAGE))
        columns: dict[str, list[float]] = {}
        with _joined(model, address, tls) as site:
            for _ in range(TURNS):
                columns.setdefault("bare up", []).append(_seconds(lambda: up(MESSAGE for _ in range(count))))
                columns.setdefault("up", []).append(_contribute(site))
                columns.setdefault("bare down", []).append(
                    _seconds(lambda: sum(len(m) for m in down(str(count).encode())))
                )
                columns.setdefault("down", []).append(_seconds(lambda: site.courier.fetch_anchor(0)))
    rates = {what: 8e-6 * bytes_ / statistics.median(column[1:]) for what, column in columns.items()}
    for way, what in (("up", "contribution, until it is durable"), ("down", "anchors")):
        yield Record(
            name=f"{what}, beside a bare stream",
            value=rates[way],
            unit="Mbit/s",
            limit=rates[f"bare {way}"] * len(MESSAGE) * count / bytes_,
            codec="fp32",
            direction=way,
            bits_per_parameter=32.0,
        )


def _joined(model: Layer, address: str, tls: TLS | None) -> Session:
    try:
        return join(model, None, address, island_id="bench", connect_timeout_s=LOOK_S, tls=tls)
    except RunMismatch as error:
        raise RunMismatch(
            "whoever connected first has settled how much is sent: use the same --elements, or let it listen anew"
        ) from error


def _contribute(site: Session) -> float:
    """Contributes once; then waits for the round to end, so that the next may follow."""
    position, staged = site.replica.position[0], site.replica.stage(0)
    duration = _seconds(lambda: site.courier.contribute(0, position.round, position.version, staged, tokens=1, steps=1))
    header = site.courier.fetch_update(0, position.round)
    site.replica.position[0] = Position(header.version, position.round + 1)
    return duration


@contextmanager
def _bare(address: str, tls: TLS | None) -> Iterator[None]:
    """A server that takes and gives raw bytes, until the end of the block."""

    def up(messages: Iterator[bytes], _: Any) -> bytes:
        return str(sum(len(message) for message in messages)).encode()

    def down(count: bytes, _: Any) -> Iterator[bytes]:
        yield from (MESSAGE for _ in range(int(count)))

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    handlers = {"Up": grpc.stream_unary_rpc_method_handler(up), "Down": grpc.unary_stream_rpc_method_handler(down)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    credentials = server_credentials(tls)
    try:
        if credentials:
            server.add_secure_port(address, credentials.grpc)
        else:
            server.add_insecure_port(address)
    except RuntimeError as error:
        raise EnvironmentFault(f"cannot listen on {address}: name another port, and leave the next one free") from error
    server.start()
    try:
        yield
    finally:
        server.stop(grace=None)


def _split(address: str) -> tuple[str, int]:
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT, for example 0.0.0.0:29400")
    return name, int(port)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
