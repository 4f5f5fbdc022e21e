"""Looks at the values of a contribution while its bytes come, so that nothing is left to look at once all are here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy
import torch

from coordinator.fold import check_values
from diloco.codec import Codec
from diloco.errors import CodecError, DivergedError
from diloco.layout import Piece

AT_ONCE = 2**16
"""Values that are looked at together."""
ELSEWHERE = -1
"""Stands for the next byte once one came that did not go on: as where an upload is gone on with."""


class Scan:
    """The values of one part, from its first byte on, some at a time.

    Args:
        pieces, codecs: of the part, in the order of its payload.
    """

    def __init__(self, pieces: Sequence[Piece], codecs: Sequence[Codec]) -> None:
        self._spans = self._cut(pieces, codecs)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._span = next(self._spans, None)
        self._filled = self._seen = 0
        self._error: DivergedError | CodecError | None = None

    @staticmethod
    def _cut(pieces: Sequence[Piece], codecs: Sequence[Codec]) -> Iterator[tuple[Piece, Codec, int, int]]:
        for piece, codec in zip(pieces, codecs, strict=True):
            for values, bytes_ in codec.slices(piece.box.numel, AT_ONCE):
                yield piece, codec, values.stop - values.start, bytes_.stop - bytes_.start

    def feed(self, offset: int, fresh: memoryview) -> None:
        """Takes the bytes of the payload from `offset`. Once some do not go on where it stands it sees no more."""
        self._seen = self._seen + len(fresh) if offset == self._seen else ELSEWHERE
        if self._seen == ELSEWHERE:
            return
        while len(fresh) and self._span and not self._error:
            size = self._span[3]
            if self._bytes.numel() < size:
                self._bytes = torch.empty(size, dtype=torch.uint8)
            taken = fresh[: size - self._filled]
            numpy.copyto(self._bytes.numpy()[self._filled :][: len(taken)], numpy.frombuffer(taken, numpy.uint8))
            self._filled, fresh = self._filled + len(taken), fresh[len(taken) :]
            if self._filled == size:
                self._look()

    def _look(self) -> None:
        assert self._span
        piece, codec, numel, size = self._span
        try:
            check_values(piece, codec, self._bytes[:size], numel)
        except (DivergedError, CodecError) as error:
            self._error = error
        self._span, self._filled = next(self._spans, None), 0

    def result(self) -> bool:
        """Whether all values were seen, and are good. Raises what `Part.check_finite` raises where one is not."""
        if self._seen == ELSEWHERE:
            return False
        if self._error:
            raise self._error
        return self._span is None
