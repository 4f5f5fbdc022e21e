"""The synchronous twin of `coordinator/upload.py` on the simulated disk; `Assembly`, `Slot` are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coordinator.upload import RETRY_S, Growing, Slot
from diloco.errors import Overload
from diloco.framing import END_BYTES, Assembly, unchunk
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
        slot: where it belongs.
        total_bytes: as announced; none for one that an earlier coordinator began, until it is announced again.
    """

    def __init__(self, disk: Disk, slot: Slot, total_bytes: int | None) -> None:
        self.disk, self.slot = disk, slot
        super().__init__(slot, total_bytes, len(self.file.data) if total_bytes is None else 0)
        self.stream: Stream | None = None

    @property
    def file(self) -> Partial:
        """Its two files, made where there are none."""
        return self.disk.partials.setdefault(self.slot.name, Partial())

    def open(self) -> int:
        """Reads the files again if this coordinator has not written them; returns what they have."""
        if self._assembly is None:
            self.disk.check()
            self._go_back(self.reread(self.total_bytes or 0))
        return self.have

    def reread(self, until: int) -> Assembly:
        """Finds how far the payload is as recorded, no further than byte `until`, where a chunk may begin."""
        file, assembly = self.file, Assembly(self.total_bytes or 0)
        for offset, length, check in file.sums:
            block = bytes(file.data[offset : offset + length])
            fits = offset == assembly.have and 0 < length <= until - offset and len(block) == length
            if not fits or not assembly.fits(memoryview(block), check):
                break
            assembly.took()
        return assembly

    def _go_back(self, assembly: Assembly) -> None:
        """Takes that for what has come, and cuts off the rest."""
        self._assembly = assembly
        del self.file.data[assembly.have :]
        self.file.sums[:] = [record for record in self.file.sums if record[0] < assembly.have]

    def add(self, message: bytes) -> bool:
        """Takes one chunk, or the end; returns whether it brought anything new. Raises as `Upload.add` does."""
        assert self._assembly is not None
        if len(message) == END_BYTES:
            self._assembly.check_complete()
            self._assembly.end(message)
            return False
        offset, check, payload = unchunk(message)
        if (offset, len(payload), check) in self.file.sums:
            return False
        earlier = self.reread(offset) if offset < self.have else self._assembly
        fresh = earlier.fresh(message)
        if earlier is not self._assembly:
            self._go_back(earlier)
        self.disk.check()
        self.file.data += fresh
        self.file.sums.append((offset, len(fresh), check))
        self._assembly.took()
        return True

    @property
    def payload(self) -> Tensor:
        """All bytes that have come (uint8)."""
        data = self.file.data
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def discard(self) -> None:
        """Removes the files."""
        if self.disk.partials.pop(self.slot.name, None) is not None:
            self.disk.changes += 1


class SimUploads:
    """All uploads that have begun and are not over: one per slot, each with at most one stream."""

    upload: type[SimUpload] = SimUpload

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.uploads: dict[Slot, SimUpload] = {}
        for name in sorted(disk.partials):
            slot = Slot.parse(name)
            if slot is None:
                del disk.partials[name]
            else:
                self.uploads[slot] = self.upload(disk, slot, None)

    @property
    def reserved_bytes(self) -> int:
        """What all uploads take, or will take, on the disk."""
        return sum(upload.reserved for upload in self.uploads.values())

    @property
    def coming_bytes(self) -> int:
        """What all uploads have still to bring."""
        return sum(upload.reserved - upload.have for upload in self.uploads.values())

    def find(self, slot: Slot, total_bytes: int) -> SimUpload | None:
        """The upload of a payload of this size, if it has begun."""
        upload = self.uploads.get(slot)
        if upload is None or upload.total_bytes not in (None, total_bytes):
            return None
        upload.total_bytes = total_bytes
        return upload

    def supersede(self, slot: Slot) -> Work[None]:
        """Ends the stream that brings something to the same slot. Raises `Overload` where it does not end at once."""
        while (upload := self.uploads.get(slot)) and (stream := upload.stream):
            if stream.storing:
                raise Overload("all bytes have come and are being stored: ask again", retry_after_s=RETRY_S)
            stream.process.interrupt(
                Superseded("a newer stream of the same part has taken over", retry_after_s=RETRY_S)
            )
            yield (stream.ended, RETRY_S)
            if upload.stream is stream:
                raise Overload("an older stream of this part has yet to end: ask again", retry_after_s=RETRY_S)

    def begin(self, slot: Slot, total_bytes: int, process: Process) -> tuple[SimUpload, Stream]:
        """Gives a process the upload of a payload; what was kept for its slot before, of another size, goes."""
        upload = self.find(slot, total_bytes)
        if upload is None:
            if other := self.uploads.get(slot):
                other.discard()
            upload = self.uploads[slot] = self.upload(self.disk, slot, total_bytes)
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
        if self.uploads.get(upload.slot) is upload:
            del self.uploads[upload.slot]
        upload.discard()

    def prune(self, over: Callable[[Slot], bool]) -> None:
        """Drops uploads that are over and that no stream brings."""
        for upload in self.over(over):
            if upload.stream is None:
                self.drop(upload)

    def over(self, over: Callable[[Slot], bool]) -> Iterator[SimUpload]:
        """The uploads to which nothing can count any more."""
        return iter([upload for upload in self.uploads.values() if over(upload.slot)])
