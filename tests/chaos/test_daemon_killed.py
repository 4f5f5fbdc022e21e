"""A rank of a real island is killed on its way; its daemon starts it again, and the run ends well."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.errors import ExitCode
from diloco.failpoints import VARIABLE
from tests.processes import Hand, background, diloco_here

RUN = """
[sync]
every_steps = 4
[snapshot]
keep = 3
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_is_started_again_by_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=24, run=RUN)
        hand.coordinator()
        monkeypatch.setenv(VARIABLE, "mixed:4")  # each life passes this; the second has no fourth round left
        command = hand.island_command("a", "island.max_restarts=1")
        process = stack.enter_context(background(*command, log=tmp_path / "a.log"))
        assert process.wait() == ExitCode.OK, process.output
        assert "failure 1" in process.output
        standing = hand.standing("a")
        assert (standing["state"], standing["epoch"], standing["contributions"]) == ("LEFT", 2, 6)
        [end] = hand.records("a", "end")
        assert [f["digest"] for f in hand.status()["fragments"]] == end["digests"].split()
    assert diloco_here("ledger", "verify", str(tmp_path / "state")).code == 0
