"""What a soak must show: processes that do not grow, a state folder that does not, and rounds all the time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

JUDGED_S = 60.0
"""Lives of processes that are shorter are not judged: they still warm up."""
DESCRIPTORS = 8.0
THREADS = 4.0
RSS_BYTES = 16 * 2**20
"""What a process may grow by over the second half of its life, by a straight line through its samples. Connections come
and go with the peers that are killed, and allocators keep a little; none of the three depends on how long it ran."""
STATE_BYTES = 16 * 2**20
"""Largest state folder of the soak's model, without `events.jsonl`, which is never cut."""
GAP_S = 45.0
"""Longest time without a commit: a coordinator that is held, killed, and started again on a busy machine, then a round
that ends by its deadline because an island is lost."""
KINDS = ("kill", "crash", "hold")


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What befalls a process."""

    at: float
    """Seconds since the beginning."""
    victim: str
    kind: str
    """`kill`: SIGKILL to all of it. `crash`: SIGKILL to a rank alone. `hold`: SIGSTOP, and SIGCONT later."""
    seconds: float
    """How long it is held."""


def attacks(seed: int, seconds: float, victims: Sequence[str], per_minute: float, longest_s: float) -> list[Attack]:
    """What befalls whom in a soak of some length: as a Poisson process, the same for a seed.

    Nobody is attacked twice before everybody has been.
    """
    chance, at, found, deck = random.Random(seed), 0.0, list[Attack](), list[str]()
    while (at := at + chance.expovariate(per_minute / 60)) < seconds:
        deck = deck or chance.sample(victims, len(victims))
        kind, held_s = chance.choice(KINDS), chance.uniform(1.0, longest_s)
        found.append(Attack(at=at, victim=deck.pop(), kind=kind, seconds=held_s))
    return found


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A process at a time."""

    at: float
    descriptors: int
    threads: int
    rss_bytes: int


@dataclass(kw_only=True)
class Life:
    """One process from its start to its end."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.samples[-1].at - self.samples[0].at if self.samples else 0.0

    def growth(self, of: Callable[[Sample], float]) -> float:
        """What a figure grew by over the second half of the life, by the line of least squares."""
        middle = self.samples[0].at + self.seconds / 2
        half = [sample for sample in self.samples if sample.at >= middle]
        if len(half) < 2:
            return 0.0
        at = np.array([sample.at for sample in half])
        slope = np.polyfit(at - at[0], np.array([of(sample) for sample in half], dtype=float), 1)[0]
        return float(slope * (at[-1] - at[0]))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a life grew by over its second half."""

    name: str
    pid: int
    seconds: float
    descriptors: float
    threads: float
    rss_bytes: float

    @classmethod
    def of(cls, life: Life) -> Growth:
        return cls(
            name=life.name,
            pid=life.pid,
            seconds=life.seconds,
            descriptors=life.growth(lambda s: s.descriptors),
            threads=life.growth(lambda s: s.threads),
            rss_bytes=life.growth(lambda s: s.rss_bytes),
        )

    def faults(self) -> Iterator[str]:
        """What is above its bound, in words."""
        for what, value, bound in (
            ("file descriptors", self.descriptors, DESCRIPTORS),
            ("threads", self.threads, THREADS),
            ("MiB of resident memory", self.rss_bytes / 2**20, RSS_BYTES / 2**20),
        ):
            if value > bound:
                yield (
                    f"{self.name} (pid {self.pid}) grew by {value:.1f} {what} over the second half of "
                    f"{self.seconds:.0f} s; the bound is {bound:g}"
                )


def judged(lives: Sequence[Life]) -> list[Growth]:
    """The growth of every life that is long enough to be judged."""
    return [Growth.of(life) for life in lives if life.seconds >= JUDGED_S]


def longest_gap(times: Sequence[float], end: float) -> float:
    """Longest time between two commits, or from the last one to the end; infinite where there was none."""
    if not times:
        return float("inf")
    return max(later - earlier for earlier, later in pairwise([*sorted(times), max(end, max(times))]))


def verdict(growths: Sequence[Growth], gap_s: float, state_bytes: int) -> list[str]:
    """What is above its bound, in words."""
    faults = [fault for growth in growths for fault in growth.faults()]
    if gap_s > GAP_S:
        faults.append(f"no round was committed for {gap_s:.1f} s; the bound is {GAP_S:g}")
    if state_bytes > STATE_BYTES:
        size, bound = state_bytes / 2**20, STATE_BYTES / 2**20
        faults.append(f"the state folder took {size:.1f} MiB without events.jsonl; the bound is {bound:g}")
    return faults
