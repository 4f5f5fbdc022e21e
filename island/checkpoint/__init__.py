"""Checkpoints of an island: its own state at a step edge, written beside training with torch's distributed checkpoints.

`Checkpoints` takes and finds them, `load` and `values` read them on any number of ranks. A checkpoint is a folder of
safetensors and JSON files; without its manifest, which is written last, it does not exist. Nothing is pickled.
"""

from island.checkpoint.manifest import Manifest as Manifest
from island.checkpoint.manifest import State as State
from island.checkpoint.pieces import Piece as Piece
from island.checkpoint.reading import load as load
from island.checkpoint.reading import some as some
from island.checkpoint.reading import values as values
from island.checkpoint.store import Store as Store
from island.checkpoint.writer import Checkpoints as Checkpoints
