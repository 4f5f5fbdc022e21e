"""The state of a run's rounds and membership, as a fold over its facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.division import Division, divide, first
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
from diloco.config import RoundsConfig, Weighting
from diloco.config_tokenizer import ShardsConfig
from diloco.schedule import Schedule

REMEMBERED = 16
"""Rounds of a fragment that are remembered: who contributed, and how late its last contribution came."""

MEMBERS = 1024
"""Islands that are remembered. Beyond that, those that left or were lost longest ago are forgotten, though none that
holds a lease or that a remembered round speaks of."""


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
    dismissed: bool = False
    """Its lease was ended by an operator."""
    contributions: int = 0
    dropped: int = 0

    @property
    def present(self) -> bool:
        return self.standing not in (Standing.LOST, Standing.LEFT)

    @property
    def awaited(self) -> bool:
        """Whether rounds wait for it."""
        return self.standing in (Standing.ACTIVE, Standing.SUSPECT)


@dataclass(frozen=True, kw_only=True)
class Late:
    """A contribution to an earlier round that is folded into the open one."""

    round: int
    entry: Entry
    factor: float


@dataclass(frozen=True, kw_only=True)
class Past:
    """A round that has ended."""

    round: int
    version: int
    """Of the anchor that its contributions were taken from."""
    opened_at: float | None
    """On the monotonic clock of this life of the coordinator."""
    lag_s: float
    """How long after its first contribution the last one came that has come so far; below 0 where it had none."""
    islands: Mapping[str, int]
    """Whose contribution counted in it, or in a later one, and under which epoch; 0 where it could not be used."""
    carried: tuple[str, ...] = ()
    """Those of them whose contribution came late and counts in a later one."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The open round of one fragment."""

    version: int = 0
    round: int = 0
    opened_at: float | None = None
    """When the first contribution came."""
    quorum_at: float | None = None
    lag_s: float = -1.0
    """How long after the first contribution the last one came."""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    carried: Mapping[str, Late] = field(default_factory=dict)
    """Late contributions, by "island@round"."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Islands whose contribution cannot be used, and why."""
    progress: Mapping[str, float] = field(default_factory=dict)
    """When bytes of an island's contribution last came."""
    past: tuple[Past, ...] = ()
    """The last `REMEMBERED` rounds, oldest first."""


@dataclass(frozen=True, kw_only=True)
class State:
    """All that decisions depend on."""

    config: RoundsConfig
    weights: Weighting
    schedule: Schedule
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    division: Division = field(default_factory=Division)
    phase: Phase = Phase.GATHERING
    running_since: float = 0.0
    """When the run started, or this life of the coordinator did."""
    seeded: bool = False
    seeder: str = ""
    paused: str = ""
    """Why the run is paused."""
    paused_at: float = 0.0
    stopping: str = ""
    """Why all islands are to leave."""
    last_epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()


def begin(
    config: RoundsConfig,
    weights: Weighting,
    schedule: Schedule,
    shards: ShardsConfig | None = None,
    *,
    epoch: int = 0,
) -> State:
    """The state of a run that nobody has joined; epochs begin above `epoch`."""
    rounds, shards = tuple(Round() for _ in schedule.offsets), shards or ShardsConfig()
    division = first(shards, epoch + 1)
    return State(
        config=config,
        weights=weights,
        schedule=schedule,
        shards=shards,
        division=division,
        rounds=rounds,
        last_epoch=epoch,
    )


def apply(state: State, fact: Fact, now: float) -> State:
    """The state after a fact. Total: a fact has happened, so it is never refused."""
    match fact:
        case Admitted():
            return _admit(state, fact, now)
        case Suspected():
            return _stand(state, fact.island, Standing.SUSPECT, fact.reason)
        case Trusted():
            return _stand(state, fact.island, Standing.ACTIVE)
        case Draining():
            return elect(_stand(state, fact.island, Standing.DRAINING, fact.reason))
        case Gone():
            member = replace(state.members[fact.island], ready=False, dismissed=fact.dismissed)
            return _divided(elect(_stand(with_member(state, member), fact.island, fact.standing, fact.reason)))
        case Absent():
            absent = tuple(sorted({*state.division.absent, fact.island}))
            return _divided(replace(state, division=replace(state.division, absent=absent)))
        case Released():
            division = state.division.at(fact.places).without(fact.island, fact.shards)
            return _divided(replace(state, division=division))
        case Planted():
            return replace(state, seeded=True, seeder="")
        case Moved():
            for island in fact.active:
                state = _stand(state, island, Standing.ACTIVE)
            return replace(state, phase=fact.phase, running_since=now)
        case Paused():
            return replace(state, paused=fact.reason, paused_at=now)
        case Resumed():
            shifted = tuple(_shifted(current, state.paused_at, now) for current in state.rounds)
            return replace(state, paused="", rounds=shifted)
        case Stopping():
            return replace(state, stopping=fact.reason)
        case Accepted():
            return _accept(state, fact, now)
        case Carried():
            return _carry(state, fact)
        case Dropped():
            return _drop(state, fact, now)
        case Committed():
            return _close(state, fact.fragment, fact.version)
        case Skipped() | Aborted():
            return _close(state, fact.fragment, None)


def revive(state: State, now: float) -> State:
    """The state of a coordinator that has just started again from its facts.

    Islands get a full lease to report under the epochs they hold, and open rounds a full deadline: for how long nobody
    answered is not known. A run that was being stopped goes on.
    """
    for member in state.members.values():
        state = with_member(state, replace(member, lease_until=now + state.config.lease_s))
    for fragment, current in enumerate(state.rounds):
        past = tuple(replace(p, opened_at=None) for p in current.past)
        quorum = now if current.opened_at is not None and len(current.entries) >= state.config.quorum else None
        opened = None if current.opened_at is None else now
        state = with_round(state, fragment, replace(current, past=past, opened_at=opened, quorum_at=quorum))
    return replace(state, stopping="", paused_at=now, running_since=now)


# -- one fact ---------------------------------------------------------------------------------------------------------


def _admit(state: State, fact: Admitted, now: float) -> State:
    old = state.members.get(fact.island)
    member = Member(
        id=fact.island,
        epoch=fact.epoch,
        lease_until=now + state.config.lease_s,
        ranks=fact.ranks,
        standing=Standing.ACTIVE if fact.awaited else Standing.JOINING,
        contributions=old.contributions if old else 0,
        dropped=old.dropped if old else 0,
    )
    seeder = "" if state.seeder == fact.island else state.seeder
    here = tuple(island for island in state.division.absent if island != fact.island)
    state = replace(state, last_epoch=fact.epoch, seeder=seeder, division=replace(state.division, absent=here))
    return elect(_divided(_bounded(with_member(state, member))))


def _accept(state: State, fact: Accepted, now: float) -> State:
    current, entry = state.rounds[fact.fragment], fact.entry
    entries = {**current.entries, entry.island: entry}
    quorum = now if len(entries) == state.config.quorum else current.quorum_at
    current = replace(_opened(current, now), entries=entries, quorum_at=quorum, lag_s=max(current.lag_s, fact.lag_s))
    return with_round(_at(_settled_in(state, entry.island), fact.places), fact.fragment, current)


def _carry(state: State, fact: Carried) -> State:
    current, island = state.rounds[fact.fragment], fact.entry.island
    late = Late(round=fact.round, entry=fact.entry, factor=fact.factor)
    past = tuple(
        replace(
            p,
            islands={**p.islands, island: fact.entry.epoch},
            carried=(*p.carried, island),
            lag_s=max(p.lag_s, fact.lag_s),
        )
        if p.round == fact.round
        else p
        for p in current.past
    )
    current = replace(current, carried={**current.carried, f"{island}@{fact.round}": late}, past=past)
    return with_round(_at(_settled_in(state, island), fact.places), fact.fragment, current)


def _drop(state: State, fact: Dropped, now: float) -> State:
    member, current = state.members[fact.island], state.rounds[fact.fragment]
    state = with_member(state, replace(member, dropped=member.dropped + 1))
    if fact.spoiled:
        refused = {**current.refused, fact.island: fact.reason}
        return with_round(state, fact.fragment, replace(_opened(current, now), refused=refused))
    past = tuple(replace(p, lag_s=max(p.lag_s, fact.lag_s)) if p.round == fact.round else p for p in current.past)
    return with_round(_settled_in(state, fact.island), fact.fragment, replace(current, past=past))


def _close(state: State, fragment: int, version: int | None) -> State:
    """Ends a round: at `version` where it is committed, with the anchor as it was where not."""
    current = state.rounds[fragment]
    folded = version is not None
    for entry in (*current.entries.values(), *(late.entry for late in current.carried.values())):
        member = state.members[entry.island]
        contributions, dropped = member.contributions + folded, member.dropped + (not folded)
        state = with_member(state, replace(member, contributions=contributions, dropped=dropped))
    ended = Past(
        round=current.round,
        version=current.version,
        opened_at=current.opened_at,
        lag_s=current.lag_s,
        islands=dict.fromkeys(current.refused, 0) | {i: entry.epoch for i, entry in current.entries.items()},
    )
    version = current.version if version is None else version
    past = (*current.past, ended)[-REMEMBERED:]
    return with_round(state, fragment, Round(version=version, round=current.round + 1, past=past))


# -- small changes ----------------------------------------------------------------------------------------------------


def elect(state: State) -> State:
    """Names who is to bring the first parameters, while nobody has."""
    able = sorted(m.id for m in state.members.values() if m.present and m.standing is not Standing.DRAINING)
    if state.seeded or state.seeder in able:
        return state
    return replace(state, seeder=able[0] if able else "")


def _divided(state: State) -> State:
    """The state where shards that can move have moved."""
    present = {m.id for m in state.members.values() if m.present}
    return replace(state, division=divide(state.division, state.shards, present))


def _at(state: State, places: tuple[str, ...]) -> State:
    return replace(state, division=state.division.at(places)) if places else state


def with_member(state: State, member: Member) -> State:
    """The state with a member in place of the one of its name."""
    return replace(state, members={**state.members, member.id: member})


def with_round(state: State, fragment: int, current: Round) -> State:
    """The state with another open round of a fragment."""
    rounds = list(state.rounds)
    rounds[fragment] = current
    return replace(state, rounds=tuple(rounds))


def _bounded(state: State) -> State:
    """The state without the members that are too many, by their epochs."""
    excess = len(state.members) - MEMBERS
    if excess <= 0:
        return state
    spoken_of = {late.entry.island for current in state.rounds for late in current.carried.values()}
    for current in state.rounds:
        spoken_of.update(current.entries, current.refused, *(past.islands for past in current.past))
    gone = [m for m in state.members.values() if not m.present and m.id not in spoken_of]
    forgotten = {m.id for m in sorted(gone, key=lambda m: m.epoch)[:excess]}
    return replace(state, members={name: m for name, m in state.members.items() if name not in forgotten})


def _stand(state: State, island: str, standing: Standing, reason: str = "") -> State:
    return with_member(state, replace(state.members[island], standing=standing, reason=reason))


def _settled_in(state: State, island: str) -> State:
    """Makes a newcomer that has contributed an active island."""
    member = state.members[island]
    return _stand(state, island, Standing.ACTIVE) if member.standing is Standing.JOINING else state


def _opened(current: Round, now: float) -> Round:
    return replace(current, opened_at=now) if current.opened_at is None else current


def _shifted(current: Round, paused_at: float, now: float) -> Round:
    """A round whose clocks stood still between `paused_at` and `now`."""

    def shift(at: float) -> float:
        return at + now - max(at, paused_at)

    opened_at = None if current.opened_at is None else shift(current.opened_at)
    quorum_at = None if current.quorum_at is None else shift(current.quorum_at)
    progress = {island: shift(at) for island, at in current.progress.items()}
    return replace(current, opened_at=opened_at, quorum_at=quorum_at, progress=progress)
