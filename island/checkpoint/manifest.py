"""The file that makes a checkpoint: what it is of, and its files with their bytes and digests. It is written last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco.errors import InputError
from island.checkpoint.pieces import Piece
from island.checkpoint.planning import Tensors

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class State:
    """What is to be kept of one rank at a step edge."""

    pieces: Mapping[str, Piece]
    """By name; where several ranks hold the same box, one of them writes it."""
    island: Mapping[str, Any]
    """JSON; what rank 0 says is kept."""
    rank: Mapping[str, Any] = field(default_factory=dict)
    """JSON; kept for each rank."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A complete checkpoint."""

    folder: str
    serial: int
    """Checkpoints of the island before this one, in all of its lives."""
    step: int
    """Inner step of the run at whose edge it was taken."""
    about: Mapping[str, str]
    """Run, island, and digests of the run's settings and of the model's layout."""
    ranks: int
    """That have written it."""
    files: Mapping[str, tuple[int, str]]
    """Bytes and XXH3-128 (hex) of every other file."""
    tensors: Tensors
    island: Mapping[str, Any]
    """JSON: what is no tensor, and of the whole island."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def dump(self) -> bytes:
        """As the bytes of its file."""
        record = {"format": FORMAT, **asdict(self)}
        del record["folder"]
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def parse(cls, folder: str, content: bytes) -> Manifest:
        """From the bytes of its file. Raises `InputError` where they are torn, or of another format."""
        try:
            record = json.loads(content)
            if record.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            files = {name: (int(size), str(digest)) for name, (size, digest) in record.pop("files").items()}
            return cls(folder=folder, files=files, **record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"the manifest of {folder} cannot be used: {error or repr(error)}") from error


def folder_of(serial: int, step: int) -> str:
    """Name of a checkpoint's folder."""
    return f"{serial:08d}-step-{step}"


def serial_of(folder: str) -> int:
    """The serial in a folder's name; -1 where it is none of a checkpoint."""
    head, _, step = folder.partition("-step-")
    return int(head) if head.isdecimal() and step.isdecimal() else -1


def values_of(rank: int) -> str:
    """Name of the file of what is no tensor and of one rank."""
    return f"rank-{rank:05d}.json"
