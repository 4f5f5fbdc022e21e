"""Facts: what has happened in a run and is kept. Each has a kind and a JSON body in the ledger.

The kinds and bodies are a format: later code reads ledgers that this code wrote, so fields are only ever added, with
a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from diloco.errors import InputError


class Standing(StrEnum):
    """Where an island stands in the run."""

    JOINING = "JOINING"
    """It has a lease; rounds do not wait for it before its first contribution."""
    ACTIVE = "ACTIVE"
    SUSPECT = "SUSPECT"
    """Half of its lease has passed without a heartbeat; rounds still wait for it."""
    LOST = "LOST"
    """Its lease ran out."""
    DRAINING = "DRAINING"
    """It was asked to leave; rounds do not wait for it, and what it still sends counts."""
    LEFT = "LEFT"


class Phase(StrEnum):
    """Where the run stands."""

    GATHERING = "gathering"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A complete contribution of one island."""

    island: str
    epoch: int
    tokens: int
    steps: int = 0
    """Inner steps trained since the anchor was adopted; 0 where that is not known."""


# -- membership -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The island holds a lease under `epoch`."""

    island: str
    epoch: int
    reason: str
    ranks: int = 0
    awaited: bool = False
    """Whether rounds wait for it as before: it came back in time, and goes on where it stood."""


@dataclass(frozen=True, kw_only=True)
class Suspected:
    """The island has been silent for a while."""

    island: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Trusted:
    """The island has been heard again."""

    island: str


@dataclass(frozen=True, kw_only=True)
class Draining:
    """The island was asked to leave."""

    island: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Gone:
    """The island no longer holds a lease; rounds do not wait for it. `dismissed`: by an operator, for good."""

    island: str
    standing: Standing
    reason: str
    dismissed: bool = False


@dataclass(frozen=True, kw_only=True)
class Absent:
    """The island has been away for so long that others take over its shards, until it comes back."""

    island: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Released:
    """The island reads some `shards` no more; `places` are where it stood in those and others that it gave up."""

    island: str
    shards: tuple[int, ...] = ()
    places: tuple[str, ...] = ()


# -- the run --------------------------------------------------------------------------------------------------------


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
class Paused:
    """No round ends by a deadline, and islands hold at their next step edge, until it is resumed."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The run goes on after a pause."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """All islands were asked to leave; the coordinator ends once they have. A coordinator started again goes on."""

    reason: str


# -- rounds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A contribution counts in its round. `lag_s`: seconds after the round's first. `places`: where its island stood
    in its shards, where that is news."""

    fragment: int
    round: int
    entry: Entry
    lag_s: float = 0.0
    places: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A contribution to a round that has ended is folded into the open round `into`, with its weight times `factor`."""

    fragment: int
    round: int
    into: int
    entry: Entry
    factor: float
    reason: str
    lag_s: float = 0.0
    places: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A contribution is recorded and not folded. `spoiled`: its round no longer waits for the island."""

    fragment: int
    round: int
    island: str
    reason: str
    spoiled: bool = False
    lag_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The round ends; its contributions are folded into `version` with these shares, in this order.

    The keys of `shares` are islands, and "island@round" for contributions carried from an earlier round.
    """

    fragment: int
    round: int
    version: int
    shares: Mapping[str, float]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """The round ends below quorum, or with nothing that can be used; the anchor stays."""

    fragment: int
    round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Aborted:
    """The round is given up although contributions have come, because the run is stopped; the anchor stays."""

    fragment: int
    round: int
    reason: str


Ended = Committed | Skipped | Aborted
Fact = (
    Admitted | Suspected | Trusted | Draining | Gone | Absent | Released | Planted | Moved | Paused | Resumed | Stopping
    | Accepted | Carried | Dropped | Ended
)  # fmt: skip


# -- as the ledger keeps them ---------------------------------------------------------------------------------------

_KINDS: dict[str, type[Any]] = {
    cls.__name__.lower(): cls
    for cls in (
        Admitted, Suspected, Trusted, Draining, Gone, Absent, Released, Planted, Moved, Paused, Resumed, Stopping,
        Accepted, Carried, Dropped, Committed, Skipped, Aborted,
    )
}  # fmt: skip


def encode(fact: Fact) -> tuple[str, dict[str, Any]]:
    """(kind, body) of a fact; the body is JSON-able."""
    return type(fact).__name__.lower(), asdict(fact)


def is_fact(kind: str) -> bool:
    """Whether a row of the ledger is a fact."""
    return kind in _KINDS


def decode(kind: str, body: dict[str, Any]) -> Fact:
    """The fact of a ledger row. Raises `InputError` for a body that is not one of its kind."""
    cls = _KINDS[kind]
    values = {f.name: body[f.name] for f in fields(cls) if f.name in body}
    try:
        if "entry" in values:
            entry = values["entry"]
            values["entry"] = Entry(**{f.name: entry[f.name] for f in fields(Entry) if f.name in entry})
        if "standing" in values:
            values["standing"] = Standing(values["standing"])
        if "phase" in values:
            values["phase"] = Phase(values["phase"])
        values |= {name: tuple(values[name]) for name in ("active", "shards", "places") if name in values}
        fact: Fact = cls(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the ledger has a damaged fact of kind '{kind}': {error}") from error
    return fact
