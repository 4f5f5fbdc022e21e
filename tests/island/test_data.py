"""Corpus, shards, epochs and the held-out part."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.errors import InputError
from island.data import ByteText, corpus

ALL = slice(None)
T = 4
SPAN = 3 * T + 1 + T + 1  # held_out 0.25: three training sequences, then one held out


def numbered(spans: int, tail: int = 0) -> tuple[ByteText, bytes]:
    """A text in which every byte value occurs once, so that a byte tells where it is from."""
    text = bytes(range(spans * SPAN + tail))
    return ByteText(text, sequence_length=T, held_out=0.25), text


def starts(batch: tuple[Tensor, Tensor]) -> list[int]:
    """Where in a numbered text each sequence of a batch begins."""
    inputs, targets = batch
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape
    assert torch.equal(inputs + 1, targets)
    return inputs[:, 0].tolist()


def epoch_starts(text: ByteText, shard: int, shards: int, epoch: int = 0, seed: int = 0) -> list[int]:
    """The sequences of one epoch of a shard, in the order of visit."""
    size = len(range(shard, text.train_sequences, shards))
    return [starts(text.train_batch(epoch * size + i, shard, shards, 1, seed, ALL))[0] for i in range(size)]


def test_layout_of_a_span() -> None:
    text, _ = numbered(spans=2, tail=5)
    assert (text.train_sequences, text.held_out_sequences) == (6, 2)
    assert sorted(epoch_starts(text, 0, 1)) == [0, 4, 8, SPAN, SPAN + 4, SPAN + 8]
    assert starts(text.held_out(2)) == [13, SPAN + 13]


def test_shards_are_disjoint_and_cover_the_training_text() -> None:
    text, _ = numbered(spans=10)
    shards = [epoch_starts(text, shard, 4) for shard in range(4)]
    together = [start for shard in shards for start in shard]
    assert len(set(together)) == len(together) == text.train_sequences == 30
    assert sorted(map(len, shards)) == [7, 7, 8, 8]
    assert sorted(together) == sorted(epoch_starts(text, 0, 1))


def test_held_out_bytes_are_never_trained_on() -> None:
    text, whole = numbered(spans=9, tail=17)
    trained: set[int] = set()
    for shard in range(2):
        for start in epoch_starts(text, shard, 2):
            trained |= set(whole[start : start + T + 1])
    kept = {byte for start in starts(text.held_out(99)) for byte in whole[start : start + T + 1]}
    assert len(kept) == 9 * (T + 1)
    assert not trained & kept


def test_every_epoch_is_another_permutation() -> None:
    text, _ = numbered(spans=10)
    first, second = (epoch_starts(text, 1, 2, epoch) for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert first != epoch_starts(text, 1, 2, seed=1)


def test_a_batch_may_reach_into_the_next_epoch() -> None:
    text, _ = numbered(spans=3)  # 9 training sequences
    visits = epoch_starts(text, 0, 1, 0) + epoch_starts(text, 0, 1, 1)
    assert starts(text.train_batch(2, 0, 1, 4, 0, ALL)) == visits[8:12]


@pytest.mark.parametrize("rows", [lambda r, n: slice(r, None, n), lambda r, n: slice(r * 12 // n, (r + 1) * 12 // n)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_of_all_ranks_are_the_batch(rows: Callable[[int, int], slice], ranks: int) -> None:
    text, _ = numbered(spans=10)
    whole = starts(text.train_batch(3, 0, 2, 12, 0, ALL))
    assert len(whole) == 12
    parts = {range(12)[rows(r, ranks)]: text.train_batch(3, 0, 2, 12, 0, rows(r, ranks)) for r in range(ranks)}
    rebuilt = {row: start for index, part in parts.items() for row, start in zip(index, starts(part), strict=True)}
    assert [rebuilt[row] for row in range(12)] == whole


def test_batches_depend_on_nothing_but_their_arguments() -> None:
    text, whole = numbered(spans=10)
    forward = [starts(text.train_batch(step, 1, 3, 4, 9, ALL)) for step in range(12)]
    torch.manual_seed(3)
    fresh = ByteText(whole, sequence_length=T, held_out=0.25)
    backward = [starts(fresh.train_batch(step, 1, 3, 4, 9, ALL)) for step in reversed(range(12))]
    assert forward == backward[::-1]


def test_held_out_is_spread_and_bounded() -> None:
    text, _ = numbered(spans=10)
    assert starts(text.held_out(5)) == [span * SPAN + 13 for span in (0, 2, 4, 6, 8)]
    assert starts(text.held_out(4)) == [span * SPAN + 13 for span in (0, 2, 5, 7)]
    assert starts(text.held_out(11)) == [span * SPAN + 13 for span in range(10)]


def test_unigram_loss_of_a_counted_text() -> None:
    train, held_out = b"aaaaaaaaabbbb", b"?aabc"  # the first held-out byte is only ever an input
    text = ByteText(train + held_out, sequence_length=T, held_out=0.25)
    total = 13 + 256
    expected = -(2 * math.log(10 / total) + math.log(5 / total) + math.log(1 / total)) / 4
    assert text.unigram_loss() == pytest.approx(expected, rel=1e-12)


def test_text_without_a_span_says_how_much_is_needed() -> None:
    with pytest.raises(InputError, match=rf"has {SPAN - 1} bytes; .* need {SPAN}:"):
        ByteText(bytes(SPAN - 1), sequence_length=T, held_out=0.25)
    assert ByteText(bytes(SPAN), sequence_length=T, held_out=0.25).train_sequences == 3


def test_shards_without_a_batch_say_how_much_is_needed() -> None:
    text, _ = numbered(spans=3)
    with pytest.raises(InputError, match=rf"has {3 * SPAN} bytes; 2 shard.* batch of 5 .* need {4 * SPAN}:"):
        text.train_batch(0, 0, 2, 5, 0, ALL)
    enough, _ = numbered(spans=4)
    assert len(starts(enough.train_batch(0, 1, 2, 5, 0, ALL))) == 5


def test_corpus_reads_files_and_folders_in_order(tmp_path: Path) -> None:
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
    assert corpus([str(named), str(folder)]) == "first\n\none\n\nzwei – two".encode()


def test_corpus_refuses_what_is_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*absent.* data\.text"):
        corpus([str(tmp_path / "absent")])
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"binary is not UTF-8 text: .* data\.text"):
        corpus([str(tmp_path / "binary")])
    with pytest.raises(InputError, match=r"no text in .*: .* data\.text"):
        corpus([str(tmp_path)])
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InputError, match=r"no text in .*empty: "):
        corpus([str(tmp_path / "empty")])


def test_corpus_of_nothing_is_the_standard_library() -> None:
    text = corpus(())
    assert len(text) > 5_000_000
    assert b"class Random(_random.Random):" in text
    assert text == corpus(())
