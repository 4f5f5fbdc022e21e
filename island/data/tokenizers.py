"""Text to tokens and back, the same on every island."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from diloco.config_tokenizer import TokenizerConfig
from diloco.errors import ConfigError, EnvironmentFault, InputError
from island.data.packing import Tokens

BYTES = 256
"""Tokens of text that is read as bytes."""
USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]", "[EOS]")


class Tokenizer(Protocol):
    """How text becomes tokens."""

    vocabulary: int
    """One more than the largest token there is."""
    digest: str
    """Two tokenizers with one digest make the same tokens of every text."""
    separator: Tokens
    """What is between two documents [n]."""

    @property
    def dtype(self) -> str:
        """The narrowest dtype that holds every token."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens [n] of every text, without the separator."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; what is no text shows as U+FFFD."""


class Bytes:
    """UTF-8 bytes are the tokens; an empty line is between two documents."""

    vocabulary, digest, dtype = BYTES, "bytes", "uint8"
    separator: Tokens = np.frombuffer(b"\n\n", np.uint8)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens uint8 [n] of every text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of bytes; what is not UTF-8, or no byte at all, shows as U+FFFD."""
        return bytes(min(token, 0xFF) for token in tokens).decode(errors="replace")


class HuggingFace:
    """A tokenizer of the library `tokenizers`; an end token is between two documents.

    Args:
        name: a tokenizer.json, a folder that has one, or a name that `transformers` knows.
        end: the end token; empty: the first of `USUAL_ENDS` that the vocabulary has.

    Raises:
        EnvironmentFault: the library is not installed.
        InputError: there is no such tokenizer, or it has no such token.
    """

    def __init__(self, name: str, end: str = "") -> None:
        self._tokenizer = _load(name)
        self.digest = _digest(self._tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not tokens:
            raise InputError(f"the tokenizer {name} has no tokens: name another in tokenizer.name")
        self.vocabulary = max(tokens.values()) + 1
        self.end = end or next((usual for usual in USUAL_ENDS if usual in tokens), "")
        if self.end not in tokens:
            raise InputError(
                f"the tokenizer {name} has no token {self.end or 'that usually ends a document'!r}: name one of its "
                "tokens in tokenizer.end"
            )
        self.separator: Tokens = np.array([tokens[self.end]], self.dtype)

    @property
    def dtype(self) -> str:
        """The narrowest dtype that holds every token."""
        return "uint16" if self.vocabulary <= 2**16 else "uint32"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens [n] of every text; on all of the machine's cores where there are many texts."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load(config: TokenizerConfig, vocab_size: int, elsewhere: str = "") -> Tokenizer:
    """The run's tokenizer.

    Args:
        config: what the run says of it.
        vocab_size: tokens that the model knows.
        elsewhere: where this island keeps it, if not where the run says.

    Raises:
        ConfigError: another tokenizer than the run's, or one with more tokens than the model.
        EnvironmentFault, InputError: it cannot be loaded.
    """
    name = elsewhere or config.name if config.kind == "hf" else ""
    tokenizer = named(name, vocab_size, config.end)
    if name and tokenizer.digest != config.digest:
        raise ConfigError(
            f"the tokenizer {name} has the digest {tokenizer.digest[:16]}, and the run's tokenizer.digest is "
            f"{config.digest[:16]}: copy the run's tokenizer here and name it in data.tokenizer (and have the same "
            "version of the library tokenizers)"
        )
    return tokenizer


def named(name: str, vocab_size: int, end: str = "") -> Tokenizer:
    """Bytes where `name` is empty, else the library's tokenizer of that name.

    Raises:
        ConfigError: it has more tokens than the model, which has `vocab_size`.
        EnvironmentFault, InputError: it cannot be loaded.
    """
    if not name:
        check_vocabulary(vocab_size)
        return Bytes()
    tokenizer = HuggingFace(name, end)
    if tokenizer.vocabulary > vocab_size:
        raise ConfigError(
            f"model.vocab_size ({vocab_size}) is below the {tokenizer.vocabulary} tokens of the tokenizer {name}: "
            f"set model.vocab_size={tokenizer.vocabulary}"
        )
    return tokenizer


def check_vocabulary(size: int) -> None:
    """Raises `ConfigError` where a model with a vocabulary of `size` tokens cannot read bytes."""
    if size < BYTES:
        raise ConfigError(
            f"model.vocab_size ({size}) is below {BYTES}, and text is read as bytes: set model.vocab_size={BYTES}"
        )


def _load(name: str) -> Any:
    """The library's tokenizer, from a file or a folder, or by name."""
    try:
        import tokenizers
    except ImportError as error:
        raise EnvironmentFault("tokenizer.kind='hf' needs tokenizers: pip install 'diloco[data]'") from error
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises no narrower one
            raise InputError(f"{file} is no tokenizer ({error}): name another in tokenizer.name") from error
    return _from_transformers(name)


def _from_transformers(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EnvironmentFault(
            f"{name} is no file, and a tokenizer's name needs transformers: pip install 'diloco[data]'"
        ) from error
    try:
        found = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"there is no tokenizer {name} ({str(error).splitlines()[0]}): correct tokenizer.name, or name this "
            "island's copy in data.tokenizer"
        ) from error
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{name} is a tokenizer in Python alone, which is too slow: name one with a tokenizer.json")
    return backend


def _digest(tokenizer: Any) -> str:
    """SHA-256 (hex) of what the library knows of a tokenizer, as canonical JSON."""
    return hashlib.sha256(json.dumps(json.loads(tokenizer.to_str()), sort_keys=True).encode()).hexdigest()
