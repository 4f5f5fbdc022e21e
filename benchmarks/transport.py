"""Bulk streams through a real coordinator process, beside a bare gRPC stream of the same bytes, in turns.

A push ends with its receipt, so its bytes are on the disk of the coordinator's state folder; with a folder in memory,
as /dev/shm, what is left is the transport. Each figure is held against a bare stream between two processes as any
program is, and against one whose processes keep freed memory as this system's do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare import Bare
from benchmarks.certificates import Authority
from benchmarks.processes import coordinator
from benchmarks.record import Record
from diloco.codec import CODECS
from diloco.framing import PROTOCOL, piece_to_proto
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link

ISLANDS, TURNS = 8, 6
"""The first turn warms up."""
SHARE = 2
"""With all islands together each sends one over so much of what one alone does."""
WIDTH = 1024
WAIT_S = 300.0
CODEC = CODECS["fp32"]
RUN = """
[run]
id = "bench"
steps = 8
[sync]
strategy = "strided"
fragments = 2
every_steps = 2
[rounds]
lease_s = 600.0
[snapshot]
every_rounds = 1000000
"""


class Client:
    """An island that speaks the protocol. Each turn another of its ranks sends, so that no round is ever whole."""

    def __init__(self, address: str, name: str, layout: Layout, tls: TLS | None = None) -> None:
        self._link = Link(address, patience_s=WAIT_S, say=lambda _: None, tls=tls)
        self._layout = layout
        tensors = [pb.TensorSpec(name=s.name, shape=s.shape, kind=s.kind) for s in layout.tensors]
        reply = self._link.join(
            pb.JoinRequest(
                protocol_min=PROTOCOL,
                protocol_max=PROTOCOL,
                island_id=name,
                ranks=len(layout.tensors),
                tensors=tensors,
                layout_digest=layout.digest,
            )
        )
        self._key: dict[str, Any] = {"run_id": reply.run_id, "island_id": name, "epoch": reply.epoch}

    def ready(self) -> None:
        self._link.heartbeat(pb.HeartbeatRequest(**self._key, ready=True))

    def push(self, tensors: Sequence[int], payload: torch.Tensor, **fields: Any) -> None:
        header = pb.PushHeader(
            **self._key,
            rank=tensors[0],
            fragment=tensors[0] % 2,
            codec_id=CODEC.id,
            codec_version=CODEC.version,
            pieces=self._pieces(tensors),
            total_bytes=payload.numel(),
            tokens=1,
            steps=1,
            **fields,
        )
        self._link.push(header, lambda: [payload], 2**20)

    def fetch(self, tensor: int) -> None:
        request = pb.FetchRequest(**self._key, fragment=tensor % 2, anchor=True, pieces=self._pieces([tensor]))
        _, payload = self._link.fetch(request, CODEC.size(self._layout.tensors[tensor].numel))
        self._link.buffers.give(payload)

    def _pieces(self, tensors: Sequence[int]) -> list[pb.Piece]:
        return [piece_to_proto(Piece(t, Box.whole(self._layout.tensors[t].shape))) for t in tensors]

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
        sizes = mebibytes * 2**18, mebibytes * 2**18 // SHARE
        specs = [TensorSpec(f"layers.{i}.w", (sizes[i % 2] // WIDTH, WIDTH)) for i in range(2 * TURNS)]
        layout = Layout(
            [*specs, TensorSpec(f"layers.{2 * TURNS}.w", (1,)), TensorSpec(f"layers.{2 * TURNS + 1}.w", (1,))]
        )
        islands = []
        for number in range(ISLANDS):
            islands.append(Client(address, f"island-{number}", layout, tls))
            stack.callback(islands[-1].close)
        payload = torch.randn(sizes[0], generator=torch.Generator().manual_seed(0)).mul_(1e-3).view(torch.uint8)
        _seed(islands, layout, payload)
        pool = stack.enter_context(ThreadPoolExecutor(ISLANDS))
        bytes_, part = mebibytes * 2**20, mebibytes * 2**20 // SHARE

        def together(work: Callable[..., None], *words: object) -> None:
            for done in [pool.submit(work, island, *words) for island in islands]:
                done.result()

        columns: dict[str, list[float]] = {}
        for turn in range(TURNS):
            one, each = 2 * turn, 2 * turn + 1
            for name, count, work in (
                ("push", bytes_, partial(islands[0].push, [one], payload)),
                ("push of 8", ISLANDS * part, partial(together, Client.push, [each], payload[:part])),
                ("fetch", bytes_, partial(islands[0].fetch, one)),
                ("fetch of 8", ISLANDS * part, partial(together, Client.fetch, each)),
            ):
                columns.setdefault(name, []).append(count / 1e9 / _seconds(work))
            for bare, keeps in zip(bares, ("bare", "bare, memory kept"), strict=True):
                for way, stream in (("push", bare.up), ("fetch", bare.down)):
                    columns.setdefault(f"{way}: {keeps}", []).append(bytes_ / 1e9 / stream(mebibytes))
                    together_s = stream(mebibytes // SHARE, ISLANDS)
                    columns.setdefault(f"{way} of 8: {keeps}", []).append(ISLANDS * part / 1e9 / together_s)
    found = {name: statistics.median(column[1:]) for name, column in columns.items()}
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


def _seed(islands: Sequence[Client], layout: Layout, payload: torch.Tensor) -> None:
    """Gives the run its first parameters, and starts it."""
    for tensor, spec in enumerate(layout.tensors):
        islands[0].push([tensor], payload[: 4 * spec.numel], seed=True)
    for island in islands:
        island.ready()
