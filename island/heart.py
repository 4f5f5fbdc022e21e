"""The island's heartbeat: renews the lease on a thread of its own, carries progress, hears directives."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from diloco.errors import DeadlineExceeded, DilocoError, Dismissed, RunMismatch, StaleEpoch, Unreachable
from diloco.failpoints import failpoint
from diloco.v1 import coordinator_pb2 as pb
from island.link import CONTROL_TIMEOUT_S, Link

log = logging.getLogger("diloco.island")
LEAVE_TIMEOUT_S = 2.0
LEAST_TIMEOUT_S = 2.0
RATE_WINDOW_S = 10.0
SILENT_BEATS = 2
"""Nobody answers where heartbeats have failed for longer than so many."""


class Heart:
    """Beats on rank 0 until it is stopped, or the lease has ended.

    Args:
        link: the connection; its control channel is used.
        identity: run, island and epoch.
        every_s: a third of the lease. Beats come so often, and at least once a second; one that is not answered within
            that time (2 to 20 s) has failed.
        clock: seconds on a monotonic clock.
    """

    def __init__(
        self, link: Link, identity: pb.HeartbeatRequest, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._every_s, self._clock = link, min(every_s, 1.0), clock
        self._timeout_s = min(CONTROL_TIMEOUT_S, max(LEAST_TIMEOUT_S, every_s))
        self._beat = pb.HeartbeatRequest(loss=math.nan, outer_loss=math.nan)
        self._beat.MergeFrom(identity)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._fatal: DilocoError | None = None
        self._silent_since: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self.directive = self.directive_reason = ""
        """What the coordinator last asked of the island, and why."""
        self.ready = False
        """Whether the anchors are loaded."""
        self.rounds: tuple[int, ...] = ()
        """Rounds of each fragment whose end the island knows of."""
        self.told: tuple[int, tuple[str, ...]] = 0, ()
        """Serial and shards of what the island is to read, as last heard; (0, ()) where nobody says it."""
        self._given_up: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def report(self, **progress: float) -> None:
        """Sets fields of the next beats: step, tokens, loss, outer_loss, mfu, bytes_up, bytes_down."""
        with self._lock:
            for name, value in progress.items():
                setattr(self._beat, name, value)
            now = self._clock()
            self._recent.append((now, self._beat.tokens))
            while now - self._recent[0][0] > RATE_WINDOW_S and len(self._recent) > 2:
                self._recent.popleft()
            (begin, first), (end, last) = self._recent[0], self._recent[-1]
            self._beat.tokens_per_second = (last - first) / (end - begin) if end > begin else 0.0

    def obey(self, serial: int, given_up: Sequence[str] = ()) -> None:
        """The island reads what it is told under `serial`, and gave up shards at places that go out until answered."""
        with self._lock:
            self._beat.serial = serial
            self._given_up = tuple(given_up) or self._given_up

    @property
    def tokens_per_second(self) -> float:
        """Recent rate."""
        return self._beat.tokens_per_second

    @property
    def silent_s(self) -> float:
        """Seconds since the first beat that nobody has answered began; 0 where the last one was answered."""
        since = self._silent_since
        return 0.0 if since is None else self._clock() - since

    @property
    def silent(self) -> bool:
        """Whether nobody answers: beats have failed for a while."""
        return self.silent_s > SILENT_BEATS * self._every_s

    @property
    def fatal(self) -> DilocoError | None:
        """What ended the lease, if it has ended."""
        return self._fatal

    def poll(self) -> pb.RunState:
        """Beats now; returns how the run stands.

        Raises:
            Unreachable, DeadlineExceeded: nobody answered.
            StaleEpoch, Dismissed, RunMismatch: the lease has ended, or the coordinator knows less than the island.
        """
        if self._fatal:
            raise self._fatal
        begun, known = self._clock(), self.rounds
        message = self._message()
        try:
            state = self._link.heartbeat(message, self._timeout_s)
        except (Unreachable, DeadlineExceeded):
            if self._silent_since is None:
                self._silent_since = begun
            raise
        except DilocoError as error:
            self._silent_since = None
            if isinstance(error, StaleEpoch | Dismissed | RunMismatch):
                self._fatal = error
            raise
        self._silent_since = None
        self.directive_reason, self.directive = state.directive_reason, state.directive
        with self._lock:
            if self._given_up == tuple(message.places):
                self._given_up = ()
            if state.serial > self.told[0] and state.serial != message.serial:
                self.told = state.serial, tuple(state.shards)
        if any(f.round < known[f.fragment] for f in state.fragments[: len(known)]):
            self._fatal = StaleEpoch("the coordinator is back at an earlier state of the run")
            raise self._fatal
        return state

    def end(self) -> None:
        """Stops beating, and says nothing: the lease is over, or another heart takes it over."""
        self._stopped.set()

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
        failpoint("leave-begun")
        with contextlib.suppress(DilocoError):
            self._link.leave(request, LEAVE_TIMEOUT_S)

    def _message(self) -> pb.HeartbeatRequest:
        with self._lock:
            message = pb.HeartbeatRequest()
            message.CopyFrom(self._beat)
            message.places.extend(self._given_up)
        message.ready = self.ready
        return message

    def _run(self) -> None:
        reason = ""
        while not self._stopped.wait(self._every_s) and not self._fatal:
            try:
                self.poll()
                reason = ""
            except DilocoError as error:
                if error.message != reason and not self._stopped.is_set():
                    log.warning("heartbeat: %s", error.message)
                    reason = error.message
