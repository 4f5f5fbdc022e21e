"""Tokenised text on disk: made once, found again, and made anew where it is not whole."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import DeadlineExceeded, InputError
from island.config_data import DataConfig
from island.data import Bytes
from island.data.cache import tokenised
from island.data.packing import InMemory, Mapped, Tokens


class Counting(Bytes):
    """Bytes, with a count of texts and a fault when it is asked for."""

    def __init__(self) -> None:
        self.texts = 0
        self.faulty = False

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        if self.faulty:
            raise InputError("asked for")
        self.texts += len(texts)
        return super().encode(texts)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    lines = (json.dumps({"text": text}) + "\n" for text in ("one", "two", "", "drei – three"))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return DataConfig(jsonl=(str(tmp_path / "a.jsonl"),), cache_dir=str(tmp_path / "cache"))


WHOLE = "one\n\ntwo\n\ndrei – three".encode()


def text(data: DataConfig, tokenizer: Bytes) -> bytes:
    part = tokenised(data, tokenizer)
    assert isinstance(part, Mapped if data.cache_dir else InMemory)
    return part.tokens.tobytes()


def test_tokens_are_made_once(data: DataConfig) -> None:
    tokenizer = Counting()
    assert [text(data, tokenizer) for _ in range(3)] == [WHOLE] * 3
    assert tokenizer.texts == 3
    assert text(data.model_copy(update={"cache_dir": ""}), tokenizer) == WHOLE
    names = sorted(Path(name).suffix for name in Path(data.cache_dir).iterdir())
    assert names == [".json", ".lock", ".tokens"]


def test_other_text_and_other_tokens_are_made_apart(data: DataConfig, tmp_path: Path) -> None:
    text(data, Counting())
    (tmp_path / "a.jsonl").write_text('{"text": "new"}')
    assert text(data, Counting()) == b"new"
    other = Counting()
    other.digest = "another"
    assert text(data, other) == b"new"
    assert len(list(Path(data.cache_dir).glob("*.tokens"))) == 3


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".tokens", lambda file: file.write_bytes(file.read_bytes()[:-1])),
        (".tokens", lambda file: file.unlink()),
        (".json", lambda file: file.write_text("{")),
        (".json", lambda file: file.write_text('{"version": 0}')),
        (".json", lambda file: file.unlink()),
    ],
)
def test_what_is_damaged_is_made_anew(data: DataConfig, suffix: str, damage: object) -> None:
    text(data, Counting())
    [file] = Path(data.cache_dir).glob(f"*{suffix}")
    assert callable(damage)
    damage(file)
    tokenizer = Counting()
    assert text(data, tokenizer) == WHOLE
    assert tokenizer.texts == 3


def test_a_fault_leaves_nothing_that_looks_whole(data: DataConfig) -> None:
    tokenizer = Counting()
    tokenizer.faulty = True
    with pytest.raises(InputError, match="asked for"):
        text(data, tokenizer)
    assert [file.suffix for file in Path(data.cache_dir).iterdir()] == [".lock"]
    tokenizer.faulty = False
    assert text(data, tokenizer) == WHOLE


def test_a_second_process_waits_and_not_for_ever(data: DataConfig) -> None:
    text(data, Counting())
    [lock] = Path(data.cache_dir).glob("*.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match=r"has been tokenising .* raise data\.prepare_timeout_s"):
            text(data.model_copy(update={"prepare_timeout_s": 0.01}), Counting())
    assert text(data, Counting()) == WHOLE


def test_a_folder_that_cannot_be_used_is_told(data: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot use the folder .*file.cache \(Not a directory\): .*data\.cache_dir"):
        text(data.model_copy(update={"cache_dir": str(tmp_path / "file" / "cache")}), Counting())


def test_many_batches_are_one_text(tmp_path: Path) -> None:
    texts = ["x" * 400_000, "y" * 900_000, "z" * 10]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    data = DataConfig(jsonl=(str(tmp_path / "a.jsonl"),))
    assert tokenised(data, Bytes()).tokens.tobytes() == "\n\n".join(texts).encode()
    assert np.dtype(Bytes.dtype) == np.uint8
