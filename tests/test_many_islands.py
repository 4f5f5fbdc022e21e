"""Many islands on one coordinator process: what it takes does not depend on how many there are."""

from __future__ import annotations

import os

import pytest

from benchmarks.islands import STREAMS, Outcome, memory, play


def test_memory_is_read_in_bytes() -> None:
    assert 2**20 < memory(os.getpid())["RssAnon"] <= memory(os.getpid())["VmHWM"]


def test_streams_beyond_the_limit_raise_no_ceiling() -> None:
    def ceiling(islands: int) -> int:
        return Outcome(
            islands=islands,
            parameters=2**20,
            base_bytes=0,
            peak_bytes=0,
            high_water_bytes=0,
            fold_s=0.0,
            beat_s=0.0,
            worst_beat_s=0.0,
            seconds=0.0,
        ).ceiling_bytes

    assert ceiling(1) < ceiling(STREAMS) == ceiling(4 * STREAMS)


@pytest.mark.slow
@pytest.mark.parametrize("islands", [1, 64])
def test_anonymous_memory_stays_below_its_ceiling(islands: int) -> None:
    outcome = play(islands, 4 * 2**20)
    assert outcome.grown_bytes <= outcome.ceiling_bytes, outcome
    assert outcome.grown_bytes >= 12 * outcome.parameters, "the state itself is not seen"
