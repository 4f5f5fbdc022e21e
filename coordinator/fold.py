"""The fold: applies a committed round to the outer state of one fragment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codec import Choice, Codec
from diloco.config import OuterConfig
from diloco.digest import combine, digest
from diloco.errors import DivergedError
from diloco.fragments import Fragment
from diloco.layout import Box, Piece
from diloco.outer import nesterov

LARGEST = 1e18
"""Largest magnitude of a value that is taken; momentum adds such values up far below the range of fp32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outer:
    """The outer state of a fragment at one version. Its tensors never change: a fold makes new ones.

    All are fp32 [fragment.numel], in the fragment's flat order.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One rank's part of a contribution: its pieces, their codecs and their payload (uint8), in the same order."""

    pieces: Sequence[Piece]
    codecs: Sequence[Codec]
    payload: Tensor

    def split(self) -> Iterator[tuple[Piece, Codec, Tensor]]:
        """Yields each piece with its codec and its own bytes."""
        start = 0
        for piece, codec in zip(self.pieces, self.codecs, strict=True):
            size = codec.size(piece.box.numel)
            yield piece, codec, self.payload[start : start + size]
            start += size

    def check_finite(self) -> None:
        """Raises `DivergedError` where a value is not finite, or so large that the outer step could overflow."""
        for piece, codec, payload in self.split():
            for values, bytes_ in codec.slices(piece.box.numel):
                check_values(piece, codec, payload[bytes_], values.stop - values.start)


def check_values(piece: Piece, codec: Codec, payload: Tensor, numel: int) -> None:
    """Raises `DivergedError` where one of some values of a piece is not finite, or too large."""
    decoded = torch.empty(numel, dtype=torch.float32)
    codec.decode(payload, decoded)
    low, high = torch.aminmax(decoded)
    if not -LARGEST <= low <= high <= LARGEST:  # NaN compares false
        raise DivergedError(
            f"tensor {piece.tensor} of the contribution has values that are not finite or beyond {LARGEST:g}"
        )


Chart = dict[int, list[tuple[float, Codec, Box, Tensor]]]
"""Per tensor of a fragment: share, codec, box and payload of every piece, in the order to add them."""


def fold(
    fragment: Fragment,
    outer: Outer,
    contributions: Mapping[str, Sequence[Part]],
    shares: Mapping[str, float],
    config: OuterConfig,
    down: Choice,
) -> tuple[Outer, Tensor]:
    """Takes one outer step.

    For each tensor: the weighted mean of the contributions in the order of `shares`, the outer step, what earlier
    updates left over, the update as its codec can say it, and the anchor moved by exactly what that update decodes
    to, so that coordinator and islands keep the same bits. Buffers take the mean.

    Returns:
        The outer state at the next version, and the update's payload (uint8): what to subtract from the anchor.
    """
    anchor, momentum, residual = (x.clone() for x in (outer.anchor, outer.momentum, outer.residual))
    update = torch.empty(sum(down.of(spec).size(spec.numel) for spec in fragment.specs), dtype=torch.uint8)
    pieces = chart(contributions, shares)
    end = 0
    for tensor, spec, start in zip(fragment.tensors, fragment.specs, fragment.starts, strict=True):
        span, codec = slice(start, start + spec.numel), down.of(spec)
        gradient = weighted_mean(spec.shape, pieces[tensor])
        lr, mu = (config.lr, config.momentum) if spec.kind == "parameter" else (1.0, 0.0)
        wanted = nesterov(gradient.view(-1), momentum[span], lr=lr, mu=mu).add_(residual[span])
        begin, end = end, end + codec.size(spec.numel)
        codec.encode(wanted, update[begin:end])
        applied = gradient.view(-1)  # its values are used up
        codec.decode(update[begin:end], applied)
        residual[span] = wanted.sub_(applied)
        anchor[span].sub_(applied)
    new = Outer(
        version=outer.version + 1,
        anchor=anchor,
        momentum=momentum,
        residual=residual,
        digest=digest_of(fragment, anchor),
    )
    return new, update


def chart(contributions: Mapping[str, Sequence[Part]], shares: Mapping[str, float]) -> Chart:
    """Sorts the pieces of all contributions by tensor, keeping the order of `shares` within each."""
    by_tensor: Chart = defaultdict(list)
    for island, share in shares.items():
        for part in contributions[island]:
            for piece, codec, payload in part.split():
                by_tensor[piece.tensor].append((share, codec, piece.box, payload))
    return by_tensor


def weighted_mean(shape: tuple[int, ...], pieces: Sequence[tuple[float, Codec, Box, Tensor]]) -> Tensor:
    """The mean of one tensor over contributions: sum of share times pseudo-gradient, in the order of `pieces`.

    Returns:
        fp32 of `shape`.
    """
    mean = torch.zeros(shape, dtype=torch.float32)
    for share, codec, box, payload in pieces:
        values = torch.empty(box.numel, dtype=torch.float32)
        codec.decode(payload, values)
        mean[box.slices].add_(values.view(box.size), alpha=share)
    return mean


def digest_of(fragment: Fragment, anchor: Tensor) -> int:
    """The digest of a whole fragment from its flat values (fp32 [fragment.numel])."""
    parts = (
        digest(anchor[start : start + spec.numel], start, spec.shape, Box.whole(spec.shape))
        for spec, start in zip(fragment.specs, fragment.starts, strict=True)
    )
    return combine(*parts)
