"""Compaction: facts that every snapshot kept holds are replaced by the state they came to.

Replaying a compacted ledger gives what replaying the whole one does. `events.jsonl` keeps the whole history.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.files import ReadOnly
from coordinator.ledger import Ledger, Row
from coordinator.recovery import Locate, layout_row, replay, state_row, stored
from coordinator.snapshots import oldest_rounds
from coordinator.store import Store
from diloco.config import RunConfig
from diloco.failpoints import failpoint

log = logging.getLogger("diloco.coordinator")
COMPACT_ROWS = 1000
"""Rows that must be able to go; fewer are not worth the writing."""

Replacement = list[tuple[float, str, dict[str, Any]]]


def compact(store: Store, config: RunConfig, least: int) -> int:
    """Compacts the ledger of a store behind its oldest snapshot, if at least `least` rows go; returns how many went.

    One transaction replaces them, whatever is appended meanwhile. A kill leaves the ledger as it was or compacted.

    Raises:
        OSError: the disk is full or failed; the ledger is as it was.
    """
    oldest = oldest_rounds(store.root, store.files)
    reader = Ledger(store.ledger.path)  # not the writer's connection: that one would show rows that are not durable
    try:
        rows = [row for row in reader.read() if row.seq <= store.shown]
    finally:
        reader.close()
    rows = rows[: behind(rows, oldest)]
    if len(rows) < least:
        return 0
    files = ReadOnly()
    replaced = replacement(rows, config, store.root, lambda body: stored(body, store.root, files), oldest)
    gone = len(rows) - len(replaced)
    if gone < least:
        return 0
    failpoint("compact-begun")
    store.files.transact(lambda: store.ledger.replace(rows[-1].seq, replaced))
    failpoint("compact-done")
    log.info("the ledger is compacted: %d facts behind the oldest snapshot are now one state", gone)
    return gone


def behind(rows: Sequence[Row], oldest: Sequence[int]) -> int:
    """How many rows come before the first round that ended after the oldest snapshot; 0 before first parameters."""
    ends = (
        place
        for place, row in enumerate(rows)
        if row.kind in ("committed", "skipped", "aborted") and row.body["round"] >= oldest[row.body["fragment"]]
    )
    place = next(ends, len(rows))
    return place if any(row.kind in ("planted", "state") for row in rows[:place]) else 0


def replacement(
    rows: Sequence[Row], config: RunConfig, root: Path, locate: Locate, oldest: Sequence[int]
) -> Replacement:
    """What to put in the place of rows: the run, its layout, their state, and the contributions still needed."""
    found = replay(rows, config, root, locate)
    # A fragment may be further in the snapshot than in these rows; those behind them may yet speak of its parts.
    reached = [state.round for state in found.state.rounds]
    oldest = [*map(min, oldest, reached), *oldest[len(reached) :]]
    found.forget(oldest)
    assert found.layout is not None
    at = rows[-1].at
    [settings] = [row.body for row in rows if row.kind == "run"]
    parts = [
        (row.at, "part", row.body) for row in rows if row.kind == "part" and found.inbox.holds(locate(row.body).path)
    ]
    return [
        (at, "run", settings),
        (at, *layout_row(found.layout)),
        (at, *state_row(found, oldest)),
        *parts,
    ]
