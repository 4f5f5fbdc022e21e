"""Looks at the values of a contribution while its bytes come, so that nothing is left to look at once all are here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import numpy.typing
import torch

from coordinator.fold import check_values
from diloco.codec import Codec
from diloco.errors import CodecError, DivergedError
from diloco.layout import Piece

AT_ONCE = 2**17
"""Values that are looked at together, at least."""
Coded = numpy.typing.NDArray[numpy.uint8]
"""Coded values. Slices of arrays, unlike those of tensors, leave the GIL to whoever has it."""


class _Span(NamedTuple):
    """Values that are looked at no less than together, and where their bytes are in the payload."""

    piece: Piece
    codec: Codec
    numel: int
    begin: int
    end: int


class Scan:
    """The values of one part, looked at in the memory in which its bytes come.

    Args:
        pieces, codecs: of the part, in the order of its payload.
    """

    def __init__(self, pieces: Sequence[Piece], codecs: Sequence[Codec]) -> None:
        self._spans = _cut(pieces, codecs)
        self._span = next(self._spans, None)
        self._come = 0
        self._rest: Coded = numpy.empty(0, numpy.uint8)
        """What has come of a span that is not here yet."""
        self._error: DivergedError | CodecError | None = None
        self._torn = False

    def look(self, fresh: memoryview, offset: int) -> None:
        """Looks at bytes that have come, from byte `offset` of the payload on. Where they do not go on where the last
        ones ended, as after a cut line, not all values are seen."""
        self._torn = self._torn or offset != self._come
        first, self._come = offset - len(self._rest), offset + len(fresh)
        if self._torn or self._error:
            return
        come: Coded = numpy.frombuffer(fresh, numpy.uint8)
        come = come if come.flags.writeable else come.copy()  # torch takes no other
        if len(self._rest) and self._span:  # the span that began before
            missing = self._span.end - offset
            self._rest, come = numpy.concatenate((self._rest, come[:missing])), come[missing:]
            if self._span.end > self._come:
                return
            self._check(self._span.piece, self._span.codec, self._rest, self._span.numel)
            first, self._span = self._span.end, next(self._spans, None)
        while self._span and self._span.end <= self._come:
            piece, codec, numel, begin, end = self._span
            self._span = next(self._spans, None)
            while self._span and self._span.piece is piece and self._span.end <= self._come:
                numel, end = numel + self._span.numel, self._span.end
                self._span = next(self._spans, None)
            self._check(piece, codec, come[begin - first : end - first], numel)
            come, first = come[end - first :], end
        self._rest = come.copy()

    def _check(self, piece: Piece, codec: Codec, coded: Coded, numel: int) -> None:
        try:
            check_values(piece, codec, torch.from_numpy(coded), numel, threads=1)
        except (DivergedError, CodecError) as error:
            self._error = self._error or error

    def result(self) -> bool:
        """Whether all values were seen, and are good. Raises what `Part.check_finite` raises where one is not."""
        if self._torn:
            return False
        if self._error:
            raise self._error
        return self._span is None


def _cut(pieces: Sequence[Piece], codecs: Sequence[Codec]) -> Iterator[_Span]:
    start = 0
    for piece, codec in zip(pieces, codecs, strict=True):
        for values, bytes_ in codec.slices(piece.box.numel, AT_ONCE):
            yield _Span(piece, codec, values.stop - values.start, start + bytes_.start, start + bytes_.stop)
        start += codec.size(piece.box.numel)
