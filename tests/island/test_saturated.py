"""A line of 10 Mbit/s with a deep queue, that a push saturates for longer than a lease."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import island.link
from coordinator.facts import Standing
from diloco.fragments import partition
from diloco.layout import Layout, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from diloco.window import Window
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


@pytest.mark.slow
def test_heartbeats_pass_a_line_that_is_saturated_both_ways(at: Serving, tmp_path: Path) -> None:
    with closing(Bottleneck(at.address, BYTES_PER_S)) as line, visit(line.address, "a", LAYOUT) as a:
        epoch = a.join().epoch
        heart = Heart(a.link, a.identity, LEASE_S / 3)
        heart.ready = True
        try:
            assert a.push(FRAGMENT, draw(FRAGMENT, 0), seed=True) == pb.Receipt()
            assert a.push(FRAGMENT, draw(FRAGMENT, 1)) == pb.Receipt()
            a.fetch(FRAGMENT, anchor=True)
        finally:
            heart.end()
        assert heart.fatal is None
        assert line.count["up"] > 2 * 4 * FRAGMENT.numel
        assert line.count["down"] > 4 * FRAGMENT.numel
        member = at.ask(lambda run: run.state.members["a"])
    assert (member.epoch, member.standing) == (epoch, Standing.ACTIVE)
    kinds = [json.loads(row)["kind"] for row in (tmp_path / "state" / "events.jsonl").read_text().splitlines()]
    assert "lost" not in kinds


@pytest.mark.parametrize(("receive_bytes", "bound"), [(2**20, 2**20), (64 * 2**20, None)])
def test_a_window_follows_its_link_within_the_bound_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receive_bytes: int, bound: int | None
) -> None:
    """A line of 400 Mbit/s and 100 ms carries 5 MB."""
    under_way = [0]

    class Noted(Window):
        def sent(self, count: int, now: float) -> None:
            super().sent(count, now)
            under_way.append(self._handed - self._have)

    monkeypatch.setattr(island.link, "Window", Noted)
    config = configure('sync.strategy="whole"', "sync.fragments=1", f"limits.receive_bytes={receive_bytes}")
    layout = Layout([TensorSpec("w", (8 * 1024, 1024))])
    [fragment] = partition(layout, config.sync)
    with (
        serving(config, tmp_path / "state") as at,
        closing(Bottleneck(at.address, 50e6, 0.05)) as line,
        visit(line.address, "a", layout) as a,
    ):
        a.join()
        assert a.push(fragment, draw(fragment, 0), seed=True) == pb.Receipt()
    assert 2**18 < max(under_way) <= (bound or 32 * 2**20)
    assert bound or max(under_way) > 4 * 2**20
