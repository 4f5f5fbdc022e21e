"""Where an island stands in its data: a small value, from which everything that it reads next follows.

An island reads its shards in turn, a row each: row n from now is of place (turn + n) modulo their number, and the
sequence that the shard visits next. So the rows that follow a cursor are a function of the cursor alone, whatever the
batch, the number of ranks and the number of workers; and a shard that is taken over is read on from its own place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.errors import InputError
from diloco.shards import Place


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where an island stands in its shards."""

    places: tuple[Place, ...]
    """One per shard, at least one, in the order of their numbers."""
    turn: int = 0
    """Which of `places` the next row is of."""

    @classmethod
    def at(cls, shards: Iterable[int], rows: int) -> Cursor:
        """Where an island stands that has read so many rows of these shards from their beginning."""
        order = sorted(shards)
        each, turn = divmod(rows, len(order))
        return cls(places=tuple(Place(shard=s, visits=each + (i < turn)) for i, s in enumerate(order)), turn=turn)

    def count(self, place: int, rows: int) -> int:
        """How many of the next `rows` rows are of a place."""
        shards = len(self.places)
        return max(0, -(-(rows - (place - self.turn) % shards) // shards))

    def after(self, rows: int, sizes: Mapping[int, int]) -> Cursor:
        """Where the island stands so many rows later, with the sequences of every shard known."""
        moved = []
        for index, place in enumerate(self.places):
            epochs, visits = divmod(place.visits + self.count(index, rows), sizes[place.shard])
            moved.append(replace(place, epoch=place.epoch + epochs, visits=visits))
        return Cursor(places=tuple(moved), turn=(self.turn + rows) % len(moved))

    def under(self, shards: Iterable[int], taken: Iterable[Place]) -> Cursor:
        """The same cursor for an island whose shards have changed.

        A shard that it has keeps its place, one that it takes over begins where `taken` says, another one at its
        beginning; what it has no longer goes.
        """
        known = {place.shard: place for place in (*taken, *self.places)}
        order = sorted({*shards, *(place.shard for place in taken)})
        places = tuple(known.get(shard, Place(shard=shard)) for shard in order)
        return self if places == self.places else Cursor(places=places)

    def holding(self, shards: Iterable[Place]) -> Cursor:
        """The same cursor for an island that holds these shards from now on: each is read on from where anybody who is
        known of has come, this cursor or the place that is named."""
        own = {place.shard: place for place in self.places}
        held = sorted(shards, key=lambda place: place.shard)
        places = tuple(max(own.get(place.shard, place), place, key=lambda p: p.order) for place in held)
        return self if places == self.places else Cursor(places=places)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that says all of it."""
        return {"places": [str(place) for place in self.places], "turn": self.turn}

    @classmethod
    def from_json(cls, value: Any) -> Cursor:
        """What `to_json` gave. Raises `InputError` where it is something else."""
        match value:
            case {"places": [_, *_] as places, "turn": int(turn)} if 0 <= turn < len(places):
                cursor = cls(places=tuple(Place.parse(str(place)) for place in places), turn=turn)
                shards = [place.shard for place in cursor.places]
                if shards == sorted(set(shards)):
                    return cursor
        raise InputError(f"{value!r} is no cursor: the checkpoint is damaged, or of another version")

    def __str__(self) -> str:
        return " ".join(map(str, self.places))


def merge(cursors: Sequence[Cursor]) -> Cursor:
    """The cursor of an island from those of all its ranks at the same step.

    A rank that reads a stream knows the places of its own rows; the furthest one of each shard is the island's.
    """
    first = cursors[0]
    columns = zip(*(cursor.places for cursor in cursors), strict=True)
    places = tuple(max(column, key=lambda place: place.order) for column in columns)
    return Cursor(places=places, turn=first.turn)
