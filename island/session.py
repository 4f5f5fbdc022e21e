"""A site in a run: joins the algorithm to a model and its process group.

    with join(model, "host:port", island_id="tokyo") as site:
        for batch in data:
            ...                                     # forward, backward, optimizer.step()
            site.step(tokens=batch.numel())

`step` does what the schedule says at the edge after an inner step. Encoding, sending, receiving and decoding run on
threads of their own; the training thread is held for a copy of the fragment, and at the sync step until the round has
ended. All ranks of the island call `step` the same number of times.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor, nn

from diloco.codec import CODECS
from diloco.config import RunConfig, load_run
from diloco.digest import combine, show
from diloco.errors import DeadlineExceeded, DigestMismatch, Expired, LayoutError
from diloco.fragments import partition
from diloco.framing import PROTOCOL
from diloco.layout import Box, Kind, Layout, Piece, TensorSpec, box_of, local, named_tensors
from diloco.replica import Held, Position, Replica
from diloco.schedule import Schedule, Send
from diloco.v1 import coordinator_pb2 as pb
from island.courier import Courier
from island.group import Group
from island.heart import Heart
from island.link import Link

log = logging.getLogger("diloco.island")
DIGEST_ATTEMPTS = 3


def join(
    model: nn.Module,
    coordinator: str,
    *,
    island_id: str,
    run_id: str = "",
    connect_timeout_s: float = 300.0,
    start_timeout_s: float = 3600.0,
) -> Session:
    """Joins a run; returns once the first parameters are loaded and the run has started.

    Call it on every rank of the island, after sharding and before the first step. The model's parameters are
    replaced by the run's.

    Args:
        model: float32 parameters, plain or DTensor (FSDP2, HSDP, tensor parallel).
        coordinator: HOST:PORT.
        island_id: unique in the run.
        run_id: the run that is meant; empty for whatever the coordinator serves.
        connect_timeout_s: how long to look for a coordinator that does not answer.
        start_timeout_s: how long to wait for the other islands that the run needs to start.

    Raises:
        RunMismatch: another run, or another model than the run's.
        LayoutError: parameters that are not float32, or shards that are not boxes.
        Unreachable, DeadlineExceeded: nobody answered, or the run did not start, in that time.
    """
    group = Group()
    link = Link(coordinator, patience_s=connect_timeout_s, say=log.warning)
    try:
        return Session(model, group, link, island_id=island_id, run_id=run_id, start_timeout_s=start_timeout_s)
    except BaseException:
        link.close()
        raise


class Session:
    """One rank of an island in a run. Made by `join`."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        link: Link,
        *,
        island_id: str,
        run_id: str,
        start_timeout_s: float,
    ) -> None:
        self.island_id, self._model, self._group, self._link = island_id, model, group, link
        tensors, full = _inventory(model, group)
        reply = pb.JoinReply.FromString(group.from_first(lambda: self._enter(full, run_id)))
        self.run_id, self.epoch = reply.run_id, reply.epoch
        self.config: RunConfig = load_run(reply.config_toml, "the coordinator").value
        self.schedule = Schedule.of(self.config)
        self.layout = full.under(self.config.sync.buffers)
        self.replica = Replica(
            rank=group.rank,
            fragments=partition(self.layout, self.config.sync),
            held=self._hold(tensors),
            up=CODECS[self.config.wire.up],
            down=CODECS[self.config.wire.down],
            alpha=self.config.sync.alpha,
        )
        self.at_step = 0
        """Inner step of the run at which this island stands."""
        self.tokens = 0
        """Tokens this rank has trained on in the run."""
        self.rounds = 0
        """Updates applied."""
        self._adopted = [(0, 0)] * len(self.replica.fragments)
        self.courier = Courier(link, self.replica, self._identity(), self.config)
        self._flights: dict[tuple[int, int], Future[pb.FetchHeader]] = {}
        flights = 1 + self.config.sync.overlap_steps * self.config.sync.fragments // self.config.sync.every_steps
        self._pool = ThreadPoolExecutor(max_workers=flights, thread_name_prefix="courier")
        self.heart = Heart(link, self._identity(), self.config.rounds.lease_s / 3) if group.rank == 0 else None
        try:
            self._take_up(start_timeout_s)
        except BaseException:
            self._shut("failed to start")
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asked = isinstance(error, KeyboardInterrupt | SystemExit)
        self.leave("finished" if error is None else "asked to stop" if asked else f"{type(error).__name__}: {error}")

    @property
    def done(self) -> bool:
        """Whether this island has taken all inner steps of the run."""
        return self.at_step >= self.config.run.steps

    # -- joining --------------------------------------------------------------------------------------------------

    def _enter(self, layout: Layout, run_id: str) -> bytes:
        request = pb.JoinRequest(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            run_id=run_id,
            island_id=self.island_id,
            ranks=self._group.size,
            tensors=[pb.TensorSpec(name=s.name, shape=s.shape, kind=s.kind) for s in layout.tensors],
            layout_digest=layout.digest,
        )
        return self._link.join(request).SerializeToString()

    def _identity(self) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(run_id=self.run_id, island_id=self.island_id, epoch=self.epoch)

    def _hold(self, tensors: dict[str, tuple[Tensor, Kind]]) -> list[Held]:
        """This rank's pieces, with the ranks that hold the same; forms the subgroups that share a piece."""
        boxes = {name: box_of(tensor, name) for name, (tensor, _) in tensors.items()}
        everyone = self._group.gather([[n, b.offset, b.size] for n, b in boxes.items() if b.numel])
        holders: dict[str, dict[Box, list[int]]] = {}
        for rank, rows in enumerate(everyone):
            for name, offset, size in rows:
                holders.setdefault(name, {}).setdefault(Box(tuple(offset), tuple(size)), []).append(rank)
        load = [0] * self._group.size
        held = []
        starts = {
            tensor: start
            for fragment in partition(self.layout, self.config.sync)
            for tensor, start in zip(fragment.tensors, fragment.starts, strict=True)
        }
        for number, spec in enumerate(self.layout.tensors):
            found = holders.get(spec.name, {})
            _check_tiles(spec, list(found))
            for box, ranks in sorted(found.items(), key=lambda item: item[0].offset):
                first = min(ranks, key=lambda r: (load[r], r))
                load[first] += box.numel
                if len(ranks) > 1:
                    self._group.form(tuple(ranks))
                if self._group.rank in ranks:
                    owners = (first, *(r for r in ranks if r != first))
                    tensor = local(tensors[spec.name][0])
                    held.append(
                        Held(
                            piece=Piece(number, box),
                            spec=spec,
                            start=starts[number],
                            local=tensor,
                            owners=owners,
                        )
                    )
        return held

    def _take_up(self, timeout_s: float) -> None:
        """Waits for first parameters, loads the run's anchors, and waits for the run to start."""
        state = self._await(lambda s: all(f.seeded for f in s.fragments) and bool(s.fragments), timeout_s, seed=True)
        positions = [self._load_anchor(f.fragment, f) for f in state.fragments]
        for fragment, position in enumerate(positions):
            self._meet(fragment, *position)
        if self.heart:
            self.heart.ready = True
        state = self._await(lambda s: s.phase != "gathering", timeout_s)
        moving = [p.round for p in self.replica.position[: len(self.schedule.offsets)]]
        ahead = min((self.schedule.sync_step(p, r) for p, r in enumerate(moving)), default=0)
        self.at_step = min(max(self.schedule.position(moving), state.step), ahead - 1)

    def _await(self, good: Callable[[pb.RunState], bool], timeout_s: float, seed: bool = False) -> pb.RunState:
        """Polls the run's state on rank 0 until it is `good`, seeding the run where that is asked of this island."""
        deadline = time.monotonic() + timeout_s
        seeded, told = False, ""
        while True:
            state = pb.RunState.FromString(self._group.from_first(self._poll))
            if good(state):
                return state
            if seed and state.seeder == self.island_id and not seeded:
                for fragment in range(len(self.replica.fragments)):
                    self.courier.seed(fragment)
                seeded = True
                continue
            if state.reason != told and self.heart:
                log.info("waiting: %s", state.reason)
                told = state.reason
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the run did not start within {timeout_s:g} s: {state.reason}")
            time.sleep(0.1)

    def _poll(self) -> bytes:
        assert self.heart is not None
        return self.heart.poll().SerializeToString()

    def _load_anchor(self, fragment: int, state: pb.FragmentState) -> tuple[int, int]:
        """Takes the run's anchor, unless this island's first parameters have the same bits already."""
        if state.version == 0 and self._digest(fragment)[0] == state.digest:
            return 0, state.round
        header = self.courier.fetch_anchor(fragment)
        return header.version, header.round

    def _meet(self, fragment: int, version: int, round_: int) -> None:
        """Brings all ranks to the newest version that any of them has fetched, and into training. Collective."""
        newest = max(row[0] for row in self._group.numbers([round_]))
        while round_ < newest:
            header = self.courier.fetch_update(fragment, round_)
            version, round_ = header.version, round_ + 1
        self.replica.position[fragment] = Position(version, round_)
        self._share(fragment)
        self.replica.mix(fragment, alpha=0.0)

    # -- training -------------------------------------------------------------------------------------------------

    def step(self, *, tokens: int = 0, loss: float = math.nan) -> None:
        """The edge after an inner step: sends what is due, and applies what is due.

        Args:
            tokens: tokens that this rank alone accounts for in the step; the island's are the sum over its ranks.
            loss: training loss in nats per token, for the status.

        Raises:
            StaleEpoch: the lease was lost; join again.
            DeadlineExceeded, Unreachable: a round did not end, or nobody answered, within the run's bounds.
            DigestMismatch: the anchor differs from the coordinator's, also when fetched anew.
        """
        self.at_step += 1
        self.tokens += tokens
        if self.heart:
            self.heart.check()
            self.heart.report(step=self.at_step)
            if not math.isnan(loss):
                self.heart.report(loss=loss)
        due = [a for a in self.schedule.due(self.at_step) if a.round >= self.replica.position[a.fragment].round]
        if due:
            _settle(self._model)
        for action in due:
            if isinstance(action, Send):
                self._send(action.fragment, action.round)
            else:
                self._apply(action.fragment, action.round)

    def _send(self, fragment: int, round_: int) -> None:
        tokens, steps = self._adopted[fragment]
        since = sum(row[0] for row in self._group.numbers([self.tokens - tokens]))
        staged = self.replica.stage(fragment)
        position = self.replica.position[fragment]
        work = self._pool.submit(
            self.courier.exchange, fragment, round_, position.version, staged, since, self.at_step - steps
        )
        self._flights[fragment, round_] = work

    def _apply(self, fragment: int, round_: int) -> None:
        if (fragment, round_) not in self._flights:
            # It came in after the send step. Where every island did, the round would never open, and so never end.
            self._send(fragment, round_)
        flight = self._flights.pop((fragment, round_))
        try:
            header = flight.result()
        except Expired as error:
            log.warning("fragment %d: %s; doing so", fragment, error.message)
            header = pb.FetchHeader(outcome="expired")
        if any(row[0] for row in self._group.numbers([header.outcome == "expired"])):
            fresh = self.courier.fetch_anchor(fragment)
            self._meet(fragment, fresh.version, fresh.round)
            self._adopted[fragment] = (self.tokens, self.at_step)
            return
        self.replica.position[fragment] = Position(header.version, round_ + 1)
        if header.outcome == "committed":
            self._share(fragment)
            self._verify(fragment, header)
            self.replica.mix(fragment)
            self.rounds += 1
            self._adopted[fragment] = (self.tokens, self.at_step)
        elif self._group.rank == 0:
            log.warning("fragment %d round %d was skipped: %s", fragment, round_, header.reason)

    def _share(self, fragment: int) -> None:
        """Gives every rank that holds a replicated piece its owner's anchor."""
        for held in self.replica.held(fragment):
            if len(held.owners) > 1:
                self._group.share(held.anchor.view(-1).view(torch.uint8), tuple(sorted(held.owners)), held.owners[0])

    def _digest(self, fragment: int) -> tuple[int, int]:
        """The fragment's digest over the island's anchors (unsigned), and 0 where all replicas agree. Collective."""
        rows = self._group.numbers(self.replica.digest_parts(fragment))
        owned, check = (combine(*(row[i] for row in rows)) for i in (0, 1))
        return owned & (2**64 - 1), check

    def _verify(self, fragment: int, header: pb.FetchHeader) -> None:
        """Compares the island's anchor with the coordinator's; fetches it whole where they differ."""
        for attempt in range(DIGEST_ATTEMPTS):
            found, check = self._digest(fragment)
            if found == header.digest and not check:
                return
            log.error(
                "fragment %d version %d has digest %s here and %s at the coordinator; fetching it whole (%d)",
                fragment,
                header.version,
                show(found),
                show(header.digest),
                attempt + 1,
            )
            fresh = self.courier.fetch_anchor(fragment)
            versions = {row[0] for row in self._group.numbers([fresh.version])}
            self._share(fragment)
            if versions != {header.version}:
                continue
        raise DigestMismatch(
            f"fragment {fragment} version {header.version} keeps another digest than the coordinator's",
            fragment=fragment,
            version=header.version,
        )

    # -- the outer parameters ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[nn.Module]:
        """Within it, the model computes with the outer parameters; afterwards with its own again. Collective."""
        with self.courier.anchors:
            _settle(self._model)
            self.replica.swap()
            try:
                yield self._model
            finally:
                _settle(self._model)
                self.replica.swap()

    def digests(self) -> list[str]:
        """The digest of each fragment's anchor, as the coordinator shows it. Collective."""
        return [show(self._digest(f)[0]) for f in range(len(self.replica.fragments))]

    # -- leaving ----------------------------------------------------------------------------------------------------

    def report(self) -> tuple[int, int]:
        """Puts the island's tokens and traffic into the next heartbeats. Collective.

        Returns:
            Bytes that the island's ranks have sent and received, counted at their sockets.
        """
        rows = self._group.numbers([self.tokens, *self._link.traffic()])
        tokens, up, down = (sum(row[i] for row in rows) for i in range(3))
        if self.heart:
            self.heart.report(tokens=tokens, bytes_up=up, bytes_down=down)
        return up, down

    def leave(self, reason: str) -> None:
        """Leaves the run, so that no round waits for this island."""
        self._shut(reason)

    def _shut(self, reason: str) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.heart:
            self.heart.stop(reason)
        self._link.close()


def _inventory(model: nn.Module, group: Group) -> tuple[dict[str, tuple[Tensor, Kind]], Layout]:
    """This rank's tensors by name, and the layout of the whole island's model. Collective."""
    tensors = {name: (tensor, kind) for name, tensor, kind in named_tensors(model)}
    rows = [[name, list(tensor.shape), kind] for name, (tensor, kind) in tensors.items()]
    specs: dict[str, TensorSpec] = {}
    for rank, theirs in enumerate(group.gather(rows)):
        for name, shape, kind in theirs:
            spec = TensorSpec(name, tuple(shape), kind)
            if specs.setdefault(name, spec) != spec:
                raise LayoutError(f"tensor '{name}' is {specs[name]} on an earlier rank and {spec} on rank {rank}")
    return tensors, Layout(specs.values())


def _check_tiles(spec: TensorSpec, boxes: list[Box]) -> None:
    overlap = any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    if overlap or sum(box.numel for box in boxes) != spec.numel:
        raise LayoutError(
            f"the ranks' parts of tensor '{spec.name}' {list(spec.shape)} do not make it up exactly: {boxes}"
        )


def _settle(model: nn.Module) -> None:
    """Has FSDP drop gathered copies, which would be stale once the shards change."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard):
            reshard()
