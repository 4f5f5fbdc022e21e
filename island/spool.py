"""A download as a growing file: a process that is started again goes on where it was.

    <name>.header   of the answer that the bytes belong to (serialized FetchHeader)
    <name>.payload  the bytes, from the first
    <name>.sums     a record for each chunk: offset, length, and its check (`diloco/framing.py`)

Nothing is synced, so all of it is read again, chunk by chunk, before it counts.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from google.protobuf.message import DecodeError

from diloco.framing import Bytes, Collector, Placed, unchunk
from diloco.v1 import coordinator_pb2 as pb

_RECORD = struct.Struct("<QQQ")


class Spool(Collector):
    """A collector whose bytes are in a file.

    Args:
        path: of its files, which get three endings.
        header: of the answer.
    """

    def __init__(self, path: Path, header: pb.FetchHeader) -> None:
        self.header = header
        self._sums_path = _file(path, ".sums")
        path.parent.mkdir(parents=True, exist_ok=True)
        size, name = header.total_bytes, str(_file(path, ".payload"))
        super().__init__(size, torch.from_file(name, shared=True, size=size, dtype=torch.uint8))

    @classmethod
    def begin(cls, path: Path, header: pb.FetchHeader) -> Spool:
        """A spool in which nothing has come yet, in place of any that was there."""
        remove(path)
        spool = cls(path, header)
        _file(path, ".header").write_bytes(header.SerializeToString())
        return spool

    @classmethod
    def find(cls, path: Path, total_bytes: int) -> Spool | None:
        """What an earlier process has left of a payload of this size, as far as its bytes are as they came."""
        try:
            header = pb.FetchHeader.FromString(_file(path, ".header").read_bytes())
            records = _file(path, ".sums").read_bytes()
        except (OSError, DecodeError):
            return None
        payload = _file(path, ".payload")
        if header.total_bytes != total_bytes or not payload.exists() or payload.stat().st_size != total_bytes:
            return None
        spool = cls(path, header)
        spool._reread(records)
        return spool

    def _reread(self, records: bytes) -> None:
        good = 0
        for offset, length, check in _RECORD.iter_unpack(records[: len(records) // _RECORD.size * _RECORD.size]):
            if offset != self.have or not 0 < length <= len(self._bytes) - offset:
                break
            if not self._assembly.fits(self._bytes[offset : offset + length].data, check):
                break
            self._assembly.took()
            good += 1
        with self._sums_path.open("r+b") as sums:
            sums.truncate(good * _RECORD.size)

    def add(self, message: Bytes | Placed) -> None:
        """Takes one message; raises what `Assembly.fresh` does."""
        super().add(message)
        offset, check, block = unchunk(message)
        with self._sums_path.open("ab") as sums:
            sums.write(_RECORD.pack(offset, len(block), check))


def remove(path: Path) -> None:
    """Removes the files of a spool."""
    for ending in (".header", ".sums", ".payload"):
        _file(path, ending).unlink(missing_ok=True)


def _file(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
