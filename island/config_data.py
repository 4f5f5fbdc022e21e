"""What an island reads, and on what the outer parameters are evaluated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from diloco.settings import NonNegative, Positive, Seconds, Settings
from diloco.shards import PLACE

SOURCES = ("text", "jsonl", "parquet", "tokens", "dataset")


class DataConfig(Settings):
    text: tuple[str, ...] = ()
    """Files or folders of text, a document each file. With no source at all: the sources of the Python standard
    library."""
    jsonl: tuple[str, ...] = ()
    """Files of JSON lines (`.jsonl`, `.jsonl.gz`) or folders of them, a document each line."""
    parquet: tuple[str, ...] = ()
    """Parquet files or folders of them, a document each row. Needs pyarrow (the extra `data`)."""
    tokens: tuple[str, ...] = ()
    """Files of tokens made with the run's tokenizer, or folders of them: `.npy` with one dimension of integers, or any
    other name with raw little-endian `tokens_dtype`. They are mapped into memory, not read."""
    tokens_dtype: Literal["uint16", "uint32"] = "uint16"
    """What raw token files are made of."""
    dataset: str = ""
    """Dataset that Hugging Face `datasets` streams: a name, or a builder such as `json` with `dataset_files`. Needs
    `datasets` (the extra `data`)."""
    dataset_name: str = ""
    """Configuration of the dataset, where it has several."""
    dataset_split: str = "train"
    """Split of the dataset."""
    dataset_files: tuple[str, ...] = ()
    """Files of the dataset, for a builder. Streams are divided by files where their number is a multiple of the
    shards', which is much the faster way, and else by documents."""
    field: str = "text"
    """Where a line, row or example has its text."""
    tokenizer: str = ""
    """Where this site keeps the run's tokenizer; empty: where `tokenizer.name` says."""
    shard: NonNegative = 0
    """Which of `shards` disjoint parts of the training text this island reads."""
    shards: Positive = 1
    """Number of parts; usually the number of islands. Where the run has `shards.count` it counts those instead."""
    take_over: tuple[Annotated[str, Field(pattern=PLACE)], ...] = ()
    """Shards that this island reads too, or from another place: SHARD, or SHARD@EPOCH:VISITS to go on behind so many
    sequences of an epoch. The records of an island and `docs/data.md` say how such places are found."""
    mask_documents: bool = False
    """Whether attention stays within a document, and positions begin anew with each: what a model learns of a text then
    does not depend on what was packed before it. Off, a sequence is one text, and attention takes the kernel that needs
    no mask, which is the fastest. It needs a tokenizer with an end token (`tokenizer.kind = "hf"`). Have it alike on
    all islands: they then train for the same loss."""
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Share of the text that no island trains on; the outer parameters are evaluated on it."""
    batch_sequences: Positive = 16
    """Sequences per inner step of the whole island; its ranks share them out evenly (`mesh`, `memory.accumulate`)."""
    cache_dir: str = ""
    """Folder of tokenised text, which ranks and workers map into memory and share, and which is made once; empty: each
    rank tokenises for itself and keeps its tokens in memory."""
    prepare_timeout_s: Seconds = 3600.0
    """How long a rank waits for another one that tokenises into `cache_dir`."""
    workers: NonNegative = 0
    """Processes per rank that read batches ahead; 0: the rank reads each batch when it needs it. The batches are the
    same."""
    prefetch_batches: Positive = 2
    """Batches that each worker reads ahead, at most."""
    timeout_s: Seconds = 300.0
    """How long the workers may take for a batch, their start included."""

    @model_validator(mode="after")
    def _fits(self) -> DataConfig:
        if self.shard >= self.shards:
            raise ValueError(
                f"data.shard ({self.shard}) must be below data.shards ({self.shards}): "
                f"set data.shard={self.shards - 1} or data.shards={self.shard + 1}"
            )
        sources = [f"data.{name}" for name in SOURCES if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are both a source, and an island has one: keep one of them")
        if self.dataset_files and not self.dataset:
            raise ValueError(
                "data.dataset_files needs a builder that reads them: set data.dataset='json', or 'text' or 'parquet'"
            )
        taken = [entry.partition("@")[0] for entry in self.take_over]
        if len(set(taken)) < len(taken):
            raise ValueError("data.take_over names a shard twice: keep the entry that is furthest on")
        return self


class EvalConfig(Settings):
    every_steps: NonNegative = 0
    """Inner steps between two evaluations of the outer parameters on the held-out text; 0: never."""
    sequences: Positive = 64
    """Held-out sequences per evaluation."""
