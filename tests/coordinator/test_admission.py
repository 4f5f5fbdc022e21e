"""Budgets that are spent, and old anchors that are kept for a while."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from coordinator.admission import Admission
from coordinator.anchors import Anchors, Pinned
from diloco.config import LimitsConfig
from diloco.errors import Overload
from tests.support import Clock


def admission(**limits: float) -> Admission:
    return Admission(LimitsConfig.model_validate({"retry_s": 2.5, **limits}))


def test_streams_are_counted_for_the_run_and_for_each_island() -> None:
    budget = admission(streams=3, streams_per_island=2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(budget.stream("a"))
        with pytest.raises(
            Overload, match=r"island 'a' may have 2 .*limits.streams_per_island.* again in 2.5 s"
        ) as one:
            stack.enter_context(budget.stream("a"))
        assert one.value.retry_after_s == 2.5
        stack.enter_context(budget.stream("b"))
        with pytest.raises(Overload, match=r"the run may have 3 bulk streams \(limits.streams\)"):
            stack.enter_context(budget.stream("c"))
        assert budget.streams == 3
    assert budget.streams == 0
    with budget.stream("a"), budget.stream("a"):
        pass


def test_a_stream_that_fails_gives_its_place_back() -> None:
    budget = admission(streams=1)
    for _ in range(3):
        with pytest.raises(KeyError), budget.stream("a"):
            raise KeyError


def test_a_payload_that_does_not_fit_is_refused() -> None:
    budget = admission(disk_bytes=100, disk_free_bytes=50)
    budget.room(40, kept_bytes=60, coming_bytes=10, free_bytes=100)
    with pytest.raises(Overload, match=r"limits.disk_bytes\); 60 are taken, and 41 would come"):
        budget.room(41, kept_bytes=60, coming_bytes=0, free_bytes=1000)
    with pytest.raises(Overload, match=r"limits.disk_free_bytes\); 100 are free, and 51 would come"):
        budget.room(40, kept_bytes=60, coming_bytes=11, free_bytes=100)
    admission(disk_free_bytes=0).room(10**9, kept_bytes=10**12, coming_bytes=0, free_bytes=10**9)


def test_an_island_that_holds_a_lease_is_not_counted_twice() -> None:
    budget = admission(islands=2)
    budget.lease("b", ["a"])
    budget.lease("a", ["a", "b"])
    with pytest.raises(Overload, match=r"the run may have 2 islands \(limits.islands\); 2 hold a lease"):
        budget.lease("c", ["a", "b"])


# -- anchors --------------------------------------------------------------------------------------------------------


class Asked(Anchors):
    """Anchors, with what is asked of them as a coordinator does."""

    def __init__(self, clock: Clock) -> None:
        self.dropped: list[tuple[int, int]] = []
        super().__init__(10.0, clock, lambda *gone: self.dropped.append(gone))

    def ask(self, fragment: int, current: int, version: int | None = None) -> int:
        """The version that is served."""
        found = self.find(fragment, version, current)
        if found is None:
            values = torch.full((3,), float(current))
            found = self.keep(fragment, Pinned(version=current, ended=current, digest=current, anchor=values))
        return found.version


def test_one_older_anchor_stays_for_as_long_as_it_is_asked_for() -> None:
    clock = Clock()
    anchors = Asked(clock)
    assert anchors.ask(0, 1) == 1
    for _ in range(3):
        clock.now += 10
        assert anchors.ask(0, 2, 1) == 1
    assert anchors.ask(1, 2, 1) == 2  # another fragment
    assert anchors.dropped == []
    clock.now += 10.5
    assert anchors.ask(0, 2, 1) == 2
    assert anchors.dropped == [(0, 1)]


def test_of_two_older_anchors_the_one_that_was_asked_for_last_stays() -> None:
    clock = Clock()
    anchors = Asked(clock)
    for version in (1, 2):
        anchors.ask(0, version)
        clock.now += 1
    assert anchors.ask(0, 3) == 3
    assert anchors.dropped == [(0, 1)]
    assert anchors.ask(0, 3, 2) == 2
    assert anchors.ask(0, 3, 1) == 3


def test_the_newest_anchor_is_still_known_once_it_is_older() -> None:
    clock = Clock()
    anchors = Asked(clock)
    anchors.ask(0, 1)
    anchors.ask(0, 2, 1)
    clock.now += 1
    anchors.ask(0, 2)
    assert anchors.ask(0, 3, 2) == 2
    assert anchors.versions(0) == [1, 2]


def test_what_nobody_asks_for_is_let_go() -> None:
    clock = Clock()
    anchors = Asked(clock)
    anchors.ask(0, 1)
    clock.now += 11
    anchors.expire()
    assert anchors.dropped == [(0, 1)]
    assert anchors.ask(0, 2, 1) == 2
