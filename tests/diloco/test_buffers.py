"""Buffers that are used again: never two users of one, and no more kept than is said."""

from __future__ import annotations

import torch

from diloco.buffers import KEPT, Buffers


def test_what_is_given_back_is_used_again() -> None:
    buffers = Buffers(torch.uint8)
    large = buffers.take(1000)
    assert (large.numel(), large.dtype) == (1000, torch.uint8)
    buffers.give(large)
    small = buffers.take(10)
    assert small.numel() == 10
    assert small.data_ptr() == large.data_ptr()
    buffers.give(small)
    assert buffers.take(1000).data_ptr() == large.data_ptr()


def test_nobody_gets_what_another_uses() -> None:
    buffers = Buffers(torch.float32)
    assert buffers.take(5).data_ptr() != buffers.take(5).data_ptr()


def test_one_that_is_too_small_goes() -> None:
    buffers = Buffers(torch.uint8)
    buffers.give(buffers.take(10))
    assert buffers.take(100).numel() == 100
    assert not buffers._free


def test_few_are_kept() -> None:
    buffers = Buffers(torch.uint8)
    for buffer in [buffers.take(8) for _ in range(KEPT + 3)]:
        buffers.give(buffer)
    assert len(buffers._free) == KEPT
