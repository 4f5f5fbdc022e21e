"""Uploads against a model: whatever is cut, doubled, reordered, damaged or lost, what they have is the payload's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.files import REAL
from coordinator.upload import Key, Slot, Upload, Uploads
from diloco.errors import CodecError, Overload
from diloco.framing import chunk

PAYLOAD = random.Random(1).randbytes(1000)
SLOT = Slot(3, 7, "an-island.1-2", 5, False)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


KEY = Key(SLOT, digest(PAYLOAD))


def cut(data: bytes, first: int, length: int) -> bytes:
    """One message of the payload."""
    return chunk(memoryview(data)[first : first + length], first)


@pytest.fixture
def upload(tmp_path: Path) -> Iterator[Upload]:
    upload = Upload(tmp_path, REAL, KEY, len(PAYLOAD))
    yield upload
    upload.close()


@pytest.mark.parametrize("seed", [False, True])
@pytest.mark.parametrize("island", ["a", "a-r1", "f0-r1-b-2-part", "x.partial", "x.sums"])
def test_the_name_of_its_files_says_which_payload_it_is(island: str, seed: bool) -> None:
    key = Key(Slot(1, 2, island, 3, seed), digest(b""))
    assert Key.parse(key.name) == key


@pytest.mark.parametrize("name", ["", "half", "f0-r0-a-0-other-" + "0" * 32, KEY.name[:-1], KEY.name + "0"])
def test_other_names_are_no_uploads(name: str) -> None:
    assert Key.parse(name) is None


def test_what_has_come_becomes_a_file(upload: Upload, tmp_path: Path) -> None:
    assert upload.open() == 0
    assert [upload.add(cut(PAYLOAD, first, 300)) for first in (0, 300, 300, 600, 900, 0)] == [
        *(True, True, False, True, True, False)
    ]
    assert (upload.have, upload.reserved) == (1000, 1000)
    upload.check_complete()
    assert upload.publish(tmp_path / "whole").read_bytes() == PAYLOAD
    upload.close()
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_other_bytes_than_announced_are_refused_at_the_end(tmp_path: Path) -> None:
    upload = Upload(tmp_path, REAL, KEY, 1000)
    upload.open()
    upload.add(cut(bytes(1000), 0, 1000))
    with pytest.raises(CodecError, match=f"has digest {digest(bytes(1000))}, and {KEY.digest} was announced"):
        upload.check_complete()
    upload.discard()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_half_way_takes_the_rest_later(upload: Upload, monkeypatch: pytest.MonkeyPatch) -> None:
    upload.open()
    upload.add(cut(PAYLOAD, 0, 400))
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            upload.add(cut(PAYLOAD, 400, 300))
    assert upload.have == 400
    upload.add(cut(PAYLOAD, 400, 600))
    upload.check_complete()


@given(st.data())
@settings(
    derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_happens_what_it_has_is_a_prefix_of_the_payload(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "inbox"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    upload, durable = Upload(folder, REAL, KEY, len(PAYLOAD)), 0
    upload.open()
    sums, partial = folder / f"{KEY.name}.sums", folder / f"{KEY.name}.partial"
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["next", "next", "any", "damaged", "restart", "power loss"])):
            case "next":
                length = data.draw(st.integers(0, 400))
                first = max(0, upload.have - data.draw(st.integers(0, 200)))
                end = min(first + length, len(PAYLOAD))
                expected = max(end, upload.have)
                upload.add(cut(PAYLOAD, first, length))
                assert upload.have == expected
            case "any":
                first, length = data.draw(st.integers(0, 1000)), data.draw(st.integers(0, 400))
                before = upload.have
                if first > before:
                    with pytest.raises(CodecError, match="some are missing"):
                        upload.add(cut(PAYLOAD, first, length))
                    assert upload.have == before
                else:
                    upload.add(cut(PAYLOAD, first, length))
            case "damaged":
                message, before = bytearray(cut(PAYLOAD, upload.have, 100)), upload.have
                message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
                with pytest.raises(CodecError):
                    upload.add(bytes(message))
                assert upload.have == before
            case "restart":
                before = upload.have
                upload.close()
                upload = Upload(folder, REAL, KEY, None)
                upload.total_bytes = len(PAYLOAD)
                assert upload.look() == before
                upload.open()
            case "power loss":
                before = upload.have
                upload.close()
                victim = data.draw(st.sampled_from([sums, partial]))
                content = bytearray(victim.read_bytes())
                kept = data.draw(st.integers(0, len(content)))
                content[kept:] = data.draw(st.sampled_from([b"", bytes(len(content) - kept), b"\xff" * 99]))
                victim.write_bytes(content)
                upload = Upload(folder, REAL, KEY, None)
                upload.total_bytes = len(PAYLOAD)
                assert upload.open() <= before
        durable = upload.have
        assert partial.read_bytes()[:durable] == PAYLOAD[:durable]
    if durable < len(PAYLOAD):
        with pytest.raises(CodecError, match=f"ended after {durable} of 1000 bytes"):
            upload.check_complete()
    upload.add(cut(PAYLOAD, durable, 1000))
    upload.check_complete()
    assert partial.read_bytes() == PAYLOAD
    upload.close()


# -- all of them ----------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_start_keeps_uploads_and_removes_what_is_none(tmp_path: Path) -> None:
    for name in ("half.partial", "lonely.sums", f"{KEY.name}.partial", f"{KEY.name}.sums", "whole"):
        (tmp_path / name).write_bytes(b"1234")
    uploads = Uploads(tmp_path, REAL)
    assert names(tmp_path) == sorted([f"{KEY.name}.partial", f"{KEY.name}.sums", "whole"])
    assert (uploads.reserved_bytes, uploads.coming_bytes) == (4, 0)
    found = uploads.find(KEY, 1000)
    assert found is not None
    assert uploads.reserved_bytes == 1000
    assert found.look() == 0
    assert uploads.coming_bytes == 1000
    assert uploads.find(KEY, 999) is None


def test_the_end_leaves_what_is_under_way_and_nothing_that_is_over(tmp_path: Path) -> None:
    for name in (f"{KEY.name}.partial", f"{KEY.name}.sums"):
        (tmp_path / name).write_bytes(b"1234")
    asyncio.run(Uploads(tmp_path, REAL).close(lambda slot: slot != SLOT))
    assert names(tmp_path) == [f"{KEY.name}.partial", f"{KEY.name}.sums"]
    asyncio.run(Uploads(tmp_path, REAL).close(lambda slot: slot == SLOT))
    assert names(tmp_path) == []


def test_a_slot_keeps_one_payload_and_each_one_stream(tmp_path: Path) -> None:
    async def play() -> None:
        uploads, other = Uploads(tmp_path, REAL), Key(SLOT, digest(b"other"))
        ended: list[str] = []

        async def zombie() -> None:
            await uploads.supersede(KEY)
            upload, stream = uploads.begin(KEY, 1000)
            try:
                await uploads.run(upload.open)
                await uploads.run(upload.add, cut(PAYLOAD, 0, 300))
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
        await uploads.supersede(KEY)
        assert ended == ["superseded"]
        upload, stream = uploads.begin(KEY, 1000)
        assert await uploads.run(upload.open) == 300
        stream.storing = True
        with pytest.raises(Overload, match="are being stored"):
            await uploads.supersede(other)
        uploads.end(upload)
        await uploads.supersede(other)
        replacing, _ = uploads.begin(other, 5)
        await uploads.run(replacing.open)
        assert names(tmp_path) == [f"{other.name}.partial", f"{other.name}.sums"]
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
