"""The schedule against a simulation: every round is sent once, applied once, tau steps apart and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.config import RunConfig, RunSection, SyncConfig, load_run
from diloco.schedule import Apply, Schedule, Send

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """Runs of 1 to 4 fragments, with the usual offsets or some of their own, and any overlap."""
    fragments = draw(st.integers(1, 4))
    every = fragments * draw(st.integers(1, 6))
    own = draw(st.booleans())
    sync = SyncConfig(
        strategy="strided",
        fragments=fragments,
        every_steps=every,
        overlap_steps=draw(st.integers(0, every - 1)),
        offsets_steps=tuple(draw(st.permutations(range(1, every + 1)))[:fragments]) if own else (),
    )
    return RunConfig(run=RunSection(id="r", steps=draw(st.integers(min(sync.offsets), 5 * every))), sync=sync)


def sync_steps(config: RunConfig) -> list[list[int]]:
    """Per fragment, the inner steps of the run at which it syncs: one a period, and none that is sent before step 1."""
    sync = config.sync
    first = sync.offsets_steps or [(p + 1) * sync.every_steps // sync.fragments for p in range(sync.fragments)]
    return [
        [
            step
            for step in range(1, config.run.steps + 1)
            if step % sync.every_steps == first[p] % sync.every_steps and step - sync.overlap_steps >= 1
        ]
        for p in range(sync.fragments)
    ]


@given(runs())
@PROPERTY
def test_what_is_due_is_what_a_simulation_says(config: RunConfig) -> None:
    schedule, steps = Schedule.of(config), sync_steps(config)
    for step in range(config.run.steps + config.sync.every_steps + 1):
        ahead = step + config.sync.overlap_steps
        sends = [Send(p, at.index(ahead)) for p, at in enumerate(steps) if ahead in at]
        applies = [Apply(p, at.index(step)) for p, at in enumerate(steps) if step in at]
        assert schedule.due(step) == [*sends, *applies]


@given(runs())
@PROPERTY
def test_every_round_is_sent_once_and_applied_once_tau_steps_later_in_order(config: RunConfig) -> None:
    schedule = Schedule.of(config)
    events = [(action, step) for step in range(1, config.run.steps + 1) for action in schedule.due(step)]
    for p in range(config.sync.fragments):
        count = schedule.rounds(p)
        mine = [action for action, _ in events if action.fragment == p]
        assert mine == [kind(p, r) for r in range(count) for kind in (Send, Apply)]
        at = dict(events)
        for r in range(count):
            assert at[Apply(p, r)] == schedule.sync_step(p, r)
            assert at[Apply(p, r)] - at[Send(p, r)] == config.sync.overlap_steps


@given(runs())
@PROPERTY
def test_a_run_has_the_rounds_that_fit(config: RunConfig) -> None:
    schedule, steps = Schedule.of(config), sync_steps(config)
    counts = [len(at) for at in steps]
    assert [schedule.rounds(p) for p in range(len(steps))] == counts
    assert schedule.finished(counts)
    for p, count in enumerate(counts):
        assert not count or not schedule.finished([*counts[:p], count - 1, *counts[p + 1 :]])


@given(runs(), st.data())
@PROPERTY
def test_an_island_stands_before_every_sync_to_come(config: RunConfig, data: st.DataObject) -> None:
    schedule, steps = Schedule.of(config), sync_steps(config)
    ended = [data.draw(st.integers(0, len(at))) for at in steps]
    position = schedule.position(ended)
    assert position >= 0
    assert all(position < step for at, r in zip(steps, ended, strict=True) for step in at[r:])


@given(runs())
@PROPERTY
def test_rounds_that_end_in_order_put_an_island_at_the_newest_sync(config: RunConfig) -> None:
    schedule, steps = Schedule.of(config), sync_steps(config)
    for now in range(config.run.steps + 1):
        passed = [[step for step in at if step <= now] for at in steps]
        newest = max((step for at in passed for step in at), default=0)
        assert schedule.position([len(at) for at in passed]) == newest


def test_by_hand() -> None:
    schedule = Schedule(every=6, offsets=(2, 4, 6), overlap=1, steps=13)
    assert [schedule.rounds(p) for p in range(3)] == [2, 2, 2]
    assert {step: due for step in range(1, 14) if (due := schedule.due(step))} == {
        1: [Send(0, 0)],
        2: [Apply(0, 0)],
        3: [Send(1, 0)],
        4: [Apply(1, 0)],
        5: [Send(2, 0)],
        6: [Apply(2, 0)],
        7: [Send(0, 1)],
        8: [Apply(0, 1)],
        9: [Send(1, 1)],
        10: [Apply(1, 1)],
        11: [Send(2, 1)],
        12: [Apply(2, 1)],
    }
    assert schedule.position([0, 0, 0]) == 0
    assert schedule.position([1, 0, 0]) == 2
    assert schedule.position([1, 1, 0]) == 4
    assert schedule.position([2, 2, 2]) == 12


def test_a_fragment_that_lags_holds_the_position_back() -> None:
    schedule = Schedule(every=6, offsets=(3, 6), overlap=0, steps=60)
    assert schedule.position([4, 1]) == 11
    assert schedule.position([0, 5]) == 2


def test_sends_come_before_applies_so_that_a_round_of_no_overlap_is_sent_first() -> None:
    assert Schedule(every=2, offsets=(2,), overlap=0, steps=4).due(4) == [Send(0, 1), Apply(0, 1)]
    assert Schedule(every=4, offsets=(2, 4), overlap=2, steps=9).due(6) == [Send(1, 1), Apply(0, 1)]


@pytest.mark.parametrize(
    ("overlap", "first"), [(0, (2, 4, 6, 8)), (1, (2, 4, 6, 8)), (2, (10, 4, 6, 8)), (7, (10, 12, 14, 8))]
)
def test_a_sync_too_early_to_be_sent_before_it_comes_a_period_later(overlap: int, first: tuple[int, ...]) -> None:
    sync = SyncConfig(strategy="strided", fragments=4, every_steps=8, overlap_steps=overlap)
    assert sync.offsets == first


def test_a_run_that_ends_before_a_fragments_first_sync_has_no_round_of_it() -> None:
    schedule = Schedule(every=10, offsets=(5, 10), overlap=0, steps=9)
    assert (schedule.rounds(0), schedule.rounds(1)) == (1, 0)
    assert schedule.finished([1, 0])
    assert schedule.position([1, 0]) == 5


def test_a_coordinator_has_no_rounds_of_fragments_that_another_keeps() -> None:
    config = load_run(
        '[run]\nid = "r"\nsteps = 12\ncoordinators = ["a:1", "b:1"]\ncoordinator_index = 1\n'
        '[sync]\nstrategy = "strided"\nfragments = 4\nevery_steps = 4\n',
        "the test",
    ).value
    whole, mine = Schedule.of(config), Schedule.kept(config)
    assert ([whole.rounds(f) for f in range(4)], [mine.rounds(f) for f in range(4)]) == ([3] * 4, [0, 3, 0, 3])
    for step in range(1, 13):
        assert mine.due(step) == [action for action in whole.due(step) if action.fragment % 2]
    assert mine.finished([0, 3, 0, 3])
    assert not mine.finished([0, 3, 0, 2])
    assert (whole.position([0, 1, 0, 1]), mine.position([0, 1, 0, 1])) == (0, 4)


def test_a_newcomer_goes_no_further_than_the_next_sync() -> None:
    schedule = Schedule(every=4, offsets=(2, 4), overlap=0, steps=12)
    assert [schedule.position([1, 0], step) for step in (0, 2, 3, 9)] == [2, 2, 3, 3]
    assert schedule.position([3, 3], 40) == 12
