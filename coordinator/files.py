"""Every way in which the coordinator changes or reads the files of its state folder.

One small object, so that tests can put a disk under a coordinator that is full, fails or tears what it writes. An
operation that the disk fails raises `OSError`, and what was durable before is still there.

Durable are files that are published: fsync of the file, rename, fsync of the folder. Not durable, because nothing
depends on it: lines of `events.jsonl` (the ledger has them, and the next start writes what is missing), updates that
no snapshot holds (the next start folds them again), and the removal of files (what comes back after a power loss is
removed again by the next start or snapshot).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

T = TypeVar("T")
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
WRITE_BYTES = 2**20
"""Bytes that are written at a time. Writes of 4 MiB or more were seen to take ten times as long."""
SPARE_BYTES = 4 * 2**30
"""Most that is kept in files to be written over."""
_numbers = itertools.count()
_START = 2
"""SYNC_FILE_RANGE_WRITE: begins, and does not wait for the end."""


class Files:
    """The operations, each of which a test may replace; `write`, `save` and `publish` are made of the others."""

    def __init__(self) -> None:
        self._sizes: dict[Path, int] = {}
        self._counted: frozenset[Path] = frozenset()
        self._bytes = 0
        self._lock = threading.Lock()
        self._limit_bytes = 0
        self._spare_folder: Path | None = None
        self._spares: dict[int, list[Path]] = {}
        self._spared = 0

    # -- single operations ------------------------------------------------------------------------------------------

    def dump(self, path: Path, data: Any) -> None:
        """Writes bytes to a file that nobody reads yet."""
        view = memoryview(data)
        flat = view.cast("B") if view.nbytes else view
        with path.open("wb") as file:
            for begin in range(0, view.nbytes, WRITE_BYTES):
                file.write(flat[begin : begin + WRITE_BYTES])

    def create(self, path: Path, size: int) -> int:
        """Begins a file of `size` bytes, whatever they are, that nobody reads yet; returns its descriptor."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def dump_tensors(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Writes tensors (safetensors) to a file that nobody reads yet."""
        try:
            save_file(dict(tensors), path, metadata=dict(metadata))
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error

    def write_at(self, descriptor: int, blocks: Sequence[memoryview], offset: int) -> None:
        """Writes blocks into an open file, one behind the other, and does not sync it."""
        left = list(blocks)
        while left:
            written = os.pwritev(descriptor, left, offset)
            offset += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]

    def start_writing(self, descriptor: int, offset: int, length: int) -> None:
        """Has the kernel begin to write a part of an open file to its disk, so that a later sync finds less to do.

        A hint: a kernel or a file system that cannot leaves all of it to the sync.
        """
        if _sync_file_range:
            _sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _START)

    def sync(self, path: Path) -> None:
        """Makes a file's bytes, or the names in a folder, durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file another name, in place of any file of that name."""
        old.rename(new)

    def append(self, path: Path, data: bytes) -> None:
        """Adds bytes at the end of a file."""
        with path.open("ab") as file:
            file.write(data)

    def truncate(self, path: Path, size: int) -> None:
        """Cuts a file to `size` bytes."""
        os.truncate(path, size)

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there."""
        path.unlink(missing_ok=True)

    def read(self, path: Path, start: int = 0) -> bytes:
        """The bytes of a file from `start` on."""
        with path.open("rb") as file:
            file.seek(start)
            return file.read()

    def read_tensors(self, path: Path, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and metadata of a safetensors file."""
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}

    def map(self, path: Path) -> Tensor:
        """The bytes of a file as a private memory map (uint8)."""
        size = path.stat().st_size
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0).byte()

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written to the disk of a folder."""
        return shutil.disk_usage(path).free

    def transact(self, work: Callable[[], T]) -> T:
        """Runs one transaction of the ledger."""
        return work()

    # -- made of those ----------------------------------------------------------------------------------------------

    def write(self, path: Path, data: Any) -> None:
        """Writes a file so that it is there whole and durable, or not at all."""
        partial = path.with_name(path.name + ".partial")
        with self._whole(partial):
            self.dump(partial, data)
            self.publish(partial, path)

    def save(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Writes tensors to a file so that it is there whole or not at all; its name is durable after `sync`."""
        partial = path.with_suffix(".partial")
        with self._whole(partial):
            self.dump_tensors(partial, tensors, metadata)
            self.sync(partial)
            self.rename(partial, path)

    def publish(self, partial: Path, path: Path) -> None:
        """Makes a finished temporary file durable under its name."""
        self.sync(partial)
        self.rename(partial, path)
        self.take_note(path)
        self.sync(path.parent)

    def take_note(self, path: Path) -> None:
        """Counts the bytes of a file that has its name, where its folder is counted."""
        if path.parent in self._counted:
            self._note(path, path.stat().st_size)
        if self._limit_bytes and self._bytes + self._spared > self._limit_bytes:
            self.drop_spares()

    def unlink(self, path: Path) -> None:
        """Removes a file, if it is there."""
        self.remove(path)
        if self._counted:
            self._note(path, 0)

    @contextlib.contextmanager
    def _whole(self, partial: Path) -> Iterator[None]:
        """Leaves no half of a file on a disk that may be full."""
        try:
            yield
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(partial)
            raise

    # -- files to be written over -------------------------------------------------------------------------------------

    def spare(self, folder: Path, limit_bytes: int = 0) -> None:
        """Has `retire` keep files in a folder for `reuse`; with those that are counted no more than a limit, if any.

        To write over pages that the kernel has is several times as fast as to have it find new ones, and their blocks
        on the disk are found already.
        """
        self._spare_folder, self._limit_bytes = folder, limit_bytes

    def retire(self, path: Path) -> None:
        """Removes a file; or keeps it, to be written over. Whoever has it mapped may find other bytes in it then."""
        size = path.stat().st_size if path.exists() else 0
        with self._lock:
            keep = self._spare_folder and size and self._spared + size <= SPARE_BYTES
            keep = keep and (not self._limit_bytes or self._bytes + self._spared <= self._limit_bytes)
            spare = self._spare_folder / f"{next(_numbers)}" if keep and self._spare_folder else None
        if spare is None:
            self.unlink(path)
            return
        self.rename(path, spare)
        if self._counted:
            self._note(path, 0)
        with self._lock:
            self._spares.setdefault(size, []).append(spare)
            self._spared += size

    def reuse(self, path: Path, size: int) -> bool:
        """Gives `path` a file of exactly `size` bytes, whatever they are, if one is kept; returns whether."""
        with self._lock:
            kept = self._spares.get(size)
            spare = kept.pop() if kept else None
            self._spared -= size if spare else 0
        if spare:
            self.rename(spare, path)
        return spare is not None

    def drop_spares(self) -> None:
        """Removes the files that are kept to be written over."""
        with self._lock:
            spares, self._spares, self._spared = self._spares, {}, 0
        for path in (path for paths in spares.values() for path in paths):
            self.remove(path)

    @property
    def spared_bytes(self) -> int:
        """Bytes of those files."""
        return self._spared

    # -- space ------------------------------------------------------------------------------------------------------

    def count(self, *folders: Path) -> None:
        """Counts the bytes of published files in some folders, from what is there now on."""
        with self._lock:
            self._counted = frozenset(folders)
            self._sizes = {path: path.stat().st_size for folder in folders for path in folder.iterdir()}
            self._bytes = sum(self._sizes.values())

    @property
    def counted_bytes(self) -> int:
        """Bytes of the files in the folders that are counted."""
        return self._bytes

    def _note(self, path: Path, size: int) -> None:
        with self._lock:
            self._bytes += size - self._sizes.pop(path, 0)
            if size:
                self._sizes[path] = size


class ReadOnly(Files):
    """For whoever only looks: removes and renames nothing."""

    def remove(self, path: Path) -> None:
        """Leaves the file where it is."""

    def rename(self, old: Path, new: Path) -> None:
        """Leaves the file its name."""


REAL = Files()
"""The disk as it is, for files that nobody counts."""
