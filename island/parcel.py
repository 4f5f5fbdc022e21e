"""A payload that is sent while it is still being made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

WAIT_S = 60.0
"""How long a reader waits before it looks again whether the payload is over."""


class Parcel:
    """The pieces of a payload (uint8) as one thread makes them, for others to read from the first, any number of times.

    Its last piece is followed by its end only once whoever makes it says so: nothing is whole before.
    """

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._changed = threading.Condition()
        self._over = False
        self._error: BaseException | None = None

    def make(self, pieces: Callable[[], Iterable[Tensor]]) -> None:
        """Takes pieces as they are made, until the end. Raises what making them raises; so do readers."""
        try:
            for piece in pieces():
                with self._changed:
                    self._pieces.append(piece)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def read(self) -> Iterator[Tensor]:
        """All pieces, each as soon as it is there."""
        number = 0
        while True:
            with self._changed:
                while number == len(self._pieces) and not self._over:
                    self._changed.wait(WAIT_S)
                if self._error:
                    raise self._error
                if number == len(self._pieces):
                    return
            yield self._pieces[number]
            number += 1
