"""A line of 10 Mbit/s with a deep queue, that a push saturates for longer than a lease."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.facts import Standing
from diloco.fragments import partition
from diloco.layout import Layout, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from island.heart import Heart
from tests.proxy import Bottleneck
from tests.support import Serving, configure, draw, serving, visit

BYTES_PER_S = 10e6 / 8
LEASE_S = 2.0
LAYOUT = Layout([TensorSpec("w", (1280, 1024))])
"""5 MiB: 4 seconds of the line."""
CONFIG = configure('sync.strategy="whole"', "sync.fragments=1", f"rounds.lease_s={LEASE_S}")
[FRAGMENT] = partition(LAYOUT, CONFIG.sync)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Serving]:
    with serving(CONFIG, tmp_path / "state") as at:
        yield at


def test_heartbeats_pass_a_line_that_a_push_saturates(at: Serving, tmp_path: Path) -> None:
    with closing(Bottleneck(at.address, BYTES_PER_S)) as line, visit(line.address, "a", LAYOUT) as a:
        epoch = a.join().epoch
        heart = Heart(a.link, a.identity, LEASE_S / 3)
        heart.ready = True
        try:
            assert a.push(FRAGMENT, draw(FRAGMENT, 0), seed=True) == pb.Receipt()
            assert a.push(FRAGMENT, draw(FRAGMENT, 1)) == pb.Receipt()
        finally:
            heart.end()
        assert heart.fatal is None
        assert line.count["up"] > 2 * 4 * FRAGMENT.numel
        member = at.ask(lambda run: run.state.members["a"])
    assert (member.epoch, member.standing) == (epoch, Standing.ACTIVE)
    kinds = [json.loads(row)["kind"] for row in (tmp_path / "state" / "events.jsonl").read_text().splitlines()]
    assert "lost" not in kinds
