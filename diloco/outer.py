"""The outer step, of one tensor after the other."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from diloco.codec import Codec, native
from diloco.digest import combine, digest
from diloco.errors import CodecError
from diloco.layout import Box
from diloco.merge import Addend, Runs, weighted_sum


def nesterov(gradient: Tensor, momentum: Tensor, *, lr: float, mu: float) -> Tensor:
    """One outer Nesterov step (DiLoCo, arXiv 2311.08105, algorithm 1; the same as `torch.optim.SGD(nesterov=True)`).

        m <- mu * m + g
        step = lr * (g + mu * m)          theta <- theta - step

    Args:
        gradient: g, the merged pseudo-gradient (anchor minus local: a descent direction), fp32.
        momentum: m, fp32 of the same shape; updated in place. Zeros before the first step.
        lr: outer learning rate.
        mu: outer momentum; 0 is plain SGD, and with `lr=1` federated averaging.

    Returns:
        The step to subtract from the anchor, fp32. In it g + mu * m is rounded once.
    """
    momentum.mul_(mu).add_(gradient)
    return gradient.add(momentum, alpha=mu).mul_(lr)


class OuterState(NamedTuple):
    """What the outer step of a tensor changes: fp32 [numel] each, contiguous, on the CPU."""

    anchor: Tensor
    momentum: Tensor
    residual: Tensor
    """What the codec of updates dropped, to be sent with the next one."""


class Optimizer(NamedTuple):
    """The outer optimizer; see `nesterov`."""

    lr: float
    mu: float


def step(
    shape: Sequence[int],
    start: int,
    addends: Sequence[Addend],
    state: OuterState,
    update: Tensor,
    down: Codec,
    optimizer: Optimizer,
) -> int:
    """Takes the outer step of a tensor in place, in one pass over blocks that stay in the cache.

    Of each block: the weighted sum of the contributions, the Nesterov step and what earlier updates left over; the
    update as its codec can say it; the anchor moved by exactly what that decodes to; and the rest kept. So coordinator
    and islands keep the same bits. A compiled kernel does whole blocks of `down` without the GIL, on as many threads
    as torch computes with; `_step` is its definition, and does what is left.

    Args:
        shape: of the tensor.
        start: flat offset of the tensor in its fragment.
        addends: pieces of contributions, in the order to add them. They decode: `Codec.verify` says so beforehand.
        state: changed in place.
        update: where its payload goes: uint8 [down.size(numel)].
        down: the codec of the update.
        optimizer: lr and mu.

    Returns:
        The tensor's part of the digest of the new anchor.

    Raises:
        CodecError: a payload does not decode, or there is no code for a value; part of the state has changed.
    """
    numel = math.prod(shape)
    placed = [(addend, Runs.of(addend.box, shape)) for addend in addends if addend.box.numel]
    done, found = _native(start, numel, placed, state, update, down, optimizer)
    for first in range(done, numel, down.at_once):
        _step(first, min(first + down.at_once, numel), placed, state, update, down, optimizer)
    rest = numel - done
    return combine(found, digest(state.anchor[done:], start + done, (rest,), Box.whole((rest,))))


Placed = Sequence[tuple[Addend, Runs]]


def _step(
    first: int, end: int, placed: Placed, state: OuterState, update: Tensor, down: Codec, optimizer: Optimizer
) -> None:
    """The outer step of the values from `first`, which begins a block of `down`, to `end`."""
    anchor, momentum, residual = (x[first:end] for x in state)
    gradient = weighted_sum(placed, first, end)
    wanted = nesterov(gradient, momentum, lr=optimizer.lr, mu=optimizer.mu).add_(residual)
    payload = update[down.size(first) : down.size(end)]
    down.encode(wanted, payload)
    applied = gradient  # its values are used up
    down.decode(payload, applied)
    residual.copy_(wanted.sub_(applied))
    anchor.sub_(applied)


def _native(
    start: int, numel: int, placed: Placed, state: OuterState, update: Tensor, down: Codec, optimizer: Optimizer
) -> tuple[int, int]:
    """Has the kernel do the whole blocks of `down`, where there is one for all codecs.

    Returns:
        Up to where it is done, and the digest of that.
    """
    done = numel // down.block * down.block
    tensors = (*state, update, *(addend.payload for addend, _ in placed))
    fits = all(addend.codec.kernel and len(runs.sizes) <= native.DIMS for addend, runs in placed)
    if not (done and fits and down.kernel and native.usable(*tensors)):
        return 0, 0
    tails = [_tail(addend) for addend, _ in placed]
    pieces = chain.from_iterable(_numbers(*pair, tail) for pair, tail in zip(placed, tails, strict=True))
    problem, found = down.kernel.step(state, update, done, start, optimizer.lr, optimizer.mu, tuple(pieces))
    if problem:
        codecs = ", ".join(sorted({addend.codec.name for addend, _ in placed}))
        raise down.no_codes() if problem == 2 else CodecError(f"a contribution ({codecs}) is damaged")
    return done, found


def _tail(addend: Addend) -> Tensor:
    """The values behind the last whole block of a piece."""
    numel = addend.box.numel
    return addend.codec.window(addend.payload, numel, numel // addend.codec.block * addend.codec.block, numel)


def _numbers(addend: Addend, runs: Runs, tail: Tensor) -> list[int]:
    """A piece as the kernel takes it: `native.PIECE` numbers."""
    kernel = addend.codec.kernel
    assert kernel is not None
    [share] = struct.unpack("<I", struct.pack("<f", addend.share))
    places = [addend.payload.data_ptr(), tail.data_ptr(), addend.box.numel, kernel.number, kernel.keep, share]
    padding = [0] * (native.DIMS - len(runs.sizes))
    return [*places, runs.base, runs.length, len(runs.sizes), *runs.sizes, *padding, *runs.strides, *padding]
