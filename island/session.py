"""A site in a run: joins the algorithm to a model and its process group.

    with join(model, "host:port", island_id="tokyo", optimizer=optimizer) as site:
        while not site.done:
            ...                                     # forward, backward, optimizer.step()
            site.step(tokens=batch.numel())

`step` does what the schedule says at the edge after an inner step. Encoding, sending, receiving and decoding run on
threads of their own; the training thread is held for a copy of the fragment, and at the sync step until the round has
ended. All ranks of the island call `step` the same number of times.

What one rank learns (its part cannot be sent, the lease is lost, the coordinator is silent) becomes a decision of all
ranks at a step edge or inside a wait: `_listen` gathers what each of them knows, and every rank acts on the same.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from diloco.codec.policy import down_choice, up_choice
from diloco.config import RunConfig, load_run
from diloco.digest import show
from diloco.errors import DilocoError, DivergedError, Expired, Malformed, RunMismatch, StaleEpoch
from diloco.failpoints import failpoint
from diloco.feedback import Ending
from diloco.fragments import partition
from diloco.layout import Layout
from diloco.replica import Position, Replica
from diloco.schedule import Apply, Schedule, Send
from diloco.v1 import coordinator_pb2 as pb
from island.anchors import Anchors, Stand
from island.courier import Courier
from island.group import Group
from island.heart import Heart
from island.joining import hold, inventory, join_request
from island.lease import POLL_S, Lease, Limits
from island.link import Link
from island.settling import Settling

log = logging.getLogger("diloco.island")
T = TypeVar("T")
Key = tuple[int, int]
"""Fragment and round."""
REJOINS = 5
"""Times an island joins again without a round completed in between."""
ROLLBACKS = 3
"""The so-manyth time in a row that training is not finite ends the island."""
SLICE_S = 0.25
"""How long a rank waits by itself before the ranks confer again."""


def join(
    model: nn.Module,
    coordinator: str,
    *,
    island_id: str,
    run_id: str = "",
    optimizer: torch.optim.Optimizer | None = None,
    connect_timeout_s: float = 300.0,
    start_timeout_s: float = 3600.0,
    reconnect_timeout_s: float = 86_400.0,
    max_bandwidth_mbps: float = 0.0,
    spool_dir: str = "",
) -> Session:
    """Joins a run; returns once the first parameters are loaded and the run has started.

    Call it on every rank of the island, after sharding and before the first step. The model's parameters are
    replaced by the run's.

    Args:
        model: float32 parameters, plain or DTensor (FSDP2, HSDP, tensor parallel).
        coordinator: HOST:PORT.
        island_id: unique in the run.
        run_id: the run that is meant; empty for whatever the coordinator serves.
        optimizer: the inner optimizer. Where training is not finite any more, its state is dropped along with the
            parameters, because the moments hold NaN then.
        connect_timeout_s: how long to look for a coordinator that does not answer.
        start_timeout_s: how long to wait for the other islands that the run needs to start.
        reconnect_timeout_s: how long a coordinator that has answered before may be silent.
        max_bandwidth_mbps: cap on the island's bulk traffic, each way, in megabits per second; 0 for none. Every rank
            gets an equal share of it.
        spool_dir: folder of downloads and of what the up codec dropped, for an island that is started again; or "".

    Raises:
        RunMismatch: another run, or another model than the run's.
        LayoutError: parameters that are not float32, or shards that are not boxes.
        Unreachable, DeadlineExceeded: nobody answered, or the run did not start, in that time.
        DigestMismatch: the run's parameters do not arrive as the coordinator has them.
    """
    group = Group()
    share = max_bandwidth_mbps * 1e6 / 8 / group.size
    link = Link(coordinator, patience_s=connect_timeout_s, say=log.warning, bytes_per_s=share)
    limits = Limits(start_s=start_timeout_s, reconnect_s=reconnect_timeout_s)
    spool = Path(spool_dir) if spool_dir else None
    try:
        return Session(
            model, group, link, island_id=island_id, run_id=run_id, optimizer=optimizer, limits=limits, spool_dir=spool
        )
    except BaseException:
        link.close()
        raise


@dataclass(frozen=True, kw_only=True)
class Word:
    """What the ranks agree on."""

    finite: bool
    """Every rank's reported loss is finite."""
    done: bool
    """What every rank waits for is done."""
    silent: bool
    """Nobody answers at the coordinator."""
    directive: str


DIRECTIVES = ("", "pause", "leave")


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
        optimizer: torch.optim.Optimizer | None,
        limits: Limits,
        spool_dir: Path | None = None,
    ) -> None:
        self._spool_dir = spool_dir
        self.island_id, self._model, self._group, self._link = island_id, model, group, link
        self.optimizer = optimizer
        self.record: Callable[..., None] = _no_record
        """Takes a metric: its kind, and scalars by name."""
        self.progressed: Callable[[], None] = _no_record
        """Called after every update that was applied."""
        self.at_step = 0
        """Inner step of the run at which this island stands."""
        self.tokens = 0
        """Tokens this rank has trained on in the run."""
        self.rounds = 0
        """Updates applied."""
        self.rejoins = self.rollbacks = 0
        """Times the lease was lost and the island joined again; times it went back to the anchors for NaN or Inf."""
        self.leaving = ""
        """Why the island is to leave at this step edge; empty while it is to train."""
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._closing = contextlib.ExitStack()
        self._flights: dict[Key, Future[pb.FetchHeader]] = {}
        self._overdue: dict[Key, int] = {}
        self._rejoins_in_a_row = self._rollbacks_in_a_row = self._accepted = 0
        tensors, full = inventory(model, group)
        request = join_request(full, island_id=island_id, run_id=run_id, ranks=group.size)
        self._lease = Lease(group, link, request, limits)
        try:
            reply = self._lease.enter()
            self.config: RunConfig = load_run(reply.config_toml, "the coordinator").value
            self.schedule = Schedule.of(self.config)
            self.layout: Layout = full.under(self.config.sync.buffers)
            self.replica = Replica(
                rank=group.rank,
                fragments=partition(self.layout, self.config.sync),
                held=hold(tensors, self.layout, self.config.sync, group),
                up=up_choice(self.config.wire),
                down=down_choice(self.config.wire),
                alpha=self.config.sync.alpha,
                feedback_decay=self.config.wire.feedback_decay,
            )
            whose, moving = f"{reply.run_id}_{island_id}", len(self.schedule.offsets)
            self._settling = Settling(self.replica, group, spool_dir, whose, moving)
            self._closing.callback(self._settling.close)
            self._begin(reply)
            link.persist(limits.reconnect_s)
            try:
                self._take_up()
            except StaleEpoch as error:
                self._rejoin(error)
        except BaseException as error:
            self._shut(_why(error))
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave("finished" if error is None else _why(error))

    @property
    def heart(self) -> Heart | None:
        """Rank 0's heartbeat."""
        return self._lease.heart

    @property
    def done(self) -> bool:
        """Whether this island has taken all inner steps of the run, or is to leave before."""
        return self.at_step >= self.config.run.steps or bool(self.leaving)

    # -- joining --------------------------------------------------------------------------------------------------

    def _begin(self, reply: pb.JoinReply) -> None:
        """Begins an epoch: nothing of the one before it is in flight any more."""
        self.run_id, self.epoch = reply.run_id, reply.epoch
        self._settling.rejoin(reply.contributed)
        sync = self.config.sync
        self._pool.shutdown(wait=False, cancel_futures=True)
        flights = 2 + sync.overlap_steps * sync.fragments // sync.every_steps
        self._pool = ThreadPoolExecutor(max_workers=flights, thread_name_prefix="courier")
        self.courier = Courier(
            self._link, self.replica, self._lease.identity(reply), self.config, self._spool_dir, self._settling.keep
        )
        self.anchors = Anchors(self.replica, self._group, self.courier, self._together)

    def _take_up(self) -> None:
        """Waits for first parameters, takes the run's anchors, and waits for the run to start."""
        state = self._lease.until(lambda s: all(f.seeded for f in s.fragments) and bool(s.fragments), self._seed)
        if self._sent_away(state):
            return
        for fragment in state.fragments:
            self.anchors.take_up(fragment)
            failpoint("take-up-half")
        _settle(self._model)
        self.anchors.reset()
        failpoint("ready")
        if self.heart:
            self.heart.ready = True
        state = self._lease.until(lambda s: s.phase != "gathering", lambda _: None)
        if self._sent_away(state):
            return
        moving = [p.round for p in self.replica.position[: len(self.schedule.offsets)]]
        ahead = min((self.schedule.sync_step(p, r) for p, r in enumerate(moving)), default=0)
        self.at_step = min(max(self.schedule.position(moving), state.step), ahead - 1)
        self._start_afresh()

    def _sent_away(self, state: pb.RunState) -> bool:
        """Whether the coordinator has this island leave before the run has begun for it."""
        if state.directive == "leave":
            self.leaving = state.directive_reason or "asked to leave"
        return bool(self.leaving)

    def _start_afresh(self) -> None:
        """Counts tokens and steps from here: what went before is in no contribution any more."""
        self._adopted = [(self.tokens, self.at_step)] * len(self.replica.fragments)

    def _seed(self, state: pb.RunState) -> None:
        """Sends the first parameters where that is asked of this island."""
        if state.seeder == self.island_id:
            for fragment in range(len(self.replica.fragments)):
                # Refused: the run has them, and the receipt was lost; or the lease is over, as the next beat will say.
                with contextlib.suppress(StaleEpoch):
                    self._together(partial(self.courier.seed, fragment))

    def _rejoin(self, error: StaleEpoch) -> None:
        """Joins again under a new epoch. Inner optimizer state is kept; what was not contributed is lost."""
        while True:
            self._rejoins_in_a_row += 1
            if self._rejoins_in_a_row > REJOINS:
                raise error
            self.rejoins += 1
            self._say("the lease of epoch %d is lost (%s): joining again", self.epoch, error.message)
            self.courier.abandon()
            self._flights.clear()
            self._overdue.clear()
            accepted, step = self.courier.accepted, self.at_step
            try:
                self._begin(self._enter_again())
                self.courier.accepted = accepted
                self._take_up()
            except StaleEpoch as again:
                error = again
                continue
            self.record("rejoin", step=self.at_step, epoch=self.epoch, reason=error.message)
            self._say("joined again: epoch %d, from step %d to step %d", self.epoch, step, self.at_step)
            return

    def _enter_again(self) -> pb.JoinReply:
        reply = self._lease.enter_again()
        if load_run(reply.config_toml, "the coordinator").value.digest != self.config.digest:
            raise RunMismatch(
                f"run '{reply.run_id}' has other settings than when island '{self.island_id}' joined it: start it again"
            )
        return reply

    # -- training -------------------------------------------------------------------------------------------------

    def step(self, *, tokens: int = 0, loss: float | None = None) -> None:
        """The edge after an inner step: sends what is due, and applies what is due.

        Where the lease is lost the island joins again here: parameters are then the run's, and `at_step` has moved.
        Where training is not finite the island goes back to the anchors. Once `leaving` says why, it is to leave.

        Args:
            tokens: tokens that this rank alone accounts for in the step; the island's are the sum over its ranks.
            loss: training loss in nats per token, where it is known.

        Raises:
            StaleEpoch: the lease was lost again and again.
            Dismissed: the operator has ended the lease.
            DeadlineExceeded, Unreachable: a round did not end, or nobody answered, within the bounds on that.
            DigestMismatch: the anchor differs from the coordinator's, also when fetched anew.
            DivergedError: training is not finite, also after going back to the anchors.
        """
        if self.leaving:
            return
        self.at_step += 1
        self.tokens += tokens
        if self.heart:
            self.heart.report(step=self.at_step)
            if loss is not None and math.isfinite(loss):
                self.heart.report(loss=loss)
        try:
            self._edge(loss)
        except StaleEpoch as error:
            _settle(self._model)
            self._rejoin(error)

    def _edge(self, loss: float | None) -> None:
        word = self._listen(loss)
        if word.directive == "pause":
            self._say("the coordinator has this island pause at step %d", self.at_step)
        while word.directive == "pause":
            time.sleep(POLL_S)
            word = self._listen(loss)
        due = [a for a in self.schedule.due(self.at_step) if self._ahead(a)]
        if due or self._overdue or not word.finite:
            _settle(self._model)
        for key in list(self._overdue):
            self._finish(key, may_go_on=not any(isinstance(a, Send) and a.fragment == key[0] for a in due))
        sends = [a for a in due if isinstance(a, Send) and self._ahead(a)]
        self._send_all(sends, "" if word.finite else f"the training loss is {'not finite' if loss is None else loss}")
        for action in due:
            if isinstance(action, Apply) and self._ahead(action):
                self._apply(action.fragment, action.round)
        if word.directive == "leave":
            self._go()

    def _ahead(self, action: Send | Apply) -> bool:
        """Whether a round has yet to end for this island."""
        return action.round >= self.replica.position[action.fragment].round

    def _say(self, line: str, *values: object) -> None:
        """Tells people, once for the island."""
        if self._group.rank == 0:
            log.warning(line, *values)

    def _listen(self, loss: float | None = None, task: Future[Any] | None = None, wait_s: float = SLICE_S) -> Word:
        """What all ranks know, after a little wait for `task`. Collective; what any rank has to raise, all raise."""
        if task is not None:
            wait([task], wait_s)
        heart, error = self.heart, self._lease.trouble() or self._failure()
        row = [
            loss is None or math.isfinite(loss),
            task is None or task.done(),
            0 if error is None else 2 if isinstance(error, Malformed) else 1,
            heart is not None and heart.silent,
            DIRECTIVES.index(heart.directive) if heart and heart.directive in DIRECTIVES else 0,
        ]
        rows = self._group.numbers(row)
        if any(row[2] for row in rows):
            if all(row[2] != 1 for row in rows):
                self._group.from_first(self._lease.look)  # a coordinator at an earlier state knows no such round
            self._group.raise_first(error)
        directive = DIRECTIVES[rows[0][4]]
        self.courier.held = directive == "pause"
        return Word(
            finite=all(row[0] for row in rows),
            done=all(row[1] for row in rows),
            silent=bool(rows[0][3]),
            directive=directive,
        )

    def _failure(self) -> DilocoError | None:
        """What has failed a flight of this rank for good."""
        errors = [flight.exception() for flight in self._flights.values() if flight.done()]
        return next((e for e in errors if isinstance(e, DilocoError) and not isinstance(e, Expired)), None)

    def _together(self, work: Callable[[], T]) -> T:
        """Does a rank's bulk work off its training thread; returns once every rank's is done. Collective."""
        task = self._pool.submit(work)
        while not self._listen(task=task).done:
            pass
        return self._result(task)

    def _result(self, task: Future[T]) -> T:
        """This rank's result of what is done on all ranks, or the first rank's error. Collective."""
        error = task.exception()
        known = error if isinstance(error, DilocoError) else None
        if any(row[0] for row in self._group.numbers([known is not None])):
            self._group.raise_first(known)
        return task.result()

    # -- sending --------------------------------------------------------------------------------------------------

    def _send_all(self, sends: list[Send], reason: str) -> None:
        """Sends what is due; nothing of it, and all parameters back to the anchors, where training is not finite."""
        if sends and not reason:
            finite = all(self.replica.finite(send.fragment) for send in sends)
            if not all(row[0] for row in self._group.numbers([finite])):
                reason = "the pseudo-gradient is not finite"
        if reason:
            self._roll_back(reason)
        for send in sends:
            if reason:
                self._flights[send.fragment, send.round] = self._pool.submit(
                    self.courier.sit_out, send.fragment, send.round, reason
                )
            else:
                self._send(send.fragment, send.round)

    def _send(self, fragment: int, round_: int) -> None:
        tokens, steps = self._adopted[fragment]
        since = sum(row[0] for row in self._group.numbers([self.tokens - tokens]))
        failpoint("stage-begun")
        staged = self.replica.stage(fragment)
        position = self.replica.position[fragment]
        work = self._pool.submit(
            self.courier.exchange, fragment, round_, position.version, staged, since, self.at_step - steps
        )
        self._flights[fragment, round_] = work

    def _roll_back(self, reason: str) -> None:
        """Goes back to the anchors, and drops the state of the inner optimizer: its moments hold NaN by now.

        The data goes on, so the batch that brought this is not met again. Buffers outside the run keep what they have.
        """
        accepted = sum(row[0] for row in self._group.numbers([self.courier.accepted]))
        if accepted != self._accepted:
            self._accepted, self._rollbacks_in_a_row = accepted, 0
        self._rollbacks_in_a_row += 1
        what = f"{reason} at inner step {self.at_step}"
        if self._rollbacks_in_a_row >= ROLLBACKS:
            raise DivergedError(f"{what}, for the third time in a row: lower inner.lr", step=self.at_step)
        self._say("%s: going back to the anchors", what)
        self.rollbacks += 1
        self.anchors.reset()
        with self.courier.anchors:
            self._settling.forget()
        if self.optimizer:
            self.optimizer.state.clear()
            self.optimizer.zero_grad()
        self._start_afresh()
        self.record("rollback", step=self.at_step, reason=reason)

    # -- applying -------------------------------------------------------------------------------------------------

    def _apply(self, fragment: int, round_: int) -> None:
        key = fragment, round_
        if key not in self._flights:
            # It came in after the send step. Where every island did, the round would never open, and so never end.
            self._send_all([Send(fragment, round_)], "")
        self._overdue[key] = self.at_step
        self._finish(key, may_go_on=True)

    def _finish(self, key: Key, *, may_go_on: bool) -> None:
        """Waits for a round's outcome and applies it.

        It returns without it where nobody answers at the coordinator and the island may train on for now; and where a
        round is overdue already, until its outcome is there.
        """
        flight, told = self._flights[key], False
        waits_on = may_go_on and self._overdue.get(key, self.at_step) < self.at_step
        while not (word := self._listen(task=flight, wait_s=0.0 if waits_on else SLICE_S)).done:
            at_bound = self._at_bound()
            if may_go_on and (word.silent or waits_on) and not at_bound:
                if not waits_on:
                    self._say("no coordinator answers: training on without round %d of fragment %d", key[1], key[0])
                return
            waits_on = False
            if word.silent and not told:
                self._say("pausing at step %d until round %d of fragment %d has ended", self.at_step, key[1], key[0])
                told = True
        self._adopt(key)
        if self.heart:
            self.heart.rounds = tuple(p.round for p in self.replica.position)

    def _at_bound(self) -> bool:
        """Whether the island may not train on without a coordinator."""
        first = min(self._overdue.values(), default=self.at_step)
        return self.done or self.at_step - first >= self.config.sync.max_steps_without_coordinator

    def _adopt(self, key: Key) -> None:
        """Applies the outcome that all ranks have."""
        fragment, round_ = key
        flight = self._flights.pop(key)
        late = self.at_step - self._overdue.pop(key, self.at_step)
        try:
            header = self._result(flight)
        except Expired as error:
            self._say("fragment %d: %s; doing so", fragment, error.message)
            self._settling.settle(fragment, Ending.PASSED_OVER)
            self.anchors.replace(fragment)
            self.replica.mix(fragment, alpha=0.0)
            self._adopted[fragment] = (self.tokens, self.at_step)
            return
        if late:
            self._say("fragment %d round %d is applied %d steps after its sync", fragment, round_, late)
        self._rejoins_in_a_row = 0
        ending = Ending.COMMITTED if header.outcome == "committed" else Ending.NOT_COMMITTED
        self._settling.settle(fragment, ending)
        if ending is Ending.COMMITTED:
            self.anchors.confirm(fragment, Stand(header.version, round_ + 1, header.digest))
            self.replica.mix(fragment)
            failpoint("mixed")
            self.rounds += 1
            self._adopted[fragment] = (self.tokens, self.at_step)
            self.progressed()
            return
        self.replica.position[fragment] = Position(header.version, round_ + 1)
        self._say("fragment %d round %d was %s: %s", fragment, round_, header.outcome, header.reason)

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
        return [show(self.anchors.digest(f)[0]) for f in range(len(self.replica.fragments))]

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

    def _go(self) -> None:
        """Applies what is in flight, and has the island leave, as the coordinator asks."""
        for key in list(self._flights):
            self._finish(key, may_go_on=False)
        heart = self.heart
        reason = self._group.from_first(lambda: heart.directive_reason.encode() if heart else b"").decode()
        self.leaving = reason or "asked to leave"

    def leave(self, reason: str) -> None:
        """Leaves the run, so that no round waits for this island."""
        self._shut(self.leaving or reason)

    def _shut(self, reason: str) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._lease.leave(reason)
        self._closing.close()
        self._link.close()


def _why(error: BaseException) -> str:
    asked = isinstance(error, KeyboardInterrupt | SystemExit)
    return "asked to stop" if asked else f"{type(error).__name__}: {error}"


def _no_record(*_: object, **__: object) -> None:
    """Records nothing."""


def _settle(model: nn.Module) -> None:
    """Has FSDP drop gathered copies, which would be stale once the shards change."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard):
            reshard()
