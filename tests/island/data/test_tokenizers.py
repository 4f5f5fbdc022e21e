"""Bytes, and tokenizers of the library: the same tokens everywhere, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.config import ModelConfig, load_run
from diloco.config_tokenizer import TokenizerConfig
from diloco.errors import ConfigError, InputError
from island.cli import tokenizer
from island.config_data import DataConfig
from island.data import Bytes, HuggingFace, document_end
from island.data.tokenizers import load
from tests.processes import command_here

tokenizers = pytest.importorskip("tokenizers", reason="the library tokenizers is not installed (the extra `data`)")
TEXT = ["the quick brown fox jumps over the lazy dog", "über den Fluß – and into the trees", "  two  spaces\n"]


def train(file: Path, end: str = "</s>", size: int = 300) -> str:
    """Writes a small tokenizer of byte pairs."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT * 9, trainer)
    file.parent.mkdir(exist_ok=True)
    made.save(str(file))
    return str(file)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return train(tmp_path / "tokenizer.json")


def settings(name: str, **values: Any) -> TokenizerConfig:
    return TokenizerConfig(kind="hf", name=name, digest=HuggingFace(name).digest, **values)


def test_bytes_are_tokens() -> None:
    [tokens] = Bytes().encode(["aü"])
    assert tokens.tolist() == [97, 0xC3, 0xBC]
    assert Bytes().decode([97, 0xC3, 0xBC, 0xC3, 999]) == "aü\ufffd\ufffd"
    assert isinstance(load(TokenizerConfig(), 256), Bytes)
    with pytest.raises(ConfigError, match=r"model\.vocab_size \(255\) is below 256, .*: set model\.vocab_size=256"):
        load(TokenizerConfig(), 255)


def test_text_comes_back_from_the_librarys_tokens(file: str) -> None:
    found = HuggingFace(file)
    encoded = found.encode(TEXT)
    assert [found.decode(tokens.tolist()) for tokens in encoded] == TEXT
    assert {tokens.dtype for tokens in encoded} == {np.dtype("uint16")}
    assert max(int(tokens.max()) for tokens in encoded) < found.vocabulary == 300
    assert found.decode(found.separator.tolist()) == found.end == "</s>"


def test_a_folder_is_its_file_however_that_is_written(tmp_path: Path, file: str) -> None:
    written = json.loads(Path(file).read_text())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").write_text(json.dumps(written, indent=7, sort_keys=True))
    assert HuggingFace(str(tmp_path / "folder")).digest == HuggingFace(file).digest


def test_truncation_of_a_file_does_not_apply(tmp_path: Path, file: str) -> None:
    cut = tokenizers.Tokenizer.from_file(file)
    cut.enable_truncation(3)
    cut.enable_padding(length=64)
    cut.save(str(tmp_path / "cut.json"))
    [whole], [found] = HuggingFace(file).encode(TEXT[:1]), HuggingFace(str(tmp_path / "cut.json")).encode(TEXT[:1])
    assert found.tolist() == whole.tolist()


def test_islands_with_other_files_are_refused(tmp_path: Path, file: str) -> None:
    agreed = settings(file)
    copy = tmp_path / "copy.json"
    copy.write_bytes(Path(file).read_bytes())
    assert load(agreed, 300, str(copy)).digest == agreed.digest
    other = train(tmp_path / "other" / "tokenizer.json", size=290)
    with pytest.raises(ConfigError, match=r"other.tokenizer\.json has the digest .*data\.tokenizer"):
        load(agreed, 300, other)
    with pytest.raises(ConfigError, match=r"model\.vocab_size \(299\) is below the 300 tokens .*model\.vocab_size=300"):
        load(agreed, 299)


def test_tokenizers_that_are_none(tmp_path: Path, file: str) -> None:
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(InputError, match=r"broken\.json is no tokenizer \(.*tokenizer\.name"):
        HuggingFace(str(tmp_path / "broken.json"))
    with pytest.raises(InputError, match=r"has no token '<none>': name one of its tokens in tokenizer\.end"):
        HuggingFace(file, "<none>")
    strange = train(tmp_path / "strange.json", end="<what>")
    with pytest.raises(InputError, match=r"has no token 'that usually ends a document'.*tokenizer\.end"):
        HuggingFace(strange)
    assert HuggingFace(strange, "<what>").end == "<what>"


def test_a_folder_for_transformers_is_the_same_tokenizer(tmp_path: Path, file: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")
    transformers.PreTrainedTokenizerFast(tokenizer_file=file, eos_token="</s>").save_pretrained(tmp_path / "saved")
    assert HuggingFace(str(tmp_path / "saved")).encode(TEXT)[0].tolist() == HuggingFace(file).encode(TEXT)[0].tolist()
    with pytest.raises(InputError, match=r"there is no tokenizer .*nothing \(.*correct tokenizer\.name"):
        HuggingFace(str(tmp_path / "nothing"))


def test_the_command_prints_settings_that_fit(file: str) -> None:
    ended = command_here(tokenizer, file)
    assert ended.code == 0
    run = load_run("[run]\nid = 'a'\n" + ended.out, "printed").value
    assert load(run.tokenizer, run.model.vocab_size).digest == run.tokenizer.digest
    assert run.tokenizer == settings(file, end="</s>")


def test_documents_end_where_the_tokenizer_says(file: str) -> None:
    agreed, masked = settings(file), DataConfig(mask_documents=True)
    using = load(agreed, 300)
    assert [document_end(masked, ModelConfig(vocab_size=300), agreed)] == using.separator.tolist()
    assert document_end(DataConfig(), ModelConfig(vocab_size=300), agreed) is None
    with pytest.raises(ConfigError, match=r"tokenizer\.kind 'bytes' has an empty line, which documents have within"):
        document_end(masked, ModelConfig(), TokenizerConfig())
    foreign = ModelConfig(source="my.models:net")
    with pytest.raises(ConfigError, match=r"model\.source is 'my\.models:net', of which it is not known"):
        document_end(masked, foreign, agreed)
