"""The island's heartbeat: renews the lease on a thread of its own and carries progress."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque

from diloco.errors import DilocoError, StaleEpoch
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link

log = logging.getLogger("diloco.island")
LEAVE_TIMEOUT_S = 2.0
RATE_WINDOW_S = 10.0


class Heart:
    """Beats on rank 0 until `stop`.

    Args:
        link: the connection; its control channel is used.
        identity: run, island and epoch.
        every_s: seconds between beats.
    """

    def __init__(self, link: Link, identity: pb.HeartbeatRequest, every_s: float) -> None:
        self._link, self._every_s = link, min(every_s, 1.0)
        self._beat = identity
        self._beat.loss = self._beat.outer_loss = math.nan
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._fatal: DilocoError | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self.ready = False
        """Whether the anchors are loaded."""
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def report(self, **progress: float) -> None:
        """Sets fields of the next beats: step, tokens, loss, outer_loss, bytes_up, bytes_down."""
        with self._lock:
            for name, value in progress.items():
                setattr(self._beat, name, value)
            now = time.monotonic()
            self._recent.append((now, self._beat.tokens))
            while now - self._recent[0][0] > RATE_WINDOW_S and len(self._recent) > 2:
                self._recent.popleft()
            (begin, first), (end, last) = self._recent[0], self._recent[-1]
            self._beat.tokens_per_second = (last - first) / (end - begin) if end > begin else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Recent rate."""
        return self._beat.tokens_per_second

    def poll(self) -> pb.RunState:
        """Beats now; returns how the run stands. Tries again while nobody answers, within the link's patience."""
        self.check()
        return self._link.heartbeat(self._message(), patient=True)

    def check(self) -> None:
        """Raises what ended the lease, if it has ended."""
        if self._fatal:
            raise self._fatal

    def stop(self, reason: str) -> None:
        """Stops beating and leaves the run. A coordinator that does not answer finds out by the lease."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(timeout=LEAVE_TIMEOUT_S)
        message = self._message()
        request = pb.LeaveRequest(
            run_id=message.run_id,
            island_id=message.island_id,
            epoch=message.epoch,
            reason=reason,
            last=message,
        )
        with contextlib.suppress(DilocoError):
            self._link.leave(request, LEAVE_TIMEOUT_S)

    def _message(self) -> pb.HeartbeatRequest:
        with self._lock:
            message = pb.HeartbeatRequest()
            message.CopyFrom(self._beat)
        message.ready = self.ready
        return message

    def _run(self) -> None:
        reason = ""
        while not self._stopped.wait(self._every_s):
            try:
                self._link.heartbeat(self._message())
                reason = ""
            except StaleEpoch as error:
                self._fatal = error
                return
            except DilocoError as error:
                if error.message != reason:
                    log.warning("heartbeat: %s", error.message)
                    reason = error.message
