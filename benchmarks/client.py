"""An island of one rank that speaks the protocol and trains nothing: `benchmarks.transport` has it push and fetch."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from benchmarks.processes import serve
from diloco.codec import CODECS
from diloco.errors import EnvironmentFault
from diloco.framing import PROTOCOL, piece_to_proto
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link

WIDTH = 1024
WAIT_S = 300.0
CODEC = CODECS["fp32"]


class Client:
    """The island. Its model has a fragment of one tensor for each of `sizes`.

    Args:
        sizes: bytes (fp32).
    """

    def __init__(self, address: str, name: str, sizes: list[int], tls: TLS | None = None) -> None:
        self._link = Link(address, patience_s=WAIT_S, say=lambda _: None, tls=tls)
        self._layout = Layout([TensorSpec(f"layers.{i}.w", (n // 4 // WIDTH, WIDTH)) for i, n in enumerate(sizes)])
        values = torch.randn(max(sizes) // 4, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
        self._payloads = [values.view(torch.uint8)[:size] for size in sizes]
        tensors = [pb.TensorSpec(name=s.name, shape=s.shape, kind=s.kind) for s in self._layout.tensors]
        reply = self._link.join(
            pb.JoinRequest(
                protocol_min=PROTOCOL,
                protocol_max=PROTOCOL,
                island_id=name,
                ranks=1,
                tensors=tensors,
                layout_digest=self._layout.digest,
            )
        )
        self._key: dict[str, Any] = {"run_id": reply.run_id, "island_id": name, "epoch": reply.epoch}

    def ready(self) -> None:
        """Says that it may begin."""
        self._link.heartbeat(pb.HeartbeatRequest(**self._key, ready=True))

    def seed(self) -> None:
        """Sends the first parameters."""
        for fragment in range(len(self._payloads)):
            self._push(fragment, seed=True)

    def contribute(self, fragment: int, round_: int) -> None:
        """Pushes a contribution; returns with its receipt."""
        self._push(fragment, round=round_, base_version=round_, tokens=1, steps=1)

    def _push(self, fragment: int, **fields: Any) -> None:
        payload = self._payloads[fragment]
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

    def decline(self, fragment: int, round_: int) -> None:
        """Takes no part in a round."""
        self._link.decline(pb.DeclineRequest(**self._key, fragment=fragment, round=round_, reason="benchmark"))

    def fetch(self, fragment: int, round_: int) -> None:
        """Takes the update of a round, once that has ended."""
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
        """Ends its connections."""
        self._link.close()


def main() -> None:
    """Joins, and does what it is told."""
    options = json.loads(sys.argv[1])
    tls = TLS(**options["tls"]) if options["tls"] else None
    client = Client(options["address"], options["island"], options["sizes"], tls)
    try:
        serve(client)
    finally:
        client.close()


if __name__ == "__main__":
    main()
