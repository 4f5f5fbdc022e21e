"""One peer of hivemind's averager: told what to do by `benchmarks.peers.measure`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

from benchmarks.processes import serve
from benchmarks.site import Model

CODECS = {"fp32": NoCompression, "f16": Float16Compression, "u8": Uniform8BitQuantization}
BOUND_S = 300.0
POLL_S = 0.005


class Peer:
    """What it can be told to do."""

    def __init__(self, averager: hivemind.DecentralizedAverager, addresses: list[str]) -> None:
        self._averager, self._addresses = averager, addresses
        self._step: Any = None
        with averager.get_tensors() as tensors:
            self._noise = torch.randn_like(tensors[0]).mul_(1e-3)

    def addresses(self) -> list[str]:
        """Where other peers find it."""
        return self._addresses

    def train(self) -> None:
        """Moves the parameters, as inner steps would, and finds the other peer: that is not measured."""
        with self._averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.add_(self._noise)
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=BOUND_S)
        deadline = time.monotonic() + BOUND_S
        while self._step.stage is not AveragingStage.AWAITING_TRIGGER:
            if time.monotonic() > deadline or self._step.done():
                raise RuntimeError(f"the peers did not find each other: {self._step.stage}")
            time.sleep(POLL_S)

    def sync(self) -> float:
        """Seconds of averaging with the other peer."""
        begin = time.perf_counter()
        self._step.allow_allreduce()
        group = self._step.result(timeout=BOUND_S)
        duration = time.perf_counter() - begin
        if not group or len(group) != 2:
            raise RuntimeError(f"two did not average: {group}")
        return duration

    def sample(self) -> list[float]:
        """A few parameters, to see that both sites come to the same."""
        with self._averager.get_tensors() as tensors:
            found: list[float] = tensors[0][0, :4].tolist()
            return found


def main() -> None:
    """Joins the peers at `options["peers"]`, if there are any."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    model = Model(options["layers"], options["rows"])
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{options['host']}/tcp/0"], initial_peers=options["peers"] or None, start=True
    )
    averager = hivemind.DecentralizedAverager(
        [parameter.detach() for parameter in model.parameters()],
        dht,
        prefix="bench",
        target_group_size=2,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        compression=CODECS[options["codec"]](),
        start=True,
    )
    serve(Peer(averager, [str(address) for address in dht.get_visible_maddrs()]))
    averager.shutdown()
    dht.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
