"""Hugging Face datasets as streams: documents are read, tokenised and packed as they are needed.

A document is held out for evaluation if a hash of its text says so, so that nobody trains on it wherever it stands. The
others of a shard are packed one after the other: a sequence is T + 1 tokens, and the next one begins with its last.
What is left at the end of an epoch is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from diloco.errors import DilocoError, EnvironmentFault, InputError
from diloco.shards import Place
from island.config_data import DataConfig
from island.data.cursor import Cursor
from island.data.packing import Tokens, split
from island.data.sources import text_of
from island.data.tokenizers import Tokenizer

READ = 32
"""Examples that are taken from the library and tokenised at once."""
Row = tuple[int, str, Tensor]
"""Number of a place, where it stands behind the row, and the row's tokens int64 [T + 1]."""


def library() -> Any:
    """The library `datasets`. Raises `EnvironmentFault` where it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFault("data.dataset needs datasets: pip install 'diloco[data]'") from error
    return datasets


@dataclass(kw_only=True)
class Stream:
    """Training and held-out sequences of a streamed dataset."""

    data: DataConfig
    tokenizer: Tokenizer
    sequence_length: int
    """T, tokens of a sequence."""
    _held_out: tuple[int, tuple[Tensor, Tensor]] | None = field(default=None, repr=False)

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` held-out sequences of the dataset, or all if there are fewer; read once.

        Returns:
            Inputs and targets, int64 [b, T] each.

        Raises:
            InputError: there is none.
        """
        if self._held_out and self._held_out[0] == count:
            return self._held_out[1]
        packer, rows = Packer(self.sequence_length), list[Tokens]()
        for _, tokens in self._documents(self._load(), 0, held_out=True):
            packer.put(tokens)
            while len(rows) < count and (row := packer.take()) is not None:
                rows.append(row)
            if len(rows) == count:
                break
        if not rows:
            raise InputError(
                f"the dataset {self.data.dataset} has no {self.sequence_length + 1} held-out tokens: raise "
                "data.held_out, or lower model.sequence_length"
            )
        self._held_out = count, split(torch.from_numpy(np.stack(rows).astype(np.int64)))
        return self._held_out[1]

    def read(self, place: Place, shards: int) -> Iterator[tuple[Place, Tokens]]:
        """Yields the sequences [T + 1] of one shard from a place on, for ever, each with the place behind it.

        Raises:
            InputError: the dataset cannot be read, or the shard has no sequence.
        """
        known = bool(place.documents or place.offset)
        at = place if known else replace(place, visits=0)
        skip = 0 if known else place.visits
        while True:
            packer = Packer(self.sequence_length, documents=at.documents, offset=at.offset)
            for number, tokens in self._shard(at.shard, shards, at.documents):
                packer.put(tokens, number)
                while (row := packer.take()) is not None:
                    documents, offset = packer.stands
                    at = replace(at, visits=at.visits + 1, documents=documents, offset=offset)
                    if skip:
                        skip -= 1
                    else:
                        yield at, row
            if not at.visits:
                raise InputError(
                    f"shard {at.shard} of {shards} of the dataset {self.data.dataset} has no "
                    f"{self.sequence_length + 1} tokens: have fewer shards, or lower model.sequence_length"
                )
            at = Place(shard=at.shard, epoch=at.epoch + 1)

    def _load(self) -> Any:
        """The dataset, nothing of it read yet."""
        data, datasets = self.data, library()
        try:
            return datasets.load_dataset(
                data.dataset,
                data.dataset_name or None,
                split=data.dataset_split,
                data_files=list(data.dataset_files) or None,
                streaming=True,
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"cannot open the dataset {data.dataset} ({reason}): correct data.dataset, data.dataset_name, "
                "data.dataset_split and data.dataset_files"
            ) from error

    def _shard(self, shard: int, shards: int, skip: int) -> Iterator[tuple[int, Tokens]]:
        """Yields (number, tokens) of the documents of a shard, from the number `skip` on.

        Shards are files where their number allows; else a document is of the shard that is its number modulo theirs.
        """
        dataset = self._load()
        if shards == 1 or dataset.num_shards % shards == 0:
            whole = dataset if shards == 1 else dataset.shard(num_shards=shards, index=shard, contiguous=False)
            yield from self._documents(whole, skip, held_out=False)
        else:
            yield from self._documents(dataset, skip, held_out=False, every=shards, which=shard)

    def _documents(
        self, dataset: Any, skip: int, *, held_out: bool, every: int = 1, which: int = 0
    ) -> Iterator[tuple[int, Tokens]]:
        """Yields (number, tokens with the separator) of documents, from the number `skip` on."""
        kept = round(1 / self.data.held_out)
        examples = dataset.skip(skip) if skip else dataset
        number = skip
        try:
            for batch in examples.iter(batch_size=READ):
                texts = []
                for text in self._texts(batch, number):
                    mine = number % every == which
                    if mine and text and (xxhash.xxh3_64_intdigest(text.encode()) % kept == 0) == held_out:
                        texts.append((number, text))
                    number += 1
                encoded = self.tokenizer.encode([text for _, text in texts])
                for (at, _), tokens in zip(texts, encoded, strict=True):
                    yield at, np.concatenate((tokens, self.tokenizer.separator))
        except (OSError, ValueError) as error:  # the library's own, and pyarrow's, are such
            raise InputError(
                f"the dataset {self.data.dataset} ends behind example {number} ({error}): mend it, or name other "
                "data.dataset_files"
            ) from error

    def _texts(self, batch: Mapping[str, list[Any]], number: int) -> Iterator[str]:
        column = batch.get(self.data.field)
        for index in range(len(next(iter(batch.values()), []))):
            example = {**dict.fromkeys(batch), self.data.field: column[index]} if column else dict.fromkeys(batch)
            yield text_of(example, self.data.field, f"{self.data.dataset}: example {number + index}")


class Packer:
    """Puts documents one after the other and takes sequences of T + 1 tokens, each from the last of the one before.

    Args:
        length: T.
        documents: number of the first document that will be put.
        offset: its tokens that are behind.
    """

    def __init__(self, length: int, documents: int = 0, offset: int = 0) -> None:
        self._length, self._waiting = length, list[tuple[int, Tokens]]()
        self._first, self._offset, self._size = documents, offset, -offset

    def put(self, tokens: Tokens, number: int = 0) -> None:
        """Adds a document."""
        self._waiting.append((number, tokens))
        self._size += len(tokens)

    def take(self) -> Tokens | None:
        """The next sequence [T + 1]; None before enough documents are here."""
        if self._size < self._length + 1:
            return None
        pieces, at, missing = list[Tokens](), self._offset, self._length + 1
        for _, tokens in self._waiting:
            pieces.append(tokens[at : at + missing])
            at, missing = 0, missing - len(pieces[-1])
            if not missing:
                break
        self._offset += self._length
        self._size -= self._length
        while self._offset >= len(self._waiting[0][1]):
            self._offset -= len(self._waiting.pop(0)[1])
        self._first = self._waiting[0][0]
        return np.concatenate(pieces)

    @property
    def stands(self) -> tuple[int, int]:
        """Number of the document in which the next sequence begins, and its tokens that are behind."""
        return self._first, self._offset


class StreamRows(IterableDataset[Row | DilocoError]):
    """The rows of one rank, one after the other, for ever; a worker of a loader yields its share of them.

    Rows go to ranks, and a rank's rows to its workers, in turn. Whoever yields a row of a shard reads what is before it
    in the shard, and no other shards; so where a rank's workers divide the shards evenly nothing is read twice.
    """

    def __init__(self, stream: Stream, cursor: Cursor, shards: int, rank: int, ranks: int) -> None:
        self._stream, self._cursor, self._shards, self._rank, self._ranks = stream, cursor, shards, rank, ranks

    def __iter__(self) -> Iterator[Row | DilocoError]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        try:
            yield from self._rows(self._rank + self._ranks * worker, self._ranks * workers)
        except DilocoError as error:
            yield error

    def _rows(self, first: int, step: int) -> Iterator[Row]:
        """Yields the rows first, first + step, ... from the cursor on."""
        places = self._cursor.places
        readers = [self._stream.read(place, self._shards) for place in places]
        taken = [0] * len(places)
        number = first
        while True:
            which = (self._cursor.turn + number) % len(places)
            wanted = self._cursor.count(which, number + 1)
            while taken[which] < wanted:
                place, row = next(readers[which])
                taken[which] += 1
            yield which, str(place), torch.from_numpy(row.astype(np.int64))
            number += step
