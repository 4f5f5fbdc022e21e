"""Bulk streams on their way to files. What has come stays over cut lines, and over restarts of either side.

An upload is known by its island, fragment, round, rank and the digest of its whole payload, not by the epoch: an island
that starts again and makes the same bytes goes on where it stopped. While it arrives there are two files:

    <name>.partial   the payload, from its first byte
    <name>.sums      a record for each chunk written: offset, length, XXH3-64 of its bytes with the offset as seed

Nothing is synced before the end, so after a power loss both may hold anything. They are therefore read again, chunk by
chunk, when a coordinator first needs them; what is not as recorded is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import xxhash

from coordinator.files import Files
from diloco.errors import CodecError, Overload
from diloco.framing import CONTROL_LIMIT_BYTES, Assembly

P = ParamSpec("P")
T = TypeVar("T")
RETRY_S = 1.0
"""What a stream is told to wait that another one of the same upload is in the way of."""
_RECORD = struct.Struct("<QQQ")
_NAME = re.compile(r"f(\d+)-r(\d+)-(.+)-(\d+)-(part|seed)-([0-9a-f]{32})")


class Slot(NamedTuple):
    """Where a payload belongs: at most one upload is kept for it."""

    fragment: int
    round: int
    island: str
    rank: int
    seed: bool


@dataclass(frozen=True)
class Key:
    """Which payload: its slot, and the XXH3-128 (hex) of all its bytes."""

    slot: Slot
    digest: str

    @property
    def name(self) -> str:
        """What its files are called."""
        fragment, round_, island, rank, seed = self.slot
        return f"f{fragment}-r{round_}-{island}-{rank}-{'seed' if seed else 'part'}-{self.digest}"

    @classmethod
    def parse(cls, name: str) -> Key | None:
        """The key that files are called after; none for other names."""
        match = _NAME.fullmatch(name)
        if not match:
            return None
        fragment, round_, island, rank, kind, digest = match.groups()
        return cls(Slot(int(fragment), int(round_), island, int(rank), kind == "seed"), digest)


class Growing:
    """One payload as it grows, wherever its bytes are kept.

    Args:
        key: which payload.
        total_bytes: its size as announced; none for one that an earlier coordinator began, until it is announced again.
        found_bytes: bytes that were found of such a one.
    """

    def __init__(self, key: Key, total_bytes: int | None, found_bytes: int) -> None:
        self.key, self.total_bytes = key, total_bytes
        self._found_bytes = found_bytes
        self._assembly: Assembly | None = None

    @property
    def have(self) -> int:
        """Bytes that have come, from the first; of files that were only found, their size."""
        return self._assembly.have if self._assembly else self._found_bytes

    @property
    def reserved(self) -> int:
        """Bytes that it takes, or will take, on the disk."""
        return self.have if self.total_bytes is None else self.total_bytes

    @property
    def whole(self) -> bool:
        """Whether all bytes have come."""
        return self._assembly is not None and self.have == self.total_bytes


class Upload(Growing):
    """One payload as a growing file. All methods are called on one thread.

    Args:
        folder: where its files are.
        files: how the disk is written.
        key: which payload.
        total_bytes: its size as announced; none for one that an earlier coordinator began, until it is announced again.
    """

    def __init__(self, folder: Path, files: Files, key: Key, total_bytes: int | None) -> None:
        self._disk = files
        self.path = folder / f"{key.name}.partial"
        self._sums_path = folder / f"{key.name}.sums"
        super().__init__(key, total_bytes, self.path.stat().st_size if total_bytes is None else 0)
        self._hash = xxhash.xxh3_128()
        self._records = 0
        self._files: tuple[int, int] | None = None
        self.stream: Stream | None = None
        """The stream that brings it now."""

    def open(self) -> int:
        """Opens the files, reads them again if this coordinator has not written them, and returns what they have."""
        if self._files is None:
            flags = os.O_RDWR | os.O_CREAT
            self._files = os.open(self.path, flags, 0o644), os.open(self._sums_path, flags, 0o644)
        if self._assembly is None:
            self._assembly = self._reread(*self._files)
        return self._assembly.have

    def look(self) -> int:
        """How many bytes it has, as `open` finds it; leaves the files open only where they were."""
        opened = self._files is not None
        have = self.open()
        if not opened:
            self.close()
        return have

    def _reread(self, data: int, sums: int) -> Assembly:
        """Finds how far the payload is as recorded, and cuts off the rest."""
        assembly = Assembly(self.total_bytes or 0)
        while len(record := os.pread(sums, _RECORD.size, self._records * _RECORD.size)) == _RECORD.size:
            offset, length, check = _RECORD.unpack(record)
            left = assembly.total_bytes - assembly.have
            if offset != assembly.have or not 0 < length <= min(left, CONTROL_LIMIT_BYTES):
                break
            block = os.pread(data, length, offset)
            if len(block) != length or xxhash.xxh3_64_intdigest(block, seed=offset) != check:
                break
            self._hash.update(block)
            self._records += 1
            assembly.have += length
        os.ftruncate(data, assembly.have)
        os.ftruncate(sums, self._records * _RECORD.size)
        return assembly

    def add(self, message: bytes) -> bool:
        """Takes one chunk; returns whether it brought anything new.

        Raises:
            CodecError: it is damaged, leaves a gap, or is more than was announced.
            OSError: the disk does not take it; it may come again.
        """
        assert self._assembly is not None
        assert self._files is not None
        fresh, have = self._assembly.fresh(message), self._assembly.have
        if not len(fresh):
            return False
        data, sums = self._files
        self._disk.write_at(data, fresh, have)
        record = _RECORD.pack(have, len(fresh), xxhash.xxh3_64_intdigest(fresh, seed=have))
        self._disk.write_at(sums, memoryview(record), self._records * _RECORD.size)
        self._hash.update(fresh)
        self._records += 1
        self._assembly.have += len(fresh)
        return True

    def check_complete(self) -> None:
        """Raises `CodecError` where bytes are missing, or are not those whose digest was announced."""
        assert self._assembly is not None
        self._assembly.check_complete()
        if self._hash.hexdigest() != self.key.digest:
            raise CodecError(f"the payload has digest {self._hash.hexdigest()}, and {self.key.digest} was announced")

    def publish(self, path: Path) -> Path:
        """Makes the bytes durable under `path`."""
        self._disk.publish(self.path, path)
        self._sums_path.unlink(missing_ok=True)
        return path

    def close(self) -> None:
        """Closes the files; they stay."""
        files, self._files = self._files or (), None
        for descriptor in files:
            os.close(descriptor)

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

    Used on one loop; files are touched on a thread of its own, in order. So what a stream that was cut off had still
    to write is written before the next stream of the same upload begins.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files
        self._uploads: dict[Slot, Upload] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="uploads")
        for path in sorted(folder.glob("*.partial")):
            key = Key.parse(path.stem)
            if key is None or key.slot in self._uploads:
                path.unlink()
            else:
                self._uploads[key.slot] = Upload(folder, files, key, None)
        names = {upload.key.name for upload in self._uploads.values()}
        for path in folder.glob("*.sums"):
            if path.stem not in names:
                path.unlink()

    @property
    def reserved_bytes(self) -> int:
        """What all uploads take, or will take, on the disk."""
        return sum(upload.reserved for upload in self._uploads.values())

    @property
    def coming_bytes(self) -> int:
        """What all uploads have still to bring."""
        return sum(upload.reserved - upload.have for upload in self._uploads.values())

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a method of an upload on the thread of files."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def find(self, key: Key, total_bytes: int) -> Upload | None:
        """The upload of this payload, if it has begun."""
        upload = self._uploads.get(key.slot)
        if upload is None or upload.key != key or upload.total_bytes not in (None, total_bytes):
            return None
        upload.total_bytes = total_bytes
        return upload

    async def supersede(self, key: Key) -> None:
        """Ends the stream that brings something to the same slot: its line is dead, or its sender has started again.

        Raises:
            Overload: it does not end at once, or all bytes have come and are being stored: the answer comes with the
                next try.
        """
        while (upload := self._uploads.get(key.slot)) and (stream := upload.stream):
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

    def begin(self, key: Key, total_bytes: int) -> tuple[Upload, Stream]:
        """Gives the calling task the upload of a payload; what was kept for its slot before, if other, goes."""
        upload = self.find(key, total_bytes)
        if upload is None:
            other = self._uploads.get(key.slot)
            if other:
                self._thread.submit(other.discard)
            upload = self._uploads[key.slot] = Upload(self._folder, self._files, key, total_bytes)
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
        self._thread.submit(upload.close)

    async def drop(self, upload: Upload) -> None:
        """Forgets an upload and removes its files."""
        if self._uploads.get(upload.key.slot) is upload:
            del self._uploads[upload.key.slot]
        await self.run(upload.discard)

    async def prune(self, over: Callable[[Slot], bool]) -> None:
        """Drops uploads that are over and that no stream brings."""
        for upload in [u for u in self._uploads.values() if over(u.key.slot)]:
            if upload.stream is None:
                await self.drop(upload)

    async def close(self, over: Callable[[Slot], bool]) -> None:
        """Drops what is over, and ends the thread once it has written what it is at; what is under way stays."""
        with contextlib.suppress(OSError):  # a start finds what a failing disk does not let go
            await self.prune(over)
        self._thread.shutdown()
