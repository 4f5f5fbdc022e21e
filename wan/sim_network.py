"""The simulated network: requests, replies, and streams that keep their order and may be cut at any message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco.errors import DilocoError
from wan.sim_service import SimService
from wan.sim_wire import Answer, Line, Reply, Request
from wan.sim_world import Process, World

STREAM_SHARE = 0.3
"""Longest pause between two messages of a stream, as a share of the longest delay."""

TEAR_S = 0.15
"""Longest that a connection that breaks outlives its request."""


@dataclass(kw_only=True)
class Weather:
    """How the network is at the moment."""

    loss: float = 0.0
    double: float = 0.0
    corrupt: float = 0.0
    hang_up: float = 0.5
    """Share of calls that are given up whose end the coordinator notices."""
    poison: float = 0.0
    torn: float = 0.0
    """Share of requests whose connection breaks while they are served."""
    cut: float = 0.0
    """Share of a stream's messages at which its line is cut."""
    delay_s: float = 0.02


class Network:
    """Carries what islands send to whatever coordinator is there when it arrives, and the answers back.

    Args:
        world: time and chance.
        serving: the coordinator that is there.
        say: is given a line for what arrives.
    """

    def __init__(self, world: World, serving: Callable[[], SimService | None], say: Callable[[str], None]) -> None:
        self.world, self._serving, self._say = world, serving, say
        self.weather = Weather()
        self.cut: set[str] = set()
        """Islands from and to which nothing gets through."""
        self.last_request = 0.0

    def send(self, island: str, request: Request, answer: Answer) -> Callable[[], None]:
        """Sends a request; `answer` is called for everything that arrives. What it returns hangs up."""
        served = list[tuple[SimService, Process]]()

        def back(item: Reply | DilocoError | bytes) -> None:
            messages = item.messages if isinstance(item, Reply) else ()

            def deliver() -> None:
                answer(item)
                if messages:
                    self._pour(island, messages, answer, lambda: None)

            self._carry(island, deliver)

        def arrive() -> None:
            coordinator = self._serving()
            self.last_request = self.world.now
            if coordinator is None:
                return
            self._say(f"{request.method} f{request.fragment} r{request.round} of {island}.{request.rank} arrives")
            line = Line()
            process = coordinator.serve(request, back, line)
            served.append((coordinator, process))
            torn = self.weather.torn and self.world.rng.random() < self.weather.torn

            def tear() -> None:
                if torn:
                    self.world.at(self.world.rng.random() * TEAR_S, process.cancel)

            def end() -> None:
                line.put(None)
                tear()

            if request.method == "push":
                cut = process.cancel if self.world.rng.random() < 0.5 else lambda: None  # or nobody notices
                self._pour(island, request.messages, line.put, cut, end)
            else:
                tear()

        def abandon() -> None:
            for _, process in served:
                process.cancel()

        def hang_up() -> None:
            if self.world.rng.random() < self.weather.hang_up:
                self._carry(island, abandon)

        self._carry(island, arrive)
        return hang_up

    def _pour(
        self,
        island: str,
        messages: Sequence[bytes],
        deliver: Callable[[bytes], None],
        cut: Callable[[], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Delivers the messages of a stream in their order, then its end; or cuts it at one of them."""
        rng = self.world.rng

        def one(place: int) -> None:
            if place == len(messages):
                end()
                return
            if island in self.cut or (self.weather.cut and rng.random() < self.weather.cut):
                cut()
                return
            message = messages[place]
            damaged = self.weather.corrupt and rng.random() < self.weather.corrupt / len(messages)
            deliver(_damaged(message) if damaged else message)
            if place + 1 == len(messages):
                end()
            else:
                self.world.at(rng.random() * self.weather.delay_s * STREAM_SHARE, lambda: one(place + 1))

        one(0)

    def _carry(self, island: str, deliver: Callable[[], None]) -> None:
        rng, weather = self.world.rng, self.weather
        if island in self.cut or (weather.loss and rng.random() < weather.loss):
            return
        for _ in range(2 if weather.double and rng.random() < weather.double else 1):
            late = rng.random() < 0.02
            self.world.at(rng.random() * weather.delay_s * (20 if late else 1), deliver)


def _damaged(message: bytes) -> bytes:
    changed = bytearray(message)
    changed[-1] ^= 0x40
    return bytes(changed)
