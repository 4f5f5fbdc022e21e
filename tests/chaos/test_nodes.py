"""An island of several nodes, each with a daemon of its own: nodes come and go, and a hot spare takes over."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.errors import ExitCode
from tests.processes import Hand, diloco_here, free_port, wait_until

RUN = """
[sync]
every_steps = 4
[rounds]
lease_s = 3.0
"""


class Nodes:
    """The daemons of one island on this machine, one rank each."""

    def __init__(self, hand: Hand, least: int, most: int) -> None:
        self._hand = hand
        port = free_port()
        self._settings = [
            f"nodes.least={least}",
            f"nodes.most={most}",
            f"nodes.rendezvous=127.0.0.1:{port}",
            "nodes.last_call_s=2",
            f"mesh.ranks={most}",
            "island.max_restarts=5",
        ]

    def start(self, name: str) -> None:
        """Starts one daemon; its output goes to a log of this name."""
        process = self._hand.island(name, "island.id=a", *self._settings)
        self._hand.islands[name] = process

    def worlds(self) -> list[int]:
        """With how many ranks the island has trained, as its first rank has said on whatever node, by epoch."""
        said = [re.findall(r"run by-hand, epoch (\d+), .* (\d+) rank", i.output) for i in self._hand.islands.values()]
        return [ranks for _, ranks in sorted((int(epoch), int(ranks)) for one in said for epoch, ranks in one)]


@pytest.mark.slow
def test_nodes_come_and_go(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=1_000_000, run=RUN)
        hand.coordinator()
        nodes = Nodes(hand, 1, 2)
        nodes.start("first")
        wait_until(lambda: nodes.worlds() == [1], "one node trains")
        nodes.start("second")
        wait_until(lambda: nodes.worlds() == [1, 2], "two nodes train")
        nodes.start("spare")
        hand.islands["second"].signal(signal.SIGKILL)
        wait_until(lambda: nodes.worlds() == [1, 2, 2], "the spare has taken over")
        contributions = hand.standing("a")["contributions"]
        wait_until(lambda: hand.standing("a").get("contributions", 0) > contributions, "they contribute")
        hand.islands["spare"].signal(signal.SIGTERM)
        assert hand.islands["spare"].wait() == ExitCode.OK
        wait_until(lambda: nodes.worlds() == [1, 2, 2, 1], "one node goes on")
        assert diloco_here("stop", hand.address, "--yes").code == 0
        assert hand.islands["first"].wait() == ExitCode.OK, hand.islands["first"].output
    assert diloco_here("ledger", "verify", str(tmp_path / "state")).code == 0


@pytest.mark.slow
def test_a_spare_ends_with_its_island(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=400, run=RUN)
        hand.coordinator()
        nodes = Nodes(hand, 2, 2)
        for name in ("first", "second", "spare"):
            nodes.start(name)
        codes = [hand.islands[name].wait() for name in ("first", "second", "spare")]
        assert codes == [ExitCode.OK] * 3, [island.output for island in hand.islands.values()]
        assert hand.standing("a")["step"] == 400
