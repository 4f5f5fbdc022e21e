"""Many islands on one coordinator process: its anonymous memory, its folds, and what an idle island's heartbeats take.

    python -m benchmarks.islands [--parameters N] [--islands 1,8,64]

The islands are clients that speak the protocol and train nothing: each sends the same payload to each of 3 rounds of
every fragment, and fetches every update.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.processes import coordinator
from coordinator.admission import LARGEST_WINDOW_BYTES
from diloco.codec import CODECS
from diloco.config import LimitsConfig
from diloco.framing import PROTOCOL, piece_to_proto
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link

FRAGMENTS, ROUNDS = 4, 3
COUNTS = (1, 8, 64)
PARAMETERS = 4 * 2**20
WAIT_S = 600.0
BEAT_S = 0.05
POLL_S = 0.02
CODEC = CODECS["fp32"]
CONSTANT_BYTES, RECEIVE_BYTES = 160 * 2**20, LimitsConfig().receive_bytes
STREAMS = RECEIVE_BYTES // LARGEST_WINDOW_BYTES
"""More than so many share what they may have under way."""
RUN = f"""
[run]
id = "bench"
steps = {FRAGMENTS * ROUNDS}
[sync]
strategy = "strided"
fragments = {FRAGMENTS}
every_steps = {FRAGMENTS}
[rounds]
start_islands = {{islands}}
quorum = {{islands}}
lease_s = 600.0
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run with so many islands took."""

    islands: int
    parameters: int
    base_bytes: int
    """Anonymous memory of a coordinator that nobody has joined."""
    peak_bytes: int
    """Largest anonymous memory (RssAnon) of the run."""
    high_water_bytes: int
    """Largest resident memory (VmHWM): with the pages of contributions that are mapped, which the kernel may drop."""
    fold_s: float
    """Median seconds from a round's decision to its folded update, for one fragment."""
    beat_s: float
    """Median latency of an idle island's heartbeats."""
    worst_beat_s: float
    seconds: float
    """From the first join to the last update."""

    @property
    def grown_bytes(self) -> int:
        """What anonymous memory grew by."""
        return self.peak_bytes - self.base_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """What anonymous memory grew by, per parameter of the model."""
        return self.grown_bytes / self.parameters

    @property
    def ceiling_bytes(self) -> int:
        """What anonymous memory may grow by, as `docs/performance.md` states it."""
        update = 4 * (self.parameters // FRAGMENTS)
        streams = min(self.islands, STREAMS) * LARGEST_WINDOW_BYTES
        return 12 * self.parameters + update + CONSTANT_BYTES + streams


def memory(pid: int) -> dict[str, int]:
    """Bytes by name from a process's `/proc/PID/status`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}


class Peak:
    """The largest anonymous memory of a process, sampled while the context lasts."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, threading.Event()
        self.base = self.bytes = memory(pid)["RssAnon"]
        self._thread = threading.Thread(target=self._poll, name="memory", daemon=True)

    def _poll(self) -> None:
        while not self._over.wait(POLL_S):
            self.bytes = max(self.bytes, memory(self._pid)["RssAnon"])

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Client:
    """An island that speaks the protocol."""

    def __init__(self, address: str, name: str, layout: Layout) -> None:
        self._link = Link(address, patience_s=WAIT_S, say=lambda _: None)
        self._layout, self._name = layout, name
        self._key: dict[str, Any] = {}

    def join(self) -> None:
        tensors = [pb.TensorSpec(name=s.name, shape=s.shape, kind=s.kind) for s in self._layout.tensors]
        request = pb.JoinRequest(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            island_id=self._name,
            ranks=1,
            tensors=tensors,
            layout_digest=self._layout.digest,
        )
        reply = self._link.join(request)
        self._key = {"run_id": reply.run_id, "island_id": self._name, "epoch": reply.epoch}

    def beat(self, *, ready: bool) -> pb.RunState:
        return self._link.heartbeat(pb.HeartbeatRequest(**self._key, ready=ready))

    def push(self, fragment: int, payload: torch.Tensor, **fields: Any) -> None:
        header = pb.PushHeader(
            **self._key,
            fragment=fragment,
            codec_id=CODEC.id,
            codec_version=CODEC.version,
            pieces=[piece_to_proto(self._piece(fragment))],
            total_bytes=payload.numel(),
            **fields,
        )
        self._link.push(header, lambda: [payload], 2**20)

    def fetch(self, fragment: int, round_: int, size: int) -> None:
        request = pb.FetchRequest(
            **self._key, fragment=fragment, round=round_, pieces=[piece_to_proto(self._piece(fragment))], wait_s=20.0
        )
        while self._link.fetch(request, size)[0].outcome == "open":
            pass

    def _piece(self, fragment: int) -> Piece:
        return Piece(fragment, Box.whole(self._layout.tensors[fragment].shape))

    def train(self, payload: torch.Tensor) -> None:
        """Takes part in all rounds."""
        for round_ in range(ROUNDS):
            for fragment in range(FRAGMENTS):
                self.push(fragment, payload, round=round_, base_version=round_, tokens=1, steps=1)
                self.fetch(fragment, round_, payload.numel())

    def close(self) -> None:
        self._link.close()


def play(islands: int, parameters: int) -> Outcome:
    """Runs so many islands to the end of the run."""
    rows = parameters // FRAGMENTS // 1024
    layout = Layout([TensorSpec(f"layers.{i}.w", (rows, 1024)) for i in range(FRAGMENTS)])
    payload = torch.randn(rows * 1024, generator=torch.Generator().manual_seed(0)).mul_(1e-3).view(torch.uint8)
    with tempfile.TemporaryDirectory(prefix="diloco-islands-") as name:
        folder = Path(name)
        run = RUN.format(islands=islands)
        with coordinator(folder, run, threads=1) as host, Peak(host.pid) as peak:
            begin = time.monotonic()
            clients = [Client(host.address, f"island-{i:03d}", layout) for i in range(islands)]
            idle = Client(host.address, "idle", layout)
            try:
                beats = _play(clients, idle, payload)
            finally:
                for client in (*clients, idle):
                    client.close()
            seconds, high = time.monotonic() - begin, memory(host.pid)["VmHWM"]
        fold_s = _fold_seconds(host.state / "events.jsonl")
    return Outcome(
        islands=islands,
        parameters=rows * 1024 * FRAGMENTS,
        base_bytes=peak.base,
        peak_bytes=peak.bytes,
        high_water_bytes=high,
        fold_s=fold_s,
        beat_s=statistics.median(beats),
        worst_beat_s=max(beats),
        seconds=seconds,
    )


def _play(clients: list[Client], idle: Client, payload: torch.Tensor) -> list[float]:
    """Lets all clients train at once; returns the latencies of the idle one's heartbeats meanwhile."""
    for client in clients:
        client.join()
    for fragment in range(FRAGMENTS):
        clients[0].push(fragment, payload, seed=True)
    for client in clients:
        client.beat(ready=True)
    idle.join()
    with ThreadPoolExecutor(len(clients)) as pool:
        ends, beats = [pool.submit(client.train, payload) for client in clients], []
        while True:
            begin = time.perf_counter()
            idle.beat(ready=False)
            beats.append(time.perf_counter() - begin)
            if all(end.done() for end in ends):
                break
            time.sleep(BEAT_S)
        for end in ends:
            end.result()
    return beats


def _fold_seconds(events: Path) -> float:
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    decided = {(r["fragment"], r["round"]): r["at"] for r in rows if r["kind"] == "committed"}
    folded = [float(r["at"] - decided[r["fragment"], r["round"]]) for r in rows if r["kind"] == "folded"]
    return statistics.median(folded)


def measure(parameters: int = PARAMETERS, counts: tuple[int, ...] = COUNTS) -> list[Outcome]:
    """One run for each number of islands."""
    return [play(islands, parameters) for islands in counts]


def records(parameters: int = PARAMETERS) -> list[dict[str, Any]]:
    """Records for `diloco bench`; the limit is what one island takes."""
    outcomes = measure(parameters)
    first, found = outcomes[0], []
    for o in outcomes:
        for what, value, limit, unit in (
            ("anonymous memory", o.bytes_per_parameter, first.bytes_per_parameter, "bytes per parameter"),
            ("fold of a fragment", o.fold_s, first.fold_s * o.islands, "s"),
            ("heartbeat of an idle island", o.beat_s, first.beat_s, "s"),
        ):
            found.append({"name": f"{o.islands} islands: {what}", "value": value, "limit": limit, "unit": unit})
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=PARAMETERS, help="of the model (4 Mi by default)")
    parser.add_argument("--islands", default=",".join(map(str, COUNTS)), help="numbers of islands, comma-separated")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    arguments = parser.parse_args()
    outcomes = measure(arguments.parameters, tuple(int(n) for n in arguments.islands.split(",")))
    table = Table(
        "islands", "base", "peak", "ceiling", "per parameter", "VmHWM", "fold", "beat", "worst beat", "took", box=None
    )
    for o in outcomes:
        table.add_row(
            str(o.islands),
            *(f"{n / 2**20:.0f} MiB" for n in (o.base_bytes, o.peak_bytes, o.base_bytes + o.ceiling_bytes)),
            f"{o.bytes_per_parameter:.1f} B",
            f"{o.high_water_bytes / 2**20:.0f} MiB",
            f"{o.fold_s * 1e3:.0f} ms",
            f"{o.beat_s * 1e3:.1f} ms",
            f"{o.worst_beat_s * 1e3:.0f} ms",
            f"{o.seconds:.1f} s",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))


if __name__ == "__main__":
    main()
