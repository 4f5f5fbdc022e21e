"""What goes over the simulated network: requests, replies, and the streams of chunks that belong to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from diloco.errors import DeadlineExceeded, DilocoError
from diloco.feedback import Counted
from diloco.layout import Layout, Piece
from wan.sim_world import Gate, Work

IDLE_S = 15.0
"""A stream that brings nothing for so long is ended: its line is dead."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an island sends: a method's name and its arguments."""

    method: str
    island: str
    epoch: int = 0
    rank: int = 0
    fragment: int = 0
    round: int = 0
    version: int = 0
    pieces: tuple[Piece, ...] = ()
    codec: tuple[int, int] = (0, 0)
    layout: Layout | None = None
    seed: bool = False
    reason: str = ""
    digest: str = ""
    """Of a push's payload: for whoever watches. The coordinator sees it at the end of the stream."""
    total_bytes: int = 0
    first_byte: int = 0
    messages: tuple[bytes, ...] = ()
    """The chunks that follow a push, and its end."""
    tokens: int = 0
    steps: int = 0
    step: int = 0
    ready: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the coordinator answers."""

    epoch: int = 0
    phase: str = ""
    step: int = 0
    positions: tuple[tuple[int, int, int], ...] = ()
    """(version, rounds ended, digest) of each fragment; empty before the first parameters."""
    seeder: str = ""
    contributed: tuple[Counted, ...] = ()
    """What became of the island's contributions to each fragment that moves."""
    directive: str = ""
    dropped: str = ""
    late: str = ""
    duplicate: bool = False
    settled: bool = False
    """A `resume` that says that nothing more is to be sent."""
    have_bytes: int = 0
    have_digest: str = ""
    outcome: str = ""
    version: int = 0
    round: int = 0
    digest: int = 0
    total_bytes: int = 0
    first_byte: int = 0
    messages: tuple[bytes, ...] = ()
    """The chunks that follow a header."""


Answer: TypeAlias = "Callable[[Reply | DilocoError | bytes], None]"


@dataclass(kw_only=True)
class Served:
    """A request that the coordinator is at."""

    request: Request
    moved_at: float
    """When it came, or last brought anything."""


class Line:
    """What still comes of a stream, in its order."""

    def __init__(self) -> None:
        self._waiting: deque[bytes | None] = deque()
        self._gate = Gate()

    def put(self, message: bytes | None) -> None:
        """A message has arrived; None is the end."""
        self._waiting.append(message)
        self._gate.open()

    def take(self) -> Work[bytes | None]:
        """The next message, or None at the end. Raises `DeadlineExceeded` where nothing comes any more."""
        if not self._waiting:
            yield (self._gate, IDLE_S)
        if not self._waiting:
            raise DeadlineExceeded("the stream brought nothing for a while: ask Resume, and go on there")
        return self._waiting.popleft()
