"""What a site in a run can be asked for beside training: who it is, its outer parameters, figures, what it keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from diloco.digest import show
from diloco.replica import Replica
from island.courier import Courier
from island.group import Group
from island.heart import Heart
from island.joining import settle
from island.resuming import Keeping
from island.seat import Seat, Seats


class Site:
    """The part of a `Session` that sends and applies nothing."""

    replica: Replica
    """This rank's anchors."""
    keeping: Keeping
    """Its part in the island's checkpoints."""
    tokens: int
    _model: nn.Module
    _group: Group
    _seats: Seats

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self._first.run_id

    @property
    def epoch(self) -> int:
        """Of the lease; of that at coordinator 0, where there are several, as what follows."""
        return self._first.epoch

    @property
    def heart(self) -> Heart | None:
        """Rank 0's heartbeat."""
        return self._first.heart

    @property
    def courier(self) -> Courier:
        """This rank's bulk traffic."""
        return self._first.courier

    @property
    def _first(self) -> Seat:
        return next(iter(self._seats))

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer | None = None, **extras: Callable[[], Any]) -> None:
        """Has checkpoints hold an optimizer made after joining, and what else has a state; see `Keeping.attach`."""
        self.keeping.attach(optimizer, extras)

    def kept(self, name: str) -> Any:
        """The state of an extra in the checkpoint that the island goes on with; None where there is none."""
        return self.keeping.kept(name)

    # -- the outer parameters ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[nn.Module]:
        """Within it, the model computes with the outer parameters; afterwards with its own again. Collective."""
        with self._seats.guard:
            settle(self._model)
            self.replica.swap()
            try:
                yield self._model
            finally:
                settle(self._model)
                self.replica.swap()

    def take_outer(self) -> None:
        """Replaces the model's parameters by the outer ones, for good: what to save at the end. Collective."""
        settle(self._model)
        for seat in self._seats:
            seat.anchors.reset()

    def digests(self) -> list[str]:
        """The digest of each fragment's anchor, as the coordinator shows it. Collective."""
        fragments = range(len(self.replica.fragments))
        return [show(self._seats.of(f).anchors.digest(f)[0]) for f in fragments]

    # -- figures ----------------------------------------------------------------------------------------------------

    def tell(self, **progress: float) -> None:
        """Puts figures of the island into the next heartbeats, as `Heart.report` does."""
        self._seats.report(**progress)

    def report(self) -> tuple[int, int]:
        """Puts the island's tokens and traffic into the next heartbeats. Collective.

        Returns:
            Bytes that the island's ranks have sent and received, counted at their sockets.
        """
        rows = self._group.numbers([self.tokens, *self._seats.traffic()])
        tokens, up, down = (sum(row[i] for row in rows) for i in range(3))
        self.tell(tokens=tokens, bytes_up=up, bytes_down=down)
        return up, down
