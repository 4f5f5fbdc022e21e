"""The model of a run: our decoder or any other, its first values, what it costs, and how others read it.

decoder   the model, with moe for its experts       init      first values by name and seed
sources   the run's model, whatever makes it        sampling  a text continued
llama     our decoder as transformers reads it      flops     what a token costs, and MFU
"""

from island.model.decoder import Decoder, loss
from island.model.flops import flops_per_token, mfu, peak_flops
from island.model.init import first_value
from island.model.llama import exported, exported_config, imported
from island.model.moe import rebalance
from island.model.sampling import generate
from island.model.sources import allocate, blocks, build_meta, fill

__all__ = [
    "Decoder",
    "allocate",
    "blocks",
    "build_meta",
    "exported",
    "exported_config",
    "fill",
    "first_value",
    "flops_per_token",
    "generate",
    "imported",
    "loss",
    "mfu",
    "peak_flops",
    "rebalance",
]
