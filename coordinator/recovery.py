"""Where a run stands, found from its ledger: the facts, the snapshot, and the contributions that are still to fold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from pydantic import TypeAdapter

from coordinator import facts, rounds, state
from coordinator.facts import Carried, Committed, Ended
from coordinator.files import REAL, Files, ReadOnly
from coordinator.fold import Outer, Part, fold
from coordinator.inbox import Inbox, Stored
from coordinator.ledger import Ledger, Row
from coordinator.snapshots import load_newest_good, load_snapshot, manifests, oldest_rounds
from coordinator.store import UPDATES_KEPT, check_same_run
from diloco.codec import Codec, by_id
from diloco.codec.policy import down_choice
from diloco.config import RunConfig, load_run
from diloco.digest import combine, show
from diloco.errors import DigestMismatch, InputError, Malformed
from diloco.fragments import Fragment, kept, partition
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.schedule import Schedule
from diloco.settings import to_toml

log = logging.getLogger("diloco.coordinator")


# -- rows that are not facts of `rounds` ----------------------------------------------------------------------------


def run_row(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """The first row of a ledger: the run's settings."""
    return "run", {"config_toml": to_toml(config), "config_digest": config.digest}


def layout_row(layout: Layout) -> tuple[str, dict[str, Any]]:
    """The model's layout, as the first island brought it."""
    return "layout", {"tensors": [[s.name, list(s.shape), s.kind] for s in layout.tensors]}


def part_row(
    island: str, epoch: int, rank: int, fragment: int, round_: int, stored: Stored, tokens: int, steps: int
) -> tuple[str, dict[str, Any]]:
    """One rank's part of a contribution, which is durable under `stored.path`."""
    return "part", {
        "island": island,
        "epoch": epoch,
        "rank": rank,
        "fragment": fragment,
        "round": round_,
        "tokens": tokens,
        "steps": steps,
        "file": stored.path.name,
        "digest": stored.digest,
        "codecs": [[codec.id, codec.version] for codec in stored.codecs],
        "pieces": [[p.tensor, list(p.box.offset), list(p.box.size)] for p in stored.pieces],
    }


def folded_row(fragment: int, round_: int, outer: Outer) -> tuple[str, dict[str, Any]]:
    """What a committed round came to."""
    return "folded", {"fragment": fragment, "round": round_, "version": outer.version, "digest": show(outer.digest)}


_STATE: TypeAdapter[state.State] = TypeAdapter(state.State)
_SETTINGS = ("config", "weights", "schedule", "shards")
"""Fields of `state.State` that follow from the run's settings."""


def state_row(found: Recovered, oldest: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """All that the facts so far came to, in their place.

    Args:
        found: what replaying them gives.
        oldest: rounds ended of each fragment in the oldest snapshot kept.
    """
    values = _STATE.dump_python(found.state, mode="json")
    first = [ended - UPDATES_KEPT for ended in oldest]
    ends = [
        [*facts.encode(end), version] for (fragment, r), (end, version) in found.ends.items() if r >= first[fragment]
    ]
    least = {
        end.fragment: version for (end, version) in reversed(found.ends.values()) if end.round >= first[end.fragment]
    }
    digests = [
        [fragment, version, digest]
        for (fragment, version), digest in found.digests.items()
        if version >= least.get(fragment, found.state.rounds[fragment].version)
    ]
    return "state", {
        "state": {name: value for name, value in values.items() if name not in _SETTINGS},
        "ends": ends,
        "digests": digests,
    }


# -- recovery -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Recovered:
    """What the ledger and the newest snapshot say together."""

    state: state.State
    layout: Layout | None = None
    fragments: tuple[Fragment, ...] = ()
    outers: list[Outer] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    inbox: Inbox = field(default_factory=Inbox)
    pending: list[Ended] = field(default_factory=list)
    """Rounds that have ended and that the snapshot does not hold, in their order."""
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    """(fragment, version) -> digest, for every round that was folded and may be asked for."""
    ends: dict[tuple[int, int], tuple[Ended, int]] = field(default_factory=dict)
    """(fragment, round) -> how it ended, and at which version, for every round that has ended and may be asked for."""
    fresh: bool = True
    """Whether the ledger was empty."""

    def over(self, outers: Sequence[Outer], ended: Sequence[int]) -> Recovered:
        """Lays the ledger over a snapshot: its outer state, and the rounds of each fragment that it holds."""
        self.outers, self.ended = list(outers), list(ended)
        self.pending = [end for end in self.pending if end.round >= ended[end.fragment]]
        return self

    def forget(self, oldest: Sequence[int]) -> None:
        """Forgets contributions to rounds that all snapshots kept hold: `oldest` of each fragment."""
        for fragment, ended in enumerate(oldest):
            self.inbox.forget(fragment, before=ended - self.state.config.late_window)

    def past(self) -> Iterator[Past]:
        """How the last rounds of each fragment ended that the snapshot holds: islands may not have heard of them."""
        for fragment, ended in enumerate(self.ended[: len(self.state.rounds)]):
            for round_ in range(max(0, ended - UPDATES_KEPT), ended):
                if (fragment, round_) not in self.ends:  # from before the snapshot that the run was restored from
                    continue
                end, version = self.ends[fragment, round_]
                digest = combine(int(self.digests.get((fragment, version), "0"), 16))
                yield Past(fragment, round_, type(end).__name__.lower(), end.reason, version, digest)


class Past(NamedTuple):
    """How a round ended that a snapshot holds."""

    fragment: int
    round: int
    ended: str
    """"committed", "skipped" or "aborted"."""
    reason: str
    version: int
    digest: int


Locate = Callable[[dict[str, Any]], Stored]
"""Finds the stored bytes that a `part` row speaks of."""


def recover(ledger: Ledger, config: RunConfig, root: Path, *, oldest: bool = False, files: Files = REAL) -> Recovered:
    """Replays a ledger over a snapshot.

    Args:
        ledger: the facts.
        config: the settings that the coordinator is started with.
        root: the state folder.
        oldest: start from the oldest snapshot kept rather than from the newest that is not damaged.
        files: how files are read, and removed where nothing needs them.

    Raises:
        RunMismatch: the folder belongs to another run, or to other settings.
        InputError, DigestMismatch: damaged files.
    """
    found = replay(ledger.read(), config, root, lambda body: stored(body, root, files))
    if found.fresh and manifests(root):
        raise InputError(f"{root} has snapshots but no ledger: restore ledger.sqlite or name another --state")
    if not found.state.seeded:
        return found
    snapshot = load_snapshot(root, oldest=True, files=files) if oldest else load_newest_good(root, files)
    if snapshot is None:
        raise InputError(f"the ledger in {root} speaks of first parameters, but there is no snapshot")
    found.forget(oldest_rounds(root, files))
    return found.over(snapshot.outers, snapshot.rounds)


def replay(rows: Iterable[Row], config: RunConfig, root: Path, locate: Locate) -> Recovered:
    """Folds the rows of a ledger; the outer state is still missing (`Recovered.over`)."""
    found = Recovered(state=state.begin(config.rounds, config.merge.weights, Schedule.kept(config), config.shards))
    for row in rows:
        found.fresh = False
        try:
            _replay(found, row, config, root, locate)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(f"fact {row.seq} of the ledger in {root} is damaged: {error!r}") from error
    return found


def _replay(found: Recovered, row: Row, config: RunConfig, root: Path, locate: Locate) -> None:
    body = row.body
    match row.kind:
        case "run":
            check_same_run(load_run(body["config_toml"], f"the ledger in {root}").value, config, root)
        case "layout":
            found.layout = Layout(TensorSpec(n, tuple(shape), kind) for n, shape, kind in body["tensors"])
            found.fragments = kept(partition(found.layout, config.sync), config.run)
        case "part":
            _replay_part(found, body, locate(body))
        case "folded":
            found.digests[body["fragment"], body["version"]] = body["digest"]
        case "state":
            _replay_state(found, body)
        case kind if facts.is_fact(kind):
            fact = facts.decode(kind, body)
            found.state = state.apply(found.state, fact, 0.0)
            if isinstance(fact, Carried):
                found.inbox.carry(fact.fragment, fact.round, fact.entry.island, fact.into)
            if isinstance(fact, Ended):
                found.pending.append(fact)
                if not isinstance(fact, Committed):
                    found.inbox.close(fact.fragment, fact.round, keep_partial=config.rounds.late != "drop")
                found.ends[fact.fragment, fact.round] = fact, found.state.rounds[fact.fragment].version
        case kind:
            raise InputError(f"the ledger in {root} has a fact of kind '{kind}', which this version does not know")


def _replay_state(found: Recovered, body: dict[str, Any]) -> None:
    settings = {name: getattr(found.state, name) for name in _SETTINGS}
    found.state = _STATE.validate_python({**body["state"], **settings})
    for kind, fact, version in body["ends"]:
        end = facts.decode(kind, fact)
        assert isinstance(end, Ended)
        found.pending.append(end)
        found.ends[end.fragment, end.round] = end, version
    found.digests.update({(fragment, version): digest for fragment, version, digest in body["digests"]})


def pieces_of(body: dict[str, Any]) -> tuple[Piece, ...]:
    """The pieces that a `part` row speaks of."""
    return tuple(Piece(t, Box(tuple(offset), tuple(size))) for t, offset, size in body["pieces"])


def codecs_of(body: dict[str, Any]) -> tuple[Codec, ...]:
    """The codec of each of them. Rows of earlier versions name one for all."""
    named = body["codecs"] if "codecs" in body else [body["codec"]] * len(body["pieces"])
    return tuple(by_id(*codec) for codec in named)


def stored(body: dict[str, Any], root: Path, files: Files = REAL) -> Stored:
    """The file that a `part` row speaks of."""
    return Stored(
        pieces=pieces_of(body),
        codecs=codecs_of(body),
        path=root / "inbox" / body["file"],
        digest=body["digest"],
        files=files,
    )


def _replay_part(found: Recovered, body: dict[str, Any], stored: Stored) -> None:
    fragment, round_, island = found.fragments[body["fragment"]], body["round"], body["island"]
    accepted = rounds.counted(found.state, fragment.index, round_, island) is not None
    inbound = found.inbox.inbound(fragment, round_, island, body["epoch"], accepted=accepted)
    if inbound:
        inbound.tokens, inbound.steps = body["tokens"], body.get("steps", 0)
        try:
            inbound.add(body["rank"], stored)
        except Malformed as error:
            log.warning("a recorded part does not fit and is left out: %s", error.message)
        open_round = found.state.rounds[fragment.index]
        if inbound.coverage.whole and f"{island}@{round_}" in open_round.carried:  # the fact is in a compacted state
            found.inbox.carry(fragment.index, round_, island, open_round.round)


def clean(root: Path, found: Recovered) -> None:
    """Removes what nothing in the ledger speaks of: contributions without a receipt, unfinished first parameters."""
    for path in (root / "inbox").iterdir():
        if path.suffix not in (".partial", ".sums") and not found.inbox.holds(path):  # `Uploads` looks after those
            path.unlink()
    if not found.state.seeded:
        for path in root.glob("manifest-*.json"):
            path.unlink()


# -- verification ---------------------------------------------------------------------------------------------------


def recorded_config(ledger: Ledger) -> RunConfig:
    """The settings of the run that a ledger is of. Raises `InputError` for an empty one."""
    for row in ledger.read():
        if row.kind == "run":
            return load_run(row.body["config_toml"], str(ledger.path)).value
    raise InputError(f"{ledger.path} is empty: no coordinator has run here")


def verify(ledger: Ledger, root: Path) -> Iterator[tuple[int, int, str]]:
    """Folds again what the oldest snapshot kept does not hold; yields (fragment, version, digest) as found equal.

    Beside a running coordinator the oldest snapshot may be replaced meanwhile; then it goes on from the next.

    Raises:
        DigestMismatch: a contribution or a fold with other bits than the ledger says.
        InputError: missing files.
    """
    done: set[tuple[int, int, str]] = set()
    for tries_left in reversed(range(VERIFY_TRIES)):
        before = manifests(root)[:1]
        try:
            for agreed in _refold(ledger, root):
                if agreed not in done:
                    done.add(agreed)
                    yield agreed
        except InputError:
            if manifests(root)[:1] == before or not tries_left:
                raise
        else:
            return


VERIFY_TRIES = 5


def _refold(ledger: Ledger, root: Path) -> Iterator[tuple[int, int, str]]:
    config = recorded_config(ledger)
    found = recover(ledger, config, root, oldest=True, files=ReadOnly())
    down = down_choice(config.wire)
    for end in found.pending:
        if not isinstance(end, Committed) or (end.fragment, end.version) not in found.digests:
            continue
        fragment = found.fragments[end.fragment]
        parts = {i: [_checked(s) for s in found.inbox.parts(end.fragment, end.round, i)] for i in end.shares}
        outer, _ = fold(fragment, found.outers[end.fragment], parts, end.shares, config.outer, down)
        found.outers[end.fragment] = outer
        recorded = found.digests[end.fragment, outer.version]
        if show(outer.digest) != recorded:
            raise DigestMismatch(
                f"fragment {end.fragment} version {outer.version} folds to {show(outer.digest)}, "
                f"and the ledger says {recorded}",
                fragment=end.fragment,
                version=outer.version,
            )
        yield end.fragment, outer.version, recorded


def _checked(stored: Stored) -> Part:
    """A part whose file has the bytes that were recorded."""
    try:
        part = stored.part()
    except FileNotFoundError:
        raise InputError(f"{stored.path} is missing, but the ledger speaks of it") from None
    found = xxhash.xxh3_128_hexdigest(part.payload.numpy().data)
    if found != stored.digest:
        raise DigestMismatch(f"{stored.path} has digest {found}, and the ledger says {stored.digest}")
    return part
