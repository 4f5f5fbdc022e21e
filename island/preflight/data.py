"""What the island reads: whether its data, its tokenizer and its shards are there, as far as that is quick."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from diloco.config import RunConfig
from diloco.errors import ExitCode
from diloco.shards import Place
from island.config import IslandConfig
from island.config_data import DataConfig
from island.data import HuggingFace, Packed, check_shards, document_end, open_data
from island.data.shards import first_cursor
from island.data.sources import check, files, source
from island.data.tokenizers import load
from island.preflight.finding import Finding, fail, of_others, ok, warn

MOST_FILES = 20_000
"""Files of data that are looked at."""
WHOLE_BYTES = 16 * 2**20
"""Text of up to so many bytes is tokenised, to see that it is enough; files of tokens always are looked at whole."""
SHOWN = 5
"""Shards that are named."""


def tokenizer(data: DataConfig, run: RunConfig) -> Finding:
    """Whether the run's tokenizer is here, and the model knows its tokens.

    Raises:
        ConfigError: another tokenizer than the run's, one with more tokens than the model, or one without an end token
            where documents are to be masked.
        EnvironmentFault, InputError: it cannot be loaded.
    """
    if data.tokens:
        return ok("tokenizer", "not called for: data.tokens are tokens already")
    document_end(data, run.model, run.tokenizer)
    with of_others("the tokenizer"):
        using = load(run.tokenizer, run.model.vocab_size, data.tokenizer)
    found = f"{using.vocabulary:,} tokens, of {run.model.vocab_size:,} in model.vocab_size"
    if isinstance(using, HuggingFace):
        where = data.tokenizer or run.tokenizer.name
        return ok("tokenizer", f"{where}: {found}, {using.digest[:16]}, {using.end!r} between documents")
    return ok("tokenizer", f"bytes: {found}")


def data(island: IslandConfig, run: RunConfig | None, bound_s: float) -> Finding:
    """Whether the data can be read, and has the island's shards of the run.

    The first document is read, the first bytes of every file, and all of it where it is small or tokens. Of a dataset
    the first sequence of the first shard is read.

    Args:
        bound_s: how long files are looked at.

    Raises:
        InputError: a file is missing, or not what it should be; or there is too little for the shards and a batch.
        ConfigError: the run has no shards for this island.
        EnvironmentFault: a library is missing.
    """
    settings = island.data
    count, places = settings.shards, tuple[Place, ...]((Place(shard=settings.shard),))
    if run is not None:
        count, cursor = first_cursor(run.shards, settings, island.island.id, 0)
        places = cursor.places
    names = ", ".join(str(place.shard) for place in places[:SHOWN]) + (", ..." if len(places) > SHOWN else "")
    shards = f"shard{'s' * (len(places) > 1)} {names} of {count}"
    if settings.dataset:
        return _dataset(island, run, places[0], count, shards)
    check(settings)
    if source(settings) == "text" and not settings.text:
        return ok("data", f"none named: the sources of this Python; {shards}")
    paths = files(settings)
    looked, size, error = _first_bytes(paths, bound_s)
    if error is not None:
        advice = f"correct data.{source(settings)}, or let this user read it"
        return fail("data", f"cannot read {error.filename} ({error.strerror})", advice, ExitCode.USAGE)
    number = f"{looked:,} of {len(paths):,}" if looked < len(paths) else f"{looked:,}"
    found = f"{number} file{'s' * (len(paths) > 1)}, {size / 1e6:.1f} MB, can be read; {shards}"
    if run is None or settings.cache_dir or not (settings.tokens or size <= WHOLE_BYTES):
        return ok("data", found)
    whole = open_data(settings, run.model, run.tokenizer)
    check_shards(whole, run, island)
    if isinstance(whole, Packed):
        whole.train(np.arange(1))
        found += f"; {whole.train_sequences:,} training sequences in all"
    return ok("data", found)


def _first_bytes(paths: list[Path], bound_s: float) -> tuple[int, int, OSError | None]:
    """Reads the beginning of files; how many, their bytes in all, and what stopped it."""
    until, count, size = time.monotonic() + bound_s, 0, 0
    for path in paths[:MOST_FILES]:
        try:
            with path.open("rb") as file:
                file.read(4096)
                size += os.fstat(file.fileno()).st_size
        except OSError as error:
            return count, size, error
        count += 1
        if time.monotonic() > until:
            break
    return count, size, None


def _dataset(island: IslandConfig, run: RunConfig | None, place: Place, count: int, shards: str) -> Finding:
    """Whether a dataset can be streamed."""
    name = island.data.dataset
    check(island.data)
    if run is None:
        return warn("data", f"the dataset {name} was not opened", "say --run RUN.TOML to have it opened")
    with of_others(f"the dataset {name}"):
        opened = open_data(island.data, run.model, run.tokenizer)
        assert not isinstance(opened, Packed)
        next(opened.read(place, count))
    return ok("data", f"the dataset {name}: the first sequence of shard {place.shard} was read; {shards}")
