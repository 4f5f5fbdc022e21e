"""What the up codec dropped of this rank's contributions: settled as all ranks agree, and kept on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from diloco.feedback import Counted, Ending, Fate, agreed
from diloco.replica import Replica
from diloco.v1 import coordinator_pb2 as pb
from island.courier import of_pieces
from island.group import Group
from island.residuals import Residuals

_FATES = list(Fate)


class Settling:
    """A rank's part in the error feedback of its island. It does nothing for codecs that drop little.

    Args:
        replica: holds the residuals; takes up here what an earlier process has left of them.
        group: the island's ranks.
        folder: where they are kept; none to keep none.
        whose: run and island, for the names of files.
        fragments: those that move.
    """

    def __init__(self, replica: Replica, group: Group, folder: Path | None, whose: str, fragments: int) -> None:
        self._replica, self._group, self._fragments = replica, group, range(fragments)
        self._disk: Residuals | None = None
        if replica.feedback and folder:
            owned = [replica.owned(fragment) for fragment in self._fragments]
            names = [f"{whose}_residual_f{f}_{of_pieces(held)}" for f, held in enumerate(owned)]
            self._disk = Residuals([folder / name for name in names])
            for fragment, held in enumerate(owned):
                kept = self._disk.load(fragment, [h.box.numel for h in held])
                if kept:
                    replica.feedback[fragment].restore(kept)

    def rejoin(self, contributed: Iterable[pb.Contributed]) -> None:
        """Settles what was in flight by what the coordinator knows of it: anchors are taken anew."""
        known = {c.fragment: Counted(c.oldest_round, c.open_round, frozenset(c.rounds)) for c in contributed}
        self._replica.rejoin(known)
        for fragment in known:
            self.keep(fragment)

    def settle(self, fragment: int, ending: Ending) -> None:
        """Settles what is in flight of a fragment whose round has ended. Collective."""
        if self._replica.feedback:
            rows = self._group.numbers([_FATES.index(self._replica.fate(fragment))])
            self._replica.receipt(fragment, agreed(_FATES[row[0]] for row in rows))
            self._replica.end(fragment, ending)
            self.keep(fragment)

    def forget(self) -> None:
        """Drops all that is kept, as where training is not finite."""
        self._replica.forget()
        for fragment in self._fragments:
            self.keep(fragment)

    def keep(self, fragment: int) -> None:
        """Has what is kept of a fragment outlive this process."""
        if self._disk and self._replica.feedback:
            self._disk.put(fragment, self._replica.feedback[fragment].keep())

    def close(self) -> None:
        """Writes what has yet to be written, within `residuals.CLOSE_S`."""
        if self._disk:
            self._disk.close()
