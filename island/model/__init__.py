"""The model of a run: our decoder, its first values, its cost, and how it is read by others.

decoder   the model, in one sitting      init      first values by name and seed
sources   the run's model, whatever it is   sampling  text continued
llama     names and config for transformers flops     what a token costs
"""

from island.model.decoder import Decoder, loss
from island.model.flops import flops_per_token
from island.model.init import first_value
from island.model.llama import llama_name, our_name, to_llama
from island.model.sampling import generate
from island.model.sources import blocks, build_meta, fill

__all__ = [
    "Decoder",
    "blocks",
    "build_meta",
    "fill",
    "first_value",
    "flops_per_token",
    "generate",
    "llama_name",
    "loss",
    "our_name",
    "to_llama",
]
