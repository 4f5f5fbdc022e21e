"""Contributions that are arriving: which parts of which island are here, and whether they make a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from coordinator.files import REAL, Files
from coordinator.fold import Part
from diloco.codec import Choice, Codec
from diloco.errors import Conflict, Malformed
from diloco.fragments import Fragment
from diloco.layout import Box, Piece
from diloco.merge import place

log = logging.getLogger("diloco.coordinator")


class Coverage:
    """Which boxes of a fragment's tensors have come. Whole when every element has come exactly once."""

    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._boxes: dict[int, list[Box]] = {tensor: [] for tensor in fragment.tensors}
        self._missing = fragment.numel

    @property
    def whole(self) -> bool:
        return not self._missing

    def check(self, pieces: Sequence[Piece]) -> dict[int, list[Box]]:
        """The boxes by tensor, if they fit. Raises `Malformed` where one is foreign or has come already."""
        fresh: dict[int, list[Box]] = {}
        for piece in pieces:
            if piece.tensor not in self._boxes:
                raise Malformed(f"tensor {piece.tensor} is not part of fragment {self._fragment.index}")
            if not piece.box.numel:
                continue
            known = self._boxes[piece.tensor] + fresh.get(piece.tensor, [])
            if any(box.overlaps(piece.box) for box in known):
                raise Malformed(f"tensor {piece.tensor}: {piece.box} has come already, from another rank")
            fresh.setdefault(piece.tensor, []).append(piece.box)
        return fresh

    def completed_by(self, pieces: Sequence[Piece]) -> bool:
        """Whether nothing is missing once these pieces have come, which fit."""
        return self._missing == sum(piece.box.numel for piece in pieces)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Takes the pieces of one part. Raises `Malformed`, and takes none, where they do not fit."""
        for tensor, boxes in self.check(pieces).items():
            self._boxes[tensor] += boxes
            self._missing -= sum(box.numel for box in boxes)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One rank's part, on disk."""

    pieces: tuple[Piece, ...]
    codecs: tuple[Codec, ...]
    path: Path
    digest: str
    files: Files = field(default=REAL, compare=False, repr=False)
    checked: bool = field(default=False, compare=False, repr=False)
    """Whether its values have been looked at in this process."""

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of its file."""
        return sum(c.size(p.box.numel) for p, c in zip(self.pieces, self.codecs, strict=True))

    def part(self) -> Part:
        """The part with its payload as a memory map."""
        payload = self.files.map(self.path)
        return Part(pieces=self.pieces, codecs=self.codecs, payload=payload, checked=self.checked)

    def discard(self) -> None:
        """Gives the file up. One that the disk keeps nothing speaks of any more; the next start removes it."""
        try:
            self.files.retire(self.path)
        except OSError as error:
            log.warning("%s is left for the next start to remove: %s", self.path, error)


@dataclass(kw_only=True)
class Inbound:
    """What has come of one island's contribution to one round."""

    epoch: int
    coverage: Coverage
    tokens: int = 0
    steps: int = 0
    carried: bool = False
    """Whether it came late and is folded into a later round than its own."""
    parts: dict[int, Stored] = field(default_factory=dict)

    def check(self, rank: int, stored: Stored) -> bool:
        """Whether a rank's part is known already.

        Raises:
            Conflict: the rank has sent other bytes under the same key.
            Malformed: its pieces do not fit.
        """
        known = self.parts.get(rank)
        if known is None:
            self.coverage.check(stored.pieces)
        elif (known.digest, known.pieces) != (stored.digest, stored.pieces):
            raise Conflict(f"rank {rank} has sent {known.digest} before and sends {stored.digest} now")
        return known is not None

    def add(self, rank: int, stored: Stored) -> bool:
        """Takes a rank's part unless it is known already, and returns whether it was. Raises what `check` raises."""
        if self.check(rank, stored):
            return True
        self.coverage.add(stored.pieces)
        self.parts[rank] = stored
        return False

    def holds(self, path: Path) -> bool:
        """Whether a file is one of the parts."""
        return any(stored.path == path for stored in self.parts.values())

    def discard(self) -> None:
        """Removes the files of all parts."""
        for stored in self.parts.values():
            stored.discard()


class Inbox:
    """What has come of all contributions whose rounds are open, or whose update no kept snapshot holds yet."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], dict[str, Inbound]] = {}

    def inbound(self, fragment: Fragment, round_: int, island: str, epoch: int, *, accepted: bool) -> Inbound | None:
        """Where an island's parts go; none where its contribution under another epoch counts in the round already.

        What it had sent under an earlier epoch, but is not `accepted`, is forgotten.
        """
        islands = self._rounds.setdefault((fragment.index, round_), {})
        known = islands.get(island)
        if known and known.epoch != epoch:
            if accepted:
                return None
            known.discard()
            known = None
        if known is None:
            known = islands[island] = Inbound(epoch=epoch, coverage=Coverage(fragment))
        return known

    def whole(self, fragment: int) -> Iterator[tuple[int, str, Inbound]]:
        """The complete contributions to a fragment's rounds: (round, island, contribution)."""
        for (number, round_), islands in self._rounds.items():
            for island, inbound in islands.items():
                if number == fragment and inbound.coverage.whole and not inbound.carried:
                    yield round_, island, inbound

    def carry(self, fragment: int, round_: int, island: str, into: int) -> None:
        """Moves a late contribution to the round it is folded into, under the name "island@round"."""
        inbound = self._rounds[fragment, round_].pop(island)
        inbound.carried = True
        self._rounds.setdefault((fragment, into), {})[f"{island}@{round_}"] = inbound

    def parts(self, fragment: int, round_: int, island: str) -> list[Stored]:
        """The parts of an island's contribution."""
        return list(self._rounds[fragment, round_][island].parts.values())

    def knows(self, fragment: int, round_: int, island: str, epoch: int, rank: int) -> bool:
        """Whether a rank's part of a whole contribution has come under an epoch."""
        inbound = self._rounds.get((fragment, round_), {}).get(island)
        return bool(inbound and inbound.epoch == epoch and inbound.coverage.whole and rank in inbound.parts)

    def find(
        self, fragment: int, round_: int, island: str, epoch: int, rank: int, pieces: Sequence[Piece]
    ) -> Stored | None:
        """A rank's part that has come under an epoch. Raises `Conflict` where it is of other pieces."""
        inbound = self._rounds.get((fragment, round_), {}).get(island)
        known = inbound.parts.get(rank) if inbound and inbound.epoch == epoch else None
        if known and known.pieces != tuple(pieces):
            raise Conflict(f"rank {rank} has sent other pieces before than it sends now")
        return known

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        inbounds = (inbound for islands in self._rounds.values() for inbound in islands.values())
        return sum(stored.size_bytes for inbound in inbounds for stored in inbound.parts.values())

    def holds(self, path: Path) -> bool:
        """Whether a file is part of a contribution."""
        return any(i.holds(path) for islands in self._rounds.values() for i in islands.values())

    def drop(self, fragment: int, round_: int, island: str) -> None:
        """Removes an island's contribution to a round, which came to nothing, and its files."""
        self._rounds[fragment, round_].pop(island).discard()

    def close(self, fragment: int, round_: int, *, keep_partial: bool) -> None:
        """Removes the contributions to a round that came to nothing, and their files.

        Those of which parts are still missing may yet be completed, and count late, where that is allowed.
        """
        islands = self._rounds.pop((fragment, round_), {})
        for name in [n for n, i in islands.items() if i.coverage.whole or not keep_partial]:
            islands.pop(name).discard()
        if islands:
            self._rounds[fragment, round_] = islands

    def forget(self, fragment: int, before: int) -> None:
        """Removes contributions to rounds of a fragment before round `before`, and their files."""
        for key in [k for k in self._rounds if k[0] == fragment and k[1] < before]:
            for inbound in self._rounds.pop(key).values():
                inbound.discard()


class SeedBed:
    """The first parameters, as they arrive from one epoch of one island."""

    def __init__(self, epoch: int, fragments: Sequence[Fragment]) -> None:
        self.epoch = epoch
        self._fragments = fragments
        self._coverage = [Coverage(fragment) for fragment in fragments]
        self._digests: dict[tuple[int, int], str] = {}
        self._anchors = [torch.empty(fragment.numel, dtype=torch.float32) for fragment in fragments]

    def known(self, fragment: int, rank: int) -> str:
        """The digest of a rank's part that has come already, or ""."""
        return self._digests.get((fragment, rank), "")

    def add(self, fragment: int, rank: int, part: Part, digest: str) -> bool:
        """Places a rank's pieces; returns whether they were known already.

        Raises:
            Conflict, DivergedError, Malformed: nothing has been placed.
        """
        before = self.known(fragment, rank)
        if before not in ("", digest):
            raise Conflict(f"rank {rank} has sent {before} before and sends {digest} now")
        if before:
            return True
        part.check_finite()
        self._coverage[fragment].add(part.pieces)
        chart = self._fragments[fragment]
        for piece, codec, payload in part.split():
            where = chart.place[piece.tensor]
            spec, start = chart.specs[where], chart.starts[where]
            place(codec, payload, piece.box, spec.shape, self._anchors[fragment][start : start + spec.numel])
        self._digests[fragment, rank] = digest
        return False

    @property
    def anchors(self) -> list[Tensor]:
        """The parameters of every fragment (fp32, flat) when all have come; otherwise, or once cleared, nothing."""
        return self._anchors if all(coverage.whole for coverage in self._coverage) else []

    def clear(self) -> None:
        """Forgets the parameters, and still knows the parts that have come."""
        self._anchors = []


def codecs_of(tensors: Fragment, pieces: Sequence[Piece], choice: Choice) -> tuple[Codec, ...]:
    """The codec of each of some pieces of a fragment."""
    return tuple(choice.of(tensors.specs[tensors.place[piece.tensor]]) for piece in pieces)


def part_size(tensors: Fragment, pieces: Sequence[Piece], choice: Choice) -> int:
    """Bytes of what `select` yields."""
    specs = (tensors.specs[tensors.place[piece.tensor]] for piece in pieces)
    return sum(choice.of(spec).part_size(spec.shape, piece.box) for spec, piece in zip(specs, pieces, strict=True))


def select(
    tensors: Fragment,
    payload: Tensor,
    pieces: Sequence[Piece],
    choice: Choice,
    reach: Callable[[int], None] = lambda byte: None,
) -> Iterator[Tensor]:
    """Yields the parts of a fragment's payload (uint8, tensors in flat order) that decode to `pieces`, in order.

    `reach` returns once the payload is there up to a byte: it is asked for the end of each tensor that is looked at.
    """
    ends = list(accumulate(choice.of(spec).size(spec.numel) for spec in tensors.specs))
    for piece in pieces:
        where = tensors.place.get(piece.tensor)
        if where is None:
            raise Malformed(f"tensor {piece.tensor} is not part of fragment {tensors.index}")
        spec = tensors.specs[where]
        codec = choice.of(spec)
        reach(ends[where])
        whole = payload[ends[where] - codec.size(spec.numel) : ends[where]]
        yield codec.select(whole, spec.shape, piece.box)
