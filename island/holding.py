"""Which shards this island reads where the coordinator has islands take over from each other. All collective.

The coordinator tells rank 0's heart what the island is to read, under a serial that grows with every change. At a step
edge all ranks turn to it together; where the island then stood in what it gives up goes out with the heartbeats, and
only once that has come may another island read on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from diloco.config import RunConfig
from diloco.shards import Place
from island.data import Batches, Cursor
from island.group import Group
from island.session import Session

log = logging.getLogger("diloco.island")


class Holding:
    """The shards that an island holds.

    Args:
        site: the island's place in the run.
        run: its settings.
        group: the island's ranks.
    """

    def __init__(self, site: Session, run: RunConfig, group: Group) -> None:
        self._site, self._group = site, group
        self.on = bool(run.shards.take_over_after_s) and site.island_id in run.shards.weights
        """Whether the coordinator says what this island reads."""
        self._epoch = site.epoch
        self._given_up: dict[int, Place] = {}  # where it stood when it last read a shard that it reads no more
        if site.keeping.exact:
            kept = site.kept("holding") or {}
            site.serial = kept.get("serial", 0)
            self._given_up = {place.shard: place for place in map(Place.parse, kept.get("given_up", ()))}
            self._obey([*self._given_up.values()])

    def first(self, cursor: Cursor | None) -> Cursor | None:
        """Where the island begins to read: at its checkpoint where it goes on exactly, else where the coordinator says,
        or further on where its own `cursor` is. None where the coordinator does not say it."""
        if not self.on or self._site.keeping.exact:
            return cursor
        self._site.serial, held = self._told()
        self._obey([])
        if not held:
            return cursor  # it has been sent away
        return (cursor or Cursor(places=tuple(held))).holding(held)

    def heard(self) -> int:
        """The serial of what the island is to read, where rank 0 has heard of a new one; else 0."""
        heart = self._site.heart
        if not self.on or heart is None:
            return 0
        if heart.told[0] == self._site.serial:
            heart.obey(self._site.serial)
            return 0
        return heart.told[0]

    def turn(self, batches: Batches) -> None:
        """Has batches go on with what the island is to read now."""
        before = batches.together(self._group)
        serial, held = self._told()
        if not held:
            return
        if self._epoch != self._site.epoch:  # what was read and not contributed counts for nothing any more
            self._epoch, self._given_up = self._site.epoch, {}
        else:
            self._given_up |= {place.shard: place for place in before.places}
        known = [max(self._given_up.get(p.shard, p), p, key=lambda place: place.order) for p in held]
        batches.turn_to(before.holding(known))
        for place in held:
            self._given_up.pop(place.shard, None)
        self._site.serial = serial
        self._obey([*self._given_up.values()])
        if self._group.rank == 0:
            log.info("now reading %d shards, after %d", len(held), len(before.places))

    def places(self, batches: Batches) -> Sequence[str]:
        """Where the island stands in what it reads and stood in what it gave up, for a contribution."""
        if not self.on:
            return []
        return [str(place) for place in (*self._given_up.values(), *batches.together(self._group).places)]

    def to_json(self) -> Any:
        """What a checkpoint keeps of it."""
        return {"serial": self._site.serial, "given_up": [str(place) for place in self._given_up.values()]}

    def _told(self) -> tuple[int, list[Place]]:
        def answer() -> bytes:
            heart = self._site.heart
            return json.dumps(heart.told if heart else (0, ())).encode()

        serial, shards = json.loads(self._group.from_first(answer))
        return serial, [Place.parse(shard) for shard in shards]

    def _obey(self, given_up: list[Place]) -> None:
        if self._site.heart:
            self._site.heart.obey(self._site.serial, [str(place) for place in given_up])
