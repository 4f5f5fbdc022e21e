"""What islands must agree on about their text: how it becomes tokens, and how the run's data is divided."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from diloco.settings import Settings

WEIGHTED = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(:[1-9][0-9]{0,2})?$"


class TokenizerConfig(Settings):
    kind: Literal["bytes", "hf"] = "bytes"
    """`bytes`: a token is a byte, 256 in all. `hf`: a tokenizer of the library `tokenizers`."""
    name: str = ""
    """With `hf`: a tokenizer.json, a folder that has one, or a name that `transformers` knows. An island that keeps it
    elsewhere says so in `data.tokenizer`."""
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """With `hf`: SHA-256 (hex) of what the tokenizer does, which `diloco tokenizer` prints. An island with another one
    is refused, because the same number would mean another token there."""
    end: str = ""
    """With `hf`: the token between two documents, such as `<|endoftext|>`; empty takes the first of the usual ones that
    the vocabulary has. Bytes have an empty line between documents."""

    @model_validator(mode="after")
    def _fits(self) -> TokenizerConfig:
        set_here = [f"tokenizer.{key}" for key in ("name", "digest", "end") if getattr(self, key)]
        if self.kind == "bytes" and set_here:
            raise ValueError(
                f"{' and '.join(set_here)} mean nothing with tokenizer.kind='bytes': set tokenizer.kind='hf', "
                "or take them out"
            )
        if self.kind == "hf" and not (self.name and self.digest):
            raise ValueError(
                "tokenizer.kind='hf' needs tokenizer.name and tokenizer.digest, so that islands cannot differ: "
                "`diloco tokenizer NAME` prints both"
            )
        return self


class ShardsConfig(Settings):
    count: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Virtual shards into which the run's data is divided; 0: each island says with `data.shard` and `data.shards` what
    it reads. More of them share it out more exactly: 100 an island are within some 10 % of the weights."""
    islands: tuple[Annotated[str, Field(pattern=WEIGHTED)], ...] = ()
    """Islands among which the shards are divided, each as NAME or NAME:WEIGHT with a weight of 1 to 999. Who is not
    named reads what its `data.take_over` names."""
    take_over_after_s: Annotated[float, Field(ge=0)] = 0.0
    """An island whose lease has been over for so long has its shards taken over by the other islands that are named,
    as if it were not in the list, until it comes back (`docs/data.md`); so has one that has not come so long after the
    run's start, and at once one that is kicked. 0: nobody takes over by himself."""

    @model_validator(mode="after")
    def _fits(self) -> ShardsConfig:
        if self.islands and not self.count:
            raise ValueError(
                f"shards.islands divides nothing with shards.count=0: set shards.count={100 * len(self.islands)}"
            )
        if self.take_over_after_s and not self.islands:
            raise ValueError(
                f"shards.take_over_after_s ({self.take_over_after_s:g}) needs islands that take over: name them in "
                "shards.islands, or set it to 0"
            )
        if len(self.weights) < len(self.islands):
            raise ValueError("shards.islands names an island twice: give it one entry, NAME:WEIGHT")
        return self

    @property
    def weights(self) -> dict[str, int]:
        """Weight of every island that is named."""
        parts = (entry.partition(":") for entry in self.islands)
        return {name: int(weight or 1) for name, _, weight in parts}
