"""How much of a stream is under way at a time: as much as the link carries, and no queue beyond that.

What is under way and more than bandwidth times round-trip time waits in a queue somewhere, where the small requests of
heartbeats wait behind it. So the window follows the time that bytes take until the other side has them: it grows while
that stays near the least that was seen, and shrinks where it has become more than twice as long (as TCP Vegas does,
Brakmo and Peterson 1994). A moderate window may take somewhat longer, as where a disk or a busy core is what bytes wait
for: heartbeats have time for that.
"""

from __future__ import annotations

from collections import deque

FIRST_BYTES = 2**18
FIRST_LIMIT_BYTES = 2**20
LEAST_BYTES = 2**17
LEAST_CHUNK_BYTES = 2**16
CHUNKS = 4
"""Chunks of a window, so that some are on their way while others are answered."""
SLACK_S = 0.005
"""Time more than twice the least that is no sign of a queue."""
MODERATE_BYTES, MODERATE_S = 2**23, 0.1
"""Up to this size a window may have so much slack: messages of 1 MiB overlap in it with what is done to them."""
TELL_BYTES = 4 * 2**20
"""A sender hears how far its payload has come after so much at the latest, and whenever it pauses: to hear of every
message would cost both sides as much as the messages do."""
PAUSE_S = 0.001
"""A sender from whom nothing comes for so long may wait to hear."""
LOOKS = 16
"""Times in a row that the smallest window takes longer before the route is taken to have become longer: such a window
makes next to no queue of its own."""


class Window:
    """The window of one stream.

    Args:
        chunk_bytes: largest payload of a message.
        begin_bytes: the window to begin with, as of an earlier stream.
        limit_bytes: what the other side allows, as an earlier stream has heard.
    """

    def __init__(self, chunk_bytes: int, begin_bytes: int = FIRST_BYTES, limit_bytes: int = FIRST_LIMIT_BYTES) -> None:
        self.bytes = max(LEAST_BYTES, begin_bytes)
        self.limit_bytes = limit_bytes
        """What the other side allows."""
        self._chunk_bytes = chunk_bytes
        self._sent: deque[tuple[int, float]] = deque()
        self._handed = self._have = 0
        self._least_s = float("inf")
        self._shrunk_at = float("-inf")
        self._lows: list[float] = []
        """What bytes took lately under the smallest window."""
        self._full = False

    def begin(self, first_byte: int) -> None:
        """A stream begins at this byte."""
        self._handed = self._have = first_byte
        self._sent.clear()

    @property
    def chunk_bytes(self) -> int:
        """Payload of the next message."""
        share = min(self.bytes, self.limit_bytes) // CHUNKS
        return max(min(self._chunk_bytes, LEAST_CHUNK_BYTES), min(share, self._chunk_bytes))

    def admits(self, count: int) -> bool:
        """Whether so many bytes more may be under way: always where nothing is."""
        under_way = self._handed - self._have
        admitted = under_way + count <= min(self.bytes, self.limit_bytes) or not under_way
        self._full = self._full or not admitted
        return admitted

    def sent(self, count: int, now: float) -> None:
        """So many bytes are handed to the line."""
        self._handed += count
        self._sent.append((self._handed, now))

    def heard(self, have: int, limit_bytes: int, now: float) -> None:
        """The other side has the payload up to byte `have`, and allows so much beyond it."""
        took, at = have - self._have, None
        self._have, self.limit_bytes = max(have, self._have), limit_bytes or self.limit_bytes
        while self._sent and self._sent[0][0] <= have:
            at = self._sent.popleft()[1]
        if at is None:
            return
        time_s = now - at
        self._least_s = min(self._least_s, time_s)
        self._lows = [*self._lows, time_s] if self.bytes == LEAST_BYTES else []
        if len(self._lows) == LOOKS:
            self._least_s, self._lows = min(self._lows), []
        slack_s = MODERATE_S if self.bytes <= MODERATE_BYTES else SLACK_S
        if time_s <= 2 * self._least_s + slack_s:
            if self._full:
                self.bytes = max(self.bytes, min(self.bytes + took, self.limit_bytes))
        elif now - self._shrunk_at > time_s:
            self.bytes = max(LEAST_BYTES, self.bytes * 3 // 4)
            self._shrunk_at = now
        self._full = False
