"""Streams: the same rows whatever the ranks and restarts, from the library's datasets too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import ModelConfig
from diloco.config_tokenizer import TokenizerConfig
from diloco.errors import InputError
from island.data import Cursor, Place, Stream, merge, open_data
from island.data.streams import Packer
from tests.island.data.support import T, reader, settings, stream, texts

KEPT = 4
"""One document in so many is held out."""


def text_of_rows(rows: list[np.ndarray[Any, Any]]) -> str:
    """The packed text, from sequences that overlap by one token."""
    return bytes([*(rows[0][:1]), *(token for row in rows for token in row[1:])]).decode()


def epoch(source: Stream, shard: int, shards: int, place: Place | None = None) -> list[tuple[Place, Any]]:
    """The rest of an epoch of a shard: the places and rows."""
    begin = place or Place(shard=shard)
    rows = source.read(begin, shards)
    out: list[tuple[Place, Any]] = []
    for at, row in rows:
        if at.epoch > begin.epoch:
            return out
        out.append((at, row))
    raise AssertionError("a stream never ends")


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=12), st.integers(0, 40))
def test_packing_goes_on_from_where_it_stands(documents: list[list[int]], resume: int) -> None:
    def rows(first: int, offset: int) -> list[tuple[tuple[int, int], list[int]]]:
        packer, out = Packer(3, first, offset), []
        for number, document in list(enumerate(documents))[first:]:
            packer.put(np.array(document), number)
            while (row := packer.take()) is not None:
                out.append((packer.stands, row.tolist()))
        return out

    straight, flat = rows(0, 0), [token for document in documents for token in document]
    assert [row for _, row in straight] == [flat[i : i + 4] for i in range(0, len(flat) - 3, 3)]
    for behind in straight[resume : resume + 1]:
        assert rows(*behind[0]) == straight[resume + 1 :]


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_every_document_is_trained_on_once_or_held_out(shards: int) -> None:
    source = stream()
    trained = "".join(text_of_rows([row for _, row in epoch(source, s, shards)]) + "\n\n" for s in range(shards))
    held_out = bytes(source.held_out(10**6)[0].flatten().tolist()).decode()
    documents = [text for file in texts(4) for text in file]
    once = Counter(part for part in trained.split("\n\n") if part)
    whole = {text for text in documents if once[text] == 1}
    kept = {text for text in documents if text in held_out.split("\n\n")}
    assert max(once.values()) == 1, "no document is trained on twice"
    assert not whole & kept
    assert len(documents) - len(whole) - len(kept) <= 2 * shards + 1, "all but the ends of shards are in either"
    assert 0.5 / KEPT < len(kept) / len(documents) < 2 / KEPT


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_place_is_resumed_to_the_bit(shards: int) -> None:
    source = stream()
    straight = epoch(source, shards - 1, shards)
    for index in range(0, len(straight) - 1, 7):
        place, _ = straight[index]
        counted = replace(place, documents=0, offset=0)
        for begin in (place, Place.parse(str(place)), counted):
            rest = epoch(source, shards - 1, shards, begin)
            assert [at for at, _ in rest] == [at for at, _ in straight[index + 1 :]]
            assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(rest, straight[index + 1 :], strict=True))


def test_the_next_epoch_is_the_same_again() -> None:
    first = epoch(stream(), 0, 3)
    following = list(islice(stream().read(Place(shard=0), 3), len(first), 2 * len(first)))
    assert [row.tolist() for _, row in following] == [row.tolist() for _, row in first]
    assert following[0][0] == replace(first[0][0], epoch=1)
    last, _ = first[-1]
    assert next(stream().read(last, 3))[0] == following[0][0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_batches_and_know_together_where_they_stand(ranks: int) -> None:
    begin = partial(reader, shards=4, batch_sequences=6)
    cursor = Cursor.at([0, 1, 3], 0)
    whole = begin(stream(), cursor)
    parts = [begin(stream(), cursor, rank=r, ranks=ranks) for r in range(ranks)]
    for _ in range(5):
        inputs, targets = whole.next()
        found = [part.next() for part in parts]
        for rank, (mine, next_ones) in enumerate(found):
            assert torch.equal(mine, inputs[rank::ranks])
            assert torch.equal(next_ones, targets[rank::ranks])
    assert merge([part.cursor for part in parts]) == whole.cursor
    again = begin(stream(), Cursor.from_json(whole.cursor.to_json()))
    for _ in range(5):
        assert torch.equal(again.next()[0], whole.next()[0])


def test_a_shard_without_a_sequence_is_told() -> None:
    source = stream()
    source.files = 1
    with pytest.raises(InputError, match=r"shard 79 of 80 of the dataset texts has no 5 tokens: have fewer shards"):
        for shard in (0, 79):
            next(source.read(Place(shard=shard), 80))
    source.sequence_length = 10**6
    with pytest.raises(InputError, match=r"the dataset texts has no 1000001 held-out tokens: raise data\.held_out"):
        source.held_out(3)


# -- the library --------------------------------------------------------------------------------------------------

Write = Callable[[Path, list[list[str]]], list[str]]


def json_files(folder: Path, files: list[list[str]]) -> list[str]:
    for number, file in enumerate(files):
        lines = "".join(json.dumps({"text": text, "more": number}) + "\n" for text in file)
        (folder / f"{number}.jsonl").write_text(lines)
    return [str(folder / f"{number}.jsonl") for number in range(len(files))]


def opened(folder: Path, files: list[list[str]], **values: Any) -> Stream:
    """The library's stream of some files."""
    pytest.importorskip("datasets", reason="Hugging Face datasets is not installed (the extra `data`)")
    data = settings(dataset="json", dataset_files=json_files(folder, files), **values)
    found = open_data(data, ModelConfig(sequence_length=T), TokenizerConfig())
    assert isinstance(found, Stream)
    return found


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_librarys_rows_are_those_of_its_texts(tmp_path: Path, shards: int) -> None:
    source = opened(tmp_path, texts(4))
    for shard in range(shards):
        found, expected = epoch(source, shard, shards), epoch(stream(), shard, shards)
        assert [(str(at), row.tolist()) for at, row in found] == [(str(at), row.tolist()) for at, row in expected]
        rest = epoch(source, shard, shards, found[9][0])
        assert [row.tolist() for _, row in rest] == [row.tolist() for _, row in found[10:]]
    assert torch.equal(source.held_out(9)[0], stream().held_out(9)[0])


def test_workers_read_the_librarys_files_as_one_process_does(tmp_path: Path) -> None:
    source = opened(tmp_path, texts(4))
    cursor = Cursor.at([0, 1, 3], 0)
    with (
        reader(source, cursor, shards=4, batch_sequences=6) as inline,
        reader(source, cursor, shards=4, batch_sequences=6, workers=2) as ahead,
    ):
        for _ in range(6):
            assert torch.equal(inline.next()[0], ahead.next()[0])
            assert inline.cursor == ahead.cursor


def test_datasets_that_cannot_be_read(tmp_path: Path) -> None:
    source = opened(tmp_path, texts(2))
    (tmp_path / "1.jsonl").write_text('{"text": "fine"}\n{"text": dam')
    with pytest.raises(InputError, match=r"the dataset json ends behind example \d+ \(.*mend it"):
        epoch(source, 0, 1)
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(InputError, match=r"cannot open the dataset json \(.*1\.jsonl.*data\.dataset_files"):
        epoch(source, 0, 1)
    other = opened(tmp_path, texts(2), field="txt")
    with pytest.raises(
        InputError, match=r"json: example 0 has no text in 'txt', but \['more', 'text'.*set data\.field"
    ):
        epoch(other, 0, 1)
    nowhere = opened(tmp_path, texts(1), dataset_split="nowhere")
    with pytest.raises(InputError, match=r"cannot open the dataset json \(.*data\.dataset_split"):
        nowhere.held_out(1)
