"""Two coordinators, each a process of its own, and two islands, one of them of two ranks."""

from __future__ import annotations

import json
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import rounds
from diloco import failpoints
from diloco.digest import show
from tests.integration import test_faults
from tests.integration.rank import STEPS
from tests.integration.test_layouts import BOUND_S, launch
from tests.processes import Process, background, diloco_here, free_port, wait_until
from tests.support import Clock, Serving, serving

LAYOUTS = ("fsdp", "single")
RUN = f"""
[run]
id = "many"
steps = {STEPS}
coordinators = {{addresses}}
[sync]
strategy = "balanced"
fragments = 4
every_steps = 4
overlap_steps = 1
alpha = 0.5
buffers = "average"
max_steps_without_coordinator = 0
[merge]
weights = "uniform"
[wire]
up = "int8"
down = "int4"
[rounds]
start_islands = 2
quorum = 2
grace_s = 100.0
lease_s = 60.0
"""
ROUNDS = [1, 2, 2, 2, 0]
"""Of each fragment, the static one last: the first one's contribution falls due before the run at step 1."""


class Trial:
    """A run with some coordinators and the islands of `LAYOUTS`, until `stack` is closed."""

    def __init__(self, folder: Path, stack: ExitStack, count: int) -> None:
        self._folder, self._stack = folder, stack
        folder.mkdir()
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        (folder / "run.toml").write_text(RUN.format(addresses=self.addresses if count > 1 else []))
        self.coordinators = [self.start(index) for index in range(count)]

    def start(self, index: int) -> Process:
        state = self.state(index)
        (state / "address").unlink(missing_ok=True)
        command = ["coordinator", f"{self._folder}/run.toml", "--state", str(state), "--index", str(index)]
        log = self._folder / f"coordinator-{index}.log"
        process = background(*command, "--listen", self.addresses[index], log=log)
        coordinator = self._stack.enter_context(process)
        wait_until(lambda: (state / "address").exists() or not coordinator.running, "the coordinator listens")
        assert coordinator.running, coordinator.output
        return coordinator

    def doom(self, index: int, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Starts a coordinator again that is killed at a step."""
        self.coordinators[index].kill()
        with monkeypatch.context() as patch:
            patch.setenv(failpoints.VARIABLE, step)
            self.coordinators[index] = self.start(index)

    def state(self, index: int) -> Path:
        return self._folder / f"state-{index}"

    def islands(self, pool: ThreadPoolExecutor) -> Future[list[list[dict[str, Any]]]]:
        """Starts the islands, at the last coordinator; returns what each rank will have seen."""
        given = SimpleNamespace(address=self.addresses[-1])
        return pool.submit(launch, given, LAYOUTS, self._folder / "islands", alike=True)  # type: ignore[arg-type]

    def commits(self, index: int) -> list[tuple[int, int]]:
        """Fragment and round of what a coordinator has folded, in order."""
        rows = map(json.loads, (self.state(index) / "events.jsonl").read_text().splitlines())
        return [(row["fragment"], row["round"]) for row in rows if row["kind"] == "folded"]

    def end(self) -> None:
        """Ends the coordinators, and checks what they leave."""
        for index, coordinator in enumerate(self.coordinators):
            coordinator.signal(signal.SIGTERM)
            assert coordinator.wait() == 0, coordinator.output
            verified = diloco_here("ledger", "verify", str(self.state(index)))
            assert verified.code == 0, verified
            found = self.commits(index)
            assert len(found) == len(set(found)), "folded once"


def last(seen: list[list[dict[str, Any]]]) -> list[Any]:
    """Versions and digests at the end of the run, the same on every rank."""
    ends = [rank["seen"][-1] for island in seen for rank in island]
    assert ends == ends[:1] * 3
    versions, _ = found = ends[0]
    assert versions == ROUNDS
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a run with one coordinator comes to."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        trial = Trial(tmp_path_factory.mktemp("one") / "run", stack, 1)
        found = last(trial.islands(pool).result(BOUND_S))
        trial.end()
        return found


def test_two_coordinators_come_to_the_bits_of_one(tmp_path: Path, expected: list[Any]) -> None:
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        trial = Trial(tmp_path / "run", stack, 2)
        assert last(trial.islands(pool).result(BOUND_S)) == expected
        trial.end()
        assert sorted(trial.commits(0)) == [(0, 0), (2, 0), (2, 1)]
        assert sorted(trial.commits(1)) == [(1, 0), (1, 1), (3, 0), (3, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["fold-computed:2", "push-recorded:5"])
def test_one_that_is_killed_goes_on_where_it_was_and_the_other_has_gone_on_meanwhile(
    step: str, tmp_path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        trial = Trial(tmp_path / "run", stack, 2)
        trial.doom(1, step, monkeypatch)
        islands = trial.islands(pool)
        assert trial.coordinators[1].wait(BOUND_S) == -signal.SIGKILL
        before = [done for done in trial.commits(1) if done[0] == 3]
        assert before == [], "killed in the middle"
        wait_until(lambda: (0, 0) in trial.commits(0), "the other's next round ends")
        trial.coordinators[1] = trial.start(1)
        assert last(islands.result(BOUND_S)) == expected
        trial.end()


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "step",
    [
        "join-recorded:2",
        "plant-saved:1",
        "push-chunk:8",
        "push-named:3",
        "round-decided:2",
        "round-recorded:1",
        "fold-written:2",
        "snapshot-manifest:2",
        "fetch-chunk:2",
    ],
)
def test_either_that_is_killed_at_any_step_ends_with_the_same_bits(
    step: str, index: int, tmp_path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        trial = Trial(tmp_path / "run", stack, 2)
        trial.doom(index, step, monkeypatch)
        islands = trial.islands(pool)
        assert trial.coordinators[index].wait(BOUND_S) == -signal.SIGKILL
        trial.coordinators[index] = trial.start(index)
        assert last(islands.result(BOUND_S)) == expected
        trial.end()


class Pair(test_faults.Island):
    """Two ranks in processes of their own, and two coordinators, each with a clock of its own."""

    def start(self) -> None:
        plain, addresses = test_faults.config(), [self._listen, f"127.0.0.1:{free_port()}"]
        self.clocks = [self.clock, Clock(1000.0)]
        self.hosts: list[Serving] = []
        for index, address in enumerate(addresses):
            run = plain.run.model_copy(update={"coordinators": tuple(addresses), "coordinator_index": index})
            config, state = plain.model_copy(update={"run": run}), self._folder / f"state-{index}"
            life = serving(config, state, listen=address, clock=self.clocks[index], killed=True)
            self.hosts.append(self._life.enter_context(life))

    def outcomes(self) -> dict[tuple[int, int], str]:
        found = [host.ask(lambda run: dict(run.outcomes)) for host in self.hosts]
        return {(f, o.version): show(o.digest) for outcomes in found for (f, _), o in outcomes.items()}


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_both_ranks_join_again_where_a_lease_is_lost_at_one_coordinator(lost: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        island = Pair(tmp_path, stack)
        island.launch("fsdp", "wait")
        island.until("at")
        island.clocks[lost].now += test_faults.LEASE_S
        island.hosts[lost].call(island.hosts[lost].run.take(rounds.Tick()))
        island.go()
        seen, _ = island.finish()
        assert (seen["rejoins"], seen["seen"][-1][2]) == (1, [4, 3, 0])
        epochs = [host.ask(lambda run: run.state.last_epoch) for host in island.hosts]
        assert epochs == [2 - lost, 1 + lost]
