"""What an island has at each coordinator of its run: a connection, a lease and a courier of its own.

A run's fragments may be spread over several coordinators. The island enters at the one it is given, learns there where
the others are, and enters at each. What belongs to a fragment then goes through its seat.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diloco.config import RunConfig, load_run
from diloco.errors import DilocoError, Expired, Malformed, RunMismatch, StaleEpoch
from diloco.failpoints import failpoint
from diloco.fragments import coordinator_of
from diloco.replica import Replica
from diloco.v1 import coordinator_pb2 as pb
from island.anchors import Anchors, Together
from island.courier import Courier
from island.courier import Key as Key
from island.group import Group
from island.heart import Heart
from island.lease import Lease, Limits
from island.link import Link
from island.settling import Settling

DIRECTIVES = ("", "pause", "leave")
"""Of several coordinators' the last in this order holds."""
REJOINS = 5
"""Times an island joins a coordinator again without a round completed there in between."""


class Seat:
    """One rank's part of an island's place at one coordinator.

    Args:
        group: the island's ranks.
        link: the connection.
        request: what the island says of itself to join.
        limits: bounds on waiting.
        guard: held while anchors are read or moved.
    """

    def __init__(
        self, group: Group, link: Link, request: pb.JoinRequest, limits: Limits, guard: threading.RLock
    ) -> None:
        self.link, self.lease = link, Lease(group, link, request, limits)
        self._group, self._island, self._guard = group, request.island_id, guard
        self.reply = pb.JoinReply()
        """What the coordinator said when the island joined."""
        self._spoiled = False
        self.index = 0
        """Which of the run's coordinators this is."""
        self.fragments: tuple[int, ...] = ()
        """Those that it keeps."""
        self.at_home = False
        """Whether the fragments are taken up under the present epoch."""
        self.losses = 0
        """Times in a row that the lease was lost, without a round completed in between."""
        self.pool = ThreadPoolExecutor(max_workers=1)

    @property
    def epoch(self) -> int:
        """Of the present lease."""
        return self.reply.epoch

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.reply.run_id

    @property
    def heart(self) -> Heart | None:
        """Rank 0's heartbeat."""
        return self.lease.heart

    @property
    def lost(self) -> bool:
        """Whether this rank has heard that the lease is over."""
        return self._spoiled or (self.heart is not None and isinstance(self.heart.fatal, StaleEpoch))

    def enter(self) -> RunConfig:
        """Joins; returns the run's settings as this coordinator serves them. Collective."""
        self.reply = self.lease.enter()
        config = self._served()
        self.index = config.run.coordinator_index
        return config

    def enter_again(self, agreed: RunConfig) -> None:
        """Joins under a new epoch; nothing of the one before is in flight any more. Collective.

        Raises:
            RunMismatch: the coordinator has other settings than those the island has `agreed` to.
        """
        self.losses += 1
        self.courier.abandon()
        accepted = self.courier.accepted
        self.reply = self.lease.enter_again()
        self.check(self._served(), agreed)
        self.begin(*self._begun)
        self.courier.accepted = accepted

    def check(self, served: RunConfig, agreed: RunConfig) -> None:
        """Raises `RunMismatch` where a coordinator serves other settings than agreed."""
        if served.digest != agreed.digest:
            raise RunMismatch(
                f"run '{self.run_id}' has other settings at {self.link.address} than when island '{self._island}' "
                "joined it: start the coordinators with one run file, and the island again"
            )

    def _served(self) -> RunConfig:
        return load_run(self.reply.config_toml, "the coordinator").value

    def begin(
        self, replica: Replica, config: RunConfig, together: Together, settling: Settling, spool_dir: Path | None
    ) -> None:
        """Begins an epoch.

        Args:
            replica: this rank's anchors.
            config: the run's settings.
            together: does bulk work with this coordinator on all ranks.
            settling: hears what the coordinator knows of the island's contributions.
            spool_dir: see `Courier`.
        """
        self._begun, sync = (replica, config, together, settling, spool_dir), config.sync
        self._spoiled = self.at_home = False
        settling.rejoin(self.reply.contributed)
        self.fragments = tuple(f.index for f in replica.fragments if coordinator_of(f.index, config.run) == self.index)
        self.pool.shutdown(wait=False, cancel_futures=True)
        flights = 2 + sync.overlap_steps * len(self.fragments) // sync.every_steps
        self.pool = ThreadPoolExecutor(max_workers=flights, thread_name_prefix="courier")
        identity = self.lease.identity(self.reply)
        self.courier = Courier(
            self.link,
            replica,
            identity,
            config,
            spool_dir,
            settling.keep,
            fragments=self.fragments,
            guard=self._guard,
        )
        self.anchors = Anchors(replica, self._group, self.courier, together)

    def take_up(self) -> pb.RunState:
        """Waits for the first parameters of this coordinator's fragments, and takes up their anchors. Collective.

        Returns:
            How the run stood; it may say that the island is to leave, which then has taken up nothing.
        """
        state = self.lease.until(lambda s: bool(s.fragments) and all(f.seeded for f in s.fragments), self._seed)
        if state.directive != "leave":
            for fragment in state.fragments:
                self.anchors.take_up(fragment)
                failpoint("take-up-half")
        return state

    def _seed(self, state: pb.RunState) -> None:
        """Sends the first parameters where that is asked of this island. Collective."""

        def bring(fragment: int) -> None:
            # Refused: the run has them, and the receipt was lost; or the lease is over, as the next beat will say.
            with contextlib.suppress(StaleEpoch):
                self.courier.seed(fragment)

        together = self._begun[2]
        if state.seeder == self._island:
            for fragment in self.fragments:
                together(partial(bring, fragment))

    def failure(self, flight: Future[Any]) -> DilocoError | None:
        """What has failed a flight of this rank that is done; notes where that is a lease that is over."""
        error = flight.exception()
        self._spoiled = self._spoiled or isinstance(error, StaleEpoch)
        return error if isinstance(error, DilocoError) else None

    def trouble(self, flights: list[Future[Any]]) -> DilocoError | None:
        """What this rank knows that has ended the lease, or failed a flight for good. Not collective."""
        errors = [self.failure(flight) for flight in flights if flight.done()]
        return self.lease.trouble() or next((e for e in errors if e and not isinstance(e, Expired)), None)


@dataclass(frozen=True, kw_only=True)
class Word:
    """What the ranks agree on."""

    finite: bool
    """Every rank's reported loss is finite."""
    done: bool
    """What every rank waits for is done."""
    silent: tuple[bool, ...]
    """Nobody answers at a coordinator, by its index."""
    directive: str


class Seats:
    """The seats of an island at all coordinators of its run, by their index.

    Args:
        group: the island's ranks.
        link: the connection to the coordinator that the island is given.
        request: what the island says of itself to join.
        limits: bounds on waiting.
    """

    def __init__(self, group: Group, link: Link, request: pb.JoinRequest, limits: Limits) -> None:
        self._group, self._link, self._request, self._limits = group, link, request, limits
        self.guard = threading.RLock()
        """Held while anchors are read or moved."""
        self._seats: list[Seat] = []

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats)

    def of(self, fragment: int) -> Seat:
        """The seat at the coordinator that keeps a fragment."""
        return self._seats[coordinator_of(fragment, self._run)]

    def enter(self) -> RunConfig:
        """Joins the coordinator that the island is given, and the others that it names. Collective.

        Raises:
            RunMismatch: the coordinators do not serve one run, or are not where it says.
        """
        seat = self._open(self._link)
        config, self._request.run_id = seat.enter(), seat.run_id
        for index, address in enumerate(config.run.coordinators):
            if index != config.run.coordinator_index:
                other = self._open(self._link.sibling(address))
                other.check(other.enter(), config)
                if other.index != index:
                    raise RunMismatch(
                        f"run.coordinators[{index}] is {address}, where coordinator {other.index} answers: put the "
                        "addresses in the order of --index"
                    )
        self._seats.sort(key=lambda seat: seat.index)
        self._run = config.run
        return config

    def _open(self, link: Link) -> Seat:
        self._seats.append(Seat(self._group, link, self._request, self._limits, self.guard))
        return self._seats[-1]

    def lost(self) -> list[Seat]:
        """The seats whose lease is over, as any rank has heard. Collective."""
        rows = self._group.numbers([seat.lost for seat in self])
        return [seat for number, seat in enumerate(self) if any(row[number] for row in rows)]

    def confer(self, *, finite: bool, done: bool, flights: Mapping[Key, Future[Any]]) -> Word:
        """What all ranks know. Collective; what any rank has to raise, all raise.

        Args:
            finite: this rank's reported loss is finite.
            done: what this rank waits for is done.
            flights: this rank's exchanges that are under way, or not applied yet.
        """
        hearts = [seat.heart for seat in self]
        own = [[flight for key, flight in flights.items() if key[0] in seat.fragments] for seat in self]
        error = next(filter(None, (seat.trouble(mine) for seat, mine in zip(self, own, strict=True))), None)
        row = [
            finite,
            done,
            0 if error is None else 2 if isinstance(error, Malformed) else 1,
            max(DIRECTIVES.index(h.directive) if h and h.directive in DIRECTIVES else 0 for h in hearts),
            *(heart is not None and heart.silent for heart in hearts),
        ]
        rows = self._group.numbers(row)
        if any(row[2] for row in rows):
            if all(row[2] != 1 for row in rows):
                self._group.from_first(self._look)  # a coordinator at an earlier state knows no such round
            self._group.raise_first(error)
        directive = DIRECTIVES[rows[0][3]]
        for seat in self:
            seat.courier.held = directive == "pause"
        return Word(
            finite=all(row[0] for row in rows),
            done=all(row[1] for row in rows),
            silent=tuple(map(bool, rows[0][4:])),
            directive=directive,
        )

    def _look(self) -> bytes:
        """Beats as rank 0 at every coordinator; raises what has ended a lease."""
        return b"".join(seat.lease.look() for seat in self)

    def report(self, **progress: float) -> None:
        """Sets fields of the next heartbeats, as `Heart.report` does."""
        for seat in self:
            if seat.heart:
                seat.heart.report(**progress)

    def traffic(self) -> tuple[int, int]:
        """Bytes this process has sent to and received from all coordinators; sockets are told apart by their port."""
        ports = {seat.link.address.rpartition(":")[2]: seat.link.traffic() for seat in self}
        return sum(t.sent for t in ports.values()), sum(t.received for t in ports.values())

    def leave(self, reason: str) -> None:
        """Gives all leases back at the same time, and closes the connections. Not collective."""
        partings = [threading.Thread(target=seat.lease.leave, args=(reason,), daemon=True) for seat in self]
        for seat in self:
            seat.pool.shutdown(wait=False, cancel_futures=True)
        for parting in partings:
            parting.start()
        for parting in partings:
            parting.join()
        for seat in self:
            seat.link.close()
