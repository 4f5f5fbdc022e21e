"""Looks at the values of a contribution while its bytes come, so that nothing is left to look at once all are here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from coordinator.fold import check_values
from diloco.codec import Codec
from diloco.errors import CodecError, DivergedError
from diloco.layout import Piece

AT_ONCE = 2**16
"""Values that are looked at together, at least."""


class Scan:
    """The values of one part, from its first byte on.

    Args:
        pieces, codecs: of the part, in the order of its payload.
    """

    def __init__(self, pieces: Sequence[Piece], codecs: Sequence[Codec]) -> None:
        self._pieces, self._codecs = pieces, codecs
        self._begin()

    def _begin(self) -> None:
        self._seen = 0
        self._spans = self._cut()
        self._span = next(self._spans, None)
        self._error: DivergedError | CodecError | None = None

    def _cut(self) -> Iterator[tuple[Piece, Codec, int, int]]:
        """(piece, codec, values, last byte) of what is looked at no less than together."""
        start = 0
        for piece, codec in zip(self._pieces, self._codecs, strict=True):
            for values, bytes_ in codec.slices(piece.box.numel, AT_ONCE):
                yield piece, codec, values.stop - values.start, start + bytes_.stop
            start += codec.size(piece.box.numel)

    def look(self, payload: Tensor, have: int) -> None:
        """Looks at what has come since, of a payload (uint8) that is here up to byte `have`; where that is less than
        it was, what comes after it may be other bytes, and all are looked at again."""
        if have < self._seen:
            self._begin()
        while self._span and not self._error and self._span[3] <= have:
            piece, codec, numel, end = self._span
            self._span = next(self._spans, None)
            while self._span and self._span[0] is piece and self._span[3] <= have:
                numel, end = numel + self._span[2], self._span[3]
                self._span = next(self._spans, None)
            try:
                check_values(piece, codec, payload[end - codec.size(numel) : end], numel)
            except (DivergedError, CodecError) as error:
                self._error = error
        self._seen = have

    def result(self) -> bool:
        """Whether all values were seen, and are good. Raises what `Part.check_finite` raises where one is not."""
        if self._error:
            raise self._error
        return self._span is None
