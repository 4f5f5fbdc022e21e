"""Which codec suits which tensor: what `auto` means.

The papers leave norms and biases, which are few and matter, in bf16, and never code embeddings below 4 bits
(MuLoCo, arXiv 2505.23725; SparseLoCo, arXiv 2508.15706).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch

from diloco.codec import CODECS, Codec
from diloco.errors import ConfigError
from diloco.layout import TensorSpec

EMBEDDINGS = ("*embed*", "*wte*", "*wpe*", "*lm_head*")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Codecs by kind of tensor. All are names of `CODECS`."""

    matrices: str = "int4"
    """Tensors of two or more dimensions that are no embeddings."""
    embeddings: str = "int4"
    """Those whose name matches one of `embedding_names`; 4 bits at least."""
    vectors: str = "bf16"
    """Tensors of one dimension or none (norms, biases), and buffers."""
    embedding_names: tuple[str, ...] = EMBEDDINGS
    """Name patterns (fnmatch) of embeddings and output projections."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Codec by name pattern (fnmatch); the first that matches wins over all else."""

    def __post_init__(self) -> None:
        for name in (self.matrices, self.embeddings, self.vectors, *self.overrides.values()):
            if name not in CODECS:
                raise ConfigError(f"unknown codec '{name}'; known: {', '.join(CODECS)}")
        if bits(CODECS[self.embeddings]) < 4:
            raise ConfigError(
                f"embeddings in '{self.embeddings}' would have {bits(CODECS[self.embeddings]):.2g} bits a value, and "
                "lose rare tokens below 4: set embeddings to 'int4', or override it for a name that is meant"
            )


def bits(codec: Codec) -> float:
    """Bits a value of a large tensor takes."""
    return codec.size(2**20) * 8 / 2**20


def choose(policy: Policy, spec: TensorSpec) -> Codec:
    """The codec of a tensor. Depends on its name, shape and kind alone, so that everybody chooses alike."""
    for pattern, name in policy.overrides.items():
        if fnmatch(spec.name, pattern):
            return CODECS[name]
    if len(spec.shape) < 2 or spec.kind != "parameter":
        return CODECS[policy.vectors]
    embeds = any(fnmatch(spec.name, pattern) for pattern in policy.embedding_names)
    return CODECS[policy.embeddings if embeds else policy.matrices]
