"""The simulator's world: a virtual clock, and processes that are generators.

A process yields how long to sleep (seconds), a `Gate` to wait at, or (gate, seconds) for whichever comes first. It
belongs to an owner; where the owner is no longer alive the process never runs again, not even its `finally` blocks
have an effect, as after SIGKILL.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from diloco.errors import DilocoError

T = TypeVar("T")
Wait: TypeAlias = "float | Gate | tuple[Gate, float]"
Work: TypeAlias = Generator[Wait, None, T]


class Owner:
    """What processes belong to: one life of a coordinator or of an island."""

    def __init__(self) -> None:
        self.alive = True
        self.asleep_until = 0.0
        """Its processes make no progress before this time."""
        self.processes: list[Process] = []

    def kill(self) -> None:
        """Ends all its processes where they stand. What they do on the way out must look at `alive`."""
        self.alive = False
        processes, self.processes = self.processes, []
        for process in processes:
            if process.running:  # it is the one that asks for it, and goes no further than its next wait
                process.world.at(0.0, process.close)
            else:
                process.close()


class Gate:
    """Where processes wait until somebody opens it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Process, int]] = []

    def open(self) -> None:
        """Lets everybody who waits go on."""
        waiting, self.waiting = self.waiting, []
        for process, token in waiting:
            process.world.at(0.0, partial(process.resume, token))


class Process:
    """A generator under way."""

    def __init__(
        self,
        world: World,
        work: Work[Any],
        owner: Owner,
        root: Process | None,
        coroutine: Coroutine[Any, Any, Any] | None = None,
    ) -> None:
        self.world, self.work, self.owner = world, work, owner
        self.root: Process = root or self
        """The process on whose behalf it runs."""
        self.changes = 0
        """Changes to durable or decided state that were made on its behalf."""
        self.running = False
        self.done, self.value, self.error = False, cast(Any, None), cast("DilocoError | OSError | None", None)
        self._coroutine = coroutine
        self._thrown: DilocoError | None = None
        self.finished = Gate()
        self._token = 0

    def resume(self, token: int) -> None:
        """Runs on to the next wait."""
        if self.done or token != self._token or not self.owner.alive:
            return
        if self.owner.asleep_until > self.world.now:
            self.world.at(self.owner.asleep_until - self.world.now, lambda: self.resume(token))
            return
        self._token += 1
        token, self.world.current, self.running = self._token, self, True
        try:
            thrown, self._thrown = self._thrown, None
            wait = self.work.throw(thrown) if thrown else next(self.work)
        except StopIteration as stop:
            self._end(stop.value, None)
        except (DilocoError, OSError) as error:
            self._end(None, error)
        else:
            self.running = False
            gate, seconds = wait if isinstance(wait, tuple) else (wait, None)
            if isinstance(gate, Gate):
                gate.waiting.append((self, token))
            else:
                seconds = gate
            if seconds is not None:
                self.world.at(seconds, lambda: self.resume(token))

    def close(self) -> None:
        """Ends it where it stands."""
        self.work.close()
        if self._coroutine:
            self._coroutine.close()  # where the work has not begun, nobody else does

    def interrupt(self, error: DilocoError) -> None:
        """Has it go on with an error where it waits; what it has started goes on."""
        if not self.done and self.owner.alive and not self.running:
            self._thrown = error
            self._token += 1
            self.world.at(0.0, partial(self.resume, self._token))

    def cancel(self) -> None:
        """Ends it where it stands, as when a caller hangs up; what it has started goes on."""
        if not self.done and self.owner.alive:
            self.close()
            self._end(None, DilocoError("cancelled"))

    def result(self) -> Work[Any]:
        """Waits for its end; returns or raises what it came to."""
        while not self.done:
            yield self.finished
        if self.error:
            raise self.error
        return self.value

    def _end(self, value: Any, error: DilocoError | OSError | None) -> None:
        self.running = False
        self.done, self.value, self.error = True, value, error
        if self in self.owner.processes:
            self.owner.processes.remove(self)
        self.finished.open()


class World:
    """A heap of what is still to happen, and the time. `rng` is the only source of chance."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.current: Process | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay: float, call: Callable[[], None]) -> None:
        """Calls `call` after `delay` seconds; at equal times, in the order of asking."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, call))

    def spawn(
        self,
        work: Work[Any],
        owner: Owner,
        *,
        inherit: bool = False,
        coroutine: Coroutine[Any, Any, Any] | None = None,
    ) -> Process:
        """Starts a process. `inherit`: on behalf of the process that runs now. `coroutine`: what the work drives."""
        root = self.current.root if inherit and self.current else None
        process = Process(self, work, owner, root, coroutine)
        owner.processes.append(process)
        self.at(0.0, lambda: process.resume(0))
        return process

    def step(self) -> bool:
        """Lets the next thing happen; whether there was one."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        self.current = None
        call()
        return True


class Lock:
    """One at a time, in the order of asking."""

    def __init__(self) -> None:
        self._queue: list[Gate] = []

    def hold(self, work: Work[T]) -> Work[T]:
        """Runs `work` while holding the lock."""
        mine = Gate()
        self._queue.append(mine)
        try:
            while self._queue[0] is not mine:
                yield mine
            return (yield from work)
        finally:
            self._queue.remove(mine)
            if self._queue:
                self._queue[0].open()


class Steps(Awaitable[T]):
    """Work of a process as what a coroutine of the real code can await."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work

    def __await__(self) -> Work[T]:
        return self._work


def drive(work: Awaitable[T]) -> Work[T]:
    """A coroutine of the real code as work of a process: it awaits `Steps`."""
    return (yield from work.__await__())
