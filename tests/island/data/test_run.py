"""Whole runs: one whose island reads ahead with workers, and one without, end with the same bits."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import ExitCode
from island.data import assign
from tests.island.data.test_tokenizers import settings, train
from tests.processes import Hand, wait_until

STEPS, BATCH, SHARDS = 12, 4, 8
WORKERS = {"two": ("data.workers=2", "data.prefetch_batches=3"), "none": ()}
WEIGHTS = {"a": 1, "b": 2}


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hand]:
    """Two runs beside each other, of one island of one rank and one of two, from JSON lines by a tokenizer."""
    hands = {}
    with ExitStack() as stack:
        for name, overrides in WORKERS.items():
            folder = tmp_path_factory.mktemp(name)
            agreed = settings(train(folder / "tokenizer.json"))
            hand = Hand(folder, stack, steps=STEPS, run=_run(agreed.name, agreed.digest))
            hand.coordinator()
            lines = (json.dumps({"body": f"{i} foxes jump over {i * i} lazy dogs"}) + "\n" for i in range(900))
            (folder / "text.jsonl").write_text("".join(lines))
            source = ("data.text=[]", f"data.jsonl=['{folder}/text.jsonl']", "data.field=body")
            cache = (f"data.cache_dir='{folder}/cache'", f"data.batch_sequences={BATCH}", "data.mask_documents=true")
            records = ("eval.every_steps=6", "metrics.every_steps=4")
            hand.island("a", *source, *cache, *records, *overrides)
            hand.island("b", *source, *cache, *records, "mesh.ranks=2")
            hands[name] = hand
        for hand in hands.values():
            for island in hand.islands.values():
                assert island.wait() == ExitCode.OK, island.output
    return hands


def _run(name: str, digest: str) -> str:
    islands = [f"{island}:{weight}" for island, weight in WEIGHTS.items()]
    return f"""
vocab_size = 300
[tokenizer]
kind = "hf"
name = "{name}"
digest = "{digest}"
[shards]
count = {SHARDS}
islands = {json.dumps(islands)}
[sync]
every_steps = 4
[rounds]
start_islands = 2
quorum = 2
grace_s = 300.0
lease_s = 300.0
"""


def last(hand: Hand, island: str, kind: str) -> dict[str, Any]:
    return hand.records(island, kind)[-1]


@pytest.mark.slow
def test_workers_change_no_bit_of_a_run(hands: dict[str, Hand]) -> None:
    digests = {last(hand, island, "end")["digests"] for hand in hands.values() for island in WEIGHTS}
    assert len(digests) == 1
    for island in WEIGHTS:
        losses = [[row["loss"] for row in hand.records(island, "train")] for hand in hands.values()]
        assert losses[0] == losses[1]
        held_out = [[row["outer_loss"] for row in hand.records(island, "eval")] for hand in hands.values()]
        assert len(held_out[0]) == 2
        assert held_out[0] == held_out[1]


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.slow
def test_an_island_has_read_its_shards_and_says_where_it_stands(hands: dict[str, Hand], name: str) -> None:
    for island, shards in assign(SHARDS, WEIGHTS).items():
        record = last(hands[name], island, "data")
        visits = {int(s): int(v) for s, _, v in (p.partition("@0:") for p in record["places"].split())}
        assert tuple(visits) == shards
        assert sum(visits.values()) == record["step"] * BATCH == STEPS * BATCH
        assert max(visits.values()) - min(visits.values()) <= 1


@pytest.mark.slow
def test_the_text_was_tokenised_once(hands: dict[str, Hand]) -> None:
    for hand in hands.values():
        assert [file.suffix for file in sorted(Path(hand.folder, "cache").iterdir())] == [".json", ".lock", ".tokens"]


@pytest.mark.slow
def test_an_island_that_is_killed_is_read_on_and_gets_its_shards_back(tmp_path: Path) -> None:
    agreed = """
[shards]
count = 8
islands = ["a", "b:2"]
take_over_after_s = 0.5
[sync]
every_steps = 4
[rounds]
start_islands = 2
quorum = 1
grace_s = 0.0
lease_s = 2.0
"""
    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=1_000_000, run=agreed)
        hand.coordinator()
        local = ("data.batch_sequences=8", "metrics.every_steps=2")

        def read(island: str) -> set[int]:
            """The shards of an island's last record."""
            rows = hand.records(island, "data") if Path(hand.folder, "metrics", f"{island}.jsonl").exists() else []
            return {int(place.partition("@")[0]) for place in rows[-1]["places"].split()} if rows else set()

        def own(island: str) -> set[int]:
            return set(assign(SHARDS, WEIGHTS)[island])

        hand.island("a", *local, "mesh.ranks=2")
        hand.island("b", *local)
        wait_until(lambda: read("a") == own("a") and read("b") == own("b"), "both read their own")
        hand.islands["b"].kill()
        wait_until(lambda: read("a") == set(range(SHARDS)), "a has taken over")
        before = len(hand.records("b", "data"))
        hand.island("b", *local)
        wait_until(lambda: len(hand.records("b", "data")) > before, "b is back")
        assert read("b") == own("b")
        wait_until(lambda: read("a") == own("a"), "a has given back")
        for island in hand.islands.values():
            island.signal(signal.SIGTERM)
        for island in hand.islands.values():
            assert island.wait() == ExitCode.OK, island.output
    assert "are taken over: its lease has been over for 0.5 s" in (tmp_path / "coordinator.log").read_text()
