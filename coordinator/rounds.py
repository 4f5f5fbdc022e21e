"""Rounds and membership as a pure state machine: (state, event, now) -> (state, decisions).

No clock, no I/O, no randomness: `now` is seconds on the caller's monotonic clock, and every decision carries its
reason in words. The service, the tests and the simulator drive the same function.

Decisions are facts. `step` only finds out which facts follow from an event; `apply` alone changes the state by a
fact. So the state is a fold of `apply` over the facts, and a coordinator that kept them finds itself where it was.
What a heartbeat brings (leases, readiness) is no fact: it is forgotten, and comes again.

A round of a fragment collects contributions for the fragment's next version. It ends

    committed   all active islands have contributed, or the quorum has and the grace period is over
    skipped     the deadline has passed below quorum, or no contribution can come or be used
"""

from __future__ import annotations

from collections.abc import Mapping
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
    ranks: int = 0
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
    ranks: int = 0


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

# -- facts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The island holds a lease under `epoch`."""

    island: str
    epoch: int
    reason: str
    ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class Gone:
    """The island no longer holds a lease; rounds do not wait for it."""

    island: str
    standing: Standing
    reason: str


@dataclass(frozen=True)
class Planted:
    """The first parameters are complete."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The run entered a phase; `active` islands took part in its start."""

    phase: Phase
    reason: str
    active: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A contribution counts in its round."""

    fragment: int
    round: int
    entry: Entry


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A contribution is recorded and not folded. `spoiled`: its round no longer waits for the island."""

    fragment: int
    round: int
    island: str
    reason: str
    spoiled: bool = False


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


Fact = Admitted | Gone | Planted | Moved | Accepted | Dropped | Committed | Skipped


def start(config: RoundsConfig, weights: Weighting, schedule: Schedule, *, epoch: int = 0) -> State:
    """The state of a run that nobody has joined; epochs begin above `epoch`."""
    rounds = tuple(Round() for _ in schedule.offsets)
    return State(config=config, weights=weights, schedule=schedule, rounds=rounds, last_epoch=epoch)


def step(state: State, event: Event, now: float) -> tuple[State, list[Fact]]:
    """Takes one event. Events that no correct island sends raise and change nothing.

    Args:
        state: the state before.
        event: what happened.
        now: seconds on a monotonic clock, the same for all calls.

    Returns:
        The state after, and the facts in their order. They are to be durable before anybody hears of them.

    Raises:
        StaleEpoch: the event is from an epoch that is over.
        Malformed: the event names a round that cannot be.
    """
    state, pending = _respond(state, event, now)
    facts: list[Fact] = []
    while pending:
        for fact in pending:
            state = apply(state, fact, now)
        facts += pending
        pending = _follow(state, now)
    return state, facts


def apply(state: State, fact: Fact, now: float) -> State:
    """The state after a fact. Total: a fact has happened, so it is never refused."""
    match fact:
        case Admitted():
            old = state.members.get(fact.island)
            member = Member(
                id=fact.island,
                epoch=fact.epoch,
                lease_until=now + state.config.lease_s,
                ranks=fact.ranks,
                contributions=old.contributions if old else 0,
                dropped=old.dropped if old else 0,
            )
            seeder = "" if state.seeder == fact.island else state.seeder
            return _elect(replace(_with(state, member), last_epoch=fact.epoch, seeder=seeder))
        case Gone():
            member = replace(state.members[fact.island], standing=fact.standing, ready=False, reason=fact.reason)
            return _elect(_with(state, member))
        case Planted():
            return replace(state, seeded=True, seeder="")
        case Moved():
            for island in fact.active:
                state = _with(state, replace(state.members[island], standing=Standing.ACTIVE))
            return replace(state, phase=fact.phase)
        case Accepted():
            current, entry = state.rounds[fact.fragment], fact.entry
            entries = {**current.entries, entry.island: entry}
            quorum = now if len(entries) == state.config.quorum else current.quorum_at
            current = replace(_opened(current, now), entries=entries, quorum_at=quorum)
            return _with_round(_active(state, entry.island), fact.fragment, current)
        case Dropped():
            member = state.members[fact.island]
            state = _with(state, replace(member, dropped=member.dropped + 1))
            if not fact.spoiled:
                return _active(state, fact.island)
            current = _opened(state.rounds[fact.fragment], now)
            refused = {**current.refused, fact.island: fact.reason}
            return _with_round(state, fact.fragment, replace(current, refused=refused))
        case Committed():
            return _close(state, fact.fragment, fact.version)
        case Skipped():
            return _close(state, fact.fragment, None)


def revive(state: State, now: float) -> State:
    """The state of a coordinator that has just started again from its facts.

    Islands get a full lease to report under the epochs they hold, and open rounds a full deadline: for how long nobody
    answered is not known.
    """
    for member in state.members.values():
        state = _with(state, replace(member, lease_until=now + state.config.lease_s))
    for fragment, current in enumerate(state.rounds):
        if current.opened_at is not None:
            quorum = now if len(current.entries) >= state.config.quorum else None
            state = _with_round(state, fragment, replace(current, opened_at=now, quorum_at=quorum))
    return state


# -- what follows from an event -------------------------------------------------------------------------------------


def _respond(state: State, event: Event, now: float) -> tuple[State, list[Fact]]:
    """The facts that an event brings by itself; only a heartbeat changes the state without one."""
    match event:
        case Joined():
            reason = "came back" if event.island in state.members else "new"
            return state, [Admitted(island=event.island, epoch=state.last_epoch + 1, reason=reason, ranks=event.ranks)]
        case Beat():
            member = member_of(state, event.island, event.epoch)
            lease, ready = now + state.config.lease_s, event.ready or member.ready
            state = _with(state, replace(member, lease_until=lease, ready=ready))
            return state, _follow(state, now)
        case Leaving():
            member_of(state, event.island, event.epoch)
            return state, [Gone(island=event.island, standing=Standing.LEFT, reason=event.reason)]
        case Seeded():
            return state, [Planted()]
        case Contributed():
            return state, [_judge(state, event)]
        case Spoiled():
            return state, _spoil(state, event)
        case Tick():
            return state, _expired(state, now) or _follow(state, now)


def _judge(state: State, event: Contributed) -> Accepted | Dropped:
    entry, current = event.entry, state.rounds[event.fragment]
    member_of(state, entry.island, entry.epoch)
    reason = lateness(state, event.fragment, event.round)
    if not reason and entry.island in current.entries:
        reason = f"{entry.island} has already contributed to round {event.round}"
    if reason:
        return Dropped(fragment=event.fragment, round=event.round, island=entry.island, reason=reason)
    return Accepted(fragment=event.fragment, round=event.round, entry=entry)


def _spoil(state: State, event: Spoiled) -> list[Fact]:
    member_of(state, event.island, event.epoch)
    current = state.rounds[event.fragment]
    late = lateness(state, event.fragment, event.round)
    if not late and event.island in current.refused:
        return []  # another part of the same contribution
    spoiled = not late and event.island not in current.entries
    fact = Dropped(
        fragment=event.fragment, round=event.round, island=event.island, reason=event.reason, spoiled=spoiled
    )
    return [fact]


def _expired(state: State, now: float) -> list[Fact]:
    reason = f"no heartbeat for {state.config.lease_s:g} s"
    return [
        Gone(island=m.id, standing=Standing.LOST, reason=reason)
        for m in state.members.values()
        if m.present and now >= m.lease_until
    ]


def _follow(state: State, now: float) -> list[Fact]:
    """The facts that follow from a state at a time: the run starts, rounds end, the run is done."""
    if state.phase is Phase.GATHERING and state.seeded:
        ready = tuple(sorted(m.id for m in state.members.values() if m.present and m.ready))
        if len(ready) >= state.config.start_islands:
            return [Moved(phase=Phase.RUNNING, reason=f"{len(ready)} islands are ready", active=ready)]
    verdicts: list[Fact] = [v for f in range(len(state.rounds)) if (v := _verdict(state, f, now))]
    if verdicts:
        return verdicts
    if state.phase is Phase.RUNNING and state.schedule.finished([r.round for r in state.rounds]):
        return [Moved(phase=Phase.DONE, reason="every fragment has ended its last round")]
    return []


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


def _close(state: State, fragment: int, version: int | None) -> State:
    """Ends a round: at `version` where it is committed, with the anchor as it was where not."""
    current = state.rounds[fragment]
    for island in current.entries:
        member = state.members[island]
        folded = version is not None
        contributions, dropped = member.contributions + folded, member.dropped + (not folded)
        state = _with(state, replace(member, contributions=contributions, dropped=dropped))
    version = current.version if version is None else version
    return _with_round(state, fragment, Round(version=version, round=current.round + 1))


# -- questions ----------------------------------------------------------------------------------------------------


def missing_islands(state: State, fragment: int) -> list[str]:
    """The active islands that have not contributed to a fragment's open round."""
    current = state.rounds[fragment]
    heard = {*current.entries, *current.refused}
    return sorted(m.id for m in state.members.values() if m.standing is Standing.ACTIVE and m.id not in heard)


def counts(state: State, fragment: int, round_: int, island: str) -> bool:
    """Whether an island's contribution counts in a fragment's open round."""
    current = state.rounds[fragment]
    return current.round == round_ and island in current.entries


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


def _elect(state: State) -> State:
    """Names who is to bring the first parameters, while nobody has."""
    present = sorted(m.id for m in state.members.values() if m.present)
    if state.seeded or state.seeder in present:
        return state
    return replace(state, seeder=present[0] if present else "")


def _active(state: State, island: str) -> State:
    member = state.members[island]
    return _with(state, replace(member, standing=Standing.ACTIVE)) if member.present else state


def _opened(current: Round, now: float) -> Round:
    return replace(current, opened_at=now) if current.opened_at is None else current


def _with(state: State, member: Member) -> State:
    return replace(state, members={**state.members, member.id: member})


def _with_round(state: State, fragment: int, current: Round) -> State:
    rounds = list(state.rounds)
    rounds[fragment] = current
    return replace(state, rounds=tuple(rounds))
