"""A cursor moves as counting rows one by one does, and comes back from what it says of itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import InputError
from island.data import Cursor, Place, merge

PLACES = st.builds(
    Place,
    shard=st.integers(0, 99),
    epoch=st.integers(0, 9),
    visits=st.integers(0, 50),
    documents=st.integers(0, 9),
    offset=st.integers(0, 9),
)


@st.composite
def cursors(draw: st.DrawFn) -> Cursor:
    """Cursors of one to six shards."""
    places = draw(st.lists(PLACES, min_size=1, max_size=6, unique_by=lambda place: place.shard))
    places.sort(key=lambda place: place.shard)
    return Cursor(places=tuple(places), turn=draw(st.integers(0, len(places) - 1)))


def sizes(cursor: Cursor) -> dict[int, int]:
    return {place.shard: 3 + place.shard % 4 for place in cursor.places}


def one_by_one(cursor: Cursor, rows: int) -> Cursor:
    """The cursor after some rows, each counted alone."""
    cursor = cursor.after(0, sizes(cursor))
    for _ in range(rows):
        place = cursor.places[cursor.turn]
        visits = place.visits + 1
        full = visits == sizes(cursor)[place.shard]
        place = replace(place, epoch=place.epoch + full, visits=0 if full else visits)
        places = (*cursor.places[: cursor.turn], place, *cursor.places[cursor.turn + 1 :])
        cursor = Cursor(places=places, turn=(cursor.turn + 1) % len(places))
    return cursor


@given(cursors(), st.integers(0, 40), st.integers(0, 40))
def test_rows_at_once_are_rows_one_by_one(cursor: Cursor, first: int, then: int) -> None:
    after = cursor.after(first, sizes(cursor))
    assert after == one_by_one(cursor, first)
    assert after.after(then, sizes(cursor)) == cursor.after(first + then, sizes(cursor))
    counts = [cursor.count(index, first) for index in range(len(cursor.places))]
    assert sum(counts) == first
    assert max(counts) - min(counts) <= 1


@given(st.sets(st.integers(0, 99), min_size=1, max_size=6), st.integers(0, 60))
def test_a_place_after_rows_from_the_beginning(shards: set[int], rows: int) -> None:
    known = sizes(Cursor.at(shards, 0))
    assert Cursor.at(shards, rows).after(0, known) == Cursor.at(shards, 0).after(rows, known)


@given(cursors())
def test_a_cursor_comes_back_from_json_and_from_settings(cursor: Cursor) -> None:
    assert Cursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor
    assert tuple(map(Place.parse, str(cursor).split())) == cursor.places


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"places": [], "turn": 0},
        {"places": ["1@0:0"], "turn": 1},
        {"places": ["1@0:0"], "turn": -1},
        {"places": ["1@0:0", "1@0:0"], "turn": 0},
        {"places": ["2@0:0", "1@0:0"], "turn": 0},
        {"places": ["1@0"], "turn": 0},
        {"places": [[1, 0, 0]], "turn": 0},
    ],
)
def test_what_is_no_cursor_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"is no (cursor|place)"):
        Cursor.from_json(value)


def test_shards_come_and_go() -> None:
    cursor = Cursor(places=(Place(shard=1, visits=5), Place(shard=4, visits=4)), turn=1)
    assert cursor.under([1, 4], []) is cursor
    assert cursor.under([4], []) == Cursor(places=(Place(shard=4, visits=4),))
    taken = Place(shard=2, epoch=3, visits=9)
    assert [str(p) for p in cursor.under([0, 1, 4], [taken]).places] == ["0@0:0", "1@0:5", "2@3:9", "4@0:4"]
    assert cursor.under([1, 4], [Place(shard=1)]) is cursor, "a shard that it has is taken over once only"


def test_the_furthest_of_all_ranks_is_the_islands() -> None:
    a = Cursor(places=(Place(shard=0, epoch=1, visits=2, offset=3), Place(shard=1, visits=1, offset=1)), turn=1)
    b = Cursor(places=(Place(shard=0, visits=9, offset=2), Place(shard=1, visits=4, offset=7)), turn=1)
    assert merge([a, b]) == merge([b, a]) == Cursor(places=(a.places[0], b.places[1]), turn=1)
