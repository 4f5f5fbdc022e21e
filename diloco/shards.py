"""The run's shards: who is to read which, and where in a shard somebody stands.

Weighted rendezvous hashing: every island casts as many lots for a shard as it has weight, and the highest lot has it.
So a shard goes to an island with a chance in proportion to its weight; when an island comes, shards move to it and
nowhere else; when one goes, only its own move. Lots are integers, so every machine finds the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from diloco.errors import InputError

PLACE = r"^[0-9]+(@[0-9]+:[0-9]+(:[0-9]+:[0-9]+)?)?$"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the reader of one shard stands."""

    shard: int
    epoch: int = 0
    """Times the shard has been read to its end."""
    visits: int = 0
    """Sequences of this epoch that have been read."""
    documents: int = 0
    """Streams: documents of this epoch that need not be read again. Zero, as is `offset`, where only `visits` is known,
    and the place is found by reading."""
    offset: int = 0
    """Streams: tokens of the next document that are behind."""

    @classmethod
    def parse(cls, text: str) -> Place:
        """`SHARD`, `SHARD@EPOCH:VISITS` or `SHARD@EPOCH:VISITS:DOCUMENTS:OFFSET`. Raises `InputError`."""
        if not re.fullmatch(PLACE, text):
            raise InputError(f"{text!r} is no place in a shard: write SHARD@EPOCH:VISITS, such as 3@0:1200")
        shard, _, rest = text.partition("@")
        numbers = [int(part) for part in rest.split(":")] if rest else []
        names = ("epoch", "visits", "documents", "offset")
        return cls(shard=int(shard), **dict(zip(names, numbers, strict=False)))

    def __str__(self) -> str:
        tail = f":{self.documents}:{self.offset}" if self.documents or self.offset else ""
        return f"{self.shard}@{self.epoch}:{self.visits}{tail}"

    @property
    def order(self) -> tuple[int, int]:
        """Of two places in a shard the larger one is further on."""
        return self.epoch, self.visits


def assign(count: int, weights: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Divides the shards 0 to `count` - 1 among islands.

    Args:
        count: shards.
        weights: island id -> weight, 1 or more.

    Returns:
        Island id -> its shards, in order. Disjoint; together all shards, where there is an island.
    """
    shards: dict[str, list[int]] = {name: [] for name in sorted(weights)}
    lots = [(name, f"{name}:{i}".encode()) for name in shards for i in range(weights[name])]
    for shard in range(count if lots else 0):
        _, owner = max((xxhash.xxh3_64_intdigest(lot, seed=shard), name) for name, lot in lots)
        shards[owner].append(shard)
    return {name: tuple(own) for name, own in shards.items()}
