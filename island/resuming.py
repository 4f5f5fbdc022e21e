"""What an island keeps of itself in checkpoints, and how it goes on with it when it is started again.

A checkpoint holds, as of a step edge: parameters, inner optimizer, random state and data cursor; anchors with their
versions; what the up codec dropped; and of each contribution in flight its pseudo-gradient. A restart finds the newest
one and goes on

    exactly         where every round that has ended since has a contribution of this island: it repeats the steps from
                    there on. What it contributes again is the same, and where the coordinator says that it counts
                    already, it is not sent; outcomes that are still kept are applied at the steps at which they are
                    due. So the island ends with the bits of one that was never killed.
    from anchors    otherwise: at the run's step and with its anchors, as any island that joins, but with the inner
                    state of the checkpoint. Anchors that are there come to the run's by the updates that they lack.

Where the run goes on without an island that repeats its steps, so that a contribution comes too late, it gives that up
and joins again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from diloco.errors import EnvironmentFault, Expired
from diloco.feedback import Fate, Feedback, Kept
from diloco.replica import Held, Position, Replica, Staged
from island.anchors import Stand
from island.checkpoint import Checkpoints, Manifest, Piece, State, Store, inner, load, random_state, some, values
from island.config_checkpoint import CheckpointConfig
from island.following import several
from island.group import Group
from island.joining import settle
from island.seat import Key, Seat, Seats
from island.settling import Settling

if TYPE_CHECKING:
    from island.session import Session

log = logging.getLogger("diloco.island")
T = TypeVar("T")
PATIENCE_S = 600.0
"""How long a checkpoint waits for a contribution to be taken up by its thread."""


@dataclass(kw_only=True, eq=False)
class Sent:
    """A contribution in flight, or that there is none to a round."""

    tokens: int = 0
    """The island's, since it adopted the fragment's anchor."""
    steps: int = 0
    declined: str = ""
    """Why there is none."""
    kept: bool = False
    """Whether its pseudo-gradient is kept, or will be once its thread has taken it up."""
    parts: list[Tensor] = field(default_factory=list)
    """The pseudo-gradient of each owned piece (fp32, CPU)."""
    there: threading.Event = field(default_factory=threading.Event)

    @property
    def resumable(self) -> bool:
        """Whether it can be sent again from what is kept."""
        return self.kept or bool(self.declined)

    def part(self, number: int) -> Tensor:
        """The pseudo-gradient of the so-manyth owned piece. Raises `EnvironmentFault` where it never came."""
        if not self.there.wait(PATIENCE_S):
            raise EnvironmentFault(f"a contribution was not taken up within {PATIENCE_S:g} s")
        return self.parts[number]


def may_resume(settings: CheckpointConfig | None, run_id: str, island_id: str, group: Group) -> bool:
    """Whether there is something that the island may go on with exactly, as far as can be said before it joins.

    Collective. Nothing is where the run is not named yet.

    Raises:
        ConfigError, EnvironmentFault: the URL cannot be used.
    """
    if settings is None or not settings.url or settings.resume != "exact" or not run_id:
        return False
    store = Store.of(settings.url, run_id, island_id)
    return bool(group.from_first(lambda: b"yes" if some(store) else b""))


class Keeping:
    """One rank's part in what its island keeps. Without settings, or without a URL, it keeps nothing.

    Args:
        site: the island's place in the run; its counters, positions and flights are what is kept of it.
        model: its model.
        group: its ranks.
        seats: its places at the coordinators.
        settling: what keeps the residuals of the up codec.
        settings: where checkpoints are.

    Raises:
        ConfigError, EnvironmentFault: the URL cannot be used.
    """

    def __init__(
        self,
        site: Session,
        model: nn.Module,
        group: Group,
        seats: Seats,
        settling: Settling,
        settings: CheckpointConfig | None,
    ) -> None:
        self._site, self._model, self._group, self._seats, self._settling = site, model, group, seats, settling
        self._replica: Replica = site.replica
        self._sent: dict[Key, Sent] = {}
        self._found: Manifest | None = None
        self._extras: Mapping[str, Callable[[], Any]] = {}
        self.exact = False
        """Whether this process goes on exactly where an earlier one stood."""
        self.checkpoints: Checkpoints | None = None
        self._resume = "none"
        if settings and settings.url:
            about = {
                "run": site.run_id,
                "island": site.island_id,
                "settings": site.config.digest,
                "layout": site.layout.digest,
            }
            self._resume = settings.resume
            self.checkpoints = Checkpoints(settings, about, group, lambda *kind, **row: site.record(*kind, **row))

    # -- going on -----------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Takes up the newest checkpoint, if there is one. Collective.

        Returns:
            Whether the island stands exactly where it stood; else it is to take up the run's anchors.

        Raises:
            EnvironmentFault: the store fails.
            InputError: the checkpoint does not hold what it should.
        """
        if self.checkpoints is None or self._resume == "none":
            return False
        self._found = self.checkpoints.find()
        if self._found is None:
            return False
        kept = self._found.island["site"]
        mixed = self._load_anchors(self._found, kept["taken"])
        why = "checkpoint.resume is anchor" if self._resume == "anchor" else mixed or self._behind(kept)
        where = f"step {self._found.step}"
        if why:
            self._say(f"going on with the inner state of {where}, and the run's anchors: {why}")
        else:
            self._say(f"going on exactly from {where}")
            self.exact = True
            self._go_on(self._found, kept)
        self._take_inner()
        return self.exact

    def kept(self, name: str) -> Any:
        """What the checkpoint that the island goes on with has of an extra; None where it has nothing."""
        return self._found.island["extras"].get(name) if self._found else None

    def attach(self, optimizer: torch.optim.Optimizer | None, extras: Mapping[str, Callable[[], Any]]) -> None:
        """Names what else is kept; takes up what the checkpoint has of the optimizer. Collective.

        Args:
            optimizer: the inner one, made after the island has joined.
            extras: by name, what gives their state as JSON; called on all ranks at an edge, and rank 0's is kept.
        """
        self._extras = extras
        if optimizer:
            self._site.optimizer = optimizer
        if self._found:
            self._take_inner()

    def _say(self, line: str) -> None:
        if self._group.rank == 0:
            log.info("%s", line)

    def _load_anchors(self, found: Manifest, taken: list[list[int | None]]) -> str:
        """Loads anchors; returns why they are of no use as they are.

        Args:
            taken: by rank that wrote them, and by fragment, the rounds that they hold.
        """
        replica, rank, trouble = self._replica, self._group.rank, ""
        fragments = range(len(replica.fragments))
        owned = [h for fragment in fragments for h in replica.owned(fragment)]
        self._load({f"anchor.{h.spec.name}": _piece(h, h.anchor) for h in owned})
        for h in owned:
            h.moves += 1
        for fragment in fragments:
            found_there = {row[fragment] for row in taken}
            own = all(self._wrote(found, f"anchor.{h.spec.name}", h) for h in replica.owned(fragment))
            same = found.ranks == self._group.size and all(row[0] for row in self._group.numbers([own]))
            if len(found_there) == 1 or same:
                replica.taken[fragment] = taken[rank if same else 0][fragment]
            else:
                replica.taken[fragment] = None
                trouble = f"ranks held fragment {fragment} at different rounds, and are others now"
        return trouble

    def _wrote(self, found: Manifest, name: str, held: Held) -> bool:
        """Whether this rank wrote a piece that it owns now."""
        mine = [list(held.box.offset), list(held.box.size), self._group.rank]
        return not held.box.numel or mine in found.tensors[name]["chunks"]

    def _behind(self, kept: Mapping[str, Any]) -> str:
        """Why the island cannot go on exactly from a checkpoint; empty where it can."""
        for seat in self._seats:
            state = seat.reply.state
            if state.phase == "gathering" or state.directive == "leave":
                return f"the run is {state.directive_reason or state.phase}"
            if state.serial != (self.kept("holding") or {}).get("serial", 0):
                return "its shards have been divided anew"
            known = {c.fragment: set(c.rounds) for c in seat.reply.contributed}
            for now in state.fragments:
                fragment, round_ = now.fragment, kept["positions"][now.fragment][1]
                ended = range(round_, now.round)
                if now.round < round_:
                    return f"the coordinator is at round {now.round} of fragment {fragment}, before the checkpoint"
                lacking = [r for r in ended if r not in known.get(fragment, set())]
                if lacking:
                    return f"round {lacking[0]} of fragment {fragment} ended without this island"
                if ended and not self._remembered(seat, fragment, round_):
                    return f"the outcome of round {round_} of fragment {fragment} is no longer kept"
                same = seat.anchors.matches(fragment, Stand(now.version, now.round, now.digest))
                if not ended and not same:
                    return f"the anchor of fragment {fragment} differs from the coordinator's"
        return ""

    def _remembered(self, seat: Seat, fragment: int, round_: int) -> bool:
        """Whether the coordinator still has the outcome of a round. Collective."""
        try:
            self._group.from_first(lambda: seat.courier.outcome(fragment, round_))
        except Expired:
            return False
        return True

    def _go_on(self, found: Manifest, kept: Mapping[str, Any]) -> None:
        """Stands where the checkpoint says, with its contributions in flight."""
        site, replica, first = self._site, self._replica, self._group.rank == 0
        for name in ("at_step", "rounds", "rejoins", "rollbacks", "rollbacks_in_a_row", "accepted"):
            setattr(site, name, kept[name])
        site.tokens = kept["tokens"] if first else 0
        site.adopted = [(tokens if first else 0, step) for tokens, step in kept["adopted"]]
        for fragment, (version, round_) in enumerate(kept["positions"]):
            replica.position[fragment] = Position(version, round_)
        self._load_residuals(kept["feedback"])
        for seat in self._seats:
            seat.courier.counted = {
                (c.fragment, round_): Fate.COUNTS if round_ == c.open_round else Fate.CARRIED
                for c in seat.reply.contributed
                for round_ in c.rounds
            }
            seat.courier.repeats = True
            if seat.heart:
                seat.heart.ready, seat.heart.rounds = True, tuple(p.round for p in replica.position)
            seat.at_home = True
        next(iter(self._seats)).courier.accepted = kept["parts_accepted"] if first else 0
        for row in kept["flights"]:
            self._send_again((row["fragment"], row["round"]), row)

    def _load_residuals(self, rounds: list[int]) -> None:
        """Takes up what the up codec had dropped by then; what it has dropped since goes."""
        wanted: dict[str, Piece] = {}
        for fragment, feedback in self._feedback():
            residuals = {}
            for number, held in self._with_feedback(fragment):
                residuals[number] = torch.empty(held.box.numel, dtype=torch.float32)
                wanted[f"residual.{held.spec.name}"] = _piece(held, residuals[number])
            feedback.restore(Kept(round=rounds[fragment], residuals=residuals, left={}, fate=Fate.UNKNOWN))
        self._load(wanted)
        for fragment, _ in self._feedback():
            self._settling.keep(fragment)

    def _send_again(self, key: Key, row: Mapping[str, Any]) -> None:
        """Sends what was in flight, as it was."""
        fragment, tokens, steps = key[0], row["tokens"], row["steps"]
        site, seat = self._site, self._seats.of(fragment)
        if row["overdue"] is not None:
            site.overdue[key] = row["overdue"]
        if row["declined"]:
            self.decline(key, row["declined"])
            site.flights[key] = seat.pool.submit(seat.courier.sit_out, *key, row["declined"])
            return
        staged = self._replica.restage(fragment)
        owned = self._replica.owned(fragment)
        self._load({f"moved.{h.spec.name}": _piece(h, copy) for h, copy in zip(owned, staged.copies, strict=True)})
        sent = Sent(tokens=tokens, steps=steps, kept=True, parts=[copy.clone() for copy in staged.copies])
        sent.there.set()
        self._sent[key] = sent
        version = self._replica.position[fragment].version
        places = self.kept("data")["places"] if self.kept("holding") else ()  # by now it is at least there
        site.flights[key] = seat.pool.submit(seat.courier.exchange, *key, version, staged, tokens, steps, places)

    def _take_inner(self) -> None:
        """Loads parameters (where the island goes on exactly), inner optimizer, extras and random state."""
        found, site, model = self._found, self._site, self._model
        assert found is not None and self.checkpoints is not None
        settle(model)
        optimizers = several(site.optimizer)
        there = {name.rpartition(".")[0] for name in (*found.tensors, *found.island["numbers"])}
        for optimizer in optimizers:
            if any(name.startswith("optimizer.") for name in there):
                inner.prepare(optimizer)
                inner.keep_only(model, optimizer, there)
        if not self.exact:
            for seat in self._seats:
                seat.anchors.reset()
        pieces = inner.of_model(model)
        if not self.exact:
            pieces = {
                name: piece for name, piece in pieces.items() if name.removeprefix("model.") not in site.layout.index
            }
        for optimizer in optimizers:
            pieces |= inner.of_optimizer(model, optimizer)[0]
        self._load(pieces)
        for optimizer in optimizers:
            inner.set_numbers(model, optimizer, found.island["numbers"])
        mine = values(self.checkpoints.store, found, self._group.rank)
        if mine:
            random_state.restore(mine["random"])
        else:
            random_state.derive(site.run_id, site.island_id, found.serial, self._group.rank)

    def _load(self, pieces: Mapping[str, Piece]) -> None:
        assert self._found is not None and self.checkpoints is not None
        load(self.checkpoints.store, self._found, pieces)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def exchanging(
        self, key: Key, staged: Staged, tokens: int, steps: int, exchange: Callable[[], T]
    ) -> Callable[[], T]:
        """What sends a contribution: `exchange`, after keeping its pseudo-gradient where a checkpoint will want it."""
        if self.checkpoints is None:
            return exchange
        sent = self._sent[key] = Sent(tokens=tokens, steps=steps, kept=self._wanted(key))
        if not sent.kept:
            return exchange

        def keeping() -> T:
            sent.parts = self._replica.pseudo_gradient(key[0], staged)
            sent.there.set()
            return exchange()

        return keeping

    def _wanted(self, key: Key) -> bool:
        """Whether a checkpoint is to be taken while a contribution is in flight."""
        assert self.checkpoints is not None
        step, end = self._site.at_step, self._site.schedule.sync_step(*key)
        return step < end and self.checkpoints.due_between(step, end)

    def decline(self, key: Key, reason: str) -> None:
        """Notes that the island contributes nothing to a round."""
        self._sent[key] = Sent(declined=reason)

    def edge(self, *, last: bool = False) -> None:
        """The edge after an inner step, once all that is due is done. Collective; raises as `Checkpoints.edge`.

        At the `last` one, before the island leaves, a checkpoint is taken out of turn where it can be, and waited for.
        """
        if self.checkpoints is None:
            return
        flights = self._site.flights
        self._sent = {key: sent for key, sent in self._sent.items() if key in flights}
        able = all(key in self._sent and self._sent[key].resumable for key in flights)
        self.checkpoints.edge(self._site.at_step, self._capture, able=able, guard=self._seats.guard, last=last)

    def settle(self) -> None:
        """Waits, within its bound, for a checkpoint that is being written. Collective."""
        if self.checkpoints:
            self.checkpoints.settle()

    def _capture(self) -> State:
        """All that is kept, as of now. Collective; anchors do not move meanwhile."""
        site, replica = self._site, self._replica
        settle(self._model)
        pieces = inner.of_model(self._model)
        numbers: dict[str, Any] = {}
        for optimizer in several(site.optimizer):
            tensors, scalars = inner.of_optimizer(self._model, optimizer)
            pieces |= tensors
            numbers |= scalars
        for fragment in range(len(replica.fragments)):
            pieces |= {f"anchor.{h.spec.name}": _piece(h, h.anchor) for h in replica.owned(fragment)}
        pieces |= dict(self._residuals())
        pieces |= dict(self._moved())
        mine = [site.tokens, sum(s.courier.accepted for s in self._seats), *(tokens for tokens, _ in site.adopted)]
        sums = [sum(column) for column in zip(*self._group.numbers(mine), strict=True)]
        taken = self._group.numbers([-1 if t is None else t for t in replica.taken])
        kept = {
            **{
                n: getattr(site, n)
                for n in ("at_step", "rounds", "rejoins", "rollbacks", "rollbacks_in_a_row", "accepted")
            },
            "tokens": sums[0],
            "parts_accepted": sums[1],
            "adopted": [[tokens, step] for tokens, (_, step) in zip(sums[2:], site.adopted, strict=True)],
            "positions": [[p.version, p.round] for p in replica.position],
            "taken": [[None if t < 0 else t for t in row] for row in taken],
            "feedback": [feedback.keep().round for _, feedback in self._feedback()],
            "flights": [self._flight(key) for key in site.flights],
        }
        extras = {name: state() for name, state in self._extras.items()}
        numbers = {name: value for row in self._group.gather(numbers) for name, value in row.items()}
        island = {"site": kept, "numbers": numbers, "extras": extras}
        return State(pieces=pieces, island=island, rank={"random": random_state.capture()})

    def _flight(self, key: Key) -> dict[str, Any]:
        sent = self._sent[key]
        return {
            "fragment": key[0],
            "round": key[1],
            "tokens": sent.tokens,
            "steps": sent.steps,
            "declined": sent.declined,
            "overdue": self._site.overdue.get(key),
        }

    def _feedback(self) -> Iterable[tuple[int, Feedback]]:
        """What the up codec dropped, of the fragments that move."""
        return enumerate((self._replica.feedback or [])[: len(self._site.schedule.offsets)])

    def _with_feedback(self, fragment: int) -> Iterator[tuple[int, Held]]:
        """Owned pieces, by number, of which the up codec drops what is kept."""
        for number, held in enumerate(self._replica.owned(fragment)):
            if self._replica.up.of(held.spec).feedback:
                yield number, held

    def _residuals(self) -> Iterable[tuple[str, Piece]]:
        for fragment, feedback in self._feedback():
            for number, held in self._with_feedback(fragment):
                yield f"residual.{held.spec.name}", _piece(held, feedback.residual(number, held.box.numel), fixed=True)

    def _moved(self) -> Iterable[tuple[str, Piece]]:
        for key, sent in self._sent.items():
            if sent.kept:
                for number, held in enumerate(self._replica.owned(key[0])):
                    yield f"moved.{held.spec.name}", _piece(held, _later(sent, number), fixed=True)


def _later(sent: Sent, number: int) -> Callable[[], Tensor]:
    return lambda: sent.part(number)


def _piece(held: Held, source: Tensor | Callable[[], Tensor], *, fixed: bool = False) -> Piece:
    return Piece(source=source, box=held.box, shape=held.spec.shape, fixed=fixed)
