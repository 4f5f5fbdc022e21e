"""What a stream has under way: as much as its link carries, and no long queue, on links of every kind."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest

from diloco.window import FIRST_BYTES, LEAST_BYTES, MODERATE_BYTES, Window

MIB = 2**20


@dataclass
class Ride:
    """What came of a simulated transfer."""

    seconds: float
    peak_bytes: int
    """Most that was under way."""
    end_bytes: int
    """The window at the end."""


def ride(
    total: int, bytes_per_s: float, rtt_s: float, *, limit: int = 64 * MIB, window: Window | None = None, first: int = 0
) -> Ride:
    """Sends a payload over a line that carries so much, with a queue that takes everything, and is answered at once."""
    window = window or Window(MIB)
    window.begin(first)
    now = free_at = 0.0
    answers: list[tuple[float, int]] = []
    sent = have = first
    peak = 0
    while have < total:
        while sent < total and window.admits(count := min(window.chunk_bytes, total - sent)):
            window.sent(count, now)
            sent += count
            peak = max(peak, sent - have)
            free_at = max(free_at, now) + count / bytes_per_s
            heapq.heappush(answers, (free_at + rtt_s, sent))
        now, have = heapq.heappop(answers)
        window.heard(have, limit, now)
    return Ride(now, peak, window.bytes)


@pytest.mark.parametrize("rtt_s", [0.001, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("bytes_per_s", [1.25e6, 12.5e6, 125e6])
def test_a_window_fills_its_link_and_little_more(bytes_per_s: float, rtt_s: float) -> None:
    total = int(bytes_per_s * 60)
    found = ride(total, bytes_per_s, rtt_s)
    assert found.seconds < 1.1 * 60 + 20 * rtt_s
    carried, queued = bytes_per_s * rtt_s, max(bytes_per_s * 0.02, min(1.2 * MODERATE_BYTES, bytes_per_s * 0.3))
    assert found.end_bytes <= 3 * carried + 3 * LEAST_BYTES + queued
    assert found.peak_bytes <= max(FIRST_BYTES, 4.5 * carried + 4 * LEAST_BYTES + queued)


def test_no_more_is_under_way_than_the_other_side_allows() -> None:
    wide, narrow = (ride(2**30, 125e6, 0.1, limit=limit) for limit in (64 * MIB, 2 * MIB))
    assert narrow.peak_bytes <= 2 * MIB
    assert wide.peak_bytes > 10 * MIB
    assert narrow.seconds > 4 * wide.seconds


def test_a_line_that_is_answered_slowly_is_given_something_all_the_same() -> None:
    window = Window(MIB)
    assert window.admits(10 * MIB)  # nothing is under way
    window.sent(10 * MIB, 0.0)
    assert not window.admits(1)
    window.heard(10 * MIB, 0, 100.0)
    assert window.admits(1)


def test_a_stream_begins_where_the_last_one_stood() -> None:
    first = Window(MIB)
    ride(2**30, 125e6, 0.1, window=first)
    assert Window(MIB, first.bytes).bytes == first.bytes > FIRST_BYTES
    assert Window(MIB).chunk_bytes < MIB
    again = ride(2**28, 125e6, 0.1, window=Window(MIB, first.bytes))
    assert again.seconds < ride(2**28, 125e6, 0.1).seconds


def test_a_route_that_becomes_longer_is_followed() -> None:
    window = Window(MIB)
    ride(2**28, 125e6, 0.01, window=window)
    far = ride(2**32, 125e6, 0.2, window=window)
    assert far.end_bytes > 125e6 * 0.2


def test_chunks_are_never_larger_than_agreed() -> None:
    assert Window(4096, 2**30).chunk_bytes == 4096
