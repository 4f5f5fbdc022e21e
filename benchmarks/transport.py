"""Push and fetch of one rank through a real coordinator process, beside a bare gRPC stream of the same bytes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import torch

from diloco.replica import Position
from island.session import Session, join

CHUNK = 2**20
START_S = 60.0
RUN = """
[run]
id = "bench"
steps = 8
[sync]
every_steps = 1
[snapshot]
every_rounds = 1000000
"""


def measure(elements: int) -> list[dict[str, Any]]:
    """Records for pushing a contribution and fetching an update of `elements` fp32 values."""
    size = elements * 4
    with tempfile.TemporaryDirectory() as folder:
        bare = subprocess.Popen([sys.executable, "-m", "benchmarks.transport", folder, str(size)])
        run = Path(folder) / "run.toml"
        run.write_text(RUN)
        command = ["coordinator", str(run), "--state", f"{folder}/state", "--listen", "127.0.0.1:0"]
        host = subprocess.Popen([sys.executable, "-m", "diloco", *command], stderr=subprocess.DEVNULL)
        try:
            up, down = _bare(_read(Path(folder) / "bare", bare), size)
            pushed, fetched = _ours(_read(Path(folder) / "state" / "address", host), elements)
        finally:
            for process in (bare, host):
                process.terminate()
                process.wait(timeout=30)
    gigabytes = size / 1e9
    return [
        {
            "name": "contribution: subtract, encode fp32, send, made durable",
            "value": gigabytes / pushed,
            "limit": gigabytes / up,
            "unit": "GB/s",
        },
        {
            "name": "anchors: fetched and loaded",
            "value": gigabytes / fetched,
            "limit": gigabytes / down,
            "unit": "GB/s",
        },
    ]


def _read(path: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a benchmark's server did not start: {process.args}")
        time.sleep(0.05)
    return path.read_text()


def _ours(address: str, elements: int) -> tuple[float, float]:
    """Best seconds of a push and of a fetch, through a session of one fp32 tensor."""
    model = torch.nn.Linear(elements // 1024, 1024, bias=False)
    with join(model, address, island_id="bench") as site:
        return min(_push(site, r) for r in range(3)), min(_fetch(site) for _ in range(3))


def _push(site: Session, round_: int) -> float:
    """Contributes once, then waits for the round to end, so that the next may follow."""
    staged, version = site.replica.stage(0), site.replica.position[0].version
    begin = time.perf_counter()
    site.courier.contribute(0, round_, version, staged, tokens=1, steps=1)
    duration = time.perf_counter() - begin
    outcome = site.courier.fetch_update(0, round_)
    site.replica.position[0] = Position(outcome.version, round_ + 1)
    return duration


def _fetch(site: Session) -> float:
    begin = time.perf_counter()
    site.courier.fetch_anchor(0)
    return time.perf_counter() - begin


def _bare(address: str, size: int) -> tuple[float, float]:
    """Best seconds of streaming `size` raw bytes up and down in 1 MiB messages."""
    block = bytes(CHUNK)
    with grpc.insecure_channel(address) as channel:
        up = channel.stream_unary("/bench/Up", None, None)
        down = channel.unary_stream("/bench/Down", None, None)

        def timed(work: Any) -> float:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin

        ups = [timed(lambda: up(block for _ in range(size // CHUNK))) for _ in range(3)]
        downs = [timed(lambda: sum(len(m) for m in down(b""))) for _ in range(3)]
    return min(ups), min(downs)


def serve_bare(folder: Path, size: int) -> None:
    """A gRPC server that takes and gives raw bytes, until it is terminated."""
    block = bytes(CHUNK)

    def up(messages: Iterator[bytes], _: Any) -> bytes:
        return str(sum(len(message) for message in messages)).encode()

    def down(_: bytes, __: Any) -> Iterator[bytes]:
        for _ in range(size // CHUNK):
            yield block

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    handlers = {"Up": grpc.stream_unary_rpc_method_handler(up), "Down": grpc.unary_stream_rpc_method_handler(down)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (folder / "bare.partial").write_text(f"127.0.0.1:{port}")
    (folder / "bare.partial").rename(folder / "bare")
    server.wait_for_termination()


if __name__ == "__main__":
    serve_bare(Path(sys.argv[1]), int(sys.argv[2]))
