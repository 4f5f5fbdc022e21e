"""The fold: applies a committed round to the outer state of one fragment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.codec import Choice, Codec
from diloco.config import OuterConfig
from diloco.digest import combine, digest
from diloco.errors import DivergedError
from diloco.fragments import Fragment
from diloco.layout import Box, Piece
from diloco.merge import Addend
from diloco.outer import Optimizer, OuterState, step

LARGEST = 1e18
"""Largest magnitude of a value that is taken; momentum adds such values up far below the range of fp32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outer:
    """The outer state of a fragment at one version.

    Its tensors are fp32 [fragment.numel], in the fragment's flat order. A fold moves them on to the next version in
    place: of an earlier one only version and digest are still true.
    """

    version: int
    anchor: Tensor
    momentum: Tensor
    residual: Tensor
    """What the down-link codec dropped, to be sent with the next update."""
    digest: int

    @classmethod
    def first(cls, fragment: Fragment, anchor: Tensor) -> Outer:
        """Version 0: the first parameters and nothing else."""
        zeros = torch.zeros_like(anchor)
        return cls(
            version=0,
            anchor=anchor,
            momentum=zeros,
            residual=torch.zeros_like(anchor),
            digest=digest_of(fragment, anchor),
        )

    def copy(self) -> Outer:
        """The same state in tensors of its own."""
        return replace(self, anchor=self.anchor.clone(), momentum=self.momentum.clone(), residual=self.residual.clone())


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One rank's part of a contribution: its pieces, their codecs and their payload (uint8), in the same order."""

    pieces: Sequence[Piece]
    codecs: Sequence[Codec]
    payload: Tensor
    checked: bool = False
    """Whether `check_finite` has found it good in this process."""

    def split(self) -> Iterator[tuple[Piece, Codec, Tensor]]:
        """Yields each piece with its codec and its own bytes."""
        start = 0
        for piece, codec in zip(self.pieces, self.codecs, strict=True):
            size = codec.size(piece.box.numel)
            yield piece, codec, self.payload[start : start + size]
            start += size

    def verify(self) -> None:
        """Raises `CodecError` unless the payload decodes."""
        for piece, codec, payload in self.split():
            codec.verify(payload, piece.box.numel)

    def check_finite(self) -> None:
        """Raises `DivergedError` where a value is not finite, or so large that the outer step could overflow."""
        for piece, codec, payload in self.split():
            check_values(piece, codec, payload, piece.box.numel)


def check_values(piece: Piece, codec: Codec, payload: Tensor, numel: int, threads: int = 0) -> None:
    """Raises `DivergedError` where one of some values of a piece is not finite, or too large. On `threads` threads; 0
    for as many as torch computes with."""
    if not codec.largest(payload, numel, threads) <= LARGEST:  # NaN compares false
        raise DivergedError(
            f"tensor {piece.tensor} of the contribution has values that are not finite or beyond {LARGEST:g}"
        )


def fold(
    fragment: Fragment,
    outer: Outer,
    contributions: Mapping[str, Sequence[Part]],
    shares: Mapping[str, float],
    config: OuterConfig,
    down: Choice,
    room: Tensor | None = None,
    made: Callable[[Tensor, int], None] = lambda update, until: None,
) -> tuple[Outer, Tensor]:
    """Takes one outer step in place: of each tensor `diloco.outer.step`, with contributions in the order of `shares`.

    Buffers take the mean. Beside the update it takes a few blocks of memory.

    Args:
        fragment: of the outer state.
        outer: what to move.
        contributions: parts by island.
        shares: of the islands that count, in the order to add them.
        config: the outer optimizer.
        down: codecs of the update.
        room: where to put the update, if it fits: uint8. Memory that is new costs page faults.
        made: is told after every tensor the update's payload, and up to which byte it is made.

    Returns:
        The outer state at the next version, in the tensors of `outer`; and the update's payload (uint8): what to
        subtract from the anchor.

    Raises:
        CodecError: a payload is damaged. Nothing has changed, unless that happened after it was checked: then the
            outer state is lost, and is to be taken from a snapshot.
    """
    for island in shares:
        for part in contributions[island]:
            if not part.checked:
                part.verify()
    pieces = chart(contributions, shares)
    state = OuterState(outer.anchor, outer.momentum, outer.residual)
    size = update_size(fragment, down)
    update = torch.empty(size, dtype=torch.uint8) if room is None or room.numel() < size else room[:size]
    end, found = 0, 0
    for tensor, spec, start in zip(fragment.tensors, fragment.specs, fragment.starts, strict=True):
        codec = down.of(spec)
        begin, end = end, end + codec.size(spec.numel)
        here = OuterState(*(x[start : start + spec.numel] for x in state))
        optimizer = Optimizer(config.lr, config.momentum) if spec.kind == "parameter" else MEAN
        found = combine(found, step(spec.shape, start, pieces[tensor], here, update[begin:end], codec, optimizer))
        made(update, end)
    return replace(outer, version=outer.version + 1, digest=found), update


def update_size(fragment: Fragment, down: Choice) -> int:
    """Bytes of an update of a fragment."""
    return sum(down.of(spec).size(spec.numel) for spec in fragment.specs)


MEAN = Optimizer(lr=1.0, mu=0.0)
"""Takes the mean for the step."""


def chart(contributions: Mapping[str, Sequence[Part]], shares: Mapping[str, float]) -> dict[int, list[Addend]]:
    """Sorts the pieces of all contributions by tensor, keeping the order of `shares` within each."""
    by_tensor: dict[int, list[Addend]] = defaultdict(list)
    for island, share in shares.items():
        for part in contributions[island]:
            for piece, codec, payload in part.split():
                by_tensor[piece.tensor].append(Addend(share, codec, piece.box, payload))
    return by_tensor


def digest_of(fragment: Fragment, anchor: Tensor) -> int:
    """The digest of a whole fragment from its flat values (fp32 [fragment.numel])."""
    parts = (
        digest(anchor[start : start + spec.numel], start, spec.shape, Box.whole(spec.shape))
        for spec, start in zip(fragment.specs, fragment.starts, strict=True)
    )
    return combine(*parts)
