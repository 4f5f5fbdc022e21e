"""The synchronous twin of `island/link.py`: requests sent until they are answered, streams that go on after a cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from diloco.errors import CodecError, DeadlineExceeded, DilocoError, Expired, Overload, Unreachable
from diloco.feedback import Fate
from diloco.framing import Collector, chunks, digest_of
from wan.sim_wire import Answer, Reply, Request
from wan.sim_world import Gate, Work, World

TIMEOUT_S = 4.0
"""How long an island waits for anything to come before it sends the request again."""
PATIENCE_S = 60.0
"""How long it goes on sending one request that makes no progress; then its session fails and it joins anew."""
AGAIN = (Unreachable, Overload)
PUSH_AGAIN = (*AGAIN, DeadlineExceeded, Expired, CodecError)
FETCH_AGAIN = (*AGAIN, DeadlineExceeded, CodecError)


class Outside(Protocol):
    """What an island sees of the world beyond it: the network, and who watches."""

    def send(self, island: str, request: Request, answer: Answer) -> Callable[[], None]:
        """Sends a request; `answer` is called for everything that arrives. What it returns hangs up."""

    def poison(self, island: str) -> str:
        """Whether the island's next contribution holds NaN: "" (no), "sent" (as it is) or "seen" (and declined)."""

    def reported(self, island: str, epoch: int, fragment: int, version: int, digest: int) -> None:
        """The island holds a version."""

    def based(self, island: str, fragment: int, version: int, digest: int) -> None:
        """The island contributes from a version."""

    def settled(self, island: str, epoch: int, fragment: int, round_: int, rank: int, fate: Fate) -> None:
        """A rank settles what the codec dropped of a contribution, by what it has heard of it."""

    def mismatched(self, island: str, fragment: int, version: int) -> None:
        """What an island has fetched has another digest than the coordinator named."""

    def session_failed(self, island: str, error: DilocoError) -> None:
        """The island gives up its session and joins again."""


class SimLink:
    """One island's line to the coordinator."""

    def __init__(self, island: str, world: World, outside: Outside, chunk_bytes: int) -> None:
        self.island, self.world, self.outside, self.chunk_bytes = island, world, outside, chunk_bytes

    def call(self, request: Request, *, patience_s: float = PATIENCE_S) -> Work[Reply]:
        """Sends a request, again and again until a reply comes.

        Raises:
            Unreachable: none came in time.
            DilocoError: what the coordinator refused it with.
        """
        return (yield from self._retried(lambda _: self._once(request, None), AGAIN, patience_s))

    def push(self, request: Request, payload: Tensor) -> Work[Reply]:
        """Streams one rank's part; on a cut line, goes on at the first byte that the coordinator lacks."""
        sent = replace(request, total_bytes=payload.numel(), digest=digest_of([payload], payload.numel()))
        state = {"ask": False, "first": 0}

        def attempt(progress: Callable[[int], None]) -> Work[Reply]:
            if state["ask"]:
                reply = yield from self._once(replace(sent, method="resume"), None)
                same = reply.have_digest == digest_of([payload], reply.have_bytes)
                if reply.settled and (same or not reply.have_digest):
                    return reply
                state["first"] = reply.have_bytes if same or reply.settled else 0
                progress(state["first"])
            state["ask"] = True
            messages = tuple(chunks([payload], self.chunk_bytes, state["first"], ended=True))
            return (yield from self._once(replace(sent, first_byte=state["first"], messages=messages), None))

        return (yield from self._retried(attempt, PUSH_AGAIN, PATIENCE_S))

    def fetch(self, request: Request, expected_bytes: int) -> Work[tuple[Reply, Tensor]]:
        """Streams one rank's part of an update or of anchors; on a cut line, goes on at the first missing byte."""
        held: list[tuple[Reply, Collector]] = []

        def attempt(progress: Callable[[int], None]) -> Work[Reply]:
            ask = request
            if held:
                ask = replace(request, version=held[0][0].version, first_byte=held[0][1].have)
            reply = yield from self._once(ask, held)
            if reply.total_bytes and reply.total_bytes != expected_bytes:
                raise DilocoError(f"expected {expected_bytes} bytes of the pieces, offered {reply.total_bytes}")
            return reply

        reply = yield from self._retried(attempt, FETCH_AGAIN, PATIENCE_S)
        return reply, held[0][1].finish() if held else torch.empty(0, dtype=torch.uint8)

    def same(self, reply: Reply, other: Reply) -> bool:
        """Whether two answers are of the same payload."""
        keys = [(r.outcome, r.version, r.digest, r.total_bytes) for r in (reply, other)]
        return keys[0] == keys[1]

    def _once(self, request: Request, held: list[tuple[Reply, Collector]] | None) -> Work[Reply]:
        """Sends a request once, and takes what follows the reply into `held`."""
        gate, arrived = Gate(), list[Reply | DilocoError | bytes]()

        def answer(item: Reply | DilocoError | bytes) -> None:
            arrived.append(item)
            gate.open()

        hang_up = self.outside.send(self.island, request, answer)
        taken, wait_s, header = 0, request.wait_s + TIMEOUT_S * (2 if request.messages else 1), None
        while True:
            if taken == len(arrived):
                yield (gate, wait_s)
                if taken == len(arrived):
                    hang_up()
                    raise Unreachable("nobody answers")
            item, taken, wait_s = arrived[taken], taken + 1, TIMEOUT_S
            if isinstance(item, DilocoError):
                raise item
            if isinstance(item, Reply):
                if header is not None:
                    continue  # a double
                header = item
                if held is None or not header.total_bytes:
                    return header
                self._begin(header, held)
            elif held and header is not None:
                held[0][1].add(item)
            if held and header is not None and held[0][1].have == header.total_bytes:
                return held[0][0]

    def _begin(self, header: Reply, held: list[tuple[Reply, Collector]]) -> None:
        """Goes on with what is held, or begins again where a header is of something else."""
        if header.first_byte and not (held and self.same(header, held[0][0])):
            held.clear()
            raise Unreachable("what was fetched before is of another version: from the beginning")
        if not header.first_byte:
            held[:] = [(header, Collector(header.total_bytes))]

    def _retried(
        self,
        attempt: Callable[[Callable[[int], None]], Work[Reply]],
        again: tuple[type[DilocoError], ...],
        patience_s: float,
    ) -> Work[Reply]:
        until, furthest = self.world.now + patience_s, 0

        def progress(have: int) -> None:
            nonlocal until, furthest
            if have > furthest:
                furthest, until = have, self.world.now + patience_s

        while True:
            try:
                return (yield from attempt(progress))
            except again as error:
                if self.world.now > until:
                    raise
                asked_s = error.retry_after_s if isinstance(error, Overload) else 0.0
            yield max(asked_s, 0.2) + self.world.rng.random() * 0.3
