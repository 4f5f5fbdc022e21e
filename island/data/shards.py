"""Which of the run's shards an island reads first, and from where."""

from __future__ import annotations

from diloco.config_tokenizer import ShardsConfig
from diloco.errors import ConfigError
from diloco.shards import Place, assign
from island.config_data import DataConfig
from island.data.cursor import Cursor


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
    if shards.take_over_after_s and data.take_over:
        raise ConfigError(
            f"data.take_over is set, and in this run the coordinator says who takes over (shards.take_over_after_s "
            f"{shards.take_over_after_s:g}): take data.take_over out"
        )
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
