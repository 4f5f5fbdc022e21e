"""torch's elastic agent under this project's rules: which ranks run on this node, and when they are started again.

The daemons of an island meet at a rendezvous. When a node comes or goes, all of them stop their ranks, which leave at a
step edge, meet again, and start them anew with the new number of ranks. A daemon that finds the island complete waits
as a hot spare until it is needed, or until the island has ended.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from diloco.errors import ExitCode
from island.config import IslandConfig
from island.restarts import FINAL, GivenUp, Restarts

BARRIER_S = 60
"""How long a node whose ranks have finished waits for those of the others."""
LINGER_S = 3.0
"""How long a daemon whose island has ended stays, as it may serve the rendezvous at which spares hear of that."""
MONITOR_S = 0.2
SIGNALS = "SIGTERM,SIGINT,SIGUSR1"
"""Each asks the island to leave: the first two mean what they always do, and the last is Slurm's warning."""
WITHOUT_END = 2**31 - 1
LOST = (RendezvousConnectionError, RendezvousStateError, RendezvousTimeoutError, DistNetworkError, DistStoreError)
"""What ends a rendezvous that may come back: its host is gone, or too few nodes came."""


class Agent(LocalElasticAgent):
    """Starts, watches and stops the ranks of this node.

    Args:
        spec: the ranks.
        logs: where their output goes.
        restarts: says whether ranks that failed are started again.
        leave_s: how long ranks may take to leave before they are killed.
    """

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, restarts: Restarts, leave_s: int) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=BARRIER_S, shutdown_timeout=leave_s)
        self._restarts, self._leave_s = restarts, leave_s
        self._seen: RunResult | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._seen = super()._monitor_workers(worker_group)
        return self._seen

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        seen, self._seen = self._seen, None
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        if seen and seen.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            code = code_of(seen)
            if code != ExitCode.RESIZED:
                self._restarts.failed(code)
        self._initialize_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._leave_s)


def code_of(result: RunResult) -> int:
    """The exit code of ranks that failed: that of the first that did; where it was killed, that of a fault inside."""
    codes = [failure.exitcode for failure in sorted(result.failures.values(), key=lambda failure: failure.timestamp)]
    return next((code for code in codes if code > 0), ExitCode.INTERNAL)


def launch(config: IslandConfig, settings: Path, logs: Path, restarts: Restarts) -> int:
    """Runs this node's ranks until the island's run has ended.

    Returns:
        OK, also for a spare that was not needed.

    Raises:
        GivenUp: ranks failed, and are not started again.
        SignalException: a signal came; the ranks have left.
        RendezvousError, DistNetworkError: the daemons cannot meet (`LOST`).
    """
    nodes, alone = config.nodes, config.nodes.most == 1
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0" if alone else nodes.rendezvous,
        run_id=config.island.id,
        min_nodes=nodes.least,
        max_nodes=nodes.most,
        local_addr="127.0.0.1" if alone else None,
        join_timeout=nodes.gather_timeout_s,
        last_call_timeout=nodes.last_call_s,
        **({"is_host": True} if alone else {}),
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SIGNALS
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # shared, torch 2.13 does not tell later nodes where it is
    handler = registry.get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="rank",
        local_world_size=config.ranks_here,
        entrypoint=sys.executable,
        args=("-m", "island.rank", str(settings)),
        rdzv_handler=handler,
        max_restarts=WITHOUT_END,
        monitor_interval=MONITOR_S,
        local_addr=parameters.local_addr,
    )
    redirects = Std.ALL if config.island.log_dir else Std.NONE
    agent = Agent(
        spec, DefaultLogsSpecs(log_dir=str(logs), redirects=redirects), restarts, config.island.leave_timeout_s
    )
    try:
        agent.run()
    except RendezvousClosedError:
        return ExitCode.OK
    except GivenUp as given_up:
        if given_up.code in FINAL:
            handler.shutdown()
        raise
    handler.shutdown()  # spares need not wait any longer
    if not alone:
        time.sleep(LINGER_S)
    return ExitCode.OK
