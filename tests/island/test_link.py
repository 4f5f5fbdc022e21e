"""What the link tries again, for how long, and what it gives up at once."""

from __future__ import annotations

import itertools

import pytest

import island.link
from diloco.errors import CodecError, Conflict, DilocoError, Expired, Malformed, Overload, StaleEpoch, Unreachable
from island.link import DAMAGED_TRIES, FETCH_AGAIN, PUSH_AGAIN, Link, _Pace
from tests.support import Clock


class Time(Clock):
    """Time that passes only where somebody sleeps."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time(1000.0)
    monkeypatch.setattr(island.link, "time", clock)
    return clock


@pytest.fixture
def link() -> Link:
    link = Link("127.0.0.1:1", patience_s=30.0, say=lambda _: None)
    link.close()
    return link


def test_patience_counts_from_the_last_progress(clock: Time, link: Link) -> None:
    pace, tries = _Pace(), itertools.count()

    def attempt() -> None:
        number = next(tries)
        clock.now += 20
        if number < 10:
            pace.move(100 * (number + 1))
        raise Unreachable("gone")

    with pytest.raises(Unreachable):
        link._retried(attempt, PUSH_AGAIN, pace)
    assert next(tries) == 12
    assert clock.now < 1000 + 12 * 20 + 30


def test_bytes_that_a_line_took_and_never_delivered_are_no_progress(clock: Time, link: Link) -> None:
    pace, tries = _Pace(), itertools.count()

    def attempt() -> None:
        if next(tries):
            pace.resume(50)
        clock.now += 10
        pace.move(100)
        raise Unreachable("gone")

    with pytest.raises(Unreachable):
        link._retried(attempt, PUSH_AGAIN, pace)
    assert next(tries) < 8


def test_what_is_sent_again_is_counted(clock: Time) -> None:
    pace = _Pace()
    pace.hand(100)
    clock.now += 1
    assert pace.resume(60) == 40
    assert pace.since == 1001
    assert pace.resume(60) == 0
    pace.hand(100)
    assert pace.resume(160) == 0


@pytest.mark.parametrize("asked_s", [0.0, 7.0])
def test_an_overloaded_coordinator_is_asked_again_when_it_said(clock: Time, link: Link, asked_s: float) -> None:
    times: list[float] = []

    def attempt() -> str:
        times.append(clock.now)
        if len(times) < 3:
            raise Overload("full", retry_after_s=asked_s)
        return "done"

    assert link._retried(attempt) == "done"
    waits = [late - early for early, late in itertools.pairwise(times)]
    assert all(max(asked_s, 0.1) <= wait <= max(1.5 * asked_s, 0.4) for wait in waits)


@pytest.mark.parametrize("again", [PUSH_AGAIN, FETCH_AGAIN])
def test_what_is_damaged_again_and_again_was_not_damaged_by_the_line(
    clock: Time, link: Link, again: tuple[type[DilocoError], ...]
) -> None:
    tries = itertools.count()

    def attempt() -> str:
        if next(tries) < healed:
            raise CodecError("damaged")
        return "done"

    healed = DAMAGED_TRIES - 1
    assert link._retried(attempt, again) == "done"
    healed, tries = DAMAGED_TRIES, itertools.count()
    with pytest.raises(CodecError):
        link._retried(attempt, again)
    assert next(tries) == DAMAGED_TRIES


@pytest.mark.parametrize("kind", [Malformed, Conflict, StaleEpoch])
def test_what_would_fail_again_is_not_tried_again(clock: Time, link: Link, kind: type[DilocoError]) -> None:
    tries = itertools.count()

    def attempt() -> None:
        next(tries)
        raise kind("no")

    with pytest.raises(kind):
        link._retried(attempt, PUSH_AGAIN)
    assert next(tries) == 1


def test_only_a_push_asks_again_for_what_is_no_longer_kept(clock: Time, link: Link) -> None:
    def attempt() -> None:
        raise Expired("no longer kept")

    with pytest.raises(Expired):
        link._retried(attempt)
    assert clock.now == 1000
    with pytest.raises(Expired):
        link._retried(attempt, PUSH_AGAIN)
    assert clock.now > 1020
