"""Rounds and membership as a pure state machine: (state, event, now) -> (state, facts).

No clock, no I/O, no randomness: `now` is seconds on the caller's monotonic clock, and every decision carries its
reason in words. The service, the tests and the simulator drive the same function.

Decisions are facts. `step` only finds out which facts follow from an event; `state.apply` alone changes the state by a
fact. So the state is a fold over the facts, and a coordinator that kept them finds itself where it was. What a
heartbeat or the progress of an upload brings is no fact: it is forgotten, and comes again.

A round of a fragment collects contributions for the fragment's next version. It ends

    committed   all active islands have contributed, or the quorum has and the soft deadline has passed
    skipped     the hard deadline has passed below quorum, or no contribution can come or be used
    aborted     the run is stopped
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from coordinator.facts import (
    Aborted,
    Absent,
    Accepted,
    Admitted,
    Carried,
    Committed,
    Draining,
    Dropped,
    Entry,
    Fact,
    Gone,
    Moved,
    Paused,
    Phase,
    Planted,
    Released,
    Resumed,
    Skipped,
    Standing,
    Stopping,
    Suspected,
    Trusted,
)
from coordinator.state import Member, Past, Round, State, apply, with_member, with_round
from diloco.errors import Dismissed, Malformed, Refused, StaleEpoch
from diloco.merge import shares, weight

OBSERVED = 3
"""Rounds whose arrivals must have been seen before the soft deadline follows them."""
LEAST_DEVIATION = 0.05
"""The deviation of arrivals is taken as at least this share of their median, for islands as steady as a clock."""


# -- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Joined:
    """An island entered, or entered again."""

    island: str
    ranks: int = 0
    resumes: bool = False
    """It may go on exactly where it stood."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """An island is alive."""

    island: str
    epoch: int
    ready: bool
    serial: int = 0
    """Of what it reads now (`Division.serials`)."""
    places: tuple[str, ...] = ()
    """Where it stood in shards that it has given up."""


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
class Progressed:
    """Bytes of an island's contribution have come."""

    fragment: int
    round: int
    island: str


@dataclass(frozen=True, kw_only=True)
class Contributed:
    """A contribution is complete and durable. `places`: where its island stood in its shards."""

    fragment: int
    round: int
    entry: Entry
    places: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spoiled:
    """An island's contribution cannot be used, or will not come."""

    fragment: int
    round: int
    island: str
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Pause:
    """An operator pauses the run."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Resume:
    """An operator lets a paused run go on."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Drain:
    """An operator asks an island to leave."""

    island: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Kick:
    """An operator ends an island's lease."""

    island: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stop:
    """An operator asks all islands to leave."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Joined | Beat | Leaving | Seeded | Progressed | Contributed | Spoiled | Pause | Resume | Drain | Kick | Stop | Tick
)  # fmt: skip


def step(state: State, event: Event, now: float) -> tuple[State, list[Fact]]:
    """Takes one event. Events that no correct island or operator sends raise and change nothing.

    Args:
        state: the state before.
        event: what happened.
        now: seconds on a monotonic clock, the same for all calls.

    Returns:
        The state after, and the facts in their order. They are to be durable before anybody hears of them.

    Raises:
        StaleEpoch, Dismissed: the event is from an epoch that is over.
        Malformed: the event names a round or an island that cannot be.
        Refused: the run is being stopped and takes no more islands.
    """
    state, found = _respond(state, event, now)
    facts: list[Fact] = []
    while True:
        for fact in found:
            state = apply(state, fact, now)
        facts += found
        found = _follow(state, now)
        if not found:
            return state, facts


# -- what an event brings by itself -----------------------------------------------------------------------------------


def _respond(state: State, event: Event, now: float) -> tuple[State, list[Fact]]:
    """The state that an event leaves without any fact, and the facts that it brings."""
    match event:
        case Joined():
            return state, [_admit(state, event)]
        case Beat():
            return _beat(state, event, now)
        case Leaving():
            member_of(state, event.island, event.epoch)
            return state, [Gone(island=event.island, standing=Standing.LEFT, reason=event.reason)]
        case Seeded():
            return state, [Planted()]
        case Progressed():
            return _progress(state, event, now), []
        case Contributed():
            return state, [_judge(state, event, now)]
        case Spoiled():
            return state, _spoil(state, event)
        case Pause():
            return state, [] if state.paused else [Paused(reason=event.reason)]
        case Resume():
            return state, [Resumed(reason=event.reason)] if state.paused else []
        case Drain():
            island = _present(state, event.island)
            known = island.standing is Standing.DRAINING
            return state, [] if known else [Draining(island=event.island, reason=event.reason)]
        case Kick():
            _present(state, event.island)
            return state, [Gone(island=event.island, standing=Standing.LEFT, reason=event.reason, dismissed=True)]
        case Stop():
            return state, [] if state.stopping else [Stopping(reason=event.reason)]
        case Tick():
            return state, _silent(state, now)


def _admit(state: State, event: Joined) -> Admitted:
    if state.stopping:
        raise Refused(f"the run is being stopped ({state.stopping}): join when its coordinator is started again")
    old = state.members.get(event.island)
    return Admitted(
        island=event.island,
        epoch=state.last_epoch + 1,
        reason="came back" if old else "new",
        ranks=event.ranks,
        awaited=event.resumes and old is not None and old.awaited,
    )


def _beat(state: State, event: Beat, now: float) -> tuple[State, list[Fact]]:
    member = member_of(state, event.island, event.epoch)
    lease, ready = now + state.config.lease_s, event.ready or member.ready
    state = with_member(state, replace(member, lease_until=lease, ready=ready))
    found: list[Fact] = [Trusted(island=event.island)] if member.standing is Standing.SUSPECT else []
    division, island = state.division, event.island
    owed = division.owes.get(island, ()) if event.serial == division.serials.get(island) else ()
    places = division.news(event.places)
    return state, found + ([Released(island=island, shards=owed, places=places)] if owed or places else [])


def _progress(state: State, event: Progressed, now: float) -> State:
    if event.fragment >= len(state.rounds) or state.rounds[event.fragment].round != event.round:
        return state
    current = state.rounds[event.fragment]
    return with_round(state, event.fragment, replace(current, progress={**current.progress, event.island: now}))


def _judge(state: State, event: Contributed, now: float) -> Accepted | Carried | Dropped:
    entry, fragment, places = event.entry, event.fragment, state.division.news(event.places)
    member_of(state, entry.island, entry.epoch)
    current = state.rounds[fragment]
    reason = reception(state, fragment, event.round, entry.island)
    if reason or event.round == current.round:
        opened = current.opened_at if event.round == current.round else opened_at(state, fragment, event.round)
        lag = 0.0 if opened is None else now - opened
        if not reason:
            return Accepted(fragment=fragment, round=event.round, entry=entry, lag_s=lag, places=places)
        return Dropped(fragment=fragment, round=event.round, island=entry.island, reason=reason, lag_s=lag)
    past = _past(state, fragment, event.round)
    assert past is not None
    behind = current.version - past.version
    factor = state.config.late_discount**behind if state.config.late == "discount" else 1.0
    why = f"round {event.round} had ended; it counts in round {current.round} with its weight times {factor:g}"
    return Carried(
        fragment=fragment,
        round=event.round,
        into=current.round,
        entry=entry,
        factor=factor,
        reason=why,
        lag_s=0.0 if past.opened_at is None else now - past.opened_at,
        places=places,
    )


def _spoil(state: State, event: Spoiled) -> list[Fact]:
    member_of(state, event.island, event.epoch)
    current = state.rounds[event.fragment]
    late = bool(lateness(state, event.fragment, event.round))
    if not late and event.island in current.refused:
        return []  # another part of the same contribution
    spoiled = not late and event.island not in current.entries
    fact = Dropped(
        fragment=event.fragment, round=event.round, island=event.island, reason=event.reason, spoiled=spoiled
    )
    return [fact]


def _silent(state: State, now: float) -> list[Fact]:
    """Islands that have not been heard for half of a lease, and for a whole one."""
    lease = state.config.lease_s
    found: list[Fact] = []
    for member in state.members.values():
        if member.present and now >= member.lease_until:
            reason = f"no heartbeat for {lease:g} s"
            found.append(Gone(island=member.id, standing=Standing.LOST, reason=reason))
        elif member.standing is Standing.ACTIVE and now >= member.lease_until - lease / 2:
            found.append(Suspected(island=member.id, reason=f"no heartbeat for {lease / 2:g} s"))
    return found + _away(state, now)


def _away(state: State, now: float) -> list[Fact]:
    """Islands that have been away for so long that others take over their shards."""
    bound, found = state.shards.take_over_after_s, list[Fact]()
    if not bound or state.phase is not Phase.RUNNING:
        return found
    for island in sorted(set(state.shards.weights) - set(state.division.absent)):
        member = state.members.get(island)
        if member is None and now >= state.running_since + bound:
            found.append(Absent(island=island, reason=f"it has not come within {bound:g} s"))
        elif member and not member.present and (member.dismissed or now >= member.lease_until + bound):
            why = member.reason if member.dismissed else f"its lease has been over for {bound:g} s"
            found.append(Absent(island=island, reason=why))
    return found


# -- what follows from a state ----------------------------------------------------------------------------------------


def _follow(state: State, now: float) -> list[Fact]:
    """The facts that follow from a state at a time: the run starts, rounds end, the run is done."""
    if state.phase is Phase.GATHERING and state.seeded and not state.stopping:
        able = (m for m in state.members.values() if m.present and m.standing is not Standing.DRAINING)
        ready = tuple(sorted(m.id for m in able if m.ready))
        if len(ready) >= state.config.start_islands:
            return [Moved(phase=Phase.RUNNING, reason=f"{len(ready)} islands are ready", active=ready)]
    verdicts: list[Fact] = [v for f in range(len(state.rounds)) if (v := _verdict(state, f, now))]
    if verdicts:
        return verdicts
    if state.phase is Phase.RUNNING and state.schedule.finished([r.round for r in state.rounds]):
        return [Moved(phase=Phase.DONE, reason="every fragment has ended its last round")]
    return []


def _verdict(state: State, fragment: int, now: float) -> Committed | Skipped | Aborted | None:
    """Whether the open round of a fragment ends now, how, and why."""
    current, config = state.rounds[fragment], state.config
    if current.opened_at is None:
        return None
    missing = missing_islands(state, fragment)
    have = len(current.entries)
    hard = not state.paused and now >= current.opened_at + config.deadline_s
    if have >= config.quorum:
        soft = soft_deadline(state, fragment)
        if not missing:
            why = f"all {have} active islands have contributed"
        elif hard:
            why = f"{have} contributed within the deadline of {config.deadline_s:g} s"
        elif soft is not None and now >= soft and not state.paused:
            after = f"{soft - current.opened_at:g} s of the first"
            why = f"{have} contributed and {', '.join(missing)} did not within {after}"
        else:
            return None
        return _commit(state, fragment, why)
    if state.stopping and not any(m.present for m in state.members.values()):
        why = f"all islands have left a run that is being stopped: {state.stopping}"
        return Aborted(fragment=fragment, round=current.round, reason=why)
    if not have and not missing:
        why = "; ".join(f"{island}: {reason}" for island, reason in sorted(current.refused.items()))
    elif hard:
        why = f"{have} of the quorum of {config.quorum} contributed within the deadline of {config.deadline_s:g} s"
    else:
        return None
    return Skipped(fragment=fragment, round=current.round, reason=why)


def _commit(state: State, fragment: int, why: str) -> Committed:
    current = state.rounds[fragment]
    return Committed(
        fragment=fragment,
        round=current.round,
        version=current.version + 1,
        shares=shares(weights(state, fragment)),
        reason=why,
    )


def weights(state: State, fragment: int) -> dict[str, float]:
    """What each contribution to a fragment's open round weighs: by island, and by "island@round" where it came late."""
    current, period = state.rounds[fragment], state.schedule.every - state.schedule.overlap

    def of(entry: Entry) -> int:
        return weight(state.weights, tokens=entry.tokens, steps=entry.steps, period=period)

    late = {key: of(late.entry) * late.factor for key, late in current.carried.items()}
    return {island: of(entry) for island, entry in current.entries.items()} | late


def soft_deadline(state: State, fragment: int) -> float | None:
    """When a round that has its quorum ends without those that are missing, as things stand; none below quorum.

    The grace period is over, the slowest contribution of recent rounds would have come (their median plus some
    deviations), and no upload to the round makes progress. Never later than the hard deadline.
    """
    current, config = state.rounds[fragment], state.config
    if current.opened_at is None or current.quorum_at is None:
        return None
    soft = max(current.quorum_at + config.grace_s, current.opened_at + usual_lag(current, config.deviations))
    for island in missing_islands(state, fragment):
        if island in current.progress:
            soft = max(soft, current.progress[island] + config.progress_s)
    return min(soft, current.opened_at + config.deadline_s)


def usual_lag(current: Round, deviations: float) -> float:
    """Seconds from a round's first contribution within which its last one usually comes; 0 where that is not known."""
    lags = [past.lag_s for past in current.past if past.lag_s >= 0 and len(past.islands) > 1]
    if len(lags) < OBSERVED or not deviations:
        return 0.0
    middle = median(lags)
    deviation = max(median(abs(lag - middle) for lag in lags), LEAST_DEVIATION * middle)
    return middle + deviations * deviation


# -- questions ----------------------------------------------------------------------------------------------------


def missing_islands(state: State, fragment: int) -> list[str]:
    """The islands that a fragment's open round waits for."""
    current = state.rounds[fragment]
    heard = {*current.entries, *current.refused}
    return sorted(m.id for m in state.members.values() if m.awaited and m.id not in heard)


def counted(state: State, fragment: int, round_: int, island: str) -> int | None:
    """The epoch under which an island's contribution to a round counts, in that round or late in a later one.

    0 where it came and could not be used, none where none has come.
    """
    current = state.rounds[fragment]
    if round_ == current.round:
        return current.entries[island].epoch if island in current.entries else None
    past = _past(state, fragment, round_)
    return past.islands.get(island) if past else None


def contributed(state: State, fragment: int, island: str) -> tuple[int, list[int]]:
    """The first round of a fragment that is still known of, and those from there on to which an island's contribution
    counts: in the open one, in one that was committed, or late in another."""
    current = state.rounds[fragment]
    versions = [*(after.version for after in current.past[1:]), current.version][: len(current.past)]
    found = [
        past.round
        for past, after in zip(current.past, versions, strict=True)
        if island in past.carried or (past.islands.get(island) and after > past.version)
    ]
    found += [current.round] if island in current.entries else []
    return current.past[0].round if current.past else current.round, found


def base_version(state: State, fragment: int, round_: int) -> int | None:
    """The version that contributions to a round are taken from; none where that is no longer known."""
    current = state.rounds[fragment]
    past = _past(state, fragment, round_)
    return current.version if round_ == current.round else past.version if past else None


def opened_at(state: State, fragment: int, round_: int) -> float | None:
    """When a round that has ended was opened, as far as that is known."""
    past = _past(state, fragment, round_)
    return past.opened_at if past else None


def reception(state: State, fragment: int, round_: int, island: str) -> str:
    """Says in words why an island's contribution to a round would be dropped; empty where it is taken.

    Raises:
        Malformed: the round cannot be open yet, or never will be.
    """
    late, current, config = lateness(state, fragment, round_), state.rounds[fragment], state.config
    if counted(state, fragment, round_, island) is not None:
        return f"{island} has already contributed to round {round_}"
    if not late or config.late == "drop":
        return late
    if current.round >= state.schedule.rounds(fragment):
        return f"{late}, and no round of the fragment follows"
    if current.round - round_ > config.late_rounds or _past(state, fragment, round_) is None:
        return f"{late}: more than {config.late_rounds} rounds behind"
    return ""


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


def member_of(state: State, island: str, epoch: int) -> Member:
    """The member that holds a lease under `epoch`. Raises `StaleEpoch` where it holds none, `Dismissed` where an
    operator has ended it."""
    member = state.members.get(island)
    if member is None:
        raise StaleEpoch(f"island '{island}' has not joined this coordinator: join again", island=island)
    if member.epoch == epoch and member.dismissed:
        raise Dismissed(f"an operator has ended the lease of island '{island}': {member.reason}", island=island)
    if member.epoch != epoch or not member.present:
        why = member.reason or f"a newer lease has epoch {member.epoch}"
        raise StaleEpoch(f"island '{island}' holds no lease under epoch {epoch} ({why}): join again", island=island)
    return member


def directive(state: State, island: str) -> tuple[str, str]:
    """What an island is to do ("", "pause" or "leave"), and why."""
    member = state.members[island]
    if state.stopping:
        return "leave", state.stopping
    if member.standing is Standing.DRAINING:
        return "leave", member.reason
    return ("pause", state.paused) if state.paused else ("", "")


def _present(state: State, island: str) -> Member:
    member = state.members.get(island)
    if member is None or not member.present:
        present = ", ".join(sorted(m.id for m in state.members.values() if m.present)) or "none"
        raise Malformed(f"island '{island}' holds no lease in this run; those that do: {present}", island=island)
    return member


def _past(state: State, fragment: int, round_: int) -> Past | None:
    return next((p for p in state.rounds[fragment].past if p.round == round_), None)
