"""Batches for one rank, read ahead by workers or when they are needed; the cursor counts what was given out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from diloco.errors import ConfigError, DeadlineExceeded, DilocoError, EnvironmentFault
from diloco.shards import Place
from island.config_data import DataConfig
from island.data.cursor import Cursor, merge
from island.data.packing import Indices, Packed, split
from island.data.streams import Stream, StreamRows
from island.group import Group
from island.ties import Workers

log = logging.getLogger("diloco.island")
Batch = tuple[Tensor, Tensor]
_ENDED = "DataLoader worker (pid"
"""In what torch raises, in whatever the main thread does, where a worker has failed or was killed."""


class Batches:
    """The batches of one rank from a cursor on; a context manager, which ends the workers.

    Args:
        source: the data.
        cursor: where to begin.
        shards: shards of the run, of which the cursor names some.
        seed: of the order of packed sequences.
        data: the batch, workers, how far they read ahead and how long they may take.
        rank: which share of every batch: its rows `rank`, `rank + ranks`, ...
        ranks: shares.
        pin: whether batches are made in pinned memory, for copies to a GPU.

    Raises:
        ConfigError: the batch cannot be shared by so many ranks.
        InputError: the shards have too little data.
    """

    def __init__(
        self,
        source: Packed | Stream,
        cursor: Cursor,
        *,
        shards: int,
        seed: int,
        data: DataConfig,
        rank: int = 0,
        ranks: int = 1,
        pin: bool = False,
    ) -> None:
        if data.batch_sequences % ranks:
            raise ConfigError(
                f"data.batch_sequences ({data.batch_sequences}) must be a multiple of the {ranks} ranks that share a "
                f"batch: set data.batch_sequences={data.batch_sequences + ranks - data.batch_sequences % ranks}"
            )
        self._source, self._shards, self._seed, self._data = source, shards, seed, data
        self._rank, self._ranks, self._pin = rank, ranks, pin
        self._batches: Iterator[Batch] | None = None
        self._items: Iterator[Any] | None = None
        self.turn_to(cursor)

    def turn_to(self, cursor: Cursor) -> None:
        """Goes on from another cursor; what workers have read ahead is forgotten.

        Raises:
            InputError: its shards have too little data.
        """
        self.close()
        batch = self._data.batch_sequences
        rows: PackedRows | StreamedRows
        if isinstance(self._source, Packed):
            rows = PackedRows(self._source, cursor, self._shards, self._seed, batch, self._rank, self._ranks)
        else:
            rows = StreamedRows(self._source, cursor, self._shards, batch, self._rank, self._ranks)
        self._rows: PackedRows | StreamedRows = rows
        self._items = iter(self._loader(rows))
        self._batches = rows.batches(self._items)

    def _loader(self, rows: PackedRows | StreamedRows) -> DataLoader[Any]:
        workers = self._data.workers
        ahead = max(1, math.ceil(self._data.prefetch_batches * rows.items_per_batch / max(1, workers)))
        return DataLoader(
            rows.dataset,
            batch_size=None,
            sampler=rows.sampler,
            num_workers=workers,
            prefetch_factor=ahead if workers else None,
            timeout=self._data.timeout_s if workers else 0,
            multiprocessing_context=Workers() if workers else None,
            generator=torch.Generator(),  # the loader draws from it, and leaves torch's own alone
            pin_memory=self._pin,
        )

    def next(self) -> Batch:
        """This rank's rows of the next batch.

        Returns:
            Inputs and targets, int64 [b, T] each; the targets are one token further.

        Raises:
            InputError: the data is not what it should be.
            DeadlineExceeded: the workers took longer than `data.timeout_s`.
            EnvironmentFault: a worker was killed, as for want of memory.
        """
        if self._batches is None:
            raise RuntimeError("these batches are closed")
        try:
            return next(self._batches)
        except RuntimeError as error:
            if "timed out" in str(error):
                raise DeadlineExceeded(
                    f"the data's {self._data.workers} worker(s) gave no batch in {self._data.timeout_s:.0f} s: raise "
                    "data.timeout_s or data.workers, or have data.cache_dir on a faster disk"
                ) from error
            if _ENDED in str(error):
                raise EnvironmentFault(
                    f"a worker of the data has ended ({str(error).splitlines()[0]}): have fewer data.workers, or more "
                    "memory or /dev/shm"
                ) from error
            raise

    @property
    def cursor(self) -> Cursor:
        """Where this rank stands behind the batches it was given: of packed data, the island; of a stream, as far as
        its own rows tell (`together` has all of it)."""
        return self._rows.cursor

    def together(self, group: Group) -> Cursor:
        """Where the island stands, from what all its ranks know. Collective, at the same batch."""
        if isinstance(self._rows, PackedRows):
            return self.cursor
        return merge([Cursor.from_json(cursor) for cursor in group.gather(self.cursor.to_json())])

    def close(self) -> None:
        """Ends the workers and forgets what they have read ahead.

        They end once they have made the row that they are at; one that takes longer than 5 s is killed.
        """
        self._batches = None
        items, self._items = self._items, None
        if isinstance(items, _MultiProcessingDataLoaderIter):
            try:
                items._shutdown_workers()  # else they end with the last reference, which a traceback may hold
            except RuntimeError as error:
                if _ENDED not in str(error):
                    raise
            if codes := [worker.exitcode for worker in items._workers if worker.exitcode]:
                log.warning("workers of the data did not end well: exit codes %s", codes)

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PackedRows:
    """Rows of packed data: which sequences make a batch is found here, and their tokens by workers.

    Shard s has the sequences whose number is s modulo the shards. In every epoch it visits each of them once, in an
    order drawn from (seed, shard, epoch).
    """

    items_per_batch = 1

    def __init__(
        self, source: Packed, cursor: Cursor, shards: int, seed: int, batch: int, rank: int, ranks: int
    ) -> None:
        own = [place.shard for place in cursor.places]
        source.check(own, shards, batch)
        self._sizes = {shard: len(range(shard, source.train_sequences, shards)) for shard in own}
        self._start, self._given = cursor.after(0, self._sizes), 0
        self._shards, self._seed, self._batch, self._rank, self._ranks = shards, seed, batch, rank, ranks
        self._orders: dict[int, tuple[int, Indices]] = {}
        self.dataset: Dataset[Any] = _Sequences(source)
        self.sampler = self._plan()

    @property
    def cursor(self) -> Cursor:
        """Behind the batches that were given out."""
        return self._start.after(self._given * self._batch, self._sizes)

    def batches(self, items: Iterator[Batch | DilocoError]) -> Iterator[Batch]:
        """Yields what a loader gives, and counts it."""
        for item in items:
            if isinstance(item, DilocoError):
                raise item
            self._given += 1
            yield item[0], item[1]

    def _plan(self) -> Iterator[Indices]:
        """Yields the sequences [b] of this rank's rows, batch by batch, for ever."""
        cursor, mine = self._start, np.arange(self._rank, self._batch, self._ranks)
        while True:
            which = (cursor.turn + mine) % len(cursor.places)
            sequences = np.empty_like(mine)
            for index in np.unique(which):
                rows = which == index
                before = [cursor.count(int(index), int(row)) for row in mine[rows]]
                sequences[rows] = self._visited(cursor.places[index], np.array(before))
            yield sequences
            cursor = cursor.after(self._batch, self._sizes)

    def _visited(self, place: Place, before: Indices) -> Indices:
        """The sequences that a shard visits so many visits after a place."""
        epochs, visits = np.divmod(place.visits + before, self._sizes[place.shard])
        visited = np.empty_like(visits)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            visited[now] = self._order(place.shard, place.epoch + int(epoch))[visits[now]]
        return place.shard + self._shards * visited

    def _order(self, shard: int, epoch: int) -> Indices:
        """The order [n] in which a shard visits its sequences in an epoch; the last one of each shard is kept."""
        if self._orders.get(shard, (-1, None))[0] != epoch:
            order = np.random.default_rng((self._seed, shard, epoch)).permutation(self._sizes[shard])
            self._orders[shard] = epoch, order
        return self._orders[shard][1]


class _Sequences(Dataset[Batch | DilocoError]):
    """Tokens of sequences; what is wrong with them is given back, since a worker's exception loses its class."""

    def __init__(self, source: Packed) -> None:
        self._source = source

    def __getitem__(self, sequences: Indices) -> Batch | DilocoError:
        try:
            return self._source.train(sequences)
        except DilocoError as error:
            return error


class StreamedRows:
    """Rows of a stream: workers read, tokenise and pack; each row says where its shard stands behind it."""

    sampler = None

    def __init__(self, source: Stream, cursor: Cursor, shards: int, batch: int, rank: int, ranks: int) -> None:
        self.dataset: Dataset[Any] = StreamRows(source, cursor, shards, rank, ranks)
        self.items_per_batch = batch // ranks
        self._places, self._turn, self._batch = list(cursor.places), cursor.turn, batch

    @property
    def cursor(self) -> Cursor:
        """Behind the batches that were given out."""
        return Cursor(places=tuple(self._places), turn=self._turn)

    def batches(self, items: Iterator[Any]) -> Iterator[Batch]:
        """Yields batches of the rows that a loader gives, and notes where they end."""
        while True:
            rows = []
            for _ in range(self.items_per_batch):
                item = next(items)
                if isinstance(item, DilocoError):
                    raise item
                which, place, row = item
                self._places[which] = Place.parse(place)
                rows.append(row)
            self._turn = (self._turn + self._batch) % len(self._places)
            yield split(torch.stack(rows))
