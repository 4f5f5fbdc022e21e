"""What a run answers with, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diloco.window import FIRST_BYTES


@dataclass(frozen=True)
class Outcome:
    """How a round ended ("committed", "skipped" or "aborted"), published once its update is durable."""

    ended: str
    reason: str
    version: int
    digest: int
    update: Path | None


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What became of one rank's part of a contribution."""

    duplicate: bool = False
    """It was known already."""
    digest: str = ""
    """XXH3-128 (hex) of a part that is known; empty where nothing is to be compared any more."""
    dropped: str = ""
    """Why it is recorded and not folded."""
    late: str = ""
    """How it is folded into a later round than its own."""


@dataclass(kw_only=True)
class Progress:
    """What an island last said of itself."""

    step: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    loss: float = float("nan")
    outer_loss: float = float("nan")
    mfu: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    window_bytes: int = FIRST_BYTES
    """What its last download had under way; the next one begins with that."""


@dataclass(kw_only=True)
class Totals:
    """Counts since the run began."""

    committed: int = 0
    skipped: int = 0
    aborted: int = 0
    unsaved: int = 0
