"""An island process that is stopped for longer than its lease, and goes on: by itself, in the same process."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.errors import ExitCode
from tests.processes import Hand, wait_until

RUN = """
[sync]
every_steps = 5
[rounds]
lease_s = 1.5
"""


@pytest.mark.slow
def test_an_island_that_was_stopped_joins_again_by_itself(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=1_000_000, run=RUN)
        hand.coordinator()
        island = hand.island("a")
        hand.until_step(10)
        family = island.family()
        for process in family:
            process.suspend()
        wait_until(lambda: hand.standing("a")["state"] == "LOST", "its lease has run out")
        folded = hand.standing("a")["contributions"]
        for process in family:
            process.resume()
        wait_until(lambda: hand.standing("a")["contributions"] > folded, "it contributes again")
        assert (hand.standing("a")["state"], hand.standing("a")["epoch"]) == ("ACTIVE", 2)
        assert [p.pid for p in island.family()] == [p.pid for p in family]
        island.signal(signal.SIGTERM)
        assert island.wait() == ExitCode.OK, island.output
        assert hand.standing("a")["state"] == "LEFT"
        [rejoin] = hand.records("a", "rejoin")
        assert rejoin["epoch"] == 2
