"""Islands of two ranks to which something happens: what one rank learns, both act on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from coordinator import rounds
from diloco.config import RunConfig
from diloco.digest import show
from tests.integration.test_layouts import ROOT
from tests.processes import free_port, wait_until
from tests.support import Clock, Serving, serving

LEASE_S = 0.6
STEPS = 14


def config() -> RunConfig:
    """Two strided fragments, each every four steps, that sync in turn; beats of 0.2 s."""
    sync = {"every_steps": 4, "strategy": "strided", "fragments": 2, "alpha": 0.5, "buffers": "average"}
    return RunConfig.model_validate(
        {
            "run": {"id": "faults", "steps": STEPS},
            "sync": {**sync, "max_steps_without_coordinator": 3},
            "rounds": {"lease_s": LEASE_S, "deadline_s": 1000.0, "grace_s": 500.0},
        }
    )


class Island:
    """Two ranks in processes of their own, and their coordinator."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._listen = f"127.0.0.1:{free_port()}"
        self._life = stack.enter_context(ExitStack())
        self.clock = Clock(1000.0)
        self.start()

    def start(self) -> None:
        self.host: Serving = self._life.enter_context(
            serving(config(), self._folder / "state", listen=self._listen, clock=self.clock, killed=True)
        )

    def kill(self) -> None:
        self._life.close()

    def launch(self, layout: str, fault: str) -> None:
        spec = {"address": self._listen, "island": "two", "layout": layout, "seed": 1, "fault": fault}
        spec |= {"store": str(self._folder / "store"), "out": str(self._folder / "out")}
        path = self._folder / "spec.json"
        path.write_text(json.dumps(spec))
        self._ranks = []
        for rank in range(2):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen([sys.executable, "-m", "tests.integration.faults", str(path)], cwd=ROOT, env=env)
            self._stack.callback(process.wait, 10)
            self._stack.callback(process.kill)
            self._ranks.append(process)

    def until(self, what: str) -> None:
        """Waits until both ranks have said so."""

        def said() -> bool:
            assert all(rank.poll() in (None, 0) for rank in self._ranks), "a rank has failed"
            return all((self._folder / f"{what}-{rank}").exists() for rank in range(2))

        wait_until(said, what)

    def go(self) -> None:
        (self._folder / "go").touch()

    def finish(self) -> list[dict[str, Any]]:
        """Waits for the ranks to end well; returns what each saw, after checks that hold whatever happens."""
        assert [process.wait(100) for process in self._ranks] == [0, 0]
        first, second = (json.loads((self._folder / f"out.{rank}.json").read_text()) for rank in range(2))
        assert first == second
        assert first["finite"]
        known = self.outcomes()
        for _, _, versions, digests in first["seen"]:
            for fragment in (0, 1):
                if versions[fragment]:
                    assert digests[fragment] == known[fragment, versions[fragment]]
        return [first, second]

    def outcomes(self) -> dict[tuple[int, int], str]:
        """Digests by fragment and version."""
        return self.host.ask(lambda run: {(f, o.version): show(o.digest) for (f, _), o in run.outcomes.items()})


@pytest.fixture
def island(tmp_path: Path) -> Iterator[Island]:
    with ExitStack() as stack:
        yield Island(tmp_path, stack)


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_both_ranks_join_again_where_the_lease_is_lost(layout: str, island: Island) -> None:
    island.launch(layout, "wait")
    island.until("at")
    island.clock.now += LEASE_S
    island.host.call(island.host.run.take(rounds.Tick()))
    island.go()
    seen, _ = island.finish()
    assert seen["rejoins"] == 1
    assert {epoch for _, epoch, _, _ in seen["seen"]} == {1, 2}
    assert seen["seen"][-1][2] == [4, 3, 0]


def test_both_ranks_go_back_where_one_has_nan(island: Island, monkeypatch: pytest.MonkeyPatch) -> None:
    island.kill()
    island.start()
    island.launch("hsdp", "nan")
    seen, _ = island.finish()
    assert (seen["rollbacks"], seen["rejoins"]) == (1, 0)
    assert seen["seen"][-1][2] == [3, 3, 0], "nobody contributed to one round"


@pytest.mark.slow
def test_both_ranks_train_on_where_nobody_answers(island: Island) -> None:
    island.launch("fsdp", "silent")
    island.until("at")
    island.kill()
    island.go()
    island.until("step-8")  # two syncs further
    island.start()
    seen, _ = island.finish()
    assert seen["seen"][-1][2] == [4, 3, 0]
    assert (seen["rejoins"], seen["rollbacks"]) == (0, 0)
