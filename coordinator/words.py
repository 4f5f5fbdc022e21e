"""What a run and its rounds wait for, in words: for the status, for `explain` and for the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from coordinator.facts import (
    Aborted,
    Absent,
    Admitted,
    Carried,
    Committed,
    Draining,
    Dropped,
    Fact,
    Gone,
    Moved,
    Paused,
    Phase,
    Released,
    Resumed,
    Skipped,
    Standing,
    Stopping,
    Suspected,
    Trusted,
)
from coordinator.rounds import missing_islands, soft_deadline, usual_lag
from coordinator.state import Member, State


def waiting_for(state: State, fragment: int, now: float) -> str:
    """What a fragment's open round waits for, and until when; empty before its first contribution."""
    current, config = state.rounds[fragment], state.config
    if current.opened_at is None:
        return ""
    have = len(current.entries)
    missing = ", ".join(missing_islands(state, fragment)) or "any island"
    hard = current.opened_at + config.deadline_s
    soft = soft_deadline(state, fragment)
    what = missing if soft is not None else f"{config.quorum - have} more contributions ({missing})"
    if state.paused:
        return f"{what}; its clock stands still: {state.paused}"
    left = max(0.0, (hard if soft is None else soft) - now)
    return f"{what}, for at most {left:.0f} s more"


def phase_reason(state: State) -> str:
    """What the run waits for as a whole; empty where it goes on."""
    if state.stopping:
        present = sorted(m.id for m in state.members.values() if m.present)
        return f"ending ({state.stopping}), waiting for {', '.join(present) or 'nobody'} to leave"
    if state.paused:
        return f"paused: {state.paused}"
    if state.phase is not Phase.GATHERING:
        return ""
    if not state.seeded:
        return f"waiting for first parameters from {state.seeder}" if state.seeder else "waiting for an island"
    ready = sum(m.present and m.ready for m in state.members.values())
    return f"{ready} of {state.config.start_islands} islands are ready"


def announce(fact: Fact) -> tuple[int, str] | None:
    """How a fact is told in the log: (level, words); none where it is told by others."""
    of = ""
    if isinstance(fact, Committed | Skipped | Aborted | Dropped | Carried):
        of = f"fragment {fact.fragment} round {fact.round}"
    match fact:
        case Committed():
            return logging.INFO, f"{of} commits version {fact.version}: {fact.reason}"
        case Skipped() | Aborted():
            return logging.WARNING, f"{of} is {type(fact).__name__.lower()}: {fact.reason}"
        case Dropped():
            return logging.WARNING, f"contribution of {fact.island} to {of} is dropped: {fact.reason}"
        case Carried():
            return logging.WARNING, f"contribution of {fact.entry.island} to {of} is late: {fact.reason}"
        case Admitted():
            return logging.INFO, f"island {fact.island} joins under epoch {fact.epoch}: {fact.reason}"
        case Suspected() | Draining():
            how = Standing.SUSPECT if isinstance(fact, Suspected) else Standing.DRAINING
            return logging.WARNING, f"island {fact.island} is {how}: {fact.reason}"
        case Trusted():
            return logging.INFO, f"island {fact.island} is heard again"
        case Gone():
            level = logging.INFO if fact.standing is Standing.LEFT else logging.WARNING
            return level, f"island {fact.island} is {fact.standing}: {fact.reason}"
        case Absent():
            return logging.WARNING, f"the shards of island {fact.island} are taken over: {fact.reason}"
        case Released() if fact.shards:
            return logging.INFO, f"island {fact.island} has given up {len(fact.shards)} shards"
        case Moved():
            return logging.INFO, f"the run is {fact.phase}: {fact.reason}"
        case Paused() | Resumed() | Stopping():
            return logging.WARNING, f"the run is {type(fact).__name__.lower()}: {fact.reason}"
    return None


def explain(state: State, now: float, fragment: int | None = None) -> Iterator[str]:
    """Sentences that say why the run is as it is: as a whole, by fragment (or for one of them), and by island."""
    reason = phase_reason(state)
    halted = bool(state.stopping or state.paused)
    yield f"The run is {reason}." if halted else f"The run is {state.phase}" + (f": {reason}." if reason else ".")
    kept = [f for f in range(len(state.rounds)) if f not in state.schedule.elsewhere]
    for number in kept if fragment is None else [fragment]:
        yield from _round(state, number, now)
    for member in sorted(state.members.values(), key=lambda m: m.id):
        if member.standing in (Standing.SUSPECT, Standing.DRAINING, Standing.LOST, Standing.LEFT):
            yield f"Island {member.id} is {member.standing}: {member.reason}."
    for island in state.division.absent:
        yield f"The shards of island {island} are taken over until it comes back."
    for island, shards in state.division.owes.items():
        yield f"Island {island} has yet to give up {len(shards)} shards that are another island's again."


def _round(state: State, fragment: int, now: float) -> Iterator[str]:
    current, config = state.rounds[fragment], state.config
    name = f"Fragment {fragment} is at version {current.version}"
    if current.round >= state.schedule.rounds(fragment):
        yield f"{name}; its last round has ended."
        return
    if current.opened_at is None:
        yield f"{name}; round {current.round} is open and has no contribution yet, so no deadline runs."
        return
    have = ", ".join(sorted(current.entries)) or "nobody"
    yield (
        f"{name}; round {current.round} is open for {now - current.opened_at:.0f} s: {have} contributed, the quorum is "
        f"{config.quorum}."
    )
    for island, why in sorted(current.refused.items()):
        yield f"  {island} contributes nothing to it: {why}."
    for key, late in sorted(current.carried.items()):
        yield f"  {key} came late and counts with its weight times {late.factor:g}."
    for island in missing_islands(state, fragment):
        seen, upload = _seen(state.members[island], state, now), _progress(state, fragment, island, now)
        yield f"  It waits for {island}, {seen}{upload}."
    if state.paused:
        yield f"  Its clock stands still: {state.paused}."
        return
    hard, soft = current.opened_at + config.deadline_s - now, soft_deadline(state, fragment)
    usual = usual_lag(current, config.deviations)
    if soft is not None:
        because = f"{config.grace_s:g} s of grace" + (
            f", {usual:.0f} s that the last one usually takes" if usual else ""
        )
        yield f"  It ends without them in {max(0.0, soft - now):.0f} s ({because}), in any case in {hard:.0f} s."
    else:
        yield f"  Below quorum it is skipped in {max(0.0, hard):.0f} s."


def _seen(member: Member, state: State, now: float) -> str:
    silent = now - (member.lease_until - state.config.lease_s)
    return f"{member.standing}, last heard {max(0.0, silent):.0f} s ago"


def _progress(state: State, fragment: int, island: str, now: float) -> str:
    at = state.rounds[fragment].progress.get(island)
    return f", whose upload last brought bytes {max(0.0, now - at):.0f} s ago" if at is not None else ""
