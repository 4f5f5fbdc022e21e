"""Pushes and fetches over a shaped link between two network namespaces, while heartbeats are timed.

    sudo python -m benchmarks.shaped [--rtt-ms 100] [--mbit 1000] [--queue-ms 1000] [--mebibytes 64] [--streams 1]

Needs root, `ip` and `tc` (tbf, and netem unless --rtt-ms is 0). Where those are not permitted it says so and ends with
exit code 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.record import Record, report
from benchmarks.transport import RUN, START_S, Client
from diloco.layout import Layout, TensorSpec

HOST, SITE = "10.213.7.1", "10.213.7.2"
FAR = "diloco-bench"
BEAT_S = 0.2


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


@contextmanager
def link(rtt_ms: float, mbit: float, queue_ms: float) -> Iterator[None]:
    """A namespace `FAR` behind a line that takes half the round trip each way, and so much with such a queue.

    Raises:
        PermissionError: this machine does not let us.
    """
    try:
        _run("ip", "netns", "add", FAR)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PermissionError(f"no network namespaces here: {error}") from error
    try:
        _run("ip", "link", "add", "dlb0", "type", "veth", "peer", "name", "dlb1", "netns", FAR)
        inside = ("ip", "netns", "exec", FAR)
        for before, device, address in (((), "dlb0", HOST), (inside, "dlb1", SITE)):
            _run(*before, "ip", "addr", "add", f"{address}/24", "dev", device)
            _run(*before, "ip", "link", "set", device, "up")
            packets = str(int(1000 + mbit * 1e6 / 8 / 1500 * (rtt_ms + queue_ms) / 1e3))
            below = ["root"]
            if rtt_ms:
                delay = ("netem", "delay", f"{rtt_ms / 2}ms", "limit", packets)
                _run(*before, "tc", "qdisc", "add", "dev", device, "root", "handle", "1:", *delay)
                below = ["parent", "1:"]
            rate = ("tbf", "rate", f"{mbit}mbit", "burst", f"{max(32, int(mbit))}kb", "latency", f"{queue_ms}ms")
            _run(*before, "tc", "qdisc", "add", "dev", device, *below, "handle", "2:", *rate)
        _run(*inside, "ip", "link", "set", "lo", "up")
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        raise PermissionError(f"the link cannot be shaped here: {error} {said.decode()}") from error
    finally:
        subprocess.run(["ip", "netns", "del", FAR], check=False, capture_output=True, timeout=30)


@contextmanager
def far_coordinator(folder: Path) -> Iterator[str]:
    """A coordinator in the namespace, until the end of the block: its address."""
    run, address = folder / "run.toml", folder / "state" / "address"
    run.write_text(RUN)
    command = ["diloco", "coordinator", str(run), "--state", f"{folder}/state", "--listen", f"{SITE}:0"]
    words = ["ip", "netns", "exec", FAR, sys.executable, "-m", *command]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not address.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the coordinator did not start")
            time.sleep(0.05)
        yield address.read_text()
    finally:
        process.kill()
        process.wait(timeout=60)


class Beats:
    """Heartbeats while the context lasts: their latencies in seconds."""

    def __init__(self, client: Client) -> None:
        self._client, self._over = client, threading.Event()
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            begin = time.perf_counter()
            self._client.ready()
            self.seconds.append(time.perf_counter() - begin)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)


def measure(rtt_ms: float, mbit: float, queue_ms: float, mebibytes: int, streams: int) -> Iterator[Record]:
    """Yields the pace of pushes and of fetches, beside the link's, and the latency of heartbeats meanwhile."""
    name, limit, beat_s = f"{mbit:g} Mbit/s, {rtt_ms:g} ms, {streams} streams", mbit / 8e3, max(rtt_ms, 1.0) / 1e3
    with (
        tempfile.TemporaryDirectory(prefix="diloco-shaped-") as folder,
        link(rtt_ms, mbit, queue_ms),
        far_coordinator(Path(folder)) as address,
        ThreadPoolExecutor(streams) as pool,
    ):
        numel = mebibytes * 2**18 // streams
        specs = [TensorSpec(f"layers.{i}.w", (numel if i % 2 == 0 else 1,)) for i in range(2 * streams)]
        layout = Layout([*specs, TensorSpec(f"layers.{2 * streams}.w", (1,))])
        client = Client(address, "site", layout, {})
        payload = torch.randn(numel).mul_(1e-3).view(torch.uint8)
        tensors = list(range(0, 2 * streams, 2))
        for tensor in range(1, len(layout.tensors), 2):
            client.push([tensor], payload[:4], seed=True)
        client.push([2 * streams], payload[:4], seed=True)
        bytes_ = 4 * numel * streams
        for way, work in (
            ("push", lambda t: client.push([t], payload, seed=True)),
            ("fetch", client.fetch),
        ):
            begin = time.perf_counter()
            with Beats(client) as beats:
                list(pool.map(work, tensors))
            took = time.perf_counter() - begin
            yield Record(name=f"{way}: {name}", value=bytes_ / 1e9 / took, unit="GB/s", limit=limit)
            for what, latency in (("median", statistics.median(beats.seconds)), ("worst", max(beats.seconds))):
                yield Record(name=f"{way}: {what} heartbeat: {name}", value=latency, unit="s", limit=beat_s)
        client.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--queue-ms", type=float, default=1000.0, help="longest that the line holds bytes back")
    parser.add_argument("--mebibytes", type=int, default=64, help="payload of all streams together")
    parser.add_argument("--streams", type=int, default=1)
    a = parser.parse_args()
    try:
        if os.geteuid():
            raise PermissionError("not root")
        records = [*measure(a.rtt_ms, a.mbit, a.queue_ms, a.mebibytes, a.streams)]
    except PermissionError as error:
        print(f"skipped: {error}")
        return
    report(records, a.json)


if __name__ == "__main__":
    main()
