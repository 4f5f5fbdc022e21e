"""Anchors that are being fetched. One older version of a fragment stays for a while, for a line that was cut."""

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
    asked_at: float = 0.0


class Anchors:
    """What was last asked for of each fragment: the current version, and at most one older one.

    Args:
        keep_s: how long an older version stays after it was last asked for.
        clock: seconds on a monotonic clock.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._pinned: dict[int, list[Pinned]] = {}

    def ask(self, fragment: int, current: Pinned, version: int | None = None) -> Pinned:
        """The anchor of a fragment at `version` where it is still kept, else as it stands."""
        now = self._clock()
        known = [pin for pin in self._kept(fragment) if pin.version != current.version]
        found = next((pin for pin in known if pin.version == version), current)
        pinned = replace(found, asked_at=now)
        older = max((pin for pin in (*known, pinned) if pin.version != current.version), key=_asked, default=None)
        latest = [p for p in self._kept(fragment) if p.version == current.version and found is not current]
        self._pinned[fragment] = [*([older] if older else []), *([pinned] if found is current else latest)]
        return pinned

    def versions(self, fragment: int) -> list[int]:
        """The versions of a fragment that are kept."""
        return [pin.version for pin in self._pinned.get(fragment, [])]

    def expire(self) -> None:
        """Lets go of what nobody has asked for in `keep_s`."""
        for fragment in list(self._pinned):
            self._pinned[fragment] = self._kept(fragment)

    def _kept(self, fragment: int) -> list[Pinned]:
        since = self._clock() - self._keep_s
        return [pin for pin in self._pinned.get(fragment, []) if pin.asked_at >= since]


def _asked(pin: Pinned) -> float:
    return pin.asked_at
