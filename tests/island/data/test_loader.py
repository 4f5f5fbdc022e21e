"""Batches: who sees which sequence when, whatever the ranks, the workers and the restarts."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import hypothesis
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError, DeadlineExceeded, EnvironmentFault, InputError
from island.data import Batches, Bytes, Cursor, Packed, Place, assign
from island.group import Group
from tests.island.data.support import FailsAtTheEnd, ReadAhead, T, numbered, reader, settings, starts, stream

TEXT = numbered(spans=20)
"""60 training sequences."""


def seen(batches: Batches, count: int) -> list[int]:
    """Where the sequences of the next batches begin, batch after batch."""
    return [start for _ in range(count) for start in starts(batches.next())]


@hypothesis.settings(deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_islands_and_ranks_share_an_epoch_among_them(weights: dict[str, int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    everything: list[int] = []
    for own in assign(count, weights).values():
        for shard in own:
            size = len(range(shard, TEXT.train_sequences, count))
            cursor = Cursor.at([shard], 0)
            parts = [
                reader(TEXT, cursor, shards=count, rank=r, ranks=ranks, batch_sequences=ranks) for r in range(ranks)
            ]
            turns = [[seen(part, 1)[0] for part in parts] for _ in range(-(-size // ranks))]
            everything += [start for turn in turns for start in turn][:size]
    assert sorted(everything) == sorted(starts(TEXT.train(torch.arange(TEXT.train_sequences).numpy())))


def test_shards_are_read_in_turn_and_each_epoch_in_another_order() -> None:
    cursor = Cursor.at([1, 3], 0)
    alone = [seen(reader(TEXT, Cursor.at([shard], 0), shards=4), 12) for shard in (1, 3)]
    both = seen(reader(TEXT, cursor, shards=4), 24)
    assert [both[::2], both[1::2]] == [order[:48] for order in alone]
    first, second = alone[0][:15], alone[0][15:30]
    assert first != second
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 15


def test_another_seed_is_another_order() -> None:
    data = settings()
    orders = [seen(Batches(TEXT, Cursor.at([0], 0), shards=1, seed=seed, data=data), 15) for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_of_all_ranks_are_the_batch(ranks: int) -> None:
    cursor = Cursor.at([0, 1], 5)
    [whole] = [starts(reader(TEXT, cursor, shards=3, batch_sequences=12).next())]
    parts = [
        starts(reader(TEXT, cursor, shards=3, batch_sequences=12, rank=r, ranks=ranks).next()) for r in range(ranks)
    ]
    rebuilt = [parts[row % ranks][row // ranks] for row in range(12)]
    assert rebuilt == whole
    with pytest.raises(ConfigError, match=r"\(12\) must be a multiple of the 5 ranks .*set data\.batch_sequences=15"):
        reader(TEXT, cursor, shards=3, batch_sequences=12, ranks=5)


@given(st.integers(0, 30), st.integers(1, 9))
def test_what_a_cursor_resumes_is_what_would_have_come(before: int, batch: int) -> None:
    straight = reader(TEXT, Cursor.at([0, 2], 3), shards=3, batch_sequences=batch)
    seen(straight, before)
    cursor = Cursor.from_json(straight.cursor.to_json())
    again = reader(TEXT, cursor, shards=3, batch_sequences=batch)
    assert seen(again, 5) == seen(straight, 5)
    assert again.cursor == straight.cursor == straight.together(Group())


def test_a_shard_that_is_taken_over_goes_on_where_it_stood() -> None:
    count = 4
    lost, other = (reader(TEXT, Cursor.at([shard], 0), shards=count) for shard in (1, 2))
    before = seen(lost, 2) + seen(other, 1)
    [place] = map(Place.parse, str(lost.cursor).split())
    taker = reader(TEXT, other.cursor.under([2], [place]), shards=count)
    left = 2 * TEXT.train_sequences // count - len(before)
    rows = seen(taker, 10)
    mine = {p.shard: p.visits for p in other.cursor.under([2], [place]).places}
    assert mine == {1: 8, 2: 4}
    taken = rows[::2][: TEXT.train_sequences // count - 8]
    own = rows[1::2][: TEXT.train_sequences // count - 4]
    assert len(taken) + len(own) == left
    assert max(Counter(before + taken + own).values()) == 1, "no sequence is read twice in the epoch"
    rest = seen(lost, 2)
    assert taken == rest[: len(taken)], "it is what the lost island would have read"


def workers() -> set[psutil.Process]:
    """Processes that `multiprocessing` has begun in this one."""
    return {psutil.Process(child.pid) for child in multiprocessing.active_children()}


@pytest.fixture
def generator() -> Iterator[torch.Tensor]:
    """The state of torch's own random numbers, which must not move."""
    before = torch.get_rng_state()
    yield before
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["packed", "stream"])
@pytest.mark.usefixtures("generator")
def test_workers_change_nothing(kind: str) -> None:
    source = TEXT if kind == "packed" else stream()
    cursor = Cursor.at([0, 1, 3], 0)
    begin: dict[str, Any] = {"shards": 4, "batch_sequences": 6, "rank": 1, "ranks": 2}
    before = workers()
    with (
        reader(source, cursor, **begin) as inline,
        reader(source, cursor, workers=2, prefetch_batches=3, **begin) as ahead,
    ):
        for _ in range(9):
            for expected, found in zip(inline.next(), ahead.next(), strict=True):
                assert torch.equal(expected, found)
            assert ahead.cursor == inline.cursor, "what is only read ahead does not count"
        begun = workers() - before
    assert len(begun) == 2
    assert not any(worker.is_running() for worker in begun), "closing ends the workers"
    with pytest.raises(RuntimeError, match="closed"):
        ahead.next()


def test_a_library_that_is_at_work_does_not_make_a_worker_fail() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra `data`)")
    source = ReadAhead(data=settings(dataset="texts"), tokenizer=Bytes(), sequence_length=T)
    with reader(source, Cursor.at([0], 0), workers=1) as batches:
        batches.next()
        [worker] = multiprocessing.active_children()
    assert worker.exitcode == 0


def test_closing_ends_workers_whoever_holds_their_rows() -> None:
    with reader(TEXT, Cursor.at([0], 0), workers=2) as batches:
        batches.next()
        held, begun = batches._items, multiprocessing.active_children()
    assert held is not None
    assert [worker.exitcode for worker in begun] == [0, 0]


def test_a_worker_that_fails_when_it_is_to_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    source = FailsAtTheEnd(data=settings(dataset="texts"), tokenizer=Bytes(), sequence_length=T)
    with reader(source, Cursor.at([0], 0), workers=1) as batches:
        batches.next()
    assert "workers of the data did not end well: exit codes [-6]" in caplog.text


def test_what_a_worker_finds_wrong_keeps_its_class() -> None:
    tokens = numbered(spans=3)
    tokens._vocabulary = 40
    with reader(tokens, Cursor.at([0], 0), workers=1) as batches, pytest.raises(InputError, match="vocabulary 40 "):
        seen(batches, 3)


def test_workers_that_do_not_come_are_not_waited_for() -> None:
    with (
        reader(TEXT, Cursor.at([0], 0), workers=1, timeout_s=0.01) as batches,
        pytest.raises(DeadlineExceeded, match=r"1 worker\(s\) gave no batch in 0 s: raise data\.timeout_s"),
    ):
        batches.next()


def test_a_worker_that_is_killed_is_told() -> None:
    before = workers()
    with reader(TEXT, Cursor.at([0], 0), workers=1, prefetch_batches=1) as batches:
        batches.next()
        [worker] = workers() - before
        with pytest.raises(EnvironmentFault, match=r"a worker of the data has ended .*: have fewer data\.workers"):
            os.kill(worker.pid, signal.SIGKILL)
            for _ in range(1000):
                batches.next()


def test_a_shard_with_too_little_is_refused() -> None:
    with closing(reader(TEXT, Cursor.at([0], 0), shards=15)) as batches:
        assert len(seen(batches, 1)) == 4
    with pytest.raises(InputError, match=r"16 shard\(s\) of at least one batch of 4"):
        reader(TEXT, Cursor.at([0], 0), shards=16)


def test_batches_are_int64() -> None:
    inputs, targets = reader(TEXT, Cursor.at([0], 0)).next()
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert inputs.shape == (4, T)
    assert isinstance(TEXT, Packed)
