"""Signals: whatever the moment, a command ends soon, says so by its exit code, and leaves nothing behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.snapshots import load_snapshot
from diloco.errors import ExitCode
from tests.processes import Hand, Process, background, wait_until

INTERRUPTED_S = 5.0
"""How soon after Ctrl-C the demo has ended, with all that it started."""

RUN = """
[sync]
every_steps = 5
[rounds]
start_islands = {islands}
quorum = {islands}
lease_s = 300.0
[snapshot]
every_rounds = 1000000
"""


# -- the demo -----------------------------------------------------------------------------------------------------


def maps_torch(process: psutil.Process) -> bool:
    """Whether a process has begun to import torch."""
    try:
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


def ranks(demo: Process) -> list[psutil.Process]:
    """The processes of the islands' ranks."""
    return [p for p in demo.family() if "island.rank" in p.cmdline()]


HANGING = "training, and a rank hangs"
MOMENTS: dict[str, Callable[[Process, Path], object]] = {
    "importing": lambda demo, out: maps_torch(psutil.Process(demo.pid)),
    "the coordinator is up": lambda demo, out: (out / "state" / "address").exists(),
    "the islands are importing": lambda demo, out: any(map(maps_torch, ranks(demo))),
    HANGING: lambda demo, out: any('"train"' in path.read_text() for path in out.glob("metrics/*.jsonl")),
}


@pytest.mark.parametrize(
    "moment",
    [pytest.param(m, marks=pytest.mark.slow if m in ("the islands are importing", HANGING) else ()) for m in MOMENTS],
)
def test_an_interrupted_demo_ends_at_once_and_altogether(moment: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("To be, or not to be, that is the question.\n" * 5000)
    command = f"demo --steps 100000 --sync-every 10 --ranks-per-island 2,1 --text {text} --out {out}"
    with background(*command.split(), log=tmp_path / "output") as demo:
        wait_until(lambda: MOMENTS[moment](demo, out) or not demo.running, moment)
        assert demo.running, demo.output
        if moment == HANGING:
            ranks(demo)[-1].suspend()
        begun = time.monotonic()
        demo.signal(signal.SIGINT)
        code = demo.wait()
        took_s = time.monotonic() - begun
        assert demo.family() == []
        assert code == ExitCode.INTERRUPTED, demo.output
        assert took_s < INTERRUPTED_S
        assert demo.output.endswith("error: interrupted\n")
        assert "Traceback" not in demo.output
    if moment == "importing":
        assert not out.exists()


# -- a run by hand ------------------------------------------------------------------------------------------------


@contextmanager
def running(folder: Path, *names: str, islands: int) -> Iterator[Hand]:
    """A coordinator whose run needs so many `islands`, and some of them."""
    with ExitStack() as stack:
        hand = Hand(folder, stack, steps=1_000_000, run=RUN.format(islands=islands))
        hand.coordinator()
        for name in names:
            hand.island(name)
        yield hand


def leaves(hand: Hand, name: str) -> dict[str, Any]:
    """Sends SIGTERM to an island, checks that it ends well, and returns how it then stands."""
    island = hand.islands[name]
    island.signal(signal.SIGTERM)
    assert island.wait() == ExitCode.OK, island.output
    assert island.family() == []
    assert "Traceback" not in island.output
    return hand.standing(name)


def test_sigterm_lets_an_island_leave_and_a_coordinator_take_a_last_snapshot(tmp_path: Path) -> None:
    def saved() -> list[int]:
        snapshot = load_snapshot(tmp_path / "state")
        assert snapshot
        return [outer.version for outer in snapshot.outers]

    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=1_000_000, run=RUN.format(islands=1))
        coordinator = hand.coordinator()
        hand.island("a")
        hand.until_step(20)
        left = leaves(hand, "a")
        assert (left["state"], left["reason"]) == ("LEFT", "asked to stop")
        [end] = hand.records("a", "end")
        assert (end["reason"], end["step"]) == ("asked to stop", left["step"])

        committed = hand.status()["rounds"]
        assert committed >= 3
        assert saved() == [0]
        coordinator.signal(signal.SIGTERM)
        assert coordinator.wait() == ExitCode.OK, coordinator.output
        assert saved() == [committed]


@pytest.mark.slow
def test_sigterm_lets_an_island_leave_a_round_that_does_not_end(tmp_path: Path) -> None:
    with running(tmp_path, "a", "b", islands=2) as hand:
        hand.until_step(5)
        for process in hand.islands["b"].family():
            process.suspend()
        wait_until(lambda: "(b)" in hand.status()["fragments"][0]["waiting_for"], "a waits for b")
        assert leaves(hand, "a")["state"] == "LEFT"


@pytest.mark.slow
def test_sigterm_lets_an_island_leave_before_the_run_starts(tmp_path: Path) -> None:
    with running(tmp_path, "a", islands=2) as hand:
        wait_until(
            lambda: "waiting: 1 of 2 islands are ready" in hand.islands["a"].output, "a waits for another island"
        )
        assert leaves(hand, "a")["state"] == "LEFT"
