"""Tokens without documents: packed one after the other, cut into training and held-out sequences.

The tokens are laid out in equal spans, each of k - 1 training sequences and then one held-out sequence, with
k = round(1 / held_out). A sequence is T + 1 tokens: T inputs and the targets one further. Training sequences of a span
overlap by one token (the last target of one is the first input of the next). The held-out sequence starts after all of
them: a span is (k - 1) T + 1 tokens for training and T + 1 for evaluation, and no token is in both. What is left after
the last whole span of a file is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diloco.errors import InputError

Tokens = npt.NDArray[Any]
"""Integers [n] of any width."""
Indices = npt.NDArray[np.int64]


class Part(Protocol):
    """A run of tokens, in memory or in a file."""

    @property
    def tokens(self) -> Tokens:
        """The tokens [n]."""


@dataclass(frozen=True)
class InMemory:
    """Tokens in memory."""

    tokens: Tokens


@dataclass
class Mapped:
    """Tokens in a file, mapped when they are first asked for; in another process they are mapped anew."""

    path: Path
    dtype: str = ""
    """Of raw tokens, little-endian; empty: the file is a `.npy`."""
    _tokens: Tokens | None = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> Tokens:
        """The tokens [n]. Raises `InputError` where the file is not what it should be."""
        if self._tokens is None:
            try:
                self._tokens = self._raw() if self.dtype else _npy(self.path)
            except OSError as error:
                raise InputError(f"cannot read {self.path} ({error.strerror or error}): correct data.tokens") from error
            except ValueError as error:
                raise InputError(f"{self.path} is no file of tokens ({error}): make it again") from error
            if self._tokens.ndim != 1 or self._tokens.dtype.kind not in "ui":
                raise InputError(
                    f"{self.path} has {self._tokens.dtype} of shape {self._tokens.shape}; tokens are integers in one "
                    "dimension: save it as such"
                )
        return self._tokens

    def _raw(self) -> Tokens:
        dtype, size = np.dtype(self.dtype).newbyteorder("<"), self.path.stat().st_size
        if size % dtype.itemsize:
            raise ValueError(f"{size} bytes are no whole number of {self.dtype}")
        return np.memmap(self.path, dtype=dtype, mode="r") if size else np.empty(0, dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}


def _npy(path: Path) -> Tokens:
    tokens: Tokens = np.lib.format.open_memmap(path, mode="r")  # type: ignore[no-untyped-call]
    return tokens


class Packed:
    """Training and held-out sequences of packed tokens.

    Args:
        parts: runs of tokens; no sequence reaches from one into the next.
        sequence_length: T, tokens of a sequence.
        held_out: share of the sequences kept from training, above 0 and below 0.5; rounded to 1 / k.
        vocabulary: tokens there are.

    Raises:
        InputError: the tokens are fewer than one span, or a file of them is damaged.
    """

    def __init__(self, parts: Sequence[Part], *, sequence_length: int, held_out: float, vocabulary: int) -> None:
        self._parts, self._length, self._vocabulary = tuple(parts), sequence_length, vocabulary
        self._per_span = round(1 / held_out) - 1
        self._train_tokens = self._per_span * sequence_length + 1
        self._span = self._train_tokens + sequence_length + 1
        self._size = sum(len(part.tokens) for part in self._parts)
        self._ends: Indices = np.cumsum([len(part.tokens) // self._span for part in self._parts], dtype=np.int64)
        spans = int(self._ends[-1]) if self._parts else 0
        self.train_sequences = spans * self._per_span
        """Training sequences of all shards together."""
        self.held_out_sequences = spans
        """Held-out sequences."""
        self._require(1, "one training and one held-out sequence")

    def check(self, shards: Sequence[int], count: int, batch: int) -> None:
        """Raises `InputError` where a shard of `count` has no sequence, or `shards` together fewer than a batch."""
        needed = -(-batch // len(shards)) * count
        whose = "of" if len(shards) == 1 else f"where {len(shards)} have"
        self._require(needed, f"{count} shard(s) {whose} at least one batch of {batch} sequences")

    def train(self, sequences: Indices) -> tuple[Tensor, Tensor]:
        """Training sequences by their numbers [b], below `train_sequences`.

        Returns:
            Inputs and targets, int64 [b, T] each; the targets are one token further.

        Raises:
            InputError: a token is beyond the vocabulary.
        """
        span, place = np.divmod(sequences, self._per_span)
        return self._rows(span, place * self._length)

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` held-out sequences, or all if there are fewer, evenly spread over the tokens.

        Returns:
            Inputs and targets, int64 [min(count, held_out_sequences), T] each.
        """
        count = min(count, self.held_out_sequences)
        span = np.arange(count) * self.held_out_sequences // count
        return self._rows(span, np.full(count, self._train_tokens))

    def unigram_loss(self) -> float:
        """Cross-entropy, in nats per token, of the held-out targets under the token frequencies in training.

        The frequencies have add-one smoothing. A model that has learnt anything about order is below it.
        """
        train, held_out = np.ones(self._vocabulary, np.int64), np.zeros(self._vocabulary, np.int64)
        for part in self._parts:
            whole = len(part.tokens) // self._span * self._span
            for row in part.tokens[:whole].reshape(-1, self._span):
                train += np.bincount(row[: self._train_tokens], minlength=self._vocabulary)
                held_out += np.bincount(row[self._train_tokens + 1 :], minlength=self._vocabulary)
        return float(-(held_out @ np.log(train / train.sum())) / held_out.sum())

    def _rows(self, spans: Indices, places: Indices) -> tuple[Tensor, Tensor]:
        """Inputs and targets [b, T] of the sequences that start at the tokens `places` [b] of the spans [b]."""
        which = np.searchsorted(self._ends, spans, side="right")
        first = np.concatenate(([0], self._ends))[which]
        rows = np.empty((len(spans), self._length + 1), np.int64)
        for row, part, start in zip(rows, which, (spans - first) * self._span + places, strict=True):
            row[:] = self._parts[part].tokens[start : start + self._length + 1]
        if rows.size and not 0 <= rows.min() <= rows.max() < self._vocabulary:
            worst = rows.max() if rows.min() >= 0 else rows.min()
            raise InputError(
                f"the data has token {worst}, and the model's vocabulary {self._vocabulary} (model.vocab_size): "
                "make the tokens with the run's tokenizer, or correct data.tokens_dtype"
            )
        return split(torch.from_numpy(rows))

    def _require(self, sequences: int, purpose: str) -> None:
        """Raises `InputError` unless there are so many training sequences."""
        if self.train_sequences < sequences:
            needed = -(-sequences // self._per_span) * self._span
            raise InputError(
                f"the text has {self._size} tokens; {purpose} of {self._length + 1} tokens need {needed}: "
                "name more text in [data], or lower data.shards, data.batch_sequences or model.sequence_length"
            )


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of T + 1 tokens [b, T + 1] as inputs and targets [b, T]."""
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
