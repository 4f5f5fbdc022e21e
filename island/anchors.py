"""The island's anchors over all of its ranks: fetched, shared, and compared with the coordinator's. All collective.

A rank fetches its own pieces, and may get a newer version than another does. Nothing is brought into training before
all ranks hold the same version and its digest is the coordinator's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from diloco.digest import combine, show
from diloco.errors import DigestMismatch, Expired
from diloco.replica import Position, Replica
from diloco.v1 import coordinator_pb2 as pb
from island.courier import Courier
from island.group import Group

log = logging.getLogger("diloco.island")
DIGEST_ATTEMPTS = 3
T = TypeVar("T")


class Together(Protocol):
    """Does a rank's bulk work off its training thread; returns once every rank's is done, or raises the first error."""

    def __call__(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class Stand:
    """A version of a fragment, as the coordinator names it."""

    version: int
    round: int
    """Rounds that have ended."""
    digest: int


class Anchors:
    """A rank's part in the anchors of its island.

    Args:
        replica: what this rank holds.
        group: the island's ranks.
        courier: fetches this rank's pieces, under one epoch.
        together: does that on all ranks.
    """

    def __init__(self, replica: Replica, group: Group, courier: Courier, together: Together) -> None:
        self._replica, self._group, self._courier, self._together = replica, group, courier, together

    def take_up(self, state: pb.FragmentState) -> None:
        """Brings a fragment to where the run stands: by nothing, by the updates it lacks, or whole.

        Raises:
            DigestMismatch: the bits differ from the coordinator's, also when fetched anew.
        """
        fragment, stand = state.fragment, Stand(state.version, state.round, state.digest)
        if not self.matches(fragment, stand):
            try:
                self._together(lambda: self._courier.catch_up(fragment, stand.round))
            except Expired:
                stand = self._whole(fragment)
        self.confirm(fragment, stand)

    def replace(self, fragment: int) -> None:
        """Fetches a fragment whole. Raises `DigestMismatch` as `take_up` does."""
        self.confirm(fragment, self._whole(fragment))

    def confirm(self, fragment: int, stand: Stand) -> None:
        """Compares a fragment with the coordinator's; fetches it whole where they differ, at whatever version that is.

        Raises:
            DigestMismatch: the bits differ also when fetched anew.
        """
        for attempt in range(DIGEST_ATTEMPTS + 1):
            if self.matches(fragment, stand):
                self._replica.position[fragment] = Position(stand.version, stand.round)
                self._replica.taken[fragment] = stand.round
                return
            if attempt < DIGEST_ATTEMPTS:
                log.error(
                    "fragment %d version %d has digest %s here and %s at the coordinator; fetching it whole (%d)",
                    fragment,
                    stand.version,
                    show(self.digest(fragment)[0]),
                    show(stand.digest),
                    attempt + 1,
                )
                stand = self._whole(fragment)
        raise DigestMismatch(
            f"fragment {fragment} version {stand.version} keeps another digest than the coordinator's",
            fragment=fragment,
            version=stand.version,
        )

    def reset(self) -> None:
        """Sets the local parameters of the courier's fragments to their anchors.

        An update may be on its way, and have moved the anchors of some ranks already; that is no harm, as its sync
        follows. All holders of a replicated piece take its owner's anchor, so that they stay equal.
        """
        for fragment in self._courier.fragments:
            with self._courier.anchors:
                self._share(fragment)
                self._replica.mix(fragment, alpha=0.0)

    def digest(self, fragment: int, *, known: bool = False) -> tuple[int, int]:
        """The fragment's digest over the island's anchors (unsigned), and 0 where all replicas agree.

        `known` is that of `Replica.digest_parts`.
        """
        rows = self._group.numbers(self._replica.digest_parts(fragment, known=known))
        owned, check = (combine(*(row[i] for row in rows)) for i in (0, 1))
        return owned & (2**64 - 1), check

    def matches(self, fragment: int, stand: Stand) -> bool:
        """Whether a fragment is the coordinator's, on all ranks."""
        self._share(fragment)
        return self.digest(fragment, known=True) == (stand.digest, 0)

    def _share(self, fragment: int) -> None:
        """Gives every rank that holds a replicated piece its owner's anchor."""
        for held in self._replica.held(fragment):
            if len(held.owners) > 1:
                self._group.share(held.anchor.view(-1).view(torch.uint8), tuple(sorted(held.owners)), held.owners[0])

    def _whole(self, fragment: int) -> Stand:
        """Fetches all pieces whole, then what some ranks lack to the newest version that any of them got."""
        header: Any = self._together(lambda: self._courier.fetch_anchor(fragment))
        newest = max(row[0] for row in self._group.numbers([header.round]))
        header = self._together(lambda: self._courier.catch_up(fragment, newest)) or header
        return Stand(header.version, newest, header.digest)
