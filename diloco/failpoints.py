"""Named steps of the protocol at which a test can have a process killed or stopped.

A process is armed by `DILOCO_FAILPOINT="NAME"`, or `"NAME:N"` for the N-th time that it passes the step, or
`"NAME:N:stop"` for SIGSTOP in place of SIGKILL. Unarmed, a step costs a look at one variable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

from diloco.errors import ConfigError

VARIABLE = "DILOCO_FAILPOINT"
Signal = Literal["SIGKILL", "SIGSTOP"]

COORDINATOR = {
    "join-begun": "an island may enter; that is not durable",
    "join-recorded": "it is durable that an island has entered; nobody has heard",
    "seed-received": "one rank's part of the first parameters is here, in memory",
    "plant-begun": "all first parameters are here, in memory",
    "plant-saved": "their snapshot is complete; the ledger does not speak of it",
    "plant-recorded": "the ledger speaks of it",
    "push-announced": "the header of a push is taken",
    "push-chunk": "a chunk of a push is written",
    "push-whole": "the payload is whole and checked; not synced",
    "push-named": "the payload is durable under its name; it has no row in the ledger",
    "push-recorded": "the payload has its row; there is no receipt",
    "round-decided": "how a round ends is known; that is not durable",
    "round-recorded": "it is durable how a round ends; nobody has heard",
    "fold-begun": "a committed round is about to be folded",
    "fold-computed": "a round is folded, in memory",
    "fold-written": "its update is in its file; the ledger has no digest of it",
    "fold-recorded": "the ledger has the digest; the update is not published",
    "snapshot-fragments": "the fragment files of a snapshot are durable; it has no manifest",
    "snapshot-manifest": "a snapshot is complete; what only older ones needed is still there",
    "compact-begun": "the ledger is about to be compacted",
    "compact-done": "the ledger is compacted",
    "fetch-chunk": "a chunk of an answer is sent",
}
"""What has happened at each step of the coordinator."""

ISLAND = {
    "site-begun": "a rank has its model; the coordinator has not heard of it",
    "join-answered": "the answer to a join is here",
    "take-up-half": "one fragment's anchors are the run's; the next one's are not",
    "ready": "all anchors are the run's; the coordinator has not heard",
    "edge-begun": "an inner step is taken; nothing of its edge is done",
    "stage-begun": "a contribution is due",
    "push-encoded": "a contribution is encoded; nothing of it is sent",
    "push-begun": "the header of a contribution is handed to the line",
    "push-sending": "a chunk of a contribution is handed to the line",
    "push-sent": "all of a contribution is handed to the line; there is no receipt",
    "push-answered": "the receipt is here",
    "outcome-asked": "the island is about to ask how a round ended",
    "fetch-receiving": "a chunk of an update or of an anchor is here",
    "anchor-moved": "a rank's anchors have moved by an update; no digest is compared",
    "mixed": "an update is in training",
    "checkpoint-staged": "a checkpoint is copied; nothing of it is written",
    "checkpoint-written": "a rank has written its part of a checkpoint, which has no manifest",
    "checkpoint-complete": "a checkpoint has its manifest; what is too old is still there",
    "leave-begun": "the island is about to give its lease back",
}
"""What has happened at each step of an island."""

_hook: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Passes the step `name`, which is a key of `COORDINATOR` or `ISLAND`."""
    if _hook is not None:
        _hook(name)


def arm(hook: Callable[[str], None] | None) -> None:
    """Has `hook` called with the name of every step that is passed, on whatever thread that is; None ends that."""
    global _hook
    _hook = hook


def trap(setting: str, strike: Callable[[Signal], object]) -> Callable[[str], None] | None:
    """The hook that a setting asks for; none where it is empty.

    Args:
        setting: NAME, NAME:N or NAME:N:stop.
        strike: sends a signal to this process.

    Raises:
        ConfigError: it is none of these, or there is no such step.
    """
    if not setting:
        return None
    name, _, rest = setting.partition(":")
    count, _, how = rest.partition(":")
    if name not in COORDINATOR | ISLAND:
        raise ConfigError(f"{VARIABLE}: there is no step {name!r}; there are {', '.join(sorted(COORDINATOR | ISLAND))}")
    if not (count or "1").isdecimal() or not int(count or "1") or how not in ("", "stop"):
        raise ConfigError(f"{VARIABLE}={setting!r} is not NAME, NAME:N or NAME:N:stop with N from 1")
    passings = itertools.count(1)

    def hook(passed: str) -> None:
        if passed == name and next(passings) == int(count or "1"):
            strike("SIGSTOP" if how else "SIGKILL")

    return hook
