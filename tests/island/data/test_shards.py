"""Who reads what: every shard once, by weight, and few move."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diloco.config_tokenizer import ShardsConfig
from diloco.errors import ConfigError
from island.config_data import DataConfig
from island.data import Cursor, Place, assign
from island.data.shards import first_cursor

NAMES = st.text("abcdef", min_size=1, max_size=3)
MEMBERS = st.dictionaries(NAMES, st.integers(1, 9), min_size=1, max_size=6)
COUNTS = st.integers(1, 96)


def owners(count: int, weights: dict[str, int]) -> dict[int, str]:
    return {shard: name for name, shards in assign(count, weights).items() for shard in shards}


@given(COUNTS, MEMBERS)
def test_every_shard_has_one_island(count: int, weights: dict[str, int]) -> None:
    divided = assign(count, weights)
    assert sorted(divided) == sorted(weights)
    assert sorted(shard for shards in divided.values() for shard in shards) == list(range(count))
    assert assign(count, dict(reversed(weights.items()))) == divided


@given(COUNTS, MEMBERS, NAMES, st.integers(1, 9))
def test_only_shards_of_who_comes_or_goes_move(count: int, weights: dict[str, int], name: str, weight: int) -> None:
    assume(name not in weights)
    without, having = owners(count, weights), owners(count, {**weights, name: weight})
    assert all(having[shard] in (name, owner) for shard, owner in without.items())


@given(COUNTS, MEMBERS, st.integers(1, 9))
def test_a_larger_weight_only_brings_shards(count: int, weights: dict[str, int], more: int) -> None:
    name = min(weights)
    before, after = owners(count, weights), owners(count, {**weights, name: weights[name] + more})
    assert all(after[shard] in (name, owner) for shard, owner in before.items())


def test_shards_are_in_proportion_to_the_weights() -> None:
    divided = assign(4000, {"large": 5, "middle": 2, "small": 1})
    assert {name: round(len(shards) / 500, 1) for name, shards in divided.items()} == pytest.approx(
        {"large": 5, "middle": 2, "small": 1}, rel=0.1
    )


def test_every_machine_divides_alike() -> None:
    assert assign(12, {"oslo": 1, "tokyo": 2}) == GOLDEN


GOLDEN = {"oslo": (2, 4, 6, 7, 9, 10), "tokyo": (0, 1, 3, 5, 8, 11)}


def test_nobody_is_there() -> None:
    assert assign(5, {}) == {}


def run(count: int = 12, *islands: str) -> ShardsConfig:
    return ShardsConfig(count=count, islands=islands or ("oslo", "tokyo:2"))


def test_an_island_begins_where_its_step_says() -> None:
    data = DataConfig(shard=1, shards=3, batch_sequences=4)
    assert first_cursor(ShardsConfig(), data, "any", 5) == (3, Cursor(places=(Place(shard=1, visits=20),)))
    count, cursor = first_cursor(run(), DataConfig(batch_sequences=4), "oslo", 5)
    assert count == 12
    assert cursor == Cursor.at(GOLDEN["oslo"], 20)


def test_an_island_takes_over() -> None:
    [first, *rest] = GOLDEN["tokyo"]
    data = DataConfig(take_over=(f"{first}@1:7",))
    count, cursor = first_cursor(run(), data, "oslo", 0)
    assert {p.shard for p in cursor.places} == {*GOLDEN["oslo"], first}
    assert Place(shard=first, epoch=1, visits=7) in cursor.places
    assert first_cursor(run(), data, "stranger", 9) == (12, Cursor(places=(Place(shard=first, epoch=1, visits=7),)))
    further = cursor.after(100, dict.fromkeys(range(12), 50))
    assert first_cursor(run(), data, "oslo", 3, further) == (count, further), "its own cursor is newer"
    assert rest


@pytest.mark.parametrize(
    ("shards", "data", "says"),
    [
        (run(), {}, r"'stranger' has none of the run's 12 shards: name it in shards\.islands"),
        (run(), {"shard": 1, "shards": 2}, r"data\.shards \(2\) is set, and the run divides .*shards\.count 12"),
        (run(), {"take_over": ("12",)}, r"data\.take_over names shard 12, and there are 12: they are 0 to 11"),
        (ShardsConfig(), {"take_over": ("1@0:5",)}, r"data\.take_over names shard 1, and there are 1"),
    ],
)
def test_shards_that_there_are_not(shards: ShardsConfig, data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        first_cursor(shards, DataConfig.model_validate(data), "stranger", 0)
