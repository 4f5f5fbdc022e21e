"""The synchronous twin of `coordinator/upload.py` on the simulated disk; `Assembly`, `Key`, `Slot` are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from coordinator.upload import RETRY_S, Growing, Key, Slot
from diloco.errors import CodecError, Overload
from diloco.framing import Assembly
from wan.sim_disk import Disk, Partial
from wan.sim_world import Gate, Process, Work


class Superseded(Overload):
    """A newer stream of the same slot has taken over."""


@dataclass(eq=False)
class Stream:
    """What brings an upload at the moment."""

    process: Process
    ended: Gate = field(default_factory=Gate)
    storing: bool = False


class SimUpload(Growing):
    """One payload as a growing file.

    Args:
        disk: where its files are.
        key: which payload.
        total_bytes: as announced; none for one that an earlier coordinator began, until it is announced again.
    """

    def __init__(self, disk: Disk, key: Key, total_bytes: int | None) -> None:
        self.disk, self.key = disk, key
        super().__init__(key, total_bytes, len(self.file.data) if total_bytes is None else 0)
        self.stream: Stream | None = None

    @property
    def file(self) -> Partial:
        """Its two files, made where there are none."""
        return self.disk.partials.setdefault(self.key.name, Partial())

    def open(self) -> int:
        """Reads the files again if this coordinator has not written them; returns what they have."""
        if self._assembly is None:
            self.disk.check()
            self._assembly = Assembly(self.total_bytes or 0, self.reread())
        return self._assembly.have

    def reread(self) -> int:
        """Finds how far the payload is as recorded, and cuts off the rest."""
        file, have, records = self.file, 0, 0
        for offset, length, check in file.sums:
            block = bytes(file.data[offset : offset + length])
            fits = offset == have and 0 < length <= (self.total_bytes or 0) - have and len(block) == length
            if not fits or xxhash.xxh3_64_intdigest(block, seed=offset) != check:
                break
            have, records = have + length, records + 1
        del file.data[have:], file.sums[records:]
        return have

    def add(self, message: bytes) -> bool:
        """Takes one chunk; returns whether it brought anything new. Raises as `Upload.add` does."""
        assert self._assembly is not None
        fresh, have = self._assembly.fresh(message), self._assembly.have
        if not len(fresh):
            return False
        self.disk.check()
        file = self.file
        file.data[have : have + len(fresh)] = fresh
        file.sums.append((have, len(fresh), xxhash.xxh3_64_intdigest(fresh, seed=have)))
        self._assembly.have += len(fresh)
        return True

    def check_complete(self) -> None:
        """Raises `CodecError` where bytes are missing, or are not those whose digest was announced."""
        assert self._assembly is not None
        self._assembly.check_complete()
        if xxhash.xxh3_128_hexdigest(bytes(self.file.data)) != self.key.digest:
            raise CodecError("the payload has another digest than was announced")

    @property
    def payload(self) -> Tensor:
        """All bytes that have come (uint8)."""
        data = self.file.data
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def discard(self) -> None:
        """Removes the files."""
        if self.disk.partials.pop(self.key.name, None) is not None:
            self.disk.changes += 1


class SimUploads:
    """All uploads that have begun and are not over: one per slot, each with at most one stream."""

    upload: type[SimUpload] = SimUpload

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.uploads: dict[Slot, SimUpload] = {}
        for name in sorted(disk.partials):
            key = Key.parse(name)
            if key is None or key.slot in self.uploads:
                del disk.partials[name]
            else:
                self.uploads[key.slot] = self.upload(disk, key, None)

    @property
    def reserved_bytes(self) -> int:
        """What all uploads take, or will take, on the disk."""
        return sum(upload.reserved for upload in self.uploads.values())

    @property
    def coming_bytes(self) -> int:
        """What all uploads have still to bring."""
        return sum(upload.reserved - upload.have for upload in self.uploads.values())

    def find(self, key: Key, total_bytes: int) -> SimUpload | None:
        """The upload of this payload, if it has begun."""
        upload = self.uploads.get(key.slot)
        if upload is None or upload.key != key or upload.total_bytes not in (None, total_bytes):
            return None
        upload.total_bytes = total_bytes
        return upload

    def supersede(self, key: Key) -> Work[None]:
        """Ends the stream that brings something to the same slot. Raises `Overload` where it does not end at once."""
        while (upload := self.uploads.get(key.slot)) and (stream := upload.stream):
            if stream.storing:
                raise Overload("all bytes have come and are being stored: ask again", retry_after_s=RETRY_S)
            stream.process.interrupt(
                Superseded("a newer stream of the same payload has taken over", retry_after_s=RETRY_S)
            )
            yield (stream.ended, RETRY_S)
            if upload.stream is stream:
                raise Overload("an older stream of this part has yet to end: ask again", retry_after_s=RETRY_S)

    def begin(self, key: Key, total_bytes: int, process: Process) -> tuple[SimUpload, Stream]:
        """Gives a process the upload of a payload; what was kept for its slot before, if other, goes."""
        upload = self.find(key, total_bytes)
        if upload is None:
            if other := self.uploads.get(key.slot):
                other.discard()
            upload = self.uploads[key.slot] = self.upload(self.disk, key, total_bytes)
        assert upload.stream is None
        upload.stream = stream = Stream(process)
        return upload, stream

    def end(self, upload: SimUpload) -> None:
        """The upload's stream has ended; what has come stays."""
        assert upload.stream is not None
        upload.stream.ended.open()
        upload.stream = None

    def drop(self, upload: SimUpload) -> None:
        """Forgets an upload and removes its files."""
        if self.uploads.get(upload.key.slot) is upload:
            del self.uploads[upload.key.slot]
        upload.discard()

    def prune(self, over: Callable[[Slot], bool]) -> None:
        """Drops uploads that are over and that no stream brings."""
        for upload in self.over(over):
            if upload.stream is None:
                self.drop(upload)

    def over(self, over: Callable[[Slot], bool]) -> Iterator[SimUpload]:
        """The uploads to which nothing can count any more."""
        return iter([upload for upload in self.uploads.values() if over(upload.key.slot)])
