"""Small data for the tests of this room."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from island.config_data import DataConfig
from island.data import Batches, Bytes, Cursor, Packed, Stream
from island.data.packing import InMemory

T = 4
SPAN = 3 * T + 1 + T + 1
"""Tokens of a span where a quarter is held out: three training sequences, then one held out."""


def numbered(spans: int, tail: int = 0) -> Packed:
    """Tokens in which every number occurs once, so that a token tells where it is from."""
    tokens = np.arange(spans * SPAN + tail, dtype=np.uint32)
    return Packed([InMemory(tokens)], sequence_length=T, held_out=0.25, vocabulary=len(tokens))


def starts(batch: tuple[Tensor, Tensor]) -> list[int]:
    """Where in numbered tokens each sequence of a batch begins."""
    inputs, targets = batch
    assert inputs.shape == targets.shape == (len(inputs), T)
    assert (inputs + 1).equal(targets)
    return [int(token) for token in inputs[:, 0]]


def settings(**values: Any) -> DataConfig:
    """Settings with small batches."""
    return DataConfig.model_validate({"batch_sequences": 4, "held_out": 0.25, **values})


def reader(
    source: Packed | Stream, cursor: Cursor, *, shards: int = 1, rank: int = 0, ranks: int = 1, **values: Any
) -> Batches:
    """Batches from a cursor on, with seed 7."""
    return Batches(source, cursor, shards=shards, seed=7, data=settings(**values), rank=rank, ranks=ranks)


class Texts:
    """A dataset as the library has them, of texts in files."""

    def __init__(self, files: Sequence[Sequence[str]], skipped: int = 0) -> None:
        self._files, self._skipped = files, skipped
        self.num_shards = len(files)

    def shard(self, num_shards: int, index: int, contiguous: bool) -> Texts:
        """Every so-manyth file."""
        assert not contiguous
        return Texts(self._files[index::num_shards])

    def skip(self, count: int) -> Texts:
        """Without the first examples."""
        return Texts(self._files, self._skipped + count)

    def iter(self, batch_size: int) -> Iterator[dict[str, list[str]]]:
        """Examples, so many at once."""
        texts = [text for file in self._files for text in file][self._skipped :]
        for first in range(0, len(texts), batch_size):
            yield {"text": texts[first : first + batch_size]}


class Streamed(Stream):
    """A stream of the texts that `texts` makes, without the library."""

    files = 4

    def _load(self) -> Texts:
        return Texts(texts(self.files))


def texts(files: int) -> list[list[str]]:
    """Files of documents of different lengths; no two stretches of them are the same."""
    return [
        [" ".join(f"{file}.{number}.{word}" for word in range(1 + (7 * number + file) % 5)) for number in range(40)]
        for file in range(files)
    ]


def stream(**values: Any) -> Streamed:
    """A stream of bytes with sequences of four."""
    return Streamed(data=settings(dataset="texts", **values), tokenizer=Bytes(), sequence_length=T)


class Endless:
    """A file that never ends, and whose bytes take Python to make."""

    closed, reads = False, 0

    def read(self, size: int) -> bytes:
        """Some bytes; from the third time on none ever come."""
        self.reads += 1
        while self.reads > 2:
            AT_WORK.set()
        return b"a\n" * 500


AT_WORK, READING = threading.Event(), list[Any]()
"""Set once a thread is inside of `Endless.read` for good; what would wait for that thread, kept."""


def read_ahead() -> None:
    """Has a thread of pyarrow, which is in C++, read ahead in Python for as long as the process lives."""
    import pyarrow.csv

    READING.append(pyarrow.csv.open_csv(Endless(), read_options=pyarrow.csv.ReadOptions(block_size=1000)))
    assert AT_WORK.wait(60)


class ReadAhead(Streamed):
    """A stream whose library goes on reading ahead."""

    def _load(self) -> Texts:
        read_ahead()
        return super()._load()


class FailsAtTheEnd(Streamed):
    """A stream whose worker is killed by what it does last."""

    def _load(self) -> Texts:
        atexit.register(os.abort)
        return super()._load()
