"""Facts as the ledger keeps them: a kind and a JSON body, and back.

The kinds and bodies are a format: later code reads ledgers that this code wrote, so fields are only ever added, with
a default.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from coordinator.rounds import (
    Accepted,
    Admitted,
    Committed,
    Dropped,
    Entry,
    Fact,
    Gone,
    Moved,
    Phase,
    Planted,
    Skipped,
    Standing,
)
from diloco.errors import InputError

_KINDS: dict[str, type[Any]] = {
    "admitted": Admitted,
    "gone": Gone,
    "planted": Planted,
    "moved": Moved,
    "accepted": Accepted,
    "dropped": Dropped,
    "committed": Committed,
    "skipped": Skipped,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


def encode(fact: Fact) -> tuple[str, dict[str, Any]]:
    """(kind, body) of a fact; the body is JSON-able."""
    return _NAMES[type(fact)], asdict(fact)


def is_fact(kind: str) -> bool:
    """Whether a row of the ledger is a fact of `rounds`."""
    return kind in _KINDS


def decode(kind: str, body: dict[str, Any]) -> Fact:
    """The fact of a ledger row. Raises `InputError` for a body that is not one of its kind."""
    cls = _KINDS[kind]
    values = {f.name: body[f.name] for f in fields(cls) if f.name in body}
    try:
        if "entry" in values:
            values["entry"] = Entry(**{f.name: values["entry"][f.name] for f in fields(Entry)})
        if "standing" in values:
            values["standing"] = Standing(values["standing"])
        if "phase" in values:
            values["phase"] = Phase(values["phase"])
        if "active" in values:
            values["active"] = tuple(values["active"])
        fact: Fact = cls(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the ledger has a damaged fact of kind '{kind}': {error}") from error
    return fact
