"""Tokenised text on disk: made once, mapped by every rank and worker of the machine.

A corpus is `<key>.tokens` (raw little-endian tokens) and `<key>.json`, which is written last and says how many there
are. The key is of the files' paths, sizes and times of change, the field, and the tokenizer's digest. No file is ever
seen half written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from diloco.errors import DeadlineExceeded, InputError
from island.config_data import DataConfig
from island.data import sources
from island.data.packing import InMemory, Mapped, Part, Tokens
from island.data.tokenizers import Tokenizer

log = logging.getLogger("diloco.island")
VERSION = 1
"""Of the files; other versions are made anew."""
BATCH_CHARACTERS = 2**20
"""Text that is tokenised at once."""
POLL_S = 0.2


def tokenised(data: DataConfig, tokenizer: Tokenizer) -> Part:
    """The tokens of a source of text: from the cache, or made and put there; in memory where there is no cache.

    Raises:
        InputError: the text, or the folder of the cache, cannot be used.
        DeadlineExceeded: another process was at it for longer than `data.prepare_timeout_s`.
    """
    if not data.cache_dir:
        return InMemory(np.concatenate(list(_pieces(data, tokenizer))))
    folder, key = Path(data.cache_dir), _key(data, tokenizer)
    file = folder / f"{key}.tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{key}.lock", data.prepare_timeout_s):
            if not _whole(file, tokenizer):
                log.info("tokenising into %s", file)
                _write(file, _pieces(data, tokenizer), tokenizer)
    except OSError as error:
        raise InputError(
            f"cannot use the folder {folder} ({error.strerror}): name another in data.cache_dir"
        ) from error
    return Mapped(file, tokenizer.dtype)


def _pieces(data: DataConfig, tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yields the tokens of all documents, with the separator between them."""
    first = True
    for batch in _batches(sources.documents(data)):
        for tokens in tokenizer.encode(batch):
            if not first:
                yield tokenizer.separator
            first = False
            yield tokens


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _key(data: DataConfig, tokenizer: Tokenizer) -> str:
    separator = tokenizer.separator.tolist()
    about = [
        VERSION,
        sources.source(data),
        data.field,
        sources.describe(sources.files(data)),
        tokenizer.digest,
        separator,
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _whole(file: Path, tokenizer: Tokenizer) -> bool:
    """Whether the cache has all tokens; what is damaged or was cut off is made anew."""
    try:
        about = json.loads(file.with_suffix(".json").read_bytes())
        return bool(
            about == {"version": VERSION, "dtype": tokenizer.dtype, "tokens": about["tokens"]}
            and file.stat().st_size == about["tokens"] * np.dtype(tokenizer.dtype).itemsize
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def _write(file: Path, pieces: Iterator[Tokens], tokenizer: Tokenizer) -> None:
    dtype, count = np.dtype(tokenizer.dtype).newbyteorder("<"), 0

    def fill(path: Path) -> None:
        nonlocal count
        with path.open("wb") as out:
            for piece in pieces:
                out.write(piece.astype(dtype, copy=False).data)
                count += len(piece)
            out.flush()
            os.fsync(out.fileno())

    about = file.with_suffix(".json")
    about.unlink(missing_ok=True)
    _whole_or_not(file, fill)
    text = json.dumps({"version": VERSION, "dtype": tokenizer.dtype, "tokens": count})
    _whole_or_not(about, lambda path: path.write_text(text, encoding="utf-8"))


def _whole_or_not(file: Path, fill: Callable[[Path], object]) -> None:
    """Lets `fill` write a file under another name, which then gets its own."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        fill(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _alone(lock: Path, timeout_s: float) -> Iterator[None]:
    """Keeps other processes from the same corpus, or waits for the one that is at it."""
    until = time.monotonic() + timeout_s
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"another process has been tokenising into {lock.with_suffix('.tokens')} for "
                        f"{timeout_s:.0f} s: raise data.prepare_timeout_s"
                    ) from None
            time.sleep(POLL_S)
        yield
