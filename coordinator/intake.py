"""What comes in: parts of contributions and of first parameters, each taken once and durably, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from coordinator import rounds
from coordinator.facts import Entry
from coordinator.fold import Part
from coordinator.inbox import SeedBed, Stored
from coordinator.recovery import part_row
from coordinator.results import Taken
from coordinator.scan import Scan
from coordinator.upload import Slot
from diloco.errors import DilocoError, DivergedError, Malformed, StaleEpoch
from diloco.failpoints import failpoint
from diloco.layout import Piece

if TYPE_CHECKING:
    from coordinator.run import Run


class Place(NamedTuple):
    """Where one rank's part of a contribution belongs."""

    island: str
    epoch: int
    rank: int
    fragment: int
    round: int


class Intake:
    """Takes parts into a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seedbed: SeedBed | None = None

    # -- first parameters -----------------------------------------------------------------------------------------

    async def seed(self, island: str, epoch: int, rank: int, fragment: int, part: Part, digest: str) -> bool:
        """Takes one rank's part of the first parameters; returns whether it was known already."""
        self.seed_known(island, epoch, rank, fragment)
        bed = self._seedbed
        if bed is None or bed.epoch != epoch:
            bed = self._seedbed = SeedBed(epoch, self._run.fragments)
        duplicate = await self._run.in_worker(lambda: bed.add(fragment, rank, part, digest))
        failpoint("seed-received")
        if bed is self._seedbed and bed.anchors:
            await self._run.plant(bed.anchors)
            bed.clear()
        return duplicate

    def seed_known(self, island: str, epoch: int, rank: int, fragment: int) -> str:
        """The digest of a rank's part of the first parameters that has come already and need not come again, or "".

        Raises:
            StaleEpoch, Malformed: first parameters are not to come from this island, or not any more.
        """
        state, bed = self._run.state, self._seedbed
        rounds.member_of(state, island, epoch)
        known = bed.known(fragment, rank) if bed is not None and bed.epoch == epoch else ""
        if state.seeded:
            if known:
                return known
            raise StaleEpoch("the run has its first parameters already: fetch them")
        if state.seeder != island:
            raise Malformed(f"first parameters are to come from {state.seeder}, not from {island}")
        return "" if bed and bed.anchors else known  # where all have come and the disk failed, the last comes again

    # -- contributions --------------------------------------------------------------------------------------------

    async def settled(self, place: Place, base_version: int, pieces: Sequence[Piece]) -> Taken | None:
        """What becomes of a part without its bytes: it cannot count, or is known if it has the same digest. None where
        it is to be sent.

        Raises:
            Malformed: a round that cannot be open, or a base version that it never had.
            Conflict: the part came with other pieces.
        """
        state, (island, epoch, rank, fragment, round_) = self._run.state, place
        late = rounds.lateness(state, fragment, round_)
        version = rounds.base_version(state, fragment, round_)
        if version is not None and base_version != version:
            raise Malformed(
                f"the contribution is based on version {base_version} of fragment {fragment}, "
                f"and round {round_} continues from version {version}"
            )
        if late and rounds.reception(state, fragment, round_, island):
            return await self._run.in_turn(lambda: self._late(place, 0))
        why = self._unwanted(place)
        if why:
            return Taken(dropped=why)
        known = self._run.inbox.find(fragment, round_, island, epoch, rank, pieces)
        return Taken(duplicate=True, digest=known.digest, late=self._carried(place)) if known else None

    def _unwanted(self, place: Place) -> str:
        """Why an island's parts cannot count in an open round, or ""."""
        current = self._run.state.rounds[place.fragment]
        if current.round != place.round:
            return ""
        entry = current.entries.get(place.island)
        if entry and entry.epoch != place.epoch:
            return f"{place.island} has already contributed to round {place.round} under another epoch"
        return current.refused.get(place.island, "")

    async def check(self, place: Place, part: Part, scan: Scan | None = None) -> str:
        """Looks at a part's values, if `scan` has not; returns why its contribution cannot be used, or ""."""
        try:
            if scan is None or not scan.result():
                await self._run.in_worker(part.check_finite)
        except DivergedError as error:
            await self._run.take(
                rounds.Spoiled(
                    fragment=place.fragment,
                    round=place.round,
                    island=place.island,
                    epoch=place.epoch,
                    reason=error.message,
                )
            )
            return error.message
        return ""

    async def contribute(
        self, place: Place, keep: Callable[[], Stored], tokens: int, steps: int, places: tuple[str, ...] = ()
    ) -> Taken:
        """Takes one rank's part of a contribution; its file goes unless the round keeps it.

        Args:
            place: where it belongs.
            keep: makes the part durable; called in the worker thread.
            tokens, steps: trained by the island since it adopted the fragment's anchor.
            places: where it stood in its shards.
        """
        run = self._run

        async def work() -> Taken:
            failpoint("push-whole")
            stored = await run.in_worker(keep)
            failpoint("push-named")
            try:
                taken = await run.in_turn(lambda: self._contribute(place, stored, tokens, steps, places))
            except DilocoError:
                self._discard(stored)
                raise
            self._discard(stored)  # not where the disk failed: the row may be there all the same, and need its file
            return taken

        return await run.to_its_end(work())

    def _discard(self, stored: Stored) -> None:
        if not self._run.inbox.holds(stored.path):
            stored.discard()

    async def _contribute(
        self, place: Place, stored: Stored, tokens: int, steps: int, places: tuple[str, ...]
    ) -> Taken:
        run, (island, epoch, rank, fragment, round_) = self._run, place
        rounds.member_of(run.state, island, epoch)
        late = rounds.lateness(run.state, fragment, round_)
        if late and rounds.reception(run.state, fragment, round_, island):
            return await self._late(place, tokens)
        why = self._unwanted(place)
        if why:
            return Taken(dropped=why)
        accepted = rounds.counted(run.state, fragment, round_, island) is not None
        inbound = run.inbox.inbound(run.fragments[fragment], round_, island, epoch, accepted=accepted)
        assert inbound is not None
        if inbound.check(rank, stored):
            return Taken(duplicate=True, late=self._carried(place))

        def then() -> None:
            inbound.add(rank, stored)
            inbound.tokens, inbound.steps = tokens, steps

        row = part_row(island, epoch, rank, fragment, round_, stored, tokens, steps)
        if inbound.coverage.completed_by(stored.pieces):
            await run.take_in_turn(_contributed(place, tokens, steps, places), row, then)
        else:
            await run.record([row])
            then()
        failpoint("push-recorded")
        return Taken(late=self._carried(place))

    async def _late(self, place: Place, tokens: int) -> Taken:
        """Records a contribution that comes too late to be used."""
        run, (island, epoch, rank, fragment, round_) = self._run, place
        counted = rounds.counted(run.state, fragment, round_, island)
        if counted == epoch or run.inbox.knows(fragment, round_, island, epoch, rank):
            return Taken(duplicate=True)  # the receipt was lost on its way
        reason = rounds.reception(run.state, fragment, round_, island)
        await run.take_in_turn(_contributed(place, tokens, 0))
        return Taken(dropped=reason)

    def _carried(self, place: Place) -> str:
        into = self._run.state.rounds[place.fragment]
        late = into.carried.get(f"{place.island}@{place.round}")
        return f"folded into round {into.round} with its weight times {late.factor:g}" if late else ""

    async def progressed(self, place: Place) -> None:
        """Bytes of an island's contribution have come."""
        await self._run.take(rounds.Progressed(fragment=place.fragment, round=place.round, island=place.island))

    # -- what is left over ------------------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Enters complete contributions that do not count yet; ledgers of earlier versions may have some."""
        run = self._run
        for fragment in range(len(run.state.rounds)):
            for round_, island, inbound in list(run.inbox.whole(fragment)):
                member, current = run.state.members.get(island), run.state.rounds[fragment]
                held = member and member.present and member.epoch == inbound.epoch
                known = rounds.counted(run.state, fragment, round_, island) is not None
                if not held or known or (round_ == current.round and island in current.refused):
                    continue
                place = Place(island, inbound.epoch, 0, fragment, round_)
                await run.take_in_turn(_contributed(place, inbound.tokens, inbound.steps))
                if rounds.counted(run.state, fragment, round_, island) is None:
                    run.inbox.drop(fragment, round_, island)

    def over(self, slot: Slot) -> bool:
        """Whether nothing that is sent to a slot can count any more."""
        state = self._run.state
        if slot.seed:
            return state.seeded or state.seeder != slot.island
        if slot.fragment >= len(state.rounds):
            return True
        try:
            late = rounds.lateness(state, slot.fragment, slot.round)
        except Malformed:
            return True
        return bool(late and rounds.reception(state, slot.fragment, slot.round, slot.island))


def _contributed(place: Place, tokens: int, steps: int, places: tuple[str, ...] = ()) -> rounds.Contributed:
    entry = Entry(island=place.island, epoch=place.epoch, tokens=tokens, steps=steps)
    return rounds.Contributed(fragment=place.fragment, round=place.round, entry=entry, places=places)
