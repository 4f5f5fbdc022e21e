"""One replica of torchft's DiLoCo over gloo, and its lighthouse: told what to do by `benchmarks.peers.measure`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.processes import serve
from benchmarks.site import Model

BOUND = timedelta(seconds=300)


class Replica:
    """What it can be told to do."""

    def __init__(self, model: Model, inner: torch.optim.Optimizer, manager: Manager) -> None:
        self._model, self._inner, self._manager = model, inner, manager
        self._first = next(model.parameters()).detach()
        self._noise = torch.randn_like(self._first).mul_(1e-3)

    @torch.no_grad()
    def train(self) -> None:
        """Moves the parameters, as inner steps would."""
        for parameter in self._model.parameters():
            parameter.add_(self._noise)

    def sync(self) -> float:
        """Seconds of the step that ends a period. Raises where the outer step was not committed."""
        before, begin = self._manager.current_step(), time.perf_counter()
        self._inner.step()
        duration = time.perf_counter() - begin
        if self._manager.current_step() != before + 1 or self._manager.num_participants() != 2:
            raise RuntimeError(f"the outer step was not committed by two: {self._manager.num_participants()}")
        return duration

    def sample(self) -> list[float]:
        """A few parameters, to see that both sites come to the same."""
        found: list[float] = self._first[0, :4].tolist()
        return found


def replica(options: dict[str, Any]) -> None:
    """Takes part with the lighthouse at `options["lighthouse"]`."""
    torch.set_num_threads(options["threads"])
    store = TCPStore(options["host"], 0, is_master=True, wait_for_workers=False)
    model = Model(options["layers"], options["rows"])
    inner = torch.optim.SGD(model.parameters(), lr=0.0)  # no gradients: a step is its hooks
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    group = ProcessGroupGloo(timeout=BOUND)
    manager = Manager(
        pg=group,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=BOUND,
        quorum_timeout=BOUND,
        rank=0,
        world_size=1,
        store_addr=options["host"],
        store_port=store.port,
        lighthouse_addr=options["lighthouse"],
        replica_id=options["island"],
        hostname=options["host"],
        init_sync=False,
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=1):
        serve(Replica(model, inner, manager))
    os._exit(0)  # its threads do not end by themselves


def lighthouse() -> None:
    """Says at which port it listens; until it is ended."""
    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000, quorum_tick_ms=5)
    print(json.dumps(server.address().rpartition(":")[2]), flush=True)
    while sys.stdin.read(1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("lighthouse"):
        replica(given)
    else:
        lighthouse()
