"""A run's data as an island has it, from the settings of both."""

from __future__ import annotations

from diloco.config import ModelConfig, RunConfig
from diloco.config_tokenizer import TokenizerConfig
from diloco.errors import ConfigError
from island.config import IslandConfig
from island.config_data import DataConfig
from island.data.cache import tokenised
from island.data.cursor import Cursor
from island.data.loader import Batches
from island.data.packing import Packed, Part
from island.data.shards import first_cursor
from island.data.sources import mapped
from island.data.streams import Stream
from island.data.tokenizers import Tokenizer, load


def open_data(data: DataConfig, model: ModelConfig, tokenizer: TokenizerConfig) -> Packed | Stream:
    """The training and held-out sequences of an island.

    Raises:
        ConfigError: the tokenizer is not the run's, or its tokens are more than the model's.
        InputError: the data is missing, damaged or too little.
        EnvironmentFault: a library is missing.
        DeadlineExceeded: another process tokenised the same for too long.
    """
    parts: list[Part]
    if data.tokens:
        parts, vocabulary = list(mapped(data)), model.vocab_size
    else:
        using = load(tokenizer, model.vocab_size, data.tokenizer)
        if data.dataset:
            return Stream(data=data, tokenizer=using, sequence_length=model.sequence_length)
        parts, vocabulary = [tokenised(data, using)], using.vocabulary
    return Packed(parts, sequence_length=model.sequence_length, held_out=data.held_out, vocabulary=vocabulary)


def document_end(data: DataConfig, model: ModelConfig, tokenizer: TokenizerConfig) -> int | None:
    """The token that ends a document, where an island's attention is to stay within documents; else None.

    Raises:
        ConfigError: the tokenizer has no such token, or the model cannot do it.
        InputError, EnvironmentFault: the tokenizer cannot be loaded.
    """
    if not data.mask_documents:
        return None
    if not model.ours:
        raise ConfigError(
            f"data.mask_documents gives a model a mask of documents, and model.source is {model.source!r}, of which it "
            "is not known how it takes one: set data.mask_documents=false or model.source=decoder"
        )
    if tokenizer.kind == "bytes":
        raise ConfigError(
            "data.mask_documents finds documents by their end token, and tokenizer.kind 'bytes' has an empty line, "
            "which documents have within them too: set data.mask_documents=false or tokenizer.kind=hf"
        )
    return int(load(tokenizer, model.vocab_size, data.tokenizer).separator[-1])


def check_shards(source: Packed | Stream, run: RunConfig, island: IslandConfig) -> None:
    """Finds out early whether an island has shards, and a batch in them.

    Raises:
        ConfigError, InputError: there are no shards for it, or too little data in them.
    """
    shards, cursor = first_cursor(run.shards, island.data, island.island.id, 0)
    if isinstance(source, Packed):
        source.check([place.shard for place in cursor.places], shards, island.data.batch_sequences)


def open_batches(
    source: Packed | Stream,
    run: RunConfig,
    island: IslandConfig,
    *,
    step: int = 0,
    cursor: Cursor | None = None,
    rank: int = 0,
    ranks: int = 1,
    pin: bool = False,
    held: bool = False,
) -> Batches:
    """The batches of one rank of an island.

    Args:
        source: from `open_data`.
        step: inner step of the run at which the island begins, where it has no cursor.
        cursor: where it goes on, from its checkpoint; shards that its settings give and take since are added and left.
        rank: which share of every batch.
        ranks: shares.
        pin: for copies to a GPU.
        held: the cursor has just the shards that the coordinator has the island read.

    Raises:
        ConfigError, InputError: there are no shards for it, or too little data in them.
    """
    shards, first = first_cursor(run.shards, island.data, island.island.id, step, cursor)
    if held and cursor:
        first = cursor
    return Batches(source, first, shards=shards, seed=run.run.seed, data=island.data, rank=rank, ranks=ranks, pin=pin)


def packed_text(paths: tuple[str, ...], model: ModelConfig, tokenizer: Tokenizer) -> Packed:
    """Text files or folders, with the share of held-out text that is usual.

    Raises:
        InputError: the text is missing or too little.
    """
    data = DataConfig(text=paths)
    return Packed(
        [tokenised(data, tokenizer)],
        sequence_length=model.sequence_length,
        held_out=data.held_out,
        vocabulary=tokenizer.vocabulary,
    )
