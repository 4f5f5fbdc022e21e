"""The operator's methods: how the run stands, why, and what is to become of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from coordinator import rounds
from coordinator.answers import Context, answers
from coordinator.facts import Standing
from coordinator.health import Health
from coordinator.run import Run
from coordinator.views import status
from coordinator.words import explain
from diloco.errors import Malformed
from diloco.framing import PROTOCOL
from diloco.v1 import coordinator_pb2 as pb

LONGEST_REASON = 200
"""Characters of a reason that someone gives."""


class Desk:
    """The operator's methods of `diloco.v1.Coordinator` over one run; `origin` says which host a gRPC peer is."""

    def __init__(self, run: Run, health: Health, origin: Callable[[str], str]) -> None:
        self._run, self._health, self._origin = run, health, origin
        self._verbs: dict[str, Callable[[str, str], Awaitable[str]]] = {
            "pause": self._pause,
            "resume": self._resume,
            "drain": self._drain,
            "kick": self._kick,
            "snapshot": self._snapshot,
            "stop": self._stop,
        }

    def methods(self) -> dict[str, tuple[Any, Any]]:
        """(method, kind of its request) by name."""
        return {
            "Status": (self.status, pb.StatusRequest),
            "Explain": (self.explain, pb.ExplainRequest),
            "Command": (self.command, pb.CommandRequest),
        }

    @answers
    async def status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        """Everything an operator sees."""
        reply = status(self._run)
        reply.wall_s, reply.protocol = time.time(), PROTOCOL
        return reply

    # -- why ------------------------------------------------------------------------------------------------------

    @answers
    async def explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainReply:
        """Why the run is as it is, in words."""
        run, moving = self._run, len(self._run.state.rounds)
        if not request.all and request.fragment >= moving:
            raise Malformed(f"there is no fragment {request.fragment} with rounds; the run has {moving}, from 0")
        fragment = None if request.all else request.fragment
        if fragment is not None:
            run.here(fragment)
        return pb.ExplainReply(lines=[*self._remarks(), *explain(run.state, run.clock(), fragment)])

    def _remarks(self) -> Iterator[str]:
        """What the coordinator knows beyond its state."""
        run, which = self._run, self._run.config.run
        for reason in self._health.reasons:
            yield f"The coordinator is not ready: {reason}."
        if which.coordinator_count > 1:
            others = (f"{i} at {a}" for i, a in enumerate(which.coordinators) if i != which.coordinator_index)
            yield f"This is coordinator {which.coordinator_index} of {which.coordinator_count}; {', '.join(others)}."
        for fragment, (current, ended) in enumerate(zip(run.state.rounds, run.ended, strict=False)):
            if current.round > ended:
                yield f"Rounds of fragment {fragment} that are decided and not folded yet: {current.round - ended}."
        if run.totals.unsaved:
            every = run.config.snapshot.every_rounds
            yield f"Commits that are in no snapshot yet: {run.totals.unsaved}; one is taken every {every}."

    # -- commands ---------------------------------------------------------------------------------------------------

    @answers
    async def command(self, request: pb.CommandRequest, context: Context) -> pb.CommandReply:
        """Does what an operator asks; says what was done, or that it was so already."""
        verb = self._verbs.get(request.verb)
        if verb is None:
            raise Malformed(f"there is no command {request.verb[:64]!r}; there are {', '.join(self._verbs)}")
        said = plain(request.reason)
        reason = f"by an operator at {self._origin(context.peer())}" + (f": {said}" if said else "")
        return pb.CommandReply(message=await verb(request.island_id, reason))

    async def _pause(self, _: str, reason: str) -> str:
        before = self._run.state.paused
        if before:
            return f"the run is paused already, {before}"
        await self._run.take(rounds.Pause(reason=reason))
        return "the run is paused: no round ends by a deadline, and islands hold at their next step"

    async def _resume(self, _: str, reason: str) -> str:
        before = self._run.state.paused
        if not before:
            return "the run is not paused"
        await self._run.take(rounds.Resume(reason=reason))
        return f"the run goes on; it was paused {before}"

    async def _drain(self, island: str, reason: str) -> str:
        state = self._run.state
        if island == "*":
            named = sorted(m.id for m in state.members.values() if m.present and m.standing is not Standing.DRAINING)
        else:
            member = state.members.get(island)
            if member and member.standing is Standing.DRAINING:
                return f"island {island} is leaving already: {member.reason}"
            named = [island]
        for name in named:
            await self._run.take(rounds.Drain(island=name, reason=f"asked to leave {reason}"))
        return f"asked to leave: {', '.join(named)}" if named else "there is no island to ask to leave"

    async def _kick(self, island: str, reason: str) -> str:
        await self._run.take(rounds.Kick(island=island, reason=f"kicked {reason}"))
        return f"the lease of island {island} has ended; no round waits for it"

    async def _snapshot(self, _: str, reason: str) -> str:
        versions = await self._run.snapshot()
        return f"a snapshot is taken, of versions {', '.join(map(str, versions))}"

    async def _stop(self, _: str, reason: str) -> str:
        before = self._run.state.stopping
        if before:
            return f"the run is ending already: {before}"
        await self._run.take(rounds.Stop(reason=f"stopped {reason}"))
        present = sorted(m.id for m in self._run.state.members.values() if m.present)
        return f"the coordinator ends once these have left: {', '.join(present)}" if present else "the coordinator ends"


def plain(reason: str) -> str:
    """A reason that someone gives, fit for a line of a log. Raises `Malformed` where it is too long."""
    if len(reason) > LONGEST_REASON:
        raise Malformed(f"a reason has at most {LONGEST_REASON} characters, not {len(reason)}")
    return "".join(c for c in " ".join(reason.split()) if c.isprintable())
