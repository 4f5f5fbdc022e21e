"""One island of `benchmarks.sync`: does what its stdin says, a line each, through the product's own session."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.processes import serve
from diloco.replica import Position, Staged
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link
from island.session import Session, join

WIDTH = 1024
POLL_S = 0.0005
PATIENCE_S = 60.0


class Layer(nn.Module):
    """One matrix."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH).mul_(0.02))


class Model(nn.Module):
    """`layers` matrices of `rows` x 1024, the same on every island."""

    def __init__(self, layers: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(rows) for _ in range(layers))


class Island:
    """What an island can be told to do."""

    def __init__(self, site: Session, model: Model, link: Link) -> None:
        self._site, self._replica, self._link = site, site.replica, link
        self._parameters = [parameter.detach() for parameter in model.parameters()]
        self._noise = torch.randn_like(self._parameters[0]).mul_(1e-3)
        self._warm = [torch.empty_like(parameter) for parameter in self._parameters]
        self._fragments = range(site.config.sync.fragments)
        self._pool = ThreadPoolExecutor(len(self._fragments))
        self._staged: list[Staged] = []
        self._payloads: list[list[Tensor]] = []
        sizes = [self._replica.contribution_size(f) for f in self._fragments]
        self._room = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        sizes = [self._replica.update_size(self._replica.owned(f)) for f in self._fragments]
        self._updates = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self._headers: list[pb.FetchHeader] = []

    def train(self) -> None:
        """Moves the parameters, as inner steps would."""
        for parameter in self._parameters:
            parameter.add_(self._noise)

    def copy(self) -> float:
        """Seconds that copying the parameters takes."""

        def work() -> None:
            for warm, parameter in zip(self._warm, self._parameters, strict=True):
                warm.copy_(parameter)

        return statistics.median(_seconds(work) for _ in range(3))

    def sample(self) -> list[float]:
        """A few parameters, to see that both islands come to the same."""
        found: list[float] = self._parameters[0][0, :4].tolist()
        return found

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far, counted at the sockets."""
        return self._site.report()

    def snapshot(self) -> None:
        """Has the coordinator take a snapshot, as it does while a run goes on, and give up what that holds."""
        self._link.command(pb.CommandRequest(verb="snapshot"))

    # -- the whole ------------------------------------------------------------------------------------------------

    def sync(self) -> float:
        """Seconds from the first send to the last update applied, with no training between."""
        return _seconds(lambda: self._steps(2))

    def held_to_send(self) -> float:
        """Seconds that the training thread is held at the edges where a sync begins."""
        return _seconds(self._steps)

    def held_to_apply(self) -> float:
        """Seconds that it is held at the edges where the sync ends, once the updates have come."""
        while any(self._replica.taken[f] != self._replica.position[f].round + 1 for f in self._fragments):
            time.sleep(POLL_S)
        return _seconds(self._steps)

    def _steps(self, times: int = 1) -> None:
        """As many step edges as there are fragments, so many times."""
        for _ in range(times * len(self._fragments)):
            self._site.step(tokens=1)

    # -- its stages, each alone -----------------------------------------------------------------------------------

    def encode(self) -> float:
        """Subtracts and encodes; copying the parameters comes before."""
        self._staged = [self._replica.stage(f) for f in self._fragments]

        def work() -> None:
            rounds = [position.round for position in self._replica.position]
            self._payloads = [
                list(self._replica.encode(f, self._staged[f], rounds[f], self._room[f])) for f in self._fragments
            ]

        return _seconds(work)

    def send(self) -> float:
        """Sends what was encoded, until the coordinator has it on its disk."""

        def contribute(fragment: int) -> None:
            position = self._replica.position[fragment]
            staged = self._staged[fragment]
            self._site.courier.contribute(fragment, position.round, position.version, staged, tokens=1, steps=1)

        with patch.object(self._replica, "encode", lambda fragment, *_: iter(self._payloads[fragment])):
            return self._each(contribute)

    def receive(self) -> float:
        """Receives the updates of rounds that have ended."""
        headers: dict[int, pb.FetchHeader] = {}
        places = {id(self._replica.owned(f)[0]): f for f in self._fragments}

        def fetch(fragment: int) -> None:
            headers[fragment] = self._site.courier.fetch_update(fragment, self._replica.position[fragment].round)

        with patch.object(self._replica, "arriving", lambda owned: _Kept(self._updates[places[id(owned[0])]])):
            duration = self._each(fetch)
        self._headers = [headers[f] for f in self._fragments]
        return duration

    def decode(self) -> float:
        """Decodes them and moves the anchors; then mixes, and stands where a sync leads."""

        def work() -> None:
            for fragment in self._fragments:
                self._replica.decode(self._replica.owned(fragment), self._updates[fragment])

        duration = _seconds(work)
        for fragment, header in zip(self._fragments, self._headers, strict=True):
            self._replica.position[fragment] = Position(header.version, self._replica.position[fragment].round + 1)
            self._replica.mix(fragment)
        self._site.at_step += 2 * len(self._fragments)
        return duration

    def _each(self, work: Callable[[int], None]) -> float:
        """Seconds that something takes for all fragments at once."""
        return _seconds(lambda: [None for _ in self._pool.map(work, self._fragments)].clear())


class _Kept:
    """Takes an update as `diloco.replica.Arriving` does, and decodes nothing of it."""

    def __init__(self, room: Tensor) -> None:
        self._room = room

    def take(self, payload: Tensor, have: int) -> None:
        pass

    def apply(self, payload: Tensor) -> None:
        self._room.copy_(payload)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Joins, and does what it is told."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    model = Model(options["layers"], options["rows"])
    tls = TLS(**options["tls"]) if options["tls"] else None
    with (
        join(model, None, options["address"], island_id=options["island"], tls=tls) as site,
        contextlib.closing(Link(options["address"], patience_s=PATIENCE_S, say=print, tls=tls)) as link,
    ):
        serve(Island(site, model, link))


if __name__ == "__main__":
    main()
