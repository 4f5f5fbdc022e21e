"""Which island reads which of the run's shards.

Weighted rendezvous hashing: every island casts as many lots for a shard as it has weight, and the highest lot has it.
So a shard goes to an island with a chance in proportion to its weight; when an island comes, shards move to it and
nowhere else; when one goes, only its own move. Lots are integers, so every machine finds the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from diloco.config_tokenizer import ShardsConfig
from diloco.errors import ConfigError
from island.config_data import DataConfig
from island.data.cursor import Cursor, Place


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


def first_cursor(
    shards: ShardsConfig, data: DataConfig, island_id: str, step: int, cursor: Cursor | None = None
) -> tuple[int, Cursor]:
    """What an island reads first that takes up the run at an inner step.

    With a cursor of its own it goes on there. Without, its own shards stand where `step` batches of them end. Shards
    that it takes over stand where its settings say, unless the cursor has them already.

    Returns:
        Shards of the run, and the cursor.

    Raises:
        ConfigError: the island has no shard, or one that there is not.
    """
    count, own = _own(shards, data, island_id)
    taken = [Place.parse(entry) for entry in data.take_over]
    beyond = [place.shard for place in taken if place.shard >= count]
    if beyond:
        raise ConfigError(f"data.take_over names shard {beyond[0]}, and there are {count}: they are 0 to {count - 1}")
    own = [shard for shard in own if shard not in {place.shard for place in taken}]
    if not own and not taken:
        raise ConfigError(
            f"island '{island_id}' has none of the run's {count} shards: name it in shards.islands, raise "
            "shards.count, or set data.take_over"
        )
    if not cursor:
        cursor = Cursor.at(own, step * data.batch_sequences) if own else Cursor(places=tuple(taken))
    return count, cursor.under(own, taken)


def _own(shards: ShardsConfig, data: DataConfig, island_id: str) -> tuple[int, list[int]]:
    """Shards in all, and those that the run or the island's settings give to it."""
    if not shards.count:
        return data.shards, [data.shard]
    if data.shards > 1:
        raise ConfigError(
            f"data.shards ({data.shards}) is set, and the run divides its data itself (shards.count {shards.count}): "
            "take data.shard and data.shards out, or set data.take_over"
        )
    return shards.count, list(assign(shards.count, shards.weights).get(island_id, ()))
