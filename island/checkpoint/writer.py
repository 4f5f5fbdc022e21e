"""Takes checkpoints at step edges and writes them beside training; no rank does so alone.

    edge        all ranks copy what they have (only this holds training)
    beside it   each rank writes its file
    an edge     all have; rank 0 begins to write the manifest, and removes what is too old
    an edge     it is written: the checkpoint is complete

One is written at a time. Where a rank fails, or takes too long, that checkpoint is none, and the next one is tried.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from diloco.errors import DilocoError, EnvironmentFault
from diloco.failpoints import failpoint
from island.checkpoint import manifest as manifests
from island.checkpoint.manifest import Manifest, State, folder_of, serial_of, values_of
from island.checkpoint.pieces import Piece
from island.checkpoint.planning import Plan, rows, share_out
from island.checkpoint.reading import choose, complete
from island.checkpoint.storage import Saving, Writer
from island.checkpoint.store import Store, answering
from island.config_checkpoint import CheckpointConfig
from island.group import Group

log = logging.getLogger("diloco.island")
SLICE_S = 0.25
"""How long a rank waits by itself before the ranks confer again."""
Files = dict[str, tuple[int, str]]
Taken = tuple[int, Plan, State, dict[str, Piece], torch.cuda.Event | None]
"""Serial, plan, state, what this rank writes, and with CUDA what says that its copies are complete."""


class Task:
    """Work on a daemon thread: a store that hangs holds up no process that ends."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: DilocoError | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with answering("the checkpoint cannot be written"):
                self.result = self._work()
        except DilocoError as error:
            self.error = error

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def wait(self, within_s: float) -> None:
        """Waits for its end."""
        self._thread.join(within_s)


@dataclass(kw_only=True)
class Draft:
    """A checkpoint that is being written."""

    serial: int
    step: int
    begun: float
    held_s: float
    island: Mapping[str, Any]
    tensors: Mapping[str, Any]
    task: Task | None
    """This rank's part of what is being done; none where it has no part in it."""
    files: Files | None = None
    """Of all ranks, once all are written."""


class Checkpoints:
    """One rank's part in the checkpoints of its island.

    Args:
        settings: where, how often, how many.
        about: what they are of; see `Manifest`.
        group: the island's ranks.
        record: takes a metric: its kind, and scalars by name.

    Raises:
        ConfigError, EnvironmentFault: the URL cannot be used.
    """

    def __init__(
        self, settings: CheckpointConfig, about: Mapping[str, str], group: Group, record: Callable[..., None]
    ) -> None:
        self.store = Store.of(settings.url, about["run"], about["island"])
        self.record = record
        self.completed = self.failed = 0
        """Checkpoints of this process."""
        self._settings, self._about, self._group = settings, dict(about), group
        self._next = self._at = -1
        self._due = False
        self._draft: Draft | None = None
        self._last: Task | None = None
        """What this rank did last, which may be still at it though it has been given up."""
        self._damaged = set[str]()
        self._failures = 0
        self._plan: tuple[str, Plan] | None = None
        self._arena: dict[str, Tensor] = {}

    def find(self) -> Manifest | None:
        """The checkpoint that the island goes on with, or None. Collective; raises as `choose` does."""
        found, self._damaged = choose(self.store, self._group, self._about)
        return found

    def due_between(self, step: int, end: int) -> bool:
        """Whether one is to be taken at an edge from `step` on and before `end`, as far as that is known at `step`."""
        every = self._settings.every_steps
        return self._due or -(-step // every) * every < end

    def edge(
        self,
        step: int,
        capture: Callable[[], State],
        *,
        able: bool = True,
        guard: AbstractContextManager[object] | None = None,
        last: bool = False,
    ) -> None:
        """The edge after an inner step: takes a checkpoint where one is due, and sees to the one under way. Collective.

        Args:
            step: inner step of the run.
            capture: what there is to keep.
            able: whether it can be taken at this edge; else it is at the next one where that is so. The same on all
                ranks.
            guard: held while what is captured is copied.
            last: the island leaves: one is due in any case, and waited for.

        Raises:
            EnvironmentFault: too many have failed in a row.
        """
        self._advance()
        if last:
            self.settle()
        fresh = step != self._at
        self._due = self._due or (fresh and (last or step % self._settings.every_steps == 0))
        if self._due and able and self._draft is None:
            self._due = False
            self._at = step
            self._begin(step, capture, guard or nullcontext())
            if last or not self._settings.asynchronous:
                self.settle()

    def settle(self) -> None:
        """Waits for what is under way, within `checkpoint.timeout_s` of its beginning. Collective; raises as `edge`."""
        while self._draft is not None:
            if self._draft.task:
                self._draft.task.wait(SLICE_S)
            self._advance()

    # -- taking -----------------------------------------------------------------------------------------------------

    def _begin(self, step: int, capture: Callable[[], State], guard: AbstractContextManager[object]) -> None:
        begun = time.monotonic()
        with guard:
            taken = self._take(step, capture())
        if taken is None:
            return
        serial, plan, state, staged, copied = taken
        failpoint("checkpoint-staged")
        self._last = Task(partial(self._write, folder_of(serial, step), plan, staged, copied, state.rank))
        self._draft = Draft(
            serial=serial,
            step=step,
            begun=begun,
            held_s=time.monotonic() - begun,
            island=state.island,
            tensors=plan.tensors,
            task=self._last,
        )
        self._next = serial + 1

    def _take(self, step: int, state: State) -> Taken | None:
        """Agrees on who writes what, and copies what this rank does; None where there can be none."""
        mine = rows(state.pieces)
        cut = xxhash.xxh3_64_hexdigest(json.dumps(mine).encode())
        known = self._plan is not None and self._plan[0] == cut
        busy = self._last is not None and self._last.running
        answers = self._group.numbers([self._serial(), known, busy])
        if any(row[2] for row in answers):
            self._fail(step, "the one before is still being written")
            return None
        if answers[0][0] < 0:
            self._fail(step, f"{self.store.url} cannot be listed")
            return None
        if self._plan is None or not all(row[1] for row in answers):
            self._plan = cut, share_out(self._group.gather(mine), self._group.rank)
        plan = self._plan[1]
        return answers[0][0], plan, state, *self._stage(plan, state.pieces)

    def _serial(self) -> int:
        """The next serial, as rank 0 knows it: above all that have ever been begun here. Below 0 where it does not."""
        if self._next < 0 and self._group.rank == 0:
            try:
                self._next = max(map(serial_of, self.store.folders()), default=-1) + 1
            except EnvironmentFault as error:
                log.error("%s", error.message)
        return self._next

    def _stage(self, plan: Plan, pieces: Mapping[str, Piece]) -> tuple[dict[str, Piece], torch.cuda.Event | None]:
        """Copies what this rank writes and what may change; returns it, and with CUDA what says that it is complete."""
        staged, device = {}, False
        for item in plan.mine.items:
            name = item.index.fqn
            piece = pieces[name]
            if not piece.fixed:
                values = piece.tensor.detach()
                device = device or values.is_cuda
                copy = self._arena.get(name)
                if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                    self._arena[name] = copy
                copy.copy_(values, non_blocking=True)
                piece = replace(piece, source=copy, fixed=True)
            staged[name] = piece
        return staged, torch.cuda.current_stream().record_event() if device else None

    def _write(
        self,
        folder: str,
        plan: Plan,
        staged: Mapping[str, Piece],
        copied: torch.cuda.Event | None,
        values: Mapping[str, Any],
    ) -> Files:
        if copied:
            copied.synchronize()
        writer = Writer(self.store, folder, self._group.rank)
        writer.write_data(plan.mine, Saving(staged)).wait()
        name, content = values_of(self._group.rank), json.dumps(values, allow_nan=False).encode()
        written = {**writer.written, name: self.store.write(folder, name, [content])}
        failpoint("checkpoint-written")
        return written

    # -- completing -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        draft = self._draft
        if draft is None:
            return
        task = draft.task
        late = time.monotonic() > draft.begun + self._settings.timeout_s
        mine = 1 if task is None else 2 if task.error or (task.running and late) else 0 if task.running else 1
        known = [row[0] for row in self._group.numbers([mine])]
        if 2 in known:
            reason = f"it takes longer than {self._settings.timeout_s:g} s"
            reason = (task.error.message if task and task.error else reason) if mine == 2 else ""
            found = next(filter(None, self._group.gather(reason)))
            self._draft = None
            self._fail(draft.step, found)
        elif 0 in known:
            return
        elif draft.files is None:
            assert task is not None
            draft.files = {
                name: (size, digest) for row in self._group.gather(task.result) for name, (size, digest) in row.items()
            }
            draft.task = None
            if self._group.rank == 0:
                draft.task = self._last = Task(partial(self._finish, draft))
        else:
            self._draft = None
            self._complete(draft)

    def _finish(self, draft: Draft) -> str:
        """Writes the manifest; then removes what is too old. Returns what kept it from that."""
        folder = folder_of(draft.serial, draft.step)
        assert draft.files is not None
        manifest = Manifest(
            folder=folder,
            serial=draft.serial,
            step=draft.step,
            about=self._about,
            ranks=self._group.size,
            files=draft.files,
            tensors=draft.tensors,
            island=draft.island,
        )
        self.store.finish(folder, manifests.NAME, manifest.dump())
        failpoint("checkpoint-complete")
        try:
            self._prune(folder)
        except DilocoError as error:
            return error.message
        return ""

    def _prune(self, newest: str) -> None:
        """Removes all but the newest complete checkpoints: older ones, incomplete ones, and damaged ones."""
        kept = {newest}
        for folder in sorted(self.store.folders(), key=serial_of, reverse=True):
            if folder in kept or serial_of(folder) < 0:
                continue
            if len(kept) < self._settings.keep and folder not in self._damaged and complete(self.store, folder):
                kept.add(folder)
            else:
                self.store.remove(folder, manifests.NAME)

    def _complete(self, draft: Draft) -> None:
        self._failures = 0
        self.completed += 1
        assert draft.files is not None
        left = str(draft.task.result) if draft.task else ""
        if left:
            log.warning("old checkpoints are still there: %s", left)
        self.record(
            "checkpoint",
            step=draft.step,
            complete=True,
            bytes=sum(size for size, _ in draft.files.values()),
            held_s=draft.held_s,
            seconds=time.monotonic() - draft.begun,
            reason=left,
        )

    def _fail(self, step: int, reason: str) -> None:
        self._failures += 1
        self.failed += 1
        self.record("checkpoint", step=step, complete=False, reason=reason)
        if self._group.rank == 0:
            log.error("the checkpoint of step %d has failed (%d in a row): %s", step, self._failures, reason)
        if self._failures > self._settings.failures:
            raise EnvironmentFault(
                f"{self._failures} checkpoints in a row have failed: {reason}; see to {self.store.url}, or set "
                "checkpoint.failures higher",
                step=step,
            )
