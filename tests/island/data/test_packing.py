"""Spans, their held-out sequences, and tokens in files."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import InputError
from island.data import Packed
from island.data.packing import InMemory, Mapped
from tests.island.data.support import SPAN, T, numbered, starts


def every(packed: Packed) -> list[int]:
    """Where all training sequences begin."""
    return starts(packed.train(np.arange(packed.train_sequences)))


def packed(text: bytes, vocabulary: int = 256) -> Packed:
    tokens = np.frombuffer(text, np.uint8)
    return Packed([InMemory(tokens)], sequence_length=T, held_out=0.25, vocabulary=vocabulary)


def test_layout_of_a_span() -> None:
    text = numbered(spans=2, tail=5)
    assert (text.train_sequences, text.held_out_sequences) == (6, 2)
    assert every(text) == [0, 4, 8, SPAN, SPAN + 4, SPAN + 8]
    assert starts(text.held_out(2)) == [13, SPAN + 13]


def test_held_out_tokens_are_never_trained_on() -> None:
    text = numbered(spans=9, tail=17)
    trained, kept = (
        {t for s in found for t in range(s, s + T + 1)} for found in (every(text), starts(text.held_out(99)))
    )
    assert len(kept) == 9 * (T + 1)
    assert trained | kept == set(range(9 * SPAN)), "nothing of a span is left out"
    assert not trained & kept


def test_held_out_is_spread_and_bounded() -> None:
    text = numbered(spans=10)
    assert starts(text.held_out(5)) == [span * SPAN + 13 for span in (0, 2, 4, 6, 8)]
    assert starts(text.held_out(4)) == [span * SPAN + 13 for span in (0, 2, 5, 7)]
    assert starts(text.held_out(11)) == [span * SPAN + 13 for span in range(10)]


def test_sequences_do_not_reach_from_one_file_into_the_next() -> None:
    whole = np.arange(5 * SPAN, dtype=np.uint16)
    parts = [InMemory(whole[: SPAN + 3]), InMemory(whole[:2]), InMemory(whole[SPAN + 3 : 4 * SPAN])]
    text = Packed(parts, sequence_length=T, held_out=0.25, vocabulary=len(whole))
    assert text.train_sequences == 3 * (1 + 2)
    assert every(text)[:4] == [0, 4, 8, SPAN + 3]
    assert starts(text.held_out(9)) == [13, SPAN + 3 + 13, 2 * SPAN + 3 + 13]


def test_unigram_loss_of_a_counted_text() -> None:
    train, held_out = b"aaaaaaaaabbbb", b"?aabc"  # the first held-out byte is only ever an input
    total = 13 + 256
    expected = -(2 * math.log(10 / total) + math.log(5 / total) + math.log(1 / total)) / 4
    assert packed(train + held_out).unigram_loss() == pytest.approx(expected, rel=1e-12)


def test_text_without_a_span_says_how_much_is_needed() -> None:
    with pytest.raises(InputError, match=rf"has {SPAN - 1} tokens; .* need {SPAN}:"):
        packed(bytes(SPAN - 1))
    assert packed(bytes(SPAN)).train_sequences == 3


def test_shards_without_a_batch_say_how_much_is_needed() -> None:
    with pytest.raises(InputError, match=rf"has {3 * SPAN} tokens; 2 shard.* of at least .* 5 .* need {4 * SPAN}:"):
        numbered(spans=3).check([1], 2, 5)
    numbered(spans=4).check([1], 2, 5)
    with pytest.raises(InputError, match=r"6 shard\(s\) where 2 have at least one batch of 5 .*"):
        numbered(spans=5).check([1, 2], 6, 5)
    numbered(spans=6).check([1, 2], 6, 5)


def test_a_token_beyond_the_vocabulary_is_told() -> None:
    text = packed(bytes([*range(SPAN)]), vocabulary=SPAN - 1)
    assert text.train(np.array([0, 1, 2]))[0].max() == 11
    with pytest.raises(InputError, match=rf"token {SPAN - 1}, and the model's vocabulary {SPAN - 1} "):
        text.held_out(1)
    negative = Packed([InMemory(np.full(SPAN, -5))], sequence_length=T, held_out=0.25, vocabulary=99)
    with pytest.raises(InputError, match=r"token -5, "):
        negative.train(np.array([0]))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_in_files_are_what_was_written(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(3 * SPAN).astype(dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    (tmp_path / "tokens.bin").write_bytes(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    for part in (Mapped(tmp_path / "tokens.npy"), Mapped(tmp_path / "tokens.bin", dtype)):
        assert isinstance(part.tokens, np.memmap)
        assert np.array_equal(part.tokens, tokens)
        text = Packed([part], sequence_length=T, held_out=0.25, vocabulary=3 * SPAN)
        assert every(text) == every(numbered(spans=3))
        assert copy.copy(part).__dict__["_tokens"] is None, "another process maps the file itself"


def test_files_that_are_no_tokens(tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    with pytest.raises(InputError, match=r"cannot read .*x\.npy \(No such file .*data\.tokens"):
        _ = Mapped(file).tokens
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"x\.npy is no file of tokens \(.*make it again"):
        _ = Mapped(file).tokens
    np.save(file, np.arange(100, dtype=np.uint16))
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(InputError, match=r"x\.npy is no file of tokens \(.*make it again"):
        _ = Mapped(file).tokens
    with pytest.raises(InputError, match=r"no whole number of uint32"):
        file.write_bytes(b"12345")
        _ = Mapped(file, "uint32").tokens
    for odd in (np.zeros((2, 2), np.int64), np.zeros(4)):
        np.save(file, odd)
        with pytest.raises(InputError, match=r"tokens are integers in one dimension"):
            _ = Mapped(file).tokens
