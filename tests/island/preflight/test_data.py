"""What an island reads: every source, the tokenizer and the shards, where all is well and where it is not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from diloco.config import RunConfig
from diloco.errors import ConfigError, ExitCode, InputError
from island.config import IslandConfig
from island.data.streams import Stream
from island.preflight import data
from tests.support import configure


def look(run: RunConfig | None = None, **settings: object) -> tuple[str, int, str]:
    island = IslandConfig.model_validate({"island": {"id": "tokyo"}, "data": {"batch_sequences": 2, **settings}})
    finding = data.data(island, run, 60.0)
    return finding.verdict, finding.code, finding.found


def test_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("defg" * 2000)
    text = [str(tmp_path)]
    found = "2 files, 0.0 MB, can be read; shard 1 of 3"
    assert look(text=text, shard=1, shards=3) == ("ok", 0, found)
    verdict, _, whole = look(configure(), text=text, shard=1, shards=3)
    assert verdict == "ok" and whole == f"{found}; 114 training sequences in all"
    assert look(configure(), text=text, shard=1, shards=3, cache_dir=str(tmp_path / "c"))[2] == found
    assert not (tmp_path / "c").exists(), "a cache is not filled"
    os.mkfifo(tmp_path / "deep" / "pipe")
    assert look(text=text)[2].startswith("2 files, "), "what is no file is not waited for"
    assert look(configure()) == ("ok", 0, "none named: the sources of this Python; shard 0 of 1")


def test_what_is_missing_or_too_little_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"none\.txt \(No such file"):
        look(text=[str(tmp_path / "none.txt")])
    with pytest.raises(InputError, match="no visible file"):
        look(text=[str(tmp_path / "empty")])
    with pytest.raises(InputError, match=r"the text has 3 tokens"):
        look(configure(), text=[str(tmp_path)])


def test_a_file_that_cannot_be_opened_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("abc")
    monkeypatch.setattr(data, "files", lambda settings: [tmp_path / "a.txt", tmp_path / "gone.txt"])
    verdict, code, found = look(text=[str(tmp_path)])
    assert (verdict, code) == ("fail", ExitCode.USAGE)
    assert found == f"cannot read {tmp_path / 'gone.txt'} (No such file or directory)"


def test_looking_is_bounded(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("abc")
    island = IslandConfig.model_validate({"island": {"id": "tokyo"}, "data": {"text": [str(tmp_path)]}})
    assert data.data(island, None, 0.0).found.startswith("1 of 3 files, ")


def test_lines_of_json_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 5000 + '"}\n')
    assert look(configure(), jsonl=[str(tmp_path)])[0] == "ok"
    with pytest.raises(InputError, match=r"a\.jsonl:1 has no text in 'body'.*data\.field"):
        look(jsonl=[str(tmp_path)], field="body")


def test_tokens_are_the_models(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(4000, dtype=np.uint16) % 300)
    tokens = [str(tmp_path)]
    assert look(configure("model.vocab_size=300"), tokens=tokens)[0] == "ok"
    with pytest.raises(InputError, match=r"has token .*the model's vocabulary 60 \(model\.vocab_size\)"):
        look(configure("model.vocab_size=60"), tokens=tokens)


def test_the_shards_are_the_runs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd" * 20_000)
    text = [str(tmp_path)]
    shared = configure("shards.count=40", "shards.islands=['tokyo', 'oslo']")
    found = look(shared, text=text)[2]
    assert "; shards " in found and ", ... of 40;" in found
    with pytest.raises(ConfigError, match=r"island 'tokyo' has none of the run's 40 shards"):
        look(configure("shards.count=40", "shards.islands=['oslo']"), text=text)
    with pytest.raises(ConfigError, match=r"data\.shards \(2\) is set"):
        look(shared, text=text, shards=2)


class Texts:
    """A dataset as the library has them."""

    num_shards = 1

    def iter(self, batch_size: int) -> list[dict[str, list[str]]]:
        return [{"text": [f"number {number} " * 9 for number in range(20)]}]


def test_a_dataset_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("island.data.streams.library", lambda: SimpleNamespace())
    monkeypatch.setattr(Stream, "_load", lambda stream: Texts())
    assert look(None, dataset="books")[0] == "warn"
    verdict, _, found = look(configure(), dataset="books")
    assert verdict == "ok" and found.startswith("the dataset books: the first sequence of shard 0 was read")

    def broken(stream: Stream) -> Texts:
        raise KeyError("a fault of the library's")

    monkeypatch.setattr(Stream, "_load", broken)
    with pytest.raises(ConfigError, match="the dataset books failed with KeyError"):
        look(configure(), dataset="books")


def test_the_tokenizer_is_the_runs(tmp_path: Path) -> None:
    settings = IslandConfig.model_validate({"island": {"id": "tokyo"}}).data
    assert data.tokenizer(settings, configure()).found == "bytes: 256 tokens, of 256 in model.vocab_size"
    with pytest.raises(ConfigError, match=r"model\.vocab_size \(100\)"):
        data.tokenizer(settings, configure("model.vocab_size=100"))
    tokens = settings.model_copy(update={"tokens": ("a.npy",)})
    assert "not called for" in data.tokenizer(tokens, configure("model.vocab_size=100")).found


def test_a_tokenizer_of_the_library_is_compared(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the library tokenizers is not installed (the extra `data`)")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    from island.data import HuggingFace

    digest = HuggingFace(str(tmp_path)).digest
    settings = IslandConfig.model_validate({"island": {"id": "tokyo"}, "data": {"tokenizer": str(tmp_path)}}).data
    agreed = ("tokenizer.kind=hf", "tokenizer.name=elsewhere")
    found = data.tokenizer(settings, configure(*agreed, f"tokenizer.digest={digest}")).found
    assert found.startswith(f"{tmp_path}: 2 tokens, of 256") and "'</s>' between documents" in found
    with pytest.raises(ConfigError, match=r"copy the run's tokenizer here"):
        data.tokenizer(settings, configure(*agreed, f"tokenizer.digest={'0' * 64}"))
