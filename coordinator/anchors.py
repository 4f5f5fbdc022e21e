"""Anchors that are being fetched: beside the outer state, which folds move, and for a while, for cut lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """The anchor of a fragment (fp32, flat) at a version, without momentum and residual."""

    version: int
    ended: int
    """Rounds that had ended then."""
    digest: int
    anchor: Tensor
    """Never changes."""
    asked_at: float = 0.0


class Anchors:
    """What was last asked for of each fragment: the newest version of it, and at most one older one.

    Args:
        keep_s: how long a version stays after it was last asked for.
        clock: seconds on a monotonic clock.
        drop: is told what goes: fragment and version.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float], drop: Callable[[int, int], None]) -> None:
        self._keep_s, self._clock, self._drop = keep_s, clock, drop
        self._pinned: dict[int, list[Pinned]] = {}

    def find(self, fragment: int, *versions: int | None) -> Pinned | None:
        """The anchor of a fragment at the first of `versions` that is kept."""
        self._expire(fragment)
        kept = {pin.version: pin for pin in self._pinned.get(fragment, [])}
        found = next((kept[version] for version in versions if version in kept), None)
        return self.keep(fragment, found) if found else None

    def keep(self, fragment: int, pin: Pinned) -> Pinned:
        """Keeps an anchor that is asked for now."""
        pinned = replace(pin, asked_at=self._clock())
        others = [other for other in self._pinned.get(fragment, []) if other.version != pin.version]
        newest, *older = sorted((pinned, *others), key=lambda p: p.version, reverse=True)
        self._set(fragment, [newest, *sorted(older, key=lambda p: p.asked_at)[-1:]])
        return pinned

    def versions(self, fragment: int) -> list[int]:
        """The versions of a fragment that are kept."""
        return sorted(pin.version for pin in self._pinned.get(fragment, []))

    def expire(self) -> None:
        """Lets go of what nobody has asked for in `keep_s`."""
        for fragment in list(self._pinned):
            self._expire(fragment)

    def _expire(self, fragment: int) -> None:
        since = self._clock() - self._keep_s
        self._set(fragment, [pin for pin in self._pinned.get(fragment, []) if pin.asked_at >= since])

    def _set(self, fragment: int, pins: list[Pinned]) -> None:
        before, self._pinned[fragment] = self.versions(fragment), pins
        for version in set(before).difference(self.versions(fragment)):
            self._drop(fragment, version)
