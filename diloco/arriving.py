"""Updates on their way to anchors: worked out beside them as the bytes come, and put in their place at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codec import Choice, Codec, native
from diloco.crossing import Crossing
from diloco.digest import combine, digest
from diloco.errors import CodecError
from diloco.feedback import AT_ONCE
from diloco.layout import Box

if TYPE_CHECKING:
    from diloco.replica import Held

KEPT = 2
"""Idle homes that are kept."""
LOOSE = 1.25
"""How many times as large as it needs to be a home may be."""


@dataclass(eq=False)
class Home:
    """Where anchors live: a flat buffer (fp32), and how many pieces have theirs in it."""

    buffer: Tensor
    tenants: int = 0


class Homes:
    """Homes that are used again for the next version of the same or a similar fragment.

    Args:
        crossing: between them, on the CPU, and the device of anchors that are on one; pinned where that is CUDA's.
    """

    def __init__(self, crossing: Crossing) -> None:
        self.crossing, self._free, self._lock = crossing, list[Home](), threading.Lock()

    def take(self, numel: int) -> Home:
        """A home of at least `numel` values that holds anything."""
        with self._lock:
            for number, home in enumerate(self._free):
                if numel <= home.buffer.numel() <= LOOSE * numel:
                    return self._free.pop(number)
        return Home(torch.empty(numel, dtype=torch.float32, pin_memory=self.crossing.pinned))

    def move(self, held: Held, home: Home, anchor: Tensor, known: int | None) -> None:
        """Has a piece's anchor live in another home; one that nobody is left in may be used again.

        Args:
            anchor: of the piece: a view of `home`.
            known: its part of the digest, where that is known.
        """
        left = held.settle(home, anchor, known)
        home.tenants += 1
        if left:
            left.tenants -= 1
            if not left.tenants:
                self.give(left)

    def give(self, home: Home) -> None:
        """Takes back a home that nothing is in any more."""
        with self._lock:
            self._free = [*self._free[1 - KEPT :], home]

    def put(self, held: Sequence[Held], home: Home, known: Sequence[int]) -> None:
        """Has the anchors of pieces be the values at the beginning of a home: they move there, or those of a device are
        overwritten.

        Args:
            known: by piece, its part of the digest of these values.
        """
        parts = views(home.buffer, held)
        if not any(h.on_device for h in held):
            for h, part, found in zip(held, parts, known, strict=True):
                self.move(h, home, part, found)
            return
        for h in held:
            h.moves += 1
        self.crossing.up(parts, [h.anchor for h in held])
        for h, found in zip(held, known, strict=True):
            h.settle(None, h.anchor, found)
        self.give(home)


class Arriving:
    """An update on its way.

    Its bytes are decoded, subtracted from the anchors and added to a digest in one pass, as they come: into a new home.
    The anchors move there once all is here and right. It is done on the CPU in any case, so that no device has
    a say in the bits: of anchors on one a copy comes here first, and what was worked out goes back.

    Args:
        held: pieces of one fragment, in the order of the payload.
        choice: the codec of each.
        homes: of anchors.
    """

    def __init__(self, held: Sequence[Held], choice: Choice, homes: Homes) -> None:
        self._held, self._choice, self._homes = held, choice, homes
        self._home: Home | None = None
        self._before: Home | None = None
        """Copies of anchors that are on a device."""
        self._spans: list[tuple[int, int, int, Callable[[Tensor], int]]] = []
        """(first byte, end, number of the piece, what works them out and returns their part of a digest), in order."""
        self._done = 0
        self._digests: list[int] = []
        self._moves: list[int] = []
        """Of the anchors, when this began."""
        self._payload: Tensor | None = None
        self._error: CodecError | None = None

    @property
    def _numel(self) -> int:
        return sum(h.box.numel for h in self._held)

    def _anchors(self) -> list[Tensor]:
        """The anchors as they are now, on the CPU."""
        anchors = [h.anchor for h in self._held]
        if any(h.on_device for h in self._held):
            self._before = self._before or self._homes.take(self._numel)
            copies = views(self._before.buffer, self._held)
            self._homes.crossing.down(anchors, copies)
            return copies
        return anchors

    def _cut(self, home: Tensor) -> Iterator[tuple[int, int, int, Callable[[Tensor], int]]]:
        start = 0
        pairs = zip(self._anchors(), views(home, self._held), strict=True)
        for number, (h, (before, view)) in enumerate(zip(self._held, pairs, strict=True)):
            codec, anchor, out = self._choice.of(h.spec), before.view(-1), view.view(-1)
            size = codec.part_size(h.spec.shape, h.box)
            if h.box.size == h.spec.shape:
                for some, bytes_ in codec.slices(h.box.numel, AT_ONCE):
                    move = partial(_move, codec, anchor[some], out[some], h.start + some.start)
                    yield start + bytes_.start, start + bytes_.stop, number, move
            elif size:
                yield start, start + size, number, partial(_move_part, codec, h, before, view)
            start += size

    def take(self, payload: Tensor, have: int) -> None:
        """Works out what can be of a payload of which `have` bytes are here; begins again where it is another tensor
        than before. What is damaged, `apply` says."""
        if self._home is None:
            self._home = self._homes.take(self._numel)
        if payload is not self._payload:
            self._payload, self._done, self._error = payload, 0, None
            self._moves, self._digests = [h.moves for h in self._held], [0] * len(self._held)
            self._spans = list(self._cut(self._home.buffer))
        try:
            while not self._error and self._done < len(self._spans) and self._spans[self._done][1] <= have:
                begin, end, number, move = self._spans[self._done]
                self._digests[number] = combine(self._digests[number], move(payload[begin:end]))
                self._done += 1
        except CodecError as error:
            self._error = error

    def apply(self, payload: Tensor) -> None:
        """Moves the anchors by the whole update. Raises as `Replica.decode` does."""
        split(self._held, payload, self._choice)
        if self._moves != [h.moves for h in self._held]:
            self._payload = None  # they are others than when this began
        self.take(payload, payload.numel())
        if self._error:
            raise self._error
        home, before, self._home, self._before = self._home, self._before, None, None
        assert home is not None
        self._homes.put(self._held, home, self._digests)
        if before:
            self._homes.give(before)


def _move(codec: Codec, anchor: Tensor, out: Tensor, first: int, payload: Tensor) -> int:
    """Puts `anchor` minus the values of a payload (fp32 [n], all contiguous) into `out`; returns its digest.

    `first` is the flat index of the first value in its fragment.
    """
    numel, done, found = out.numel(), 0, 0
    if codec.kernel and native.usable(anchor, out, payload):
        blocks = numel // codec.block
        done = blocks * codec.block
        moved = codec.kernel.move(anchor, out, payload, blocks, first)
        if moved is None:
            raise codec.bad("a scale or an index is out of range")
        found = moved
    if done < numel:
        rest = out[done:]
        codec.decode(payload[codec.size(done) :], rest)
        torch.sub(anchor[done:], rest, out=rest)
        found = combine(found, digest(rest, first + done, (numel - done,), Box.whole((numel - done,))))
    return found


def _move_part(codec: Codec, held: Held, anchor: Tensor, out: Tensor, payload: Tensor) -> int:
    """The same of a piece that is not all of its tensor."""
    codec.decode_part(payload, held.spec.shape, held.box, out.view(-1))
    torch.sub(anchor, out, out=out)
    return digest(out, held.start, held.spec.shape, held.box)


def views(buffer: Tensor, held: Sequence[Held]) -> list[Tensor]:
    """The beginning of a buffer (fp32, flat) as one tensor for each piece."""
    sizes = [h.box.numel for h in held]
    parts = torch.split(buffer[: sum(sizes)], sizes) if held else ()
    return [part.view(h.box.size) for part, h in zip(parts, held, strict=True)]


def split(held: Sequence[Held], payload: Tensor, choice: Choice) -> list[Tensor]:
    """The part of each piece. Raises `CodecError` where the payload has another size."""
    sizes = [choice.of(h.spec).part_size(h.spec.shape, h.box) for h in held]
    if payload.numel() != sum(sizes):
        numel = sum(h.box.numel for h in held)
        raise CodecError(f"{choice.name}: {payload.numel()} bytes cannot be {numel} values, which take {sum(sizes)}")
    return list(torch.split(payload, sizes))
