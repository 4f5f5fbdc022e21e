"""Which codec each tensor of a run takes: one for all, or by kind (`auto`), and by name.

The papers leave norms and biases, which are few and matter, in bf16, and never code embeddings below 4 bits
(MuLoCo, arXiv 2505.23725; SparseLoCo, arXiv 2508.15706).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from diloco.codec import CODECS, Choice, Codec, by_name
from diloco.config import WireConfig
from diloco.errors import ConfigError
from diloco.layout import TensorSpec

AUTO, AUTO_ID = "auto", 64
EMBEDDINGS = ("*embed*", "*wte*", "*wpe*", "*lm_head*")
LEAST_EMBEDDING_BITS = 4.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Codecs by kind of tensor; a `Choice`. Its id stands for whatever the run's settings say."""

    id, version = AUTO_ID, 1
    name: str
    """As the settings say it."""
    matrices: Codec
    """Of tensors of two or more dimensions that are no embeddings."""
    embeddings: Codec
    """Of those whose name matches one of `EMBEDDINGS`."""
    vectors: Codec
    """Of tensors of one dimension or none (norms, biases), and buffers."""
    overrides: Mapping[str, Codec] = field(default_factory=dict)
    """By name pattern (fnmatch); the first that matches wins over all else."""

    @property
    def feedback(self) -> bool:
        """Whether some tensor may take a codec with error feedback."""
        return any(c.feedback for c in (self.matrices, self.embeddings, self.vectors, *self.overrides.values()))

    def of(self, spec: TensorSpec) -> Codec:
        """The codec of a tensor. Depends on its name, shape and kind alone, so that everybody chooses alike."""
        for pattern, codec in self.overrides.items():
            if fnmatchcase(spec.name, pattern):
                return codec
        if len(spec.shape) < 2 or spec.kind != "parameter":
            return self.vectors
        embeds = any(fnmatchcase(spec.name, pattern) for pattern in EMBEDDINGS)
        return self.embeddings if embeds else self.matrices


def bits(codec: Codec) -> float:
    """Bits a value of a large tensor takes."""
    return codec.size(2**20) * 8 / 2**20


def choice(name: str, overrides: tuple[str, ...] = ()) -> Choice:
    """What the settings of one way mean.

    Args:
        name: a codec's, for all tensors; "auto" or "auto:CODEC": that codec (int4) for matrices, at least 4 bits for
            embeddings, at least bf16 for norms, biases and buffers.
        overrides: "PATTERN=CODEC" by tensors' names, the first that matches.

    Raises:
        ConfigError: a codec or an override that there is not.
    """
    kind, _, main = name.partition(":")
    codec = by_name(main or "int4") if kind == AUTO else by_name(name)
    if kind != AUTO and not overrides:
        return codec
    named: dict[str, Codec] = {}
    for override in overrides:
        pattern, equals, other = override.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"'{override}' is not PATTERN=CODEC, for example '*router*=bf16'")
        named.setdefault(pattern, by_name(other))
    wide, fine = bits(codec) >= LEAST_EMBEDDING_BITS, bits(codec) >= bits(CODECS["bf16"])
    return Policy(
        name=name,
        matrices=codec,
        embeddings=codec if wide or kind != AUTO else CODECS["int4"],
        vectors=codec if fine or kind != AUTO else CODECS["bf16"],
        overrides=named,
    )


def up_choice(wire: WireConfig) -> Choice:
    """The codecs of a run's contributions."""
    return choice(wire.up, wire.up_overrides)


def down_choice(wire: WireConfig) -> Choice:
    """The codecs of a run's updates."""
    return choice(wire.down, wire.down_overrides)
