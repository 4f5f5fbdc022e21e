"""The island's membership in a run. Rank 0 speaks to the coordinator, and every rank hears the same. All collective."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from diloco.config import load_run
from diloco.errors import DeadlineExceeded, DilocoError, Unreachable
from diloco.failpoints import failpoint
from diloco.v1 import coordinator_pb2 as pb
from island.group import Group
from island.heart import LEAVE_TIMEOUT_S, Heart
from island.link import Link

log = logging.getLogger("diloco.island")
POLL_S = 0.1
KNOCK_S = 1.0
LOOK_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long an island waits, in seconds."""

    start_s: float
    """For first parameters, and for the run to start."""
    reconnect_s: float
    """For a coordinator that has answered before."""


class Lease:
    """A lease that can be taken, lost, taken again and given back.

    Args:
        group: the island's ranks.
        link: the connection.
        request: what the island says of itself to join.
        limits: bounds on waiting.
    """

    def __init__(self, group: Group, link: Link, request: pb.JoinRequest, limits: Limits) -> None:
        self._group, self._link, self._request, self._limits = group, link, request, limits
        self._door = ThreadPoolExecutor(max_workers=1, thread_name_prefix="join")
        self._entering: Future[pb.JoinReply] | None = None
        self.heart: Heart | None = None
        """Beats on rank 0 while there is a lease."""

    def enter(self) -> pb.JoinReply:
        """Joins; waits within the link's patience for a coordinator that is not there yet."""
        return pb.JoinReply.FromString(self._group.from_first(lambda: self._enter(patient=True)))

    def enter_again(self) -> pb.JoinReply:
        """Joins under a new epoch; tries again while nobody answers, within the bound on that."""
        if self.heart:
            self.heart.end()
        deadline = time.monotonic() + self._limits.reconnect_s
        while True:
            late = self._late(deadline)
            try:
                return pb.JoinReply.FromString(self._group.from_first(lambda: self._enter(patient=False)))
            except (Unreachable, DeadlineExceeded) as error:
                if late:
                    raise
                log.info("joining again: %s", error.message)
                time.sleep(KNOCK_S)

    def _enter(self, *, patient: bool) -> bytes:
        """Joins as rank 0, on a thread: so that a join can still be taken back whose answer was not waited for."""
        self.heart = None
        self._entering = self._door.submit(self._link.join, self._request, patient=patient)
        reply = self._entering.result()
        failpoint("join-answered")
        lease_s = load_run(reply.config_toml, "the coordinator").value.rounds.lease_s
        self.heart = Heart(self._link, self.identity(reply), lease_s / 3)
        return reply.SerializeToString()

    def identity(self, reply: pb.JoinReply) -> pb.HeartbeatRequest:
        """Run, island and epoch of a lease."""
        return pb.HeartbeatRequest(run_id=reply.run_id, island_id=self._request.island_id, epoch=reply.epoch)

    def until(self, good: Callable[[pb.RunState], bool], help_out: Callable[[pb.RunState], None]) -> pb.RunState:
        """Polls how the run stands until that is `good`, and has the island `help_out` with every other answer.

        Returns early where the island is told to leave.

        Raises:
            DeadlineExceeded, Unreachable: it did not come to that within the bound on it.
        """
        deadline, told = time.monotonic() + self._limits.start_s, ""
        while True:
            late = self._late(deadline)
            try:
                state = pb.RunState.FromString(self._group.from_first(self._poll))
                reason = state.reason
            except (Unreachable, DeadlineExceeded) as error:
                if late:
                    raise
                state, reason = pb.RunState(), error.message
            if state.phase and (good(state) or state.directive == "leave"):
                return state
            if late:
                raise DeadlineExceeded(f"the run did not start within {self._limits.start_s:g} s: {reason}")
            help_out(state)
            if reason != told and self.heart:
                log.info("waiting: %s", reason)
                told = reason
            time.sleep(POLL_S)

    def look(self) -> bytes:
        """Beats as rank 0 until somebody answers, for `LOOK_S`; raises what has ended the lease."""
        deadline = time.monotonic() + LOOK_S
        while time.monotonic() < deadline:
            try:
                return self._poll()
            except (Unreachable, DeadlineExceeded):
                time.sleep(POLL_S)
        return b""

    def _poll(self) -> bytes:
        assert self.heart is not None
        return self.heart.poll().SerializeToString()

    def _late(self, deadline: float) -> bool:
        """Whether a deadline has passed by the clock of rank 0, which decides for all ranks."""
        return bool(self._group.numbers([time.monotonic() > deadline])[0][0])

    def trouble(self) -> DilocoError | None:
        """What this rank knows that has ended the lease. Not collective."""
        if self.heart and self.heart.fatal:
            return self.heart.fatal
        if self.heart and self.heart.silent_s > self._limits.reconnect_s:
            bound = self._limits.reconnect_s
            return Unreachable(f"no coordinator has answered at {self._link.address} for {bound:g} s")
        return None

    def leave(self, reason: str) -> None:
        """Gives the lease back, so that no round waits for the island. Not collective."""
        self._door.shutdown(wait=False)
        if self.heart:
            self.heart.stop(reason)
        elif self._entering:
            self._take_back(self._entering, reason)

    def _take_back(self, entering: Future[pb.JoinReply], reason: str) -> None:
        """Leaves where a join was interrupted that the coordinator has answered by now."""
        wait([entering], LEAVE_TIMEOUT_S)
        if not entering.done() or entering.cancelled() or entering.exception():
            return
        reply, island = entering.result(), self._request.island_id
        request = pb.LeaveRequest(run_id=reply.run_id, island_id=island, epoch=reply.epoch, reason=reason)
        with contextlib.suppress(DilocoError):
            self._link.leave(request, LEAVE_TIMEOUT_S)
