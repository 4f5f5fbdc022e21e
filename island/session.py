"""A site in a run: joins the algorithm to a model and its process group.

    with join(model, optimizer, "host:port") as site:
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from diloco.codec.policy import down_choice, up_choice
from diloco.config import RunConfig
from diloco.errors import DivergedError, Expired, InputError, StaleEpoch
from diloco.failpoints import failpoint
from diloco.feedback import Ending
from diloco.fragments import partition
from diloco.layout import Layout
from diloco.replica import Position, Replica, Staged
from diloco.schedule import Apply, Schedule, Send
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from island.anchors import Stand
from island.config_checkpoint import CheckpointConfig
from island.config_mesh import AnchorPolicy
from island.following import Following, Schedulers, several
from island.group import Group
from island.joining import check, hold, inventory, join_request, name_here, settle
from island.lease import POLL_S, Limits
from island.link import Link
from island.resuming import Keeping, may_resume
from island.seat import REJOINS, Key, Seat, Seats, Word
from island.settling import Settling
from island.site import Site

log = logging.getLogger("diloco.island")
T = TypeVar("T")
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
ROLLBACKS = 3
"""The so-manyth time in a row that training is not finite ends the island."""
SLICE_S = 0.25
"""How long a rank waits by itself before the ranks confer again."""


def join(
    model: nn.Module,
    optimizer: Optimizers,
    coordinator: str,
    *,
    island_id: str = "",
    run_id: str = "",
    scheduler: Schedulers = None,
    connect_timeout_s: float = 300.0,
    start_timeout_s: float = 3600.0,
    reconnect_timeout_s: float = 86_400.0,
    max_bandwidth_mbps: float = 0.0,
    spool_dir: str = "",
    tls: TLS | None = None,
    checkpoint: CheckpointConfig | None = None,
    anchors: AnchorPolicy = "cpu",
) -> Session:
    """Joins a run; returns once the first parameters are loaded and the run has started.

    Call it on every rank of the island, after sharding and before the first step. The model's parameters are
    replaced by the run's.

    Args:
        model: float32 parameters, plain, compiled, in DDP, or DTensor (FSDP2, HSDP, tensor parallel).
        optimizer: the inner optimizer, or several. Where training is not finite any more, its state is dropped along
            with the parameters, because the moments hold NaN then. None: there is none yet.
        coordinator: HOST:PORT; where the run has several, any of them.
        island_id: unique in the run; empty for the host name of rank 0.
        run_id: the run that is meant; empty for whatever the coordinator serves.
        scheduler: learning-rate schedule for all steps of the run, or several; kept at the run's step from then on.
        connect_timeout_s: how long to look for a coordinator that does not answer.
        start_timeout_s: how long to wait for the other islands that the run needs to start.
        reconnect_timeout_s: how long a coordinator that has answered before may be silent.
        max_bandwidth_mbps: cap on the island's bulk traffic, each way, in megabits per second; 0 for none. Every rank
            gets an equal share of it.
        spool_dir: folder of downloads and of what the up codec dropped, for an island that is started again; or "".
        tls: files to speak mutual TLS with; nothing is encrypted without.
        checkpoint: where the island keeps its own state, and goes on with it; it keeps none without.
        anchors: where the outer parameters of what a rank holds are: on the "cpu", pinned where there is CUDA, or on
            the "device" of the parameters, which then holds 4 bytes more for each.

    Raises:
        InputError: the TLS files are not what they should be; or the optimizer or the schedule is none for this model;
            or `anchors` is another word.
        RunMismatch: another run, or another model than the run's.
        LayoutError: parameters that are not float32, or shards that are not boxes, or FSDP1.
        Untrusted: only one end speaks TLS, or one does not accept the other's certificate.
        Unreachable, DeadlineExceeded: nobody answered, or the run did not start, in that time.
        DigestMismatch: the run's parameters do not arrive as the coordinator has them.
    """
    check(model, several(optimizer))
    if anchors not in get_args(AnchorPolicy):
        raise InputError(f"anchors={anchors!r} is no place for them: say 'cpu' or 'device'")
    failpoint("site-begun")
    follow = Following(several(scheduler))
    group = Group()
    island_id = island_id or name_here(group)
    share = max_bandwidth_mbps * 1e6 / 8 / group.size
    link = Link(coordinator, patience_s=connect_timeout_s, say=log.warning, bytes_per_s=share, tls=tls)
    limits = Limits(start_s=start_timeout_s, reconnect_s=reconnect_timeout_s)
    spool = Path(spool_dir) if spool_dir else None
    try:
        names = {"island_id": island_id, "run_id": run_id}
        return Session(
            model,
            group,
            link,
            **names,
            optimizer=optimizer,
            follow=follow,
            limits=limits,
            spool_dir=spool,
            checkpoint=checkpoint,
            anchors=anchors,
        )
    except BaseException:
        link.close()
        raise


class Session(Site):
    """One rank of an island in a run. Made by `join`."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        link: Link,
        *,
        island_id: str,
        run_id: str,
        optimizer: Optimizers,
        follow: Callable[[int], None],
        limits: Limits,
        spool_dir: Path | None = None,
        checkpoint: CheckpointConfig | None = None,
        anchors: AnchorPolicy = "cpu",
    ) -> None:
        self.island_id, self._model, self._group = island_id, model, group
        self.optimizer, self._follow = optimizer, follow
        self.record: Callable[..., None] = _no_record
        """Takes a metric: its kind, and scalars by name."""
        self.progressed: Callable[[], None] = _no_record
        """Called after every update that was applied."""
        self.places: Callable[[], Sequence[str]] = tuple
        """Where the island stands in its shards, where the coordinator is to know; called on all ranks."""
        self.serial = 0
        """Of the shards that the coordinator has it read (`Holding`); 0 where it does not say."""
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
        self._closing = contextlib.ExitStack()
        self.flights: dict[Key, Future[pb.FetchHeader]] = {}
        self.overdue: dict[Key, int] = {}
        self.rollbacks_in_a_row = self.accepted = 0
        tensors, full = inventory(model, group)
        resumes = may_resume(checkpoint, run_id, island_id, group)
        request = join_request(full, island_id=island_id, run_id=run_id, ranks=group.size, resumes=resumes)
        self._seats = Seats(group, link, request, limits)
        try:
            self.config: RunConfig = self._seats.enter()
            request.resumes = False  # once it has lost a lease, it has not
            self.schedule = Schedule.of(self.config)
            self.layout: Layout = full.under(self.config.sync.buffers)
            self.replica = Replica(
                rank=group.rank,
                fragments=partition(self.layout, self.config.sync),
                held=hold(tensors, self.layout, self.config.sync, group, anchors),
                up=up_choice(self.config.wire),
                down=down_choice(self.config.wire),
                alpha=self.config.sync.alpha,
                feedback_decay=self.config.wire.feedback_decay,
            )
            whose, moving = f"{self.run_id}_{island_id}", len(self.schedule.offsets)
            self._settling = Settling(self.replica, group, spool_dir, whose, moving)
            self._closing.callback(self._settling.close)
            self.adopted = [(0, 0)] * len(self.replica.fragments)
            for seat in self._seats:
                seat.begin(self.replica, self.config, partial(self._together, seat), self._settling, spool_dir)
                seat.link.persist(limits.reconnect_s)
            self.keeping = Keeping(self, model, group, self._seats, self._settling, checkpoint)
            try:
                if not self.keeping.begin():
                    self._take_up()
            except StaleEpoch as error:
                self._rejoin(error)
            follow(self.at_step)
        except BaseException as error:
            self._shut(_why(error))
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.keeping.settle()
        self.leave("finished" if error is None else _why(error))

    @property
    def done(self) -> bool:
        """Whether this island has taken all inner steps of the run, or is to leave before."""
        return self.at_step >= self.config.run.steps or bool(self.leaving)

    # -- joining --------------------------------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Takes up the run's anchors where the lease is new: waits for first parameters, and for the run to start."""
        fresh = [seat for seat in self._seats if not seat.at_home]
        for seat in fresh:
            if self._sent_away(seat.take_up()):
                return
        settle(self._model)
        for seat in fresh:
            seat.anchors.reset()
        failpoint("ready")
        for seat in fresh:
            if seat.heart:
                seat.heart.ready = True
        step = self.at_step if any(seat.at_home for seat in self._seats) else 0
        for seat in fresh:
            state = seat.lease.until(lambda s: s.phase != "gathering" and not s.shards_awaited, lambda _: None)
            if self._sent_away(state):
                return
            step = max(step, state.step)
        self._stand(step)
        for seat in fresh:
            self._start_afresh(seat.fragments)
            seat.at_home = True

    def _sent_away(self, state: pb.RunState) -> bool:
        """Whether a coordinator has this island leave before the run has begun for it."""
        if state.directive == "leave":
            self.leaving = state.directive_reason or "asked to leave"
        return bool(self.leaving)

    def _stand(self, step: int) -> None:
        """Goes to where the run stands, or others are at inner step `step`; what is counted from a step moves along."""
        moving = enumerate(self.replica.position[: len(self.schedule.offsets)])
        before, rounds = self.at_step, [p.round + ((f, p.round) in self.overdue) for f, p in moving]
        self.at_step = self.schedule.position(rounds, step)
        moved = self.at_step - before
        self.adopted = [(tokens, at + moved) for tokens, at in self.adopted]
        self.overdue = {key: at + moved for key, at in self.overdue.items()}

    def _start_afresh(self, fragments: Iterable[int]) -> None:
        """Counts tokens and steps of fragments from here: what went before is in no contribution any more."""
        for fragment in fragments:
            self.adopted[fragment] = (self.tokens, self.at_step)

    def _rejoin(self, error: StaleEpoch) -> None:
        """Joins again under a new epoch where the lease is lost, and takes up the fragments of that coordinator.

        Those of others stay as they are, and what is in flight of them. Inner optimizer state is kept; what was not
        contributed is lost.
        """
        step, back = self.at_step, list[Seat]()
        while True:
            lost = self._seats.lost()
            if not lost or any(seat.losses >= REJOINS for seat in lost):
                raise error
            self.rejoins += 1
            try:
                for seat in lost:
                    self._say("the lease of epoch %d is lost (%s): joining again", seat.epoch, error.message)
                    for key in [key for key in self.flights if key[0] in seat.fragments]:
                        del self.flights[key]
                        self.overdue.pop(key, None)
                    seat.enter_again(self.config)
                    back.append(seat)
                self._take_up()
                break
            except StaleEpoch as again:
                error = again
        for seat in dict.fromkeys(back):
            self.record("rejoin", step=self.at_step, epoch=seat.epoch, coordinator=seat.index, reason=error.message)
            self._say("joined again: epoch %d, from step %d to step %d", seat.epoch, step, self.at_step)

    # -- training -------------------------------------------------------------------------------------------------

    def step(self, *, tokens: int | None = None, loss: float | None = None) -> None:
        """The edge after an inner step: sends what is due, and applies what is due.

        Where the lease is lost the island joins again here: parameters are then the run's, and `at_step` has moved.
        Where training is not finite the island goes back to the anchors. Once `leaving` says why, it is to leave.

        Args:
            tokens: tokens that this rank alone accounts for in the step; the island's are the sum over its ranks. None:
                the island's step counts as one, so that contributions weigh by steps.
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
        failpoint("edge-begun")
        self.at_step += 1
        self.tokens += int(self._group.rank == 0) if tokens is None else tokens
        self.tell(step=self.at_step)
        if loss is not None and math.isfinite(loss):
            self.tell(loss=loss)
        work: Callable[[], None] = partial(self._edge, loss)
        while True:
            try:
                work()
                break
            except StaleEpoch as error:
                settle(self._model)
                self._rejoin(error)
                work = self._resume
        self._follow(self.at_step)
        self.keeping.edge()

    def _edge(self, loss: float | None) -> None:
        word = self._listen(loss)
        if word.directive == "pause":
            self._say("the coordinator has this island pause at step %d", self.at_step)
        while word.directive == "pause":
            time.sleep(POLL_S)
            word = self._listen(loss)
        due = [a for a in self.schedule.due(self.at_step) if self._ahead(a) and not self._sent(a)]
        if due or self.overdue or not word.finite:
            settle(self._model)
        for key in list(self.overdue):
            self._finish(key, may_go_on=not any(isinstance(a, Send) and a.fragment == key[0] for a in due))
        sends = [a for a in due if isinstance(a, Send) and self._ahead(a)]
        self._send_all(sends, "" if word.finite else f"the training loss is {'not finite' if loss is None else loss}")
        for action in due:
            if isinstance(action, Apply) and self._ahead(action):
                self._apply(action.fragment, action.round)
        if word.directive == "leave":
            self._go()

    def _resume(self) -> None:
        """Applies what a lost lease has interrupted, of coordinators that have not lost it."""
        for key in list(self.overdue) if not self.leaving else ():
            self._finish(key, may_go_on=True)

    def _ahead(self, action: Send | Apply) -> bool:
        """Whether a round has yet to end for this island."""
        return action.round >= self.replica.position[action.fragment].round

    def _sent(self, action: Send | Apply) -> bool:
        """Whether it is a contribution that is in flight: the island has gone back to a step before it was sent."""
        return isinstance(action, Send) and (action.fragment, action.round) in self.flights

    def _say(self, line: str, *values: object) -> None:
        """Tells people, once for the island."""
        if self._group.rank == 0:
            log.warning(line, *values)

    def _listen(self, loss: float | None = None, task: Future[Any] | None = None, wait_s: float = SLICE_S) -> Word:
        """What all ranks know, after a little wait for `task`. Collective; what any rank has to raise, all raise."""
        if task is not None:
            wait([task], wait_s)
        finite = loss is None or math.isfinite(loss)
        return self._seats.confer(finite=finite, done=task is None or task.done(), flights=self.flights)

    def _together(self, seat: Seat, work: Callable[[], T]) -> T:
        """Does a rank's bulk work off its training thread; returns once every rank's is done. Collective."""
        task = seat.pool.submit(work)
        while not self._listen(task=task).done:
            pass
        return self._result(seat, task)

    def _result(self, seat: Seat, task: Future[T]) -> T:
        """This rank's result of what is done on all ranks, or the first rank's error. Collective."""
        known = seat.failure(task)
        if any(row[0] for row in self._group.numbers([known is not None])):
            self._group.raise_first(known)
        return task.result()

    # -- sending --------------------------------------------------------------------------------------------------

    def _send_all(self, sends: list[Send], reason: str) -> None:
        """Sends what is due; nothing of it, and all parameters back to the anchors, where training is not finite."""
        staged = [] if reason else [self._stage(send.fragment) for send in sends]
        if staged and not all(row[0] for row in self._group.numbers([all(one.finite for one in staged)])):
            reason = "the pseudo-gradient is not finite"
            for one in staged:
                self.replica.unstage(one)
        if reason:
            self._roll_back(reason)
        for number, send in enumerate(sends):
            if reason:
                seat = self._seats.of(send.fragment)
                self.keeping.decline((send.fragment, send.round), reason)
                self.flights[send.fragment, send.round] = seat.pool.submit(
                    seat.courier.sit_out, send.fragment, send.round, reason
                )
            else:
                self._send(send.fragment, send.round, staged[number])

    def _stage(self, fragment: int) -> Staged:
        failpoint("stage-begun")
        return self.replica.stage(fragment)

    def _send(self, fragment: int, round_: int, staged: Staged) -> None:
        tokens, steps = self.adopted[fragment]
        since = sum(row[0] for row in self._group.numbers([self.tokens - tokens]))
        position, seat = self.replica.position[fragment], self._seats.of(fragment)
        work = fragment, round_, position.version, staged, since, self.at_step - steps, self.places()
        exchange = partial(seat.courier.exchange, *work)
        self.flights[fragment, round_] = seat.pool.submit(
            self.keeping.exchanging((fragment, round_), staged, since, self.at_step - steps, exchange)
        )

    def _roll_back(self, reason: str) -> None:
        """Goes back to the anchors, and drops the state of the inner optimizer: its moments hold NaN by now.

        The data goes on, so the batch that brought this is not met again. Buffers outside the run keep what they have.
        """
        mine = sum(seat.courier.accepted for seat in self._seats)
        accepted = sum(row[0] for row in self._group.numbers([mine]))
        if accepted != self.accepted:
            self.accepted, self.rollbacks_in_a_row = accepted, 0
        self.rollbacks_in_a_row += 1
        what = f"{reason} at inner step {self.at_step}"
        if self.rollbacks_in_a_row >= ROLLBACKS:
            raise DivergedError(f"{what}, for the third time in a row: lower inner.lr", step=self.at_step)
        self._say("%s: going back to the anchors", what)
        self.rollbacks += 1
        for seat in self._seats:
            seat.anchors.reset()
        with self._seats.guard:
            self._settling.forget()
        for optimizer in several(self.optimizer):
            optimizer.state.clear()
            optimizer.zero_grad()
        self._start_afresh(range(len(self.adopted)))
        self.record("rollback", step=self.at_step, reason=reason)

    # -- applying -------------------------------------------------------------------------------------------------

    def _apply(self, fragment: int, round_: int) -> None:
        key = fragment, round_
        if key not in self.flights:
            # It came in after the send step. Where every island did, the round would never open, and so never end.
            self._send_all([Send(fragment, round_)], "")
        self.overdue[key] = self.at_step
        self._finish(key, may_go_on=True)

    def _finish(self, key: Key, *, may_go_on: bool) -> None:
        """Waits for a round's outcome and applies it.

        It returns without it where nobody answers at the coordinator and the island may train on for now; and where a
        round is overdue already, until its outcome is there.
        """
        flight, told, seat = self.flights[key], False, self._seats.of(key[0])
        waits_on = may_go_on and self.overdue.get(key, self.at_step) < self.at_step
        while not (word := self._listen(task=flight, wait_s=0.0 if waits_on else SLICE_S)).done:
            at_bound = self._at_bound()
            silent = word.silent[seat.index]
            if may_go_on and (silent or waits_on) and not at_bound:
                if not waits_on:
                    self._say("no coordinator answers: training on without round %d of fragment %d", key[1], key[0])
                return
            waits_on = False
            if silent and not told:
                self._say("pausing at step %d until round %d of fragment %d has ended", self.at_step, key[1], key[0])
                told = True
        self._adopt(seat, key)
        del self.flights[key]
        self.overdue.pop(key, None)
        if seat.heart:
            seat.heart.rounds = tuple(p.round for p in self.replica.position)

    def _at_bound(self) -> bool:
        """Whether the island may not train on without a coordinator."""
        first = min(self.overdue.values(), default=self.at_step)
        return self.done or self.at_step - first >= self.config.sync.max_steps_without_coordinator

    def _adopt(self, seat: Seat, key: Key) -> None:
        """Applies the outcome that all ranks have; from the beginning where a lost lease has interrupted it."""
        fragment, round_ = key
        late = self.at_step - self.overdue.get(key, self.at_step)
        try:
            header = self._result(seat, self.flights[key])
        except Expired as error:
            self._say("fragment %d: %s; doing so", fragment, error.message)
            self._settling.settle(fragment, Ending.PASSED_OVER)
            seat.anchors.replace(fragment)
            self.replica.mix(fragment, alpha=0.0)
            self.adopted[fragment] = (self.tokens, self.at_step)
            return
        if late:
            self._say("fragment %d round %d is applied %d steps after its sync", fragment, round_, late)
        seat.losses = 0
        ending = Ending.COMMITTED if header.outcome == "committed" else Ending.NOT_COMMITTED
        self._settling.settle(fragment, ending)
        if ending is Ending.COMMITTED:
            seat.anchors.confirm(fragment, Stand(header.version, round_ + 1, header.digest))
            self.replica.mix(fragment)
            failpoint("mixed")
            self.rounds += 1
            self.adopted[fragment] = (self.tokens, self.at_step)
            self.progressed()
            return
        self.replica.position[fragment] = Position(header.version, round_ + 1)
        self._say("fragment %d round %d was %s: %s", fragment, round_, header.outcome, header.reason)

    # -- leaving ----------------------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Applies what is in flight, and has the island leave, as the coordinator asks."""
        for key in list(self.flights):
            self._finish(key, may_go_on=False)
        hearts = [seat.heart for seat in self._seats]
        reasons = [h.directive_reason.encode() for h in hearts if h and h.directive == "leave"]
        reason = self._group.from_first(lambda: next(iter(reasons), b"")).decode()
        self.leaving = reason or "asked to leave"

    def leave(self, reason: str) -> None:
        """Leaves the run, so that no round waits for this island."""
        self._shut(self.leaving or reason)

    def _shut(self, reason: str) -> None:
        self._seats.leave(reason)
        self._closing.close()


def _why(error: BaseException) -> str:
    asked = isinstance(error, KeyboardInterrupt | SystemExit)
    return "asked to stop" if asked else f"{type(error).__name__}: {error}"


def _no_record(*_: object, **__: object) -> None:
    """Records nothing."""
