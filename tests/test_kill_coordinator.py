"""A coordinator process that is killed twice on the way: its island goes on by itself, and the bits are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from island.session import join
from tests.processes import free_port, wait_until

ROOT = Path(__file__).parents[1]
STEPS = 48
RUN = f"""
[run]
id = "killed"
steps = {STEPS}
[sync]
strategy = "strided"
fragments = 2
every_steps = 4
overlap_steps = 1
max_steps_without_coordinator = 0
[rounds]
lease_s = 60.0
"""
PAUSES = (14, 31)
"""Steps before which the island waits until the coordinator is to be killed."""


def island(address: str, folder: Path) -> None:
    """Trains for the whole run; writes its digests at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    data = torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(1))
    with join(model, None, address, island_id="a") as site:
        for step, batch in enumerate(data):
            loss = (model(batch) - batch).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
            if step in PAUSES:
                (folder / f"at-{step}").touch()
                wait_until(lambda step=step: (folder / f"go-{step}").exists(), "the test lets the island go on")
            site.step(tokens=8, loss=float(loss))
        (folder / "digests.json").write_text(json.dumps({"epoch": site.epoch, "digests": site.digests()}))


class Trial:
    """A coordinator and an island, each a process of its own, until `stack` is closed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        folder.mkdir()
        (folder / "run.toml").write_text(RUN)
        self.address = f"127.0.0.1:{free_port()}"
        self.coordinator = self.start_coordinator()
        self.island = self._start("island", "-m", "tests.test_kill_coordinator", self.address, str(folder))

    def start_coordinator(self) -> subprocess.Popen[bytes]:
        folder = self.folder
        (folder / "state" / "address").unlink(missing_ok=True)
        command = ["coordinator", f"{folder}/run.toml", "--state", f"{folder}/state", "--listen", self.address]
        return self._start("coordinator", "-m", "diloco", *command)

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self._stack.callback(self.end, process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait(timeout=10)

    def logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def until_paused(self, step: int) -> None:
        at = self.folder / f"at-{step}"
        wait_until(lambda: at.exists() or self.island.poll() is not None, "the island waits")
        assert self.island.poll() is None, self.logs()

    def finish(self) -> dict[str, object]:
        assert self.island.wait(timeout=120) == 0, self.logs()
        found: dict[str, object] = json.loads((self.folder / "digests.json").read_text())
        return found


@pytest.mark.slow
def test_an_island_outlives_coordinators_that_are_killed_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    with ExitStack() as stack:
        plain = Trial(tmp_path / "plain", stack)
        killed = Trial(tmp_path / "killed", stack)
        for step in PAUSES:
            (plain.folder / f"go-{step}").touch()
        for step in PAUSES:
            killed.until_paused(step)
            # The island goes on first, into a push or a wait for its round, and finds nobody.
            killed.coordinator.send_signal(signal.SIGSTOP)
            (killed.folder / f"go-{step}").touch()
            killed.end(killed.coordinator)
            killed.coordinator = killed.start_coordinator()
        expected, found = plain.finish(), killed.finish()
        assert found == expected
        assert found["epoch"] == 1
        for trial in (plain, killed):
            trial.coordinator.send_signal(signal.SIGTERM)
            assert trial.coordinator.wait(timeout=60) == 0, trial.logs()
    lines = (tmp_path / "killed" / "state" / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("admitted") == 1
    assert kinds.count("accepted") == kinds.count("committed") == 2 * STEPS // 4
    assert "taken up from the ledger" in (tmp_path / "killed" / "coordinator.log").read_text()


if __name__ == "__main__":
    island(sys.argv[1], Path(sys.argv[2]))
