"""Rounds and membership as a pure state machine: (state, event, now) -> (state, decisions).

No clock, no I/O, no randomness: `now` is seconds on the caller's monotonic clock, and every decision carries its
reason in words. The service, the tests and the simulator drive the same function.

A round of a fragment collects contributions for the fragment's next version. It ends

    committed   all active islands have contributed, or the quorum has and the grace period is over
    skipped     the deadline has passed below quorum, or no contribution can come or be used
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from diloco.config import RoundsConfig, Weighting
from diloco.errors import Malformed, StaleEpoch
from diloco.merge import shares
from diloco.schedule import Schedule


class Standing(StrEnum):
    """Where an island stands in the run."""

    JOINING = "JOINING"
    ACTIVE = "ACTIVE"
    LOST = "LOST"
    LEFT = "LEFT"


class Phase(StrEnum):
    """Where the run stands."""

    GATHERING = "gathering"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One island's membership: a lease under an epoch."""

    id: str
    epoch: int
    lease_until: float
    standing: Standing = Standing.JOINING
    ready: bool = False
    """Anchors are loaded."""
    reason: str = ""
    contributions: int = 0
    dropped: int = 0

    @property
    def present(self) -> bool:
        return self.standing in (Standing.JOINING, Standing.ACTIVE)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A complete contribution of one island to a round."""

    island: str
    epoch: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """The open round of one fragment."""

    version: int = 0
    round: int = 0
    opened_at: float | None = None
    """When the first contribution came."""
    quorum_at: float | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    """Islands whose contribution cannot be used, and why."""


@dataclass(frozen=True, kw_only=True)
class State:
    """All that decisions depend on."""

    config: RoundsConfig
    weights: Weighting
    schedule: Schedule
    phase: Phase = Phase.GATHERING
    seeded: bool = False
    seeder: str = ""
    last_epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()


# -- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Joined:
    """An island entered, or entered again."""

    island: str


@dataclass(frozen=True, kw_only=True)
class Beat:
    """An island is alive."""

    island: str
    epoch: int
    ready: bool


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """An island leaves on purpose."""

    island: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class Seeded:
    """The first parameters are complete."""


@dataclass(frozen=True, kw_only=True)
class Contributed:
    """A contribution is complete and durable."""

    fragment: int
    round: int
    entry: Entry


@dataclass(frozen=True, kw_only=True)
class Spoiled:
    """An island's contribution cannot be used."""

    fragment: int
    round: int
    island: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Joined | Beat | Leaving | Seeded | Contributed | Spoiled | Tick

# -- decisions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The island holds a lease under `epoch`."""

    island: str
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Gone:
    """The island no longer holds a lease; rounds do not wait for it."""

    island: str
    standing: Standing
    reason: str


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The run entered a phase."""

    phase: Phase
    reason: str


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The round ends; its contributions are folded into `version` with these shares, in this order."""

    fragment: int
    round: int
    version: int
    shares: Mapping[str, float]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """The round ends; the anchor stays."""

    fragment: int
    round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A contribution is recorded and not folded."""

    fragment: int
    round: int
    island: str
    reason: str


Decision = Admitted | Gone | Moved | Committed | Skipped | Dropped
Step = tuple[State, list[Decision]]


def start(config: RoundsConfig, weights: Weighting, schedule: Schedule) -> State:
    """The state of a run that nobody has joined."""
    return State(config=config, weights=weights, schedule=schedule, rounds=tuple(Round() for _ in schedule.offsets))


def resume(state: State, *, epoch: int, versions: Sequence[int] = (), ended: Sequence[int] = ()) -> State:
    """The state of a run that is taken up: epochs start above `epoch`, fragments stand where a snapshot left them."""
    if not versions:
        return replace(state, last_epoch=epoch)
    rounds = tuple(Round(version=v, round=r) for v, r in zip(versions, ended, strict=True))
    return replace(state, last_epoch=epoch, seeded=True, rounds=rounds[: len(state.rounds)])


def step(state: State, event: Event, now: float) -> Step:
    """Takes one event. Events that no correct island sends raise and change nothing.

    Args:
        state: the state before.
        event: what happened.
        now: seconds on a monotonic clock, the same for all calls.

    Returns:
        The state after, and the decisions in the order they were taken.

    Raises:
        StaleEpoch: the event is from an epoch that is over.
        Malformed: the event names a round that cannot be.
    """
    match event:
        case Joined():
            state, decisions = _join(state, event, now)
        case Beat():
            member = member_of(state, event.island, event.epoch)
            lease = now + state.config.lease_s
            state = _with(state, replace(member, lease_until=lease, ready=event.ready or member.ready))
            decisions = []
        case Leaving():
            member = member_of(state, event.island, event.epoch)
            state, decisions = _gone(state, member, Standing.LEFT, event.reason)
        case Seeded():
            state, decisions = replace(state, seeded=True, seeder=""), []
        case Contributed():
            state, decisions = _contribute(state, event, now)
        case Spoiled():
            state, decisions = _spoil(state, event, now)
        case Tick():
            state, decisions = _expire(state, now)
    return _settle(state, decisions, now)


# -- handlers -----------------------------------------------------------------------------------------------------


def _join(state: State, event: Joined, now: float) -> Step:
    epoch = state.last_epoch + 1
    known = event.island in state.members
    member = Member(id=event.island, epoch=epoch, lease_until=now + state.config.lease_s)
    if known:
        old = state.members[event.island]
        member = replace(member, contributions=old.contributions, dropped=old.dropped)
    state = replace(_with(state, member), last_epoch=epoch)
    if state.seeder == event.island:
        state = replace(state, seeder="")
    return state, [Admitted(island=event.island, epoch=epoch, reason="came back" if known else "new")]


def _contribute(state: State, event: Contributed, now: float) -> Step:
    entry, current = event.entry, state.rounds[event.fragment]
    member = replace(member_of(state, entry.island, entry.epoch), standing=Standing.ACTIVE)
    state = _with(state, member)
    reason = lateness(state, event.fragment, event.round)
    if not reason and entry.island in current.entries:
        reason = f"{entry.island} has already contributed to round {event.round}"
    if reason:
        dropped = Dropped(fragment=event.fragment, round=event.round, island=entry.island, reason=reason)
        return _with(state, replace(member, dropped=member.dropped + 1)), [dropped]
    entries = {**current.entries, entry.island: entry}
    quorum = now if len(entries) == state.config.quorum else current.quorum_at
    opened = now if current.opened_at is None else current.opened_at
    current = replace(current, entries=entries, quorum_at=quorum, opened_at=opened)
    return _with_round(state, event.fragment, current), []


def _spoil(state: State, event: Spoiled, now: float) -> Step:
    member, current = member_of(state, event.island, event.epoch), state.rounds[event.fragment]
    late = lateness(state, event.fragment, event.round)
    if not late and event.island in current.refused:
        return state, []  # another part of the same contribution
    state = _with(state, replace(member, dropped=member.dropped + 1))
    decision = Dropped(fragment=event.fragment, round=event.round, island=event.island, reason=event.reason)
    if not late and event.island not in current.entries:
        opened = now if current.opened_at is None else current.opened_at
        refused = {**current.refused, event.island: event.reason}
        state = _with_round(state, event.fragment, replace(current, refused=refused, opened_at=opened))
    return state, [decision]


def _expire(state: State, now: float) -> Step:
    decisions: list[Decision] = []
    for member in state.members.values():
        if member.present and now >= member.lease_until:
            reason = f"no heartbeat for {state.config.lease_s:g} s"
            state, gone = _gone(state, member, Standing.LOST, reason)
            decisions += gone
    return state, decisions


def _gone(state: State, member: Member, standing: Standing, reason: str) -> Step:
    state = _with(state, replace(member, standing=standing, ready=False, reason=reason))
    if state.seeder == member.id:
        state = replace(state, seeder="")
    return state, [Gone(island=member.id, standing=standing, reason=reason)]


# -- what follows from any event ------------------------------------------------------------------------------------


def _settle(state: State, decisions: list[Decision], now: float) -> Step:
    if not state.seeded and not state.seeder:
        present = sorted(m.id for m in state.members.values() if m.present)
        state = replace(state, seeder=present[0] if present else "")
    if state.phase is Phase.GATHERING and state.seeded:
        ready = [m for m in state.members.values() if m.present and m.ready]
        if len(ready) >= state.config.start_islands:
            for member in ready:
                state = _with(state, replace(member, standing=Standing.ACTIVE))
            state = replace(state, phase=Phase.RUNNING)
            decisions.append(Moved(phase=Phase.RUNNING, reason=f"{len(ready)} islands are ready"))
    for fragment in range(len(state.rounds)):
        verdict = _verdict(state, fragment, now)
        if verdict:
            state = _close(state, verdict)
            decisions.append(verdict)
    if state.phase is Phase.RUNNING and state.schedule.finished([r.round for r in state.rounds]):
        state = replace(state, phase=Phase.DONE)
        decisions.append(Moved(phase=Phase.DONE, reason="every fragment has ended its last round"))
    return state, decisions


def _verdict(state: State, fragment: int, now: float) -> Committed | Skipped | None:
    """Whether the open round of a fragment ends now, how, and why."""
    current = state.rounds[fragment]
    if current.opened_at is None:
        return None
    missing = missing_islands(state, fragment)
    have, quorum = len(current.entries), state.config.quorum
    overdue = now >= current.opened_at + state.config.deadline_s
    if have >= quorum:
        if not missing:
            why = f"all {have} active islands have contributed"
        elif current.quorum_at is not None and now >= current.quorum_at + state.config.grace_s:
            why = f"{have} contributed and {', '.join(missing)} did not within {state.config.grace_s:g} s of grace"
        elif overdue:
            why = f"{have} contributed within the deadline of {state.config.deadline_s:g} s"
        else:
            return None
        tokens = {island: entry.tokens for island, entry in current.entries.items()}
        return Committed(
            fragment=fragment,
            round=current.round,
            version=current.version + 1,
            shares=shares(tokens, state.weights),
            reason=why,
        )
    if not have and not missing:
        why = "; ".join(f"{island}: {reason}" for island, reason in sorted(current.refused.items()))
    elif overdue:
        why = f"{have} of the quorum of {quorum} contributed within the deadline of {state.config.deadline_s:g} s"
    else:
        return None
    return Skipped(fragment=fragment, round=current.round, reason=why)


def _close(state: State, verdict: Committed | Skipped) -> State:
    current = state.rounds[verdict.fragment]
    version = verdict.version if isinstance(verdict, Committed) else current.version
    for island in current.entries:
        member = state.members[island]
        folded = isinstance(verdict, Committed)
        state = _with(
            state,
            replace(member, contributions=member.contributions + folded, dropped=member.dropped + (not folded)),
        )
    return _with_round(state, verdict.fragment, Round(version=version, round=current.round + 1))


# -- questions ----------------------------------------------------------------------------------------------------


def missing_islands(state: State, fragment: int) -> list[str]:
    """The active islands that have not contributed to a fragment's open round."""
    current = state.rounds[fragment]
    heard = {*current.entries, *current.refused}
    return sorted(m.id for m in state.members.values() if m.standing is Standing.ACTIVE and m.id not in heard)


def lateness(state: State, fragment: int, round_: int) -> str:
    """Says in words that a contribution comes after its round has ended; empty where the round is open.

    Raises:
        Malformed: the round cannot be open yet, or never will be.
    """
    current, last = state.rounds[fragment].round, state.schedule.rounds(fragment) - 1
    what = f"round {round_} of fragment {fragment} is not open"
    if state.phase is Phase.GATHERING:
        raise Malformed(f"{what}: the run has not started")
    if round_ > last:
        raise Malformed(f"{what}: the fragment's last is round {last}")
    if round_ > current:
        raise Malformed(f"{what}; round {current} is")
    return f"late: round {round_} has ended, round {current} is open" if round_ < current else ""


def waiting_for(state: State, fragment: int, now: float) -> str:
    """Says in words what a fragment's open round waits for, and until when; empty before its first contribution."""
    current = state.rounds[fragment]
    if current.opened_at is None:
        return ""
    have, quorum = len(current.entries), state.config.quorum
    missing = ", ".join(missing_islands(state, fragment)) or "any island"
    if have >= quorum and current.quorum_at is not None:
        left = min(current.quorum_at + state.config.grace_s, current.opened_at + state.config.deadline_s) - now
        return f"{missing}, for at most {max(0.0, left):.0f} s more"
    left = current.opened_at + state.config.deadline_s - now
    return f"{quorum - have} more contributions ({missing}), for at most {max(0.0, left):.0f} s more"


def phase_reason(state: State) -> str:
    """Says in words what the run's phase waits for."""
    if state.phase is not Phase.GATHERING:
        return ""
    if not state.seeded:
        return f"waiting for first parameters from {state.seeder}" if state.seeder else "waiting for an island"
    ready = sum(m.present and m.ready for m in state.members.values())
    return f"{ready} of {state.config.start_islands} islands are ready"


def member_of(state: State, island: str, epoch: int) -> Member:
    """The member that holds a lease under `epoch`. Raises `StaleEpoch` where it holds none."""
    member = state.members.get(island)
    if member is None:
        raise StaleEpoch(f"island '{island}' has not joined this coordinator: join again", island=island)
    if member.epoch != epoch or not member.present:
        why = member.reason or f"a newer lease has epoch {member.epoch}"
        raise StaleEpoch(f"island '{island}' holds no lease under epoch {epoch} ({why}): join again", island=island)
    return member


def _with(state: State, member: Member) -> State:
    return replace(state, members={**state.members, member.id: member})


def _with_round(state: State, fragment: int, current: Round) -> State:
    rounds = list(state.rounds)
    rounds[fragment] = current
    return replace(state, rounds=tuple(rounds))
