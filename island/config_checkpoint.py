"""`[checkpoint]` of the island's file: where the island keeps its own state, how often, and what a restart does."""

from __future__ import annotations

from typing import Literal

from diloco.settings import Positive, Seconds, Settings

Resume = Literal["exact", "anchor", "none"]


class CheckpointConfig(Settings):
    url: str = ""
    """Folder or fsspec URL that all ranks of the island see; each island keeps its checkpoints under `run/island` in
    it. Empty: no checkpoints, and a restart begins with the run's anchors and an inner optimizer without state."""
    every_steps: Positive = 500
    """Inner steps between two checkpoints. What a restart repeats is at most this much, and training is held for one
    copy of the island's state each time."""
    keep: Positive = 2
    """Complete checkpoints that are kept; older ones are removed."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written. Else it is held until the checkpoint is complete."""
    timeout_s: Seconds = 1800.0
    """How long a checkpoint may take to be written, and the last one when the island leaves; then it has failed."""
    failures: Positive = 3
    """Checkpoints in a row that may fail; the island ends when one more does. One that fails is reported and costs
    training nothing."""
    resume: Resume = "exact"
    """What a restart begins with. `exact`: where the run has not gone on without the island, all that the checkpoint
    holds, so that the island repeats the steps after it to the same bits; else as `anchor`. `anchor`: the run's
    anchors and step, and the checkpoint's inner optimizer, data cursor and random state. `none`: no checkpoint."""
