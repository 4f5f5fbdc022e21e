"""The heart: how long nobody has answered, by its own clock, and what ends a lease."""

from __future__ import annotations

import pytest

from diloco.errors import DeadlineExceeded, DilocoError, Dismissed, RunMismatch, StaleEpoch, Unreachable
from diloco.v1 import coordinator_pb2 as pb
from island.heart import SILENT_BEATS, Heart
from tests.support import Clock


class Line:
    """A link that answers what the test says, and takes its time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.answer: pb.RunState | DilocoError = pb.RunState(phase="running")
        self.takes_s = 0.0

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.RunState:
        self._clock.now += self.takes_s
        if isinstance(self.answer, DilocoError):
            raise self.answer
        return self.answer


@pytest.fixture
def line() -> Line:
    return Line(Clock(100.0))


@pytest.fixture
def heart(line: Line) -> Heart:
    """A heart that the test alone makes beat."""
    heart = Heart(line, pb.HeartbeatRequest(run_id="r", island_id="i", epoch=1), 30.0, line._clock)  # type: ignore[arg-type]
    heart.end()
    heart._thread.join()
    return heart


def fails(heart: Heart, kind: type[DilocoError]) -> None:
    with pytest.raises(kind):
        heart.poll()


@pytest.mark.parametrize("kind", [Unreachable, DeadlineExceeded])
def test_silence_counts_from_the_first_beat_that_nobody_answered(
    kind: type[DilocoError], heart: Heart, line: Line
) -> None:
    heart.poll()
    line._clock.now += 50.0
    assert (heart.silent_s, heart.silent) == (0.0, False)
    line.answer, line.takes_s = kind("nobody"), SILENT_BEATS - 0.5
    fails(heart, kind)
    assert (heart.silent_s, heart.silent) == (1.5, False)
    fails(heart, kind)
    assert (heart.silent_s, heart.silent) == (3.0, True)
    line.answer = pb.RunState(phase="running")
    heart.poll()
    assert (heart.silent_s, heart.silent) == (0.0, False)


@pytest.mark.parametrize("kind", [StaleEpoch, Dismissed, RunMismatch])
def test_what_ends_the_lease_ends_it_for_good(kind: type[DilocoError], heart: Heart, line: Line) -> None:
    line.answer = kind("over")
    fails(heart, kind)
    line.answer = pb.RunState(phase="running")
    fails(heart, kind)
    assert isinstance(heart.fatal, kind)


def test_a_coordinator_in_trouble_has_answered(heart: Heart, line: Line) -> None:
    line.answer = DilocoError("its disk is full")
    fails(heart, DilocoError)
    assert (heart.silent_s, heart.fatal) == (0.0, None)


def test_directives_are_heard(heart: Heart, line: Line) -> None:
    line.answer = pb.RunState(phase="running", directive="pause", directive_reason="maintenance")
    heart.poll()
    assert (heart.directive, heart.directive_reason) == ("pause", "maintenance")


def test_a_coordinator_that_knows_of_fewer_rounds_has_lost_some(heart: Heart, line: Line) -> None:
    heart.rounds = (3, 2)
    fragments = [pb.FragmentState(fragment=0, round=3), pb.FragmentState(fragment=1, round=2)]
    line.answer = pb.RunState(phase="running", fragments=fragments)
    heart.poll()
    fragments[1].round = 1
    line.answer = pb.RunState(phase="running", fragments=fragments)
    fails(heart, StaleEpoch)
