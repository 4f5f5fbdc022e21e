"""Bulk streams through a real coordinator process, beside a bare gRPC stream of the same bytes, in turns.

Every push is a contribution to a round, and every fetch takes its update once that is published, so the state folder
is as it is after some rounds of a run. A push ends with its receipt, so its bytes are on the disk of that folder; with
a folder in memory, as /dev/shm, what is left is the transport. Each figure is held against a bare stream between two
processes as any program is, and against one whose processes keep freed memory as this system's do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare import Bare
from benchmarks.certificates import Authority
from benchmarks.processes import coordinator
from benchmarks.record import Record
from diloco.codec import CODECS
from diloco.errors import EnvironmentFault
from diloco.framing import PROTOCOL, piece_to_proto
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link

ISLANDS, TURNS, WARM = 8, 8, 3
"""The first turns warm up: contributions are written over those of rounds that two snapshots hold."""
SHARE = 2
"""With all islands together each sends one over so much of what one alone does."""
WIDTH = 1024
WAIT_S = 300.0
CODEC = CODECS["fp32"]
RUN = """
[run]
id = "bench"
steps = 1000000
[sync]
strategy = "strided"
fragments = 2
every_steps = 2
[rounds]
start_islands = 8
lease_s = 600.0
[snapshot]
every_rounds = 1000000
"""


class Client:
    """An island of one rank that speaks the protocol. The model has two fragments of a tensor each."""

    def __init__(self, address: str, name: str, layout: Layout, tls: TLS | None = None) -> None:
        self._link = Link(address, patience_s=WAIT_S, say=lambda _: None, tls=tls)
        self._layout = layout
        tensors = [pb.TensorSpec(name=s.name, shape=s.shape, kind=s.kind) for s in layout.tensors]
        reply = self._link.join(
            pb.JoinRequest(
                protocol_min=PROTOCOL,
                protocol_max=PROTOCOL,
                island_id=name,
                ranks=1,
                tensors=tensors,
                layout_digest=layout.digest,
            )
        )
        self._key: dict[str, Any] = {"run_id": reply.run_id, "island_id": name, "epoch": reply.epoch}

    def ready(self) -> None:
        self._link.heartbeat(pb.HeartbeatRequest(**self._key, ready=True))

    def push(self, fragment: int, payload: torch.Tensor, **fields: Any) -> None:
        header = pb.PushHeader(
            **self._key,
            fragment=fragment,
            codec_id=CODEC.id,
            codec_version=CODEC.version,
            pieces=self._pieces(fragment),
            total_bytes=payload.numel(),
            **fields,
        )
        self._link.push(header, lambda: [payload], 2**20)

    def contribute(self, fragment: int, round_: int, payload: torch.Tensor) -> None:
        self.push(fragment, payload, round=round_, base_version=round_, tokens=1, steps=1)

    def decline(self, fragment: int, round_: int) -> None:
        self._link.decline(pb.DeclineRequest(**self._key, fragment=fragment, round=round_, reason="benchmark"))

    def fetch(self, fragment: int, round_: int) -> None:
        request = pb.FetchRequest(
            **self._key, fragment=fragment, round=round_, pieces=self._pieces(fragment), wait_s=20.0
        )
        outcome = "open"
        while outcome == "open":
            header, payload = self._link.fetch(request, CODEC.size(self._layout.tensors[fragment].numel))
            outcome = header.outcome
            self._link.buffers.give(payload)
        if outcome != "committed":
            raise EnvironmentFault(f"round {round_} of the benchmark ended as {outcome}")

    def snapshot(self) -> None:
        """Returns once a snapshot is taken, and contributions that it holds are given up."""
        self._link.command(pb.CommandRequest(verb="snapshot"))

    def _pieces(self, fragment: int) -> list[pb.Piece]:
        return [piece_to_proto(Piece(fragment, Box.whole(self._layout.tensors[fragment].shape)))]

    def close(self) -> None:
        self._link.close()


def measure(mebibytes: int = 64, *, state: Path | None = None, encrypted: bool = False) -> Iterator[Record]:
    """Yields what push and fetch bring, alone and with 8 islands together.

    Args:
        mebibytes: payload of one stream.
        state: where the coordinator's state folder is made; a temporary folder where none is named.
        encrypted: over mutual TLS, the bare streams too, with certificates for this once.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-transport-", dir=state)))
        tls = Authority(folder).issue("bench") if encrypted else None
        bares = [stack.enter_context(Bare(tls, keep=keep)) for keep in (False, True)]
        address = stack.enter_context(coordinator(folder, RUN, tls=tls)).address
        bytes_, part = mebibytes * 2**20, mebibytes * 2**20 // SHARE
        layout = Layout([TensorSpec(f"layers.{i}.w", (n // 4 // WIDTH, WIDTH)) for i, n in enumerate((bytes_, part))])
        islands = []
        for number in range(ISLANDS):
            islands.append(Client(address, f"island-{number}", layout, tls))
            stack.callback(islands[-1].close)
        payload = torch.randn(bytes_ // 4, generator=torch.Generator().manual_seed(0)).mul_(1e-3).view(torch.uint8)
        for fragment, size in enumerate((bytes_, part)):
            islands[0].push(fragment, payload[:size], seed=True)
        for island in islands:
            island.ready()
        pool = stack.enter_context(ThreadPoolExecutor(ISLANDS))

        def together(work: Callable[..., None], *words: object) -> None:
            for done in [pool.submit(work, island, *words) for island in islands]:
                done.result()

        columns: dict[str, list[float]] = {}

        def clock(name: str, count: int, work: Callable[[], object]) -> None:
            columns.setdefault(name, []).append(count / 1e9 / _seconds(work))

        first = islands[0]
        for turn in range(TURNS):
            for island in islands[1:]:
                island.decline(0, turn)
            clock("push", bytes_, lambda: first.contribute(0, turn, payload))  # noqa: B023
            first.fetch(0, turn)  # waits for the round
            clock("fetch", bytes_, lambda: first.fetch(0, turn))  # noqa: B023
            clock("push of 8", ISLANDS * part, lambda: together(Client.contribute, 1, turn, payload[:part]))  # noqa: B023
            first.fetch(1, turn)
            clock("fetch of 8", ISLANDS * part, lambda: together(Client.fetch, 1, turn))  # noqa: B023
            first.snapshot()
            for bare, keeps in zip(bares, ("bare", "bare, memory kept"), strict=True):
                for way, stream in (("push", bare.up), ("fetch", bare.down)):
                    columns.setdefault(f"{way}: {keeps}", []).append(bytes_ / 1e9 / stream(mebibytes))
                    together_s = stream(mebibytes // SHARE, ISLANDS)
                    columns.setdefault(f"{way} of 8: {keeps}", []).append(ISLANDS * part / 1e9 / together_s)
    found = {name: statistics.median(column[WARM:]) for name, column in columns.items()}
    secure = ", TLS" if encrypted else ""
    for way in ("push", "fetch"):
        for keeps, words in (("bare", "a bare stream"), ("bare, memory kept", "a bare stream that keeps freed memory")):
            yield _record(f"{way}{secure}, beside {words}", found[way], found[f"{way}: {keeps}"])
        yield _record(f"{way}{secure}, 8 islands together, beside one", found[f"{way} of 8"], found[way])
        yield _record(
            f"{way}{secure}, 8 islands together, beside 8 bare streams",
            found[f"{way} of 8"],
            found[f"{way} of 8: bare"],
        )


def _record(name: str, value: float, limit: float) -> Record:
    return Record(name=name, value=value, unit="GB/s", limit=limit)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
