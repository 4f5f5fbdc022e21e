"""Uploads against a model: whatever is cut, doubled, reordered, damaged or lost, what they have is the payload's."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.files import REAL, Files
from coordinator.upload import Slot, Upload, Uploads
from diloco.errors import CodecError, Overload
from diloco.framing import chunk

PAYLOAD = random.Random(1).randbytes(1000)
SLOT = Slot(3, 7, "an-island.1-2", 5, False)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


END = xxhash.xxh3_128_digest(PAYLOAD)


def cut(data: bytes, first: int, length: int) -> bytes:
    """One message of the payload."""
    return chunk(memoryview(data)[first : first + length], first, xxhash.xxh3_128(data[:first]))


@pytest.fixture
def upload(tmp_path: Path) -> Iterator[Upload]:
    upload = Upload(tmp_path, REAL, SLOT, len(PAYLOAD))
    yield upload
    upload.close()


@pytest.mark.parametrize("seed", [False, True])
@pytest.mark.parametrize("island", ["a", "a-r1", "f0-r1-b-2-part", "x.partial", "x.sums"])
def test_the_name_of_its_files_says_which_payload_it_is(island: str, seed: bool) -> None:
    slot = Slot(1, 2, island, 3, seed)
    assert Slot.parse(slot.name) == slot


@pytest.mark.parametrize("name", ["", "half", "f0-r0-a-0-other", SLOT.name[:-1], SLOT.name + "0"])
def test_other_names_are_no_uploads(name: str) -> None:
    assert Slot.parse(name) is None


def test_what_has_come_becomes_a_file(upload: Upload, tmp_path: Path) -> None:
    assert upload.open() == 0
    assert [upload.add(cut(PAYLOAD, first, 300)) for first in (0, 300, 300, 600, 900, 0)] == [
        *(True, True, False, True, True, False)
    ]
    assert (upload.have, upload.reserved, upload.digest) == (1000, 1000, digest(PAYLOAD))
    with pytest.raises(CodecError, match="ended before the digest of its payload"):
        upload.check_complete()
    upload.add(END)
    upload.check_complete()
    assert upload.publish(tmp_path / "whole").read_bytes() == PAYLOAD
    upload.close()
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_other_bytes_than_announced_are_refused_at_the_end(tmp_path: Path) -> None:
    upload = Upload(tmp_path, REAL, SLOT, 1000)
    upload.open()
    upload.add(cut(bytes(1000), 0, 1000))
    with pytest.raises(CodecError, match=f"has digest {digest(bytes(1000))}, and {digest(PAYLOAD)} was announced"):
        upload.add(END)
    upload.discard()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_half_way_takes_the_rest_later(upload: Upload, monkeypatch: pytest.MonkeyPatch) -> None:
    upload.open()
    upload.add(cut(PAYLOAD, 0, 400))
    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            upload.add(cut(PAYLOAD, 400, 300))
    assert upload.have == 400
    upload.add(cut(PAYLOAD, 400, 600))
    upload.add(END)
    upload.check_complete()


def test_a_sender_that_begins_again_with_other_bytes_takes_over_where_they_differ(upload: Upload) -> None:
    other = PAYLOAD[:600] + bytes(400)
    upload.open()
    for first in (0, 300, 600, 900):
        upload.add(cut(PAYLOAD, first, 300))
    assert [upload.add(cut(other, first, 300)) for first in (0, 300, 600)] == [False, False, True]
    assert (upload.have, upload.digest) == (900, digest(other[:900]))
    upload.add(cut(other, 900, 100))
    upload.add(xxhash.xxh3_128_digest(other))
    upload.check_complete()
    assert upload.path.read_bytes() == other


def test_a_damaged_chunk_that_comes_again_takes_nothing_away(upload: Upload) -> None:
    upload.open()
    for first in (0, 300, 600):
        upload.add(cut(PAYLOAD, first, 300))
    message = bytearray(cut(PAYLOAD, 300, 200))
    message[-1] ^= 1
    with pytest.raises(CodecError, match="damaged"):
        upload.add(bytes(message))
    with pytest.raises(CodecError, match="begins at byte 100, and 0 bytes have come"):
        upload.add(cut(PAYLOAD, 100, 200))  # nothing began there before
    assert upload.have == 900
    with pytest.raises(CodecError, match="ended after 900 of 1000 bytes"):
        upload.add(END)


@given(st.data())
@settings(
    derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_happens_what_it_has_is_a_prefix_of_the_payload(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "inbox"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    upload, durable = Upload(folder, REAL, SLOT, len(PAYLOAD)), 0
    upload.open()
    sums, partial = folder / f"{SLOT.name}.sums", folder / f"{SLOT.name}.partial"
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["next", "next", "any", "damaged", "restart", "power loss"])):
            case "next":
                length = data.draw(st.integers(1, 400))
                first = upload.have
                if first < 1000:
                    upload.add(cut(PAYLOAD, first, length))
                assert upload.have == min(first + length, 1000)
            case "any":
                first, length = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 400))
                before = upload.have
                try:
                    moved = upload.add(cut(PAYLOAD, first, length))
                    assert upload.have == (min(first + length, 1000) if moved else before)
                except CodecError as error:
                    assert "bytes have come" in error.message
                    assert upload.have == before
            case "damaged":
                if upload.have == 1000:
                    continue
                message, before = bytearray(cut(PAYLOAD, upload.have, 100)), upload.have
                message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
                with pytest.raises(CodecError):
                    upload.add(bytes(message))
                assert upload.have == before
            case "restart":
                before = upload.have
                upload.close()
                upload = Upload(folder, REAL, SLOT, None)
                upload.total_bytes = len(PAYLOAD)
                assert upload.look() == (before, digest(PAYLOAD[:before]))
                upload.open()
            case "power loss":
                before = upload.have
                upload.close()
                victim = data.draw(st.sampled_from([sums, partial]))
                content = bytearray(victim.read_bytes())
                kept = data.draw(st.integers(0, len(content)))
                content[kept:] = data.draw(st.sampled_from([b"", bytes(len(content) - kept), b"\xff" * 99]))
                victim.write_bytes(content)
                upload = Upload(folder, REAL, SLOT, None)
                upload.total_bytes = len(PAYLOAD)
                assert upload.open() <= before
        durable = upload.have
        assert partial.read_bytes()[:durable] == PAYLOAD[:durable]
    if durable < len(PAYLOAD):
        with pytest.raises(CodecError, match=f"ended after {durable} of 1000 bytes"):
            upload.check_complete()
        upload.add(cut(PAYLOAD, durable, 1000))
    upload.add(END)
    upload.check_complete()
    assert partial.read_bytes() == PAYLOAD
    upload.close()


def test_a_disk_that_takes_less_at_a_time_takes_all(upload: Upload, monkeypatch: pytest.MonkeyPatch) -> None:
    upload.open()
    write = os.pwritev
    monkeypatch.setattr("os.pwritev", lambda file, blocks, at: write(file, [blocks[0][:7]], at))
    for message in (*(cut(PAYLOAD, first, 300) for first in range(0, 1000, 300)), END):
        upload.add(message)
    upload.check_complete()
    assert upload.path.read_bytes() == PAYLOAD


# -- written over others --------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Files:
    """One that keeps what is given up."""
    disk = Files()
    (tmp_path / "spares").mkdir()
    disk.spare(tmp_path / "spares")
    return disk


def given_up(disk: Files, path: Path, size: int) -> int:
    """Gives up a file; returns what the file system knows it by."""
    path.write_bytes(b"\x55" * size)
    disk.retire(path)
    assert not path.exists()
    return next(path.parent.glob("spares/*")).stat().st_ino


def test_a_payload_is_written_over_one_of_its_size(disk: Files, tmp_path: Path) -> None:
    old = given_up(disk, tmp_path / "old", len(PAYLOAD))
    other = Upload(tmp_path, disk, SLOT._replace(rank=6), len(PAYLOAD) - 1)
    other.open()
    assert (other.path.stat().st_ino != old, other.coming) == (True, len(PAYLOAD) - 1)
    other.discard()
    upload = Upload(tmp_path, disk, SLOT, len(PAYLOAD))
    assert (upload.open(), upload.coming, disk.spared_bytes) == (0, 0, 0)
    for first in range(0, 1000, 250):
        upload.add(cut(PAYLOAD, first, 250))
    whole = upload.publish(tmp_path / "whole")
    assert (whole.stat().st_ino, whole.read_bytes()) == (old, PAYLOAD)
    upload.close()


@pytest.mark.parametrize("recorded", [0, 500])
def test_what_was_there_before_never_counts(disk: Files, tmp_path: Path, recorded: int) -> None:
    given_up(disk, tmp_path / "old", len(PAYLOAD))
    upload = Upload(tmp_path, disk, SLOT, len(PAYLOAD))
    upload.open()
    if recorded:
        upload.add(cut(PAYLOAD, 0, recorded))
    upload.close()
    after = Upload(tmp_path, REAL, SLOT, None)  # of the next start
    assert (after.have, after.reserved, after.coming) == (recorded, 1000, 0)
    after.total_bytes = len(PAYLOAD)
    assert after.look() == (recorded, digest(PAYLOAD[:recorded]))
    after.open()
    for first in range(recorded, 1000, 250):
        after.add(cut(PAYLOAD, first, 250))
    assert after.publish(tmp_path / "whole").read_bytes() == PAYLOAD
    after.close()


def test_first_parameters_are_not_written_over_contributions(disk: Files, tmp_path: Path) -> None:
    given_up(disk, tmp_path / "old", len(PAYLOAD))
    upload = Upload(tmp_path, disk, SLOT._replace(seed=True), len(PAYLOAD))
    upload.open()
    assert disk.spared_bytes == len(PAYLOAD)
    upload.discard()


def test_no_more_is_kept_than_may_be(disk: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.files.SPARE_BYTES", 2500)
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(PAYLOAD)
        disk.retire(tmp_path / f"{number}")
    assert (disk.spared_bytes, len(list((tmp_path / "spares").iterdir()))) == (2000, 2)
    disk.retire(tmp_path / "never")  # as one that is gone already
    disk.drop_spares()
    assert (disk.spared_bytes, list((tmp_path / "spares").iterdir())) == (0, [])
    assert not disk.reuse(tmp_path / "new", len(PAYLOAD))


# -- all of them ----------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_start_keeps_uploads_and_removes_what_is_none(tmp_path: Path) -> None:
    for name in ("half.partial", "lonely.sums", f"{SLOT.name}.partial", f"{SLOT.name}.sums", "whole"):
        (tmp_path / name).write_bytes(b"1234")
    uploads = Uploads(tmp_path, REAL)
    assert names(tmp_path) == sorted([f"{SLOT.name}.partial", f"{SLOT.name}.sums", "whole"])
    assert (uploads.reserved_bytes, uploads.coming_bytes) == (4, 0)
    found = uploads.find(SLOT, 1000)
    assert found is not None
    assert uploads.reserved_bytes == 1000
    assert found.look() == (0, digest(b""))
    assert uploads.coming_bytes == 1000
    assert uploads.find(SLOT, 999) is None


def test_the_end_leaves_what_is_under_way_and_nothing_that_is_over(tmp_path: Path) -> None:
    for name in (f"{SLOT.name}.partial", f"{SLOT.name}.sums"):
        (tmp_path / name).write_bytes(b"1234")
    asyncio.run(Uploads(tmp_path, REAL).close(lambda slot: slot != SLOT))
    assert names(tmp_path) == [f"{SLOT.name}.partial", f"{SLOT.name}.sums"]
    asyncio.run(Uploads(tmp_path, REAL).close(lambda slot: slot == SLOT))
    assert names(tmp_path) == []


def test_a_slot_keeps_one_payload_and_each_one_stream(tmp_path: Path) -> None:
    async def play() -> None:
        uploads = Uploads(tmp_path, REAL)
        ended: list[str] = []

        async def zombie() -> None:
            await uploads.supersede(SLOT)
            upload, stream = uploads.begin(SLOT, 1000)
            try:
                await uploads.run(SLOT, upload.open)
                await uploads.run(SLOT, upload.add, cut(PAYLOAD, 0, 300))
                started.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                assert stream.superseded
                ended.append("superseded")
            finally:
                uploads.end(upload)

        started = asyncio.Event()
        task = asyncio.create_task(zombie())
        await asyncio.wait_for(started.wait(), 30)
        await uploads.supersede(SLOT)
        assert ended == ["superseded"]
        upload, stream = uploads.begin(SLOT, 1000)
        assert await uploads.run(SLOT, upload.open) == 300
        stream.storing = True
        with pytest.raises(Overload, match="are being stored"):
            await uploads.supersede(SLOT)
        uploads.end(upload)
        await uploads.supersede(SLOT)
        replacing, _ = uploads.begin(SLOT, 5)
        await uploads.run(SLOT, replacing.open)
        assert names(tmp_path) == [f"{SLOT.name}.partial", f"{SLOT.name}.sums"]
        await uploads.prune(lambda slot: True)
        assert len(names(tmp_path)) == 2  # a stream brings it
        uploads.end(replacing)
        await uploads.prune(lambda slot: slot != SLOT)
        assert len(names(tmp_path)) == 2
        await uploads.prune(lambda slot: slot == SLOT)
        assert names(tmp_path) == []
        assert uploads.reserved_bytes == 0
        await task

    asyncio.run(play())
