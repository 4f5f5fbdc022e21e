"""Bulk streams on their way to files. What has come stays over cut lines, and over restarts of either side.

An upload is known by its island, fragment, round and rank, not by the epoch: an island that starts again and makes the
same bytes goes on where it stopped. Whether they are the same, the sender finds by the digest of what has come. While
it arrives there are two files:

    <name>.partial   the payload, from its first byte; of its whole size from the beginning
    <name>.sums      a record for each chunk written: offset, length, and its check (`diloco/framing.py`)

What is beyond the last record is whatever the file held before: it may be one that was another contribution. Nothing is
synced before the end, so after a power loss both may hold anything. They are therefore read again, chunk by chunk, when
a coordinator first needs them; what is not as recorded does not count. Chunks that come again, as from a sender
that asks nothing, are passed over; at the first that differs the payload goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from torch import Tensor

from coordinator.files import Files
from diloco.errors import CodecError, Overload
from diloco.failpoints import failpoint
from diloco.framing import CONTROL_LIMIT_BYTES, END_BYTES, Assembly, Bytes, Placed, unchunk

P = ParamSpec("P")
T = TypeVar("T")
RETRY_S = 1.0
"""What a stream is told to wait that another one of the same upload is in the way of."""
BEGIN_BYTES = 8 * 2**20
"""So much is handed to the disk at a time while more is coming, so that little is left to sync at the end."""
THREADS = max(1, min(4, os.cpu_count() or 1))
_RECORD = struct.Struct("<QQQ")
_NAME = re.compile(r"f(\d+)-r(\d+)-(.+)-(\d+)-(part|seed)")


def _alone(method: Callable[Concatenate[Upload, P], T]) -> Callable[Concatenate[Upload, P], T]:
    """Has a method hold the lock of its upload."""

    @wraps(method)
    def locked(self: Upload, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[Upload, P], T]", locked)


class Slot(NamedTuple):
    """Where a payload belongs: at most one upload is kept for it."""

    fragment: int
    round: int
    island: str
    rank: int
    seed: bool

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"f{self.fragment}-r{self.round}-{self.island}-{self.rank}-{'seed' if self.seed else 'part'}"

    @classmethod
    def parse(cls, name: str) -> Slot | None:
        """The slot that files are called after; none for other names."""
        match = _NAME.fullmatch(name)
        if not match:
            return None
        fragment, round_, island, rank, kind = match.groups()
        return cls(int(fragment), int(round_), island, int(rank), kind == "seed")


class Growing:
    """One payload as it grows, wherever its bytes are kept.

    Args:
        slot: where it belongs.
        total_bytes: its size as announced; none for one that an earlier coordinator began, until it is announced again.
        found_bytes: bytes that were found of such a one.
    """

    def __init__(self, slot: Slot, total_bytes: int | None, found_bytes: int) -> None:
        self.slot, self.total_bytes = slot, total_bytes
        self._found_bytes = found_bytes
        self._assembly: Assembly | None = None

    @property
    def have(self) -> int:
        """Bytes that have come, from the first; of files that were only found, their size."""
        return self._assembly.have if self._assembly else self._found_bytes

    @property
    def digest(self) -> str:
        """XXH3-128 (hex) of them; of one that was opened."""
        assert self._assembly is not None
        return self._assembly.digest

    @property
    def reserved(self) -> int:
        """Bytes that it takes, or will take, on the disk."""
        return self.have if self.total_bytes is None else self.total_bytes

    @property
    def whole(self) -> bool:
        """Whether all bytes have come."""
        return self._assembly is not None and self.have == self.total_bytes

    def check_complete(self) -> None:
        """Raises `CodecError` where bytes or the end are missing."""
        assert self._assembly is not None
        self._assembly.check_complete()
        if not self._assembly.ended:
            raise CodecError("the stream ended before the digest of its payload")


class Upload(Growing):
    """One payload as a growing file. Any thread may call its methods, which wait for one another.

    Args:
        folder: where its files are.
        files: how the disk is written.
        slot: where it belongs.
        total_bytes: its size as announced; none for one that an earlier coordinator began, until it is announced again.
    """

    def __init__(self, folder: Path, files: Files, slot: Slot, total_bytes: int | None) -> None:
        self.lock = threading.RLock()
        """Is held while one of its methods runs."""
        self._disk = files
        self.path = folder / f"{slot.name}.partial"
        self._sums_path = folder / f"{slot.name}.sums"
        super().__init__(slot, total_bytes, self._recorded() if total_bytes is None else 0)
        self._records: dict[int, tuple[int, int]] = {}
        """Length and check of the chunks that are here, by offset."""
        self._files: tuple[int, int] | None = None
        self._reused = False
        """Whether the disk has its blocks already."""
        self._begun = 0
        """Bytes that the kernel was told to write to the disk."""
        self.stream: Stream | None = None
        """The stream that brings it now."""
        self.watch: Callable[[memoryview, int], None] | None = None
        """Is given what has come, in the memory in which it came, and where in the payload that begins."""

    def _recorded(self) -> int:
        """Up to which byte the last record of a payload goes that an earlier coordinator began."""
        size = self._sums_path.stat().st_size // _RECORD.size * _RECORD.size if self._sums_path.exists() else 0
        if not size:
            return 0
        offset, length, _ = _RECORD.unpack(self._disk.read(self._sums_path, size - _RECORD.size)[: _RECORD.size])
        return min(int(offset + length), self.path.stat().st_size)

    @property
    def reserved(self) -> int:
        return self.path.stat().st_size if self.total_bytes is None else self.total_bytes

    @property
    def coming(self) -> int:
        """Bytes that it has still to take on the disk."""
        return 0 if self._reused or self.total_bytes is None else self.total_bytes - self.have

    @_alone
    def open(self) -> int:
        """Opens the files, reads them again if this coordinator has not written them, and returns what they have."""
        if self._files is None:
            if not self.slot.seed and not self.path.exists():
                self._reused = self._disk.reuse(self.path, self.total_bytes or 0)
            flags = os.O_RDWR | os.O_CREAT
            self._files = os.open(self.path, flags, 0o644), os.open(self._sums_path, flags, 0o644)
        if self._assembly is None:
            self._go_back(*self._reread(self.total_bytes or 0))
        return self.have

    @property
    def payload(self) -> Tensor:
        """The file as a memory map (uint8)."""
        return self._disk.map(self.path)

    @_alone
    def look(self) -> tuple[int, str]:
        """How many bytes it has, as `open` finds it, and their digest; leaves the files open only where they were."""
        opened = self._files is not None
        have = self.open()
        if not opened:
            self.close()
        return have, self.digest

    def _reread(self, until: int) -> tuple[Assembly, dict[int, tuple[int, int]]]:
        """Finds how far the payload is as recorded, no further than byte `until`, where a chunk may begin."""
        assert self._files is not None
        data, sums = self._files
        assembly, records = Assembly(self.total_bytes or 0), dict[int, tuple[int, int]]()
        while len(record := os.pread(sums, _RECORD.size, len(records) * _RECORD.size)) == _RECORD.size:
            offset, length, check = _RECORD.unpack(record)
            if offset != assembly.have or not 0 < length <= min(until - offset, CONTROL_LIMIT_BYTES):
                break
            block = os.pread(data, length, offset)
            if len(block) != length or not assembly.fits(memoryview(block), check):
                break
            assembly.took()
            records[offset] = length, check
        return assembly, records

    def _go_back(self, assembly: Assembly, records: dict[int, tuple[int, int]]) -> None:
        """Takes that for what has come. What is there beyond it is written over."""
        assert self._files is not None
        self._assembly, self._records = assembly, records
        if os.fstat(self._files[0]).st_size != self.total_bytes:
            os.ftruncate(self._files[0], self.total_bytes or 0)
        os.ftruncate(self._files[1], len(self._records) * _RECORD.size)
        self._begun = min(self._begun, self.have)

    @_alone
    def add(self, message: Bytes | Placed) -> bool:
        """Takes one chunk, or the end; returns whether it brought anything new.

        Raises:
            CodecError: it is damaged, leaves a gap, or is more than was announced. What came before stays.
            OSError: the disk does not take it; it may come again.
        """
        assert self._assembly is not None
        if len(message) == END_BYTES:
            self._assembly.check_complete()
            self._assembly.end(bytes(message))
            return False
        offset, check, payload = unchunk(message)
        if self._records.get(offset) == (len(payload), check):
            return False
        if offset < self.have:
            earlier = self._reread(offset)
            fresh = earlier[0].fresh(message)
            self._go_back(*earlier)
        else:
            fresh = self._assembly.fresh(message)
        self._write(fresh, check)
        failpoint("push-chunk")
        if self.watch:
            self.watch(fresh, offset)
        return True

    def _write(self, fresh: memoryview, check: int) -> None:
        """Writes what goes on at `have`."""
        assert self._assembly is not None
        assert self._files is not None
        data, sums = self._files
        self._disk.write_at(data, [fresh], self.have)
        record = _RECORD.pack(self.have, len(fresh), check)
        self._disk.write_at(sums, [memoryview(record)], len(self._records) * _RECORD.size)
        self._records[self.have] = len(fresh), check
        self._assembly.took()
        if self.have - self._begun >= BEGIN_BYTES or self.whole:
            self._disk.start_writing(data, self._begun, self.have - self._begun)
            self._begun = self.have

    def publish(self, path: Path) -> Path:
        """Makes the bytes durable under `path`."""
        self._disk.publish(self.path, path)
        self._sums_path.unlink(missing_ok=True)
        return path

    @_alone
    def close(self) -> None:
        """Closes the files; they stay."""
        files, self._files = self._files or (), None
        for descriptor in files:
            os.close(descriptor)

    @_alone
    def discard(self) -> None:
        """Closes and removes the files."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._sums_path.unlink(missing_ok=True)


@dataclass(eq=False, kw_only=True)
class Stream:
    """What brings an upload at the moment."""

    task: asyncio.Task[object]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: bool = False
    storing: bool = False
    """All bytes are here and are being stored."""


class Uploads:
    """All uploads that have begun and are not over: one per slot, each with at most one stream.

    Used on one loop; the files of a slot are opened, closed and removed on one thread, in order.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files
        self._uploads: dict[Slot, Upload] = {}
        self._threads = [ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"uploads {i}") for i in range(THREADS)]
        for path in sorted(folder.glob("*.partial")):
            slot = Slot.parse(path.stem)
            if slot is None:
                path.unlink()
            else:
                self._uploads[slot] = Upload(folder, files, slot, None)
        names = {slot.name for slot in self._uploads}
        for path in folder.glob("*.sums"):
            if path.stem not in names:
                path.unlink()

    @property
    def reserved_bytes(self) -> int:
        """What all uploads take, or will take, on the disk."""
        return sum(upload.reserved for upload in self._uploads.values())

    @property
    def coming_bytes(self) -> int:
        """What all uploads have still to take on the disk."""
        return sum(upload.coming for upload in self._uploads.values())

    def run(self, slot: Slot, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Runs a method of an upload on the thread of its slot, after what was given to it before."""
        return asyncio.get_running_loop().run_in_executor(self._thread(slot), lambda: work(*args, **kwargs))

    def _thread(self, slot: Slot) -> ThreadPoolExecutor:
        return self._threads[hash(slot) % THREADS]

    def find(self, slot: Slot, total_bytes: int) -> Upload | None:
        """The upload of a payload of this size, if it has begun."""
        upload = self._uploads.get(slot)
        if upload is None or upload.total_bytes not in (None, total_bytes):
            return None
        upload.total_bytes = total_bytes
        return upload

    async def supersede(self, slot: Slot) -> None:
        """Ends the stream that brings something to the same slot: its line is dead, or its sender has started again.

        Raises:
            Overload: it does not end at once, or all bytes have come and are being stored: the answer comes with the
                next try.
        """
        while (upload := self._uploads.get(slot)) and (stream := upload.stream):
            if stream.storing:
                raise Overload("all bytes have come and are being stored: ask again", retry_after_s=RETRY_S)
            stream.superseded = True
            stream.task.cancel()
            try:
                async with asyncio.timeout(RETRY_S):
                    await stream.ended.wait()
            except TimeoutError:
                raise Overload(
                    "an older stream of this part has yet to end: ask again", retry_after_s=RETRY_S
                ) from None

    def begin(self, slot: Slot, total_bytes: int) -> tuple[Upload, Stream]:
        """Gives the calling task the upload of a payload; what was kept for its slot before, of another size, goes."""
        upload = self.find(slot, total_bytes)
        if upload is None:
            other = self._uploads.get(slot)
            if other:
                self._thread(slot).submit(other.discard)
            upload = self._uploads[slot] = Upload(self._folder, self._files, slot, total_bytes)
        task = asyncio.current_task()
        assert task is not None
        assert upload.stream is None
        stream = upload.stream = Stream(task=task)
        return upload, stream

    def end(self, upload: Upload) -> None:
        """The upload's stream has ended; what has come stays."""
        assert upload.stream is not None
        upload.stream.ended.set()
        upload.stream = None
        self._thread(upload.slot).submit(upload.close)

    async def drop(self, upload: Upload) -> None:
        """Forgets an upload and removes its files."""
        if self._uploads.get(upload.slot) is upload:
            del self._uploads[upload.slot]
        await self.run(upload.slot, upload.discard)

    async def prune(self, over: Callable[[Slot], bool]) -> None:
        """Drops uploads that are over and that no stream brings."""
        for upload in [u for u in self._uploads.values() if over(u.slot)]:
            if upload.stream is None:
                await self.drop(upload)

    async def close(self, over: Callable[[Slot], bool]) -> None:
        """Drops what is over, and ends the thread once it has written what it is at; what is under way stays."""
        with contextlib.suppress(OSError):  # a start finds what a failing disk does not let go
            await self.prune(over)
        for thread in self._threads:
            thread.shutdown()
