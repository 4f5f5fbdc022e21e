"""Ranks of an island as threads of one process: a group whose collectives meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from diloco.errors import DilocoError
from island.group import Group

T = TypeVar("T")
PATIENCE_S = 60.0


class Meeting:
    """Where ranks exchange values."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.values: list[Any] = [None] * size


class Threads(Group):
    """One rank's side of a group of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.values)

    def _exchange(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        found = list(self._meeting.values)
        self._meeting.barrier.wait()
        return found

    def numbers(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers."""
        return self._exchange([int(value) for value in values])

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        return self._exchange(value)

    def raise_first(self, error: DilocoError | None) -> None:
        """Raises the first rank's error on all."""
        for found in self._exchange(error):
            if found:
                raise found


def on_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """What work returns on each rank; raises the first rank's error."""
    meeting = Meeting(size)
    results, errors = dict[int, T](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(meeting, rank))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [results[rank] for rank in range(size)]
