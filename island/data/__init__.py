"""The data: from files or a stream, through a tokenizer, packed and divided into shards, to the batches of a rank.

Which rows an island reads is a function of the settings, the seed and a `Cursor`; see `cursor` for how it moves,
`packing` for what a sequence is, and `shards` for who reads what.
"""

from diloco.shards import Place, assign
from island.data.corpus import check_shards, document_end, open_batches, open_data, packed_text
from island.data.cursor import Cursor, merge
from island.data.loader import Batches
from island.data.packing import Packed
from island.data.streams import Stream
from island.data.tokenizers import Bytes, HuggingFace, Tokenizer, check_vocabulary, named

__all__ = [
    "Batches",
    "Bytes",
    "Cursor",
    "HuggingFace",
    "Packed",
    "Place",
    "Stream",
    "Tokenizer",
    "assign",
    "check_shards",
    "check_vocabulary",
    "document_end",
    "merge",
    "named",
    "open_batches",
    "open_data",
    "packed_text",
]
