"""The text: a corpus of bytes in training and held-out sequences, and batches that follow from the step.

The corpus is laid out in equal spans, each of k - 1 training sequences and then one held-out sequence, with
k = round(1 / held_out). A sequence is T + 1 bytes: T inputs and the targets one further. Training sequences
of a span overlap by one byte (the last target of one is the first input of the next). The held-out sequence
starts after all of them: a span is (k - 1) T + 1 bytes for training and T + 1 for evaluation, and no byte is
in both. What is left after the last whole span is not used.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diloco.errors import ConfigError, InputError

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]

VOCABULARY = 256
"""Tokens that the text is made of: the values of a byte."""

NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
"""Folders of the standard library that are left out: installed packages, tests and whole applications."""


def check_vocabulary(size: int) -> None:
    """Raises `ConfigError` where a model with a vocabulary of `size` tokens cannot read bytes."""
    if size < VOCABULARY:
        raise ConfigError(
            f"model.vocab_size ({size}) is below {VOCABULARY}, and text is read as bytes: "
            f"set model.vocab_size={VOCABULARY}"
        )


def to_text(tokens: Tensor) -> str:
    """Token ids [T] as text; what is not UTF-8, or no byte at all, shows as U+FFFD."""
    return bytes(min(token, 0xFF) for token in tokens.tolist()).decode(errors="replace")


def corpus(paths: Sequence[str]) -> bytes:
    """The text of files and folders, joined by an empty line.

    A folder stands for all UTF-8 files below it in the order of their names, without hidden and binary ones.
    No paths at all stand for the sources of this Python's standard library, about 11 MB.

    Raises:
        InputError: a path cannot be read, a named file is not UTF-8 text, or there is no text.
    """
    texts = [text for path in map(Path, paths) for text in _texts(path)] if paths else list(_library())
    if not any(texts):
        raise InputError(
            f"no text in {', '.join(paths) or 'the Python standard library'}: "
            "name files or folders of UTF-8 text in data.text"
        )
    return b"\n\n".join(texts)


def _texts(path: Path) -> Iterator[bytes]:
    """Yields the texts of a file or of every visible file below a folder."""
    if not path.is_dir():
        text = _read(path)
        if text is None:
            raise InputError(f"{path} is not UTF-8 text: name a text file or a folder in data.text")
        yield text
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if not hidden and file.is_file() and (text := _read(file)):
            yield text


def _library() -> Iterator[bytes]:
    """Yields the sources of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint(file.relative_to(root).parts) and (text := _read(file)):
            yield text


def _read(path: Path) -> bytes | None:
    """The bytes of a file, or None where they are not text. Raises `InputError` where it cannot be read."""
    try:
        text = path.read_bytes()
        text.decode()
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): correct data.text") from error
    return None if b"\0" in text else text


class ByteText:
    """Training and held-out sequences of one corpus; bytes are the tokens.

    Args:
        text: the corpus. It is not copied.
        sequence_length: T, tokens of a sequence.
        held_out: share of the sequences kept from training, above 0 and below 0.5; rounded to 1 / k.

    Raises:
        InputError: the text is shorter than one span.
    """

    def __init__(self, text: bytes, *, sequence_length: int, held_out: float) -> None:
        every = round(1 / held_out)
        self._length = sequence_length
        self._per_span = every - 1
        self._train_bytes = self._per_span * sequence_length + 1
        self._span = self._train_bytes + sequence_length + 1
        self._text: Bytes = np.frombuffer(text, dtype=np.uint8)
        spans = len(text) // self._span
        self.train_sequences = spans * self._per_span
        """Training sequences of all shards together."""
        self.held_out_sequences = spans
        """Held-out sequences."""
        self._require(1, "one training and one held-out sequence")

    def train_batch(
        self, step: int, shard: int, shards: int, batch: int, seed: int, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """The batch of one inner step, or some rows of it: a pure function of the arguments.

        Shard s owns the training sequences whose index is s modulo `shards`. In every epoch it visits each of
        them once, in an order drawn from (seed, shard, epoch). Row r of step n is its visit n * batch + r,
        counted over all epochs; so the step alone says where to go on, and ranks may share a batch anyhow.

        Args:
            step: inner step of the run, from 0.
            shard: this island's part of the training text, below `shards`.
            shards: parts of the training text.
            batch: sequences of the whole batch.
            seed: of the order.
            rows: which rows of the batch to return, such as `slice(rank, None, ranks)`.

        Returns:
            Inputs and targets, int64 [b, T] each; the targets are one byte further in the text.

        Raises:
            InputError: a shard has fewer sequences than a batch.
        """
        self.check_batches(shards, batch)
        size = len(range(shard, self.train_sequences, shards))
        epochs, places = np.divmod(step * batch + np.arange(batch)[rows], size)
        visited = np.empty_like(places)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            visited[now] = _order(size, seed, shard, int(epoch))[places[now]]
        span, place = np.divmod(shard + shards * visited, self._per_span)
        return self._sequences(span * self._span + place * self._length)

    def check_batches(self, shards: int, batch: int) -> None:
        """Raises `InputError` where one of `shards` has fewer sequences than a batch."""
        self._require(shards * batch, f"{shards} shard(s) of at least one batch of {batch} sequences")

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` held-out sequences, or all if there are fewer, evenly spread over the text.

        Returns:
            Inputs and targets, int64 [min(count, held_out_sequences), T] each.
        """
        count = min(count, self.held_out_sequences)
        span = np.arange(count) * self.held_out_sequences // count
        return self._sequences(span * self._span + self._train_bytes)

    def unigram_loss(self) -> float:
        """Cross-entropy, in nats per byte, of the held-out targets under the byte frequencies in training.

        The frequencies have add-one smoothing. A model that has learnt anything about order is below it.
        """
        spans = self._text[: self.held_out_sequences * self._span].reshape(-1, self._span)
        train = _counts(spans[:, : self._train_bytes]) + 1
        held_out = _counts(spans[:, self._train_bytes + 1 :])
        return float(-(held_out @ np.log(train / train.sum())) / held_out.sum())

    def _sequences(self, starts: Indices) -> tuple[Tensor, Tensor]:
        """The inputs and targets [b, T] of the sequences that start at the bytes `starts` [b]."""
        index = starts[:, None] + np.arange(self._length)
        inputs, targets = (self._text[at].astype(np.int64) for at in (index, index + 1))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _require(self, sequences: int, purpose: str) -> None:
        """Raises `InputError` unless there are so many training sequences."""
        if self.train_sequences < sequences:
            needed = -(-sequences // self._per_span) * self._span
            raise InputError(
                f"the text has {len(self._text)} bytes; {purpose} of {self._length + 1} bytes need {needed}: "
                "name more text in data.text, or lower data.shards, data.batch_sequences or "
                "model.sequence_length"
            )


@lru_cache(maxsize=4)
def _order(size: int, seed: int, shard: int, epoch: int) -> Indices:
    """The order [size] in which `shard` visits its sequences in `epoch`. Shared by all callers: read only."""
    order = np.random.default_rng((seed, shard, epoch)).permutation(size)
    order.flags.writeable = False
    return order


def _counts(rows: Bytes) -> Indices:
    """How often each byte occurs [256]; row by row, since a count widens what it reads to eight bytes."""
    counts = np.zeros(256, dtype=np.int64)
    for row in rows:
        counts += np.bincount(row, minlength=256)
    return counts
