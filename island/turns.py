"""Whose turn it is to send: contributions go one after the other, and the first is whole while others are to come.

Streams that share a line by halves are all whole at its end. In turns the first round is decided, and its update comes,
while the next contribution goes out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRICKLE_S = 3.0
"""How long one stream waits for those before it until it sends a message all the same: the coordinator waits longer
for a contribution of which something comes (`rounds.progress_s`)."""


class Turns:
    """The streams of one process to one coordinator, in the order in which they began."""

    def __init__(self, trickle_s: float = TRICKLE_S) -> None:
        self._trickle_s = trickle_s
        self._changed = threading.Condition()
        self._streams: list[object] = []

    @contextmanager
    def stream(self) -> Iterator[tuple[Callable[[], bool], Callable[[], None]]]:
        """Yields (wait, done) of a stream that begins.

        `wait` returns whether it is the first, at once where it is; otherwise it does so once it is, or when a message
        may be sent all the same. `done` says that it has nothing more to send, as the end of the block does.
        """
        mine = object()

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: mine not in self._streams[1:], self._trickle_s)

        def done() -> None:
            with self._changed:
                self._streams = [stream for stream in self._streams if stream is not mine]
                self._changed.notify_all()

        with self._changed:
            self._streams.append(mine)
            self._changed.notify_all()
        try:
            yield wait, done
        finally:
            done()
