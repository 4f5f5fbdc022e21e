"""A cap on bandwidth, under a clock that only sleeping moves."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from island.throttle import BURST_S, Throttle
from tests.support import Rig, configure, draw


class Time:
    """A clock; sleeping moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize(("rate", "chunk"), [(1e6, 1000), (1e6, 250_000), (12.5e6, 2**20)])
def test_bytes_pass_at_the_rate_and_no_faster(rate: float, chunk: int) -> None:
    time = Time()
    throttle = Throttle(rate, time, time.sleep)
    count = int(5 * rate / chunk)
    for _ in range(count):
        throttle.take(chunk)
    assert time.now - 100.0 == pytest.approx((count - 1) * chunk / rate, abs=2 * BURST_S)


def test_a_pause_is_not_made_up_for() -> None:
    time = Time()
    throttle = Throttle(1000.0, time, time.sleep)
    throttle.take(1000)
    time.now += 3600.0
    begin = time.now
    for _ in range(10):
        throttle.take(1000)
    assert time.now - begin == pytest.approx(9.0, abs=2 * BURST_S)


def test_without_a_cap_nobody_waits() -> None:
    time = Time()
    throttle = Throttle(0.0, time, time.sleep)
    for _ in range(100):
        throttle.take(2**30)
    assert time.now == 100.0


def test_what_an_island_sends_and_receives_is_counted_against_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[Throttle, int] = {}
    monkeypatch.setattr(Throttle, "take", lambda self, count: taken.update({self: taken.get(self, 0) + count}))
    with ExitStack() as stack:
        at = Rig(configure(), tmp_path, stack)
        [a] = at.started("a")
        taken.clear()
        fragment = at.run.fragments[0]
        a.push(fragment, draw(fragment, 1))
        a.fetch(fragment)
        payload = 4 * fragment.numel
        assert payload < taken[a.link._up] < payload + 100
        assert payload < taken[a.link._down] < payload + 100
