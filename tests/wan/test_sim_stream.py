"""Simulated uploads: what a crash leaves of unsynced bytes, and what is taken up of it."""

from __future__ import annotations

import random

import pytest
import torch

from coordinator.upload import Slot
from diloco.errors import CodecError
from diloco.framing import chunks
from wan.sim_disk import Disk
from wan.sim_stream import SimUpload, SimUploads

PAYLOAD = torch.arange(40, dtype=torch.uint8)
SLOT = Slot(0, 3, "a", 1, False)


def begun(disk: Disk, messages: int) -> SimUpload:
    """An upload of which some chunks of 8 bytes have come."""
    upload = SimUpload(disk, SLOT, 40)
    upload.open()
    for message in list(chunks([PAYLOAD], 8))[:messages]:
        assert upload.add(message)
    return upload


def test_an_upload_is_whole_once_all_chunks_have_come() -> None:
    upload = begun(Disk(), 4)
    with pytest.raises(CodecError, match="ended after 32 of 40"):
        upload.check_complete()
    for message in chunks([PAYLOAD], 8, 32, ended=True):
        upload.add(message)
    upload.check_complete()
    assert upload.whole
    assert upload.payload.equal(PAYLOAD)


def test_a_coordinator_that_starts_again_takes_up_what_is_as_recorded() -> None:
    disk = Disk()
    begun(disk, 4)
    disk.partials[SLOT.name].data[20] ^= 1
    uploads = SimUploads(disk)
    assert uploads.reserved_bytes == 32
    found = uploads.find(SLOT, 40)
    assert found
    assert found.open() == 16
    assert bytes(found.file.data) == bytes(range(16))


def test_whatever_a_crash_leaves_is_a_beginning_of_the_payload() -> None:
    kept = set()
    for seed in range(60):
        disk = Disk()
        begun(disk, 4)
        disk.crash(random.Random(seed))
        found = SimUploads(disk).find(SLOT, 40)
        have = found.open() if found else 0
        kept.add(have)
        assert not found or bytes(found.file.data) == bytes(PAYLOAD[:have].tolist())
    assert {0, 32} < kept
