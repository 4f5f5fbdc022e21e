"""How a run's shards are divided among its islands, as the coordinator's state has it. Pure.

A shard is read by one island at a time. Islands that are absent for too long have their shards taken over by the
others, as `diloco.shards.assign` divides them; who comes back gets its own again. A shard moves

    from an island that holds no lease    at once. What it has read since its last contribution that counts will never
                                          count: its epoch is over.
    from one that trains                  once it has said that it reads it no more, and where it stood.

Whoever reads a shard next begins where the reading that counts has come to. So no sequence is trained on twice in an
epoch of its shard, as far as the training counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from diloco.config_tokenizer import ShardsConfig
from diloco.errors import InputError, Malformed
from diloco.shards import Place, assign

LONGEST = 100
"""Characters of a place."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Who reads which shard of a run whose shards are taken over; nobody any, in another run."""

    absent: tuple[str, ...] = ()
    """Islands whose shards are the others', in order."""
    reads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By island: the shards that it is to read."""
    owes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By island: the shards that it has yet to give up, for another one."""
    serials: Mapping[str, int] = field(default_factory=dict)
    """By island: a number that grows whenever what it is to read changes."""
    places: Mapping[int, str] = field(default_factory=dict)
    """By shard: where the reading that counts has come to."""

    def awaited(self, config: ShardsConfig, island: str) -> int:
        """How many shards an island gets once others have given them up; none where nobody takes over."""
        if not config.take_over_after_s:
            return 0
        due = _due(config, self.absent).get(island, ())
        return max(0, len(due) - len(self.reads.get(island, ())))

    def told(self, island: str) -> list[str]:
        """What an island is to read, each shard with the place where to begin."""
        return [self.places.get(shard, str(Place(shard=shard))) for shard in self.reads.get(island, ())]

    def news(self, places: Iterable[str]) -> tuple[str, ...]:
        """Those of some places that are further on than what is known."""
        found = map(Place.parse, places)
        return tuple(str(p) for p in found if p.order > Place.parse(self.places.get(p.shard, str(p.shard))).order)

    def at(self, places: Iterable[str]) -> Division:
        """The same, where reading that counts has come to some places."""
        fresh = {Place.parse(place).shard: place for place in self.news(places)}
        return replace(self, places={**self.places, **fresh}) if fresh else self

    def without(self, island: str, shards: Iterable[int]) -> Division:
        """The same, where an island has given up shards that it owed."""
        gone = set(shards)
        left = tuple(shard for shard in self.owes.get(island, ()) if shard not in gone)
        return replace(self, owes={**self.owes, island: left})


def checked(places: Iterable[str], config: ShardsConfig) -> tuple[str, ...]:
    """Places that an island has sent; none where the run has nobody take over.

    Raises:
        Malformed: one is no place in a shard of the run, or there are more than shards.
    """
    if not config.take_over_after_s:
        return ()
    found = tuple(places)
    if len(found) > config.count:
        raise Malformed(f"{len(found)} places were sent, and the run has {config.count} shards")
    for text in found:
        try:
            place = Place.parse(text[:LONGEST])
        except InputError as error:
            raise Malformed(error.message) from error
        if place.shard >= config.count or len(text) > LONGEST:
            raise Malformed(f"{text[:LONGEST]} is in none of the run's {config.count} shards, which are 0 to n - 1")
    return found


def first(config: ShardsConfig, serial: int) -> Division:
    """The division of a run that begins; serials begin at `serial`."""
    if not config.take_over_after_s:
        return Division()
    return Division(reads=_due(config, ()), serials=dict.fromkeys(config.weights, serial))


def divide(division: Division, config: ShardsConfig, present: Collection[str]) -> Division:
    """Moves the shards that can move, once islands have come, gone, or given shards up.

    Args:
        division: as it was, with `absent` as it is now.
        config: how the run divides its shards.
        present: islands that hold a lease.
    """
    if not config.take_over_after_s:
        return division
    due = _due(config, division.absent)
    target = {shard: island for island, shards in due.items() for shard in shards}
    holder = {
        shard: island for of in (division.reads, division.owes) for island, shards in of.items() for shard in shards
    }
    reads: dict[str, list[int]] = {island: [] for island in config.weights}
    owes: dict[str, list[int]] = {}
    for shard in range(config.count):
        held = holder.get(shard, "")
        wanted = target.get(shard, held)
        if held == wanted or held not in present:
            reads[wanted].append(shard)
        else:
            owes.setdefault(held, []).append(shard)
    changed = {i: tuple(shards) for i, shards in reads.items() if tuple(shards) != division.reads.get(i, ())}
    serials = {i: serial + (i in changed) for i, serial in division.serials.items()}
    return replace(
        division,
        reads={**division.reads, **changed},
        owes={i: tuple(shards) for i, shards in owes.items()},
        serials=serials,
    )


def _due(config: ShardsConfig, absent: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return _assigned(config.count, config.islands, absent)


@lru_cache(maxsize=64)
def _assigned(count: int, islands: tuple[str, ...], absent: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    weights = ShardsConfig(count=count, islands=islands).weights
    return assign(count, {name: weight for name, weight in weights.items() if name not in absent})
