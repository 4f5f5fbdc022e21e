"""Text from files: in order, whole, and told what is wrong with it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import ModelConfig
from diloco.config_tokenizer import TokenizerConfig
from diloco.errors import InputError
from island.config_data import DataConfig
from island.data import Bytes, Packed, open_data, packed_text
from island.data.sources import check, documents, mapped


def read(**values: Any) -> list[str]:
    return list(documents(DataConfig.model_validate(values)))


def test_files_and_folders_of_text_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name, content in {
        "b.txt": "zwei – two".encode(),
        "a/z.md": b"one",
        "c.bin": b"\xff\xfe",
        "d.dat": b"nul\0",
        "e.txt": b"",
        ".hidden": b"no",
        ".git/config": b"no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    named = tmp_path / ".named"
    named.write_bytes(b"first")
    assert read(text=(str(named), str(folder))) == ["first", "one", "zwei – two"]


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*absent.* data\.text"):
        read(text=(str(tmp_path / "absent"),))
    for name, content in (("binary", b"\xff"), ("nul", b"a\0b")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name} is not UTF-8 text: .* data\.text"):
            read(text=(str(tmp_path / name),))
    with pytest.raises(InputError, match=r"no text in .*: .* data\.text"):
        read(text=(str(tmp_path),))
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InputError, match=r"no text in .*empty: "):
        read(text=(str(tmp_path / "empty"),))


def test_no_source_is_the_standard_library() -> None:
    texts = read()
    assert sum(map(len, texts)) > 5_000_000
    assert any("class Random(_random.Random):" in text for text in texts)
    assert texts == read()
    first = packed_text((), ModelConfig(), Bytes())
    assert bytes(first.train(np.array([0]))[0][0].tolist()).decode() == "\n\n".join(texts)[:64]


@given(texts=st.lists(st.text(max_size=20), max_size=8))
def test_json_lines_come_back(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("lines")
    written = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts)).encode()
    (folder / "a.jsonl").write_bytes(written)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n" + written))
    (folder / "c.txt").write_text("no")
    expected = [text for text in texts if text] * 2
    if expected:
        assert read(jsonl=(str(folder),), field="body") == expected
    else:
        with pytest.raises(InputError, match=r"no text in .*: name files or folders with text in data\.jsonl"):
            read(jsonl=(str(folder),), field="body")


def test_lines_that_are_wrong_are_told(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line, says in {
        '{"text": "b"': r"a\.jsonl:2 is not a line of JSON \(.*mend it",
        '["b"]': r"a\.jsonl:2 is no JSON object with a 'text'",
        '{"txt": "b"}': r"a\.jsonl:2 has no text in 'text', but \['txt'\]: set data\.field",
        '{"text": 3}': r"a\.jsonl:2 has no text in 'text', but \['text'\]",
    }.items():
        file.write_text('{"text": "a"}\n' + line)
        with pytest.raises(InputError, match=says):
            read(jsonl=(str(file),))
    file.write_bytes(b'{"text": "\xff"}')
    with pytest.raises(InputError, match=r"a\.jsonl:1 is not a line of JSON"):
        read(jsonl=(str(file),))
    zipped = tmp_path / "b.jsonl.gz"
    for damaged in (gzip.compress(b'{"text": "a"}\n' * 99)[:-9], b"nothing of the kind"):
        zipped.write_bytes(damaged)
        with pytest.raises(InputError, match=r"cannot read .*b\.jsonl\.gz behind line \d+ \(.*data\.jsonl"):
            read(jsonl=(str(zipped),))
    with pytest.raises(InputError, match=r"it has no \.parquet file; correct data\.parquet"):
        read(parquet=(str(tmp_path),))


def test_parquet_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra `data`)")
    import pyarrow
    import pyarrow.parquet

    texts = [f"row {i} – ü" for i in range(3000)]
    table = pyarrow.table({"body": [*texts, None, ""], "n": [1] * 3002, "large": [*texts, "", ""]})
    table = table.set_column(2, "large", table["large"].cast(pyarrow.large_string()))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(parquet=(str(tmp_path),), field="body") == texts
    assert read(parquet=(str(tmp_path / "a.parquet"),), field="large") == texts
    with pytest.raises(InputError, match=r"a\.parquet has no column 'text', but \['body', 'n', 'large'\]: set"):
        read(parquet=(str(tmp_path),))
    with pytest.raises(InputError, match=r"a\.parquet has int64 in 'n', not text: correct data\.field"):
        read(parquet=(str(tmp_path),), field="n")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet \(.*data\.parquet, or copy it again"):
        read(parquet=(str(tmp_path),), field="body")


def test_a_folder_of_tokens_is_a_source(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(500, dtype=np.uint32))
    (tmp_path / "b.bin").write_bytes(np.arange(500, 900).astype("<u2").tobytes())
    data = DataConfig(tokens=(str(tmp_path),))
    assert [part.path.name for part in mapped(data)] == ["a.npy", "b.bin"]
    found = open_data(data, ModelConfig(vocab_size=900, sequence_length=8), TokenizerConfig())
    assert isinstance(found, Packed)
    inputs, targets = found.train(np.array([0, found.train_sequences - 1]))
    assert inputs[0].tolist() == list(range(8))
    assert targets[1, -1] < 900
    (tmp_path / "a.npy").unlink()
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"no tokens in .*: name files with tokens in data\.tokens"):
        mapped(data)


@pytest.mark.parametrize("name", ["text", "jsonl", "parquet", "tokens"])
def test_a_missing_file_is_told_before_any_rank_starts(name: str) -> None:
    with pytest.raises(InputError, match=rf"cannot read absent \(No such file or directory\): correct data\.{name}"):
        check(DataConfig.model_validate({name: ("absent",)}))


def test_nothing_is_wrong_with_the_default() -> None:
    check(DataConfig())
