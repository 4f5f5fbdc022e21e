"""Downloads that outlive the process that began them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco import failpoints
from diloco.framing import chunks, piece_to_proto
from diloco.layout import Layout, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from island.spool import Spool, remove
from tests.support import Rig, Visitor, configure, draw, whole

LAYOUT = Layout([TensorSpec("layers.0.w", (32, 1024)), TensorSpec("layers.1.w", (2, 2))])
CHUNK = 4096
CHUNKS = 32


class Killed(BaseException):
    """As if the process were gone."""


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Rig]:
    config = configure(f"wire.chunk_bytes={CHUNK}", 'sync.buffers="local"')
    with ExitStack() as stack:
        yield Rig(config, tmp_path / "state", stack)


def joined(at: Rig, island: str) -> Visitor:
    visitor = at.visitor(island, LAYOUT)
    visitor.join()
    return visitor


@pytest.fixture
def received() -> Iterator[list[str]]:
    """A name for every chunk that comes."""
    seen: list[str] = []
    failpoints.arm(lambda name: seen.append(name) if name == "fetch-receiving" else None)
    yield seen
    failpoints.arm(None)


def anchors(visitor: Visitor, at: Rig, spool: Path) -> Any:
    fragment = at.run.fragments[0]
    request = pb.FetchRequest(
        **visitor.key(), fragment=0, anchor=True, pieces=[piece_to_proto(p) for p in whole(fragment)]
    )
    return visitor.link.fetch(request, 4 * fragment.numel, spool)


def kill_after(received: list[str], count: int) -> None:
    """Has the process that receives die with its next chunk after so many."""

    def hook(name: str) -> None:
        if name == "fetch-receiving":
            received.append(name)
            if len(received) == count:
                raise Killed

    failpoints.arm(hook)


def begun(at: Rig) -> Visitor:
    seeder = joined(at, "a")
    for fragment in at.run.fragments:
        seeder.push(fragment, draw(fragment, 0), seed=True)
    seeder.beat(ready=True)
    return seeder


@pytest.mark.parametrize("damage", ["", "payload", "sums", "header", "short"])
def test_a_process_that_is_started_again_goes_on_with_what_is_there(
    at: Rig, tmp_path: Path, received: list[str], damage: str
) -> None:
    begun(at)
    spool = tmp_path / "spool" / "run.of.dots_f0"
    first = joined(at, "b")
    kill_after(received, 20)
    with pytest.raises(Killed):
        anchors(first, at, spool)
    kept = {"": 20, "payload": 10, "sums": 12, "header": 0, "short": 0}[damage]
    file = spool.with_name(f"{spool.name}.{damage if damage in ('sums', 'header') else 'payload'}")
    data = bytearray(file.read_bytes())
    if damage == "payload":
        data[10 * CHUNK + 7] ^= 1
    elif damage == "sums":
        del data[12 * 24 + 5 :]
    elif damage == "header":
        data[:] = b"\xff\xff"
    elif damage == "short":
        del data[-1:]
    file.write_bytes(data)
    received.clear()
    failpoints.arm(lambda name: received.append(name) if name == "fetch-receiving" else None)
    second = joined(at, "b")
    header, payload = anchors(second, at, spool)
    assert header.version == 0
    assert torch.equal(payload.view(torch.float32), draw(at.run.fragments[0], 0))
    assert len(received) == CHUNKS - kept
    assert second.link.resumes == (kept > 0)
    remove(spool)
    assert not list(spool.parent.iterdir())


def test_a_version_that_is_no_longer_kept_is_begun_again(at: Rig, tmp_path: Path, received: list[str]) -> None:
    a = begun(at)
    spool = tmp_path / "spool"
    first = joined(at, "b")
    kill_after(received, 20)
    with pytest.raises(Killed):
        anchors(first, at, spool)
    failpoints.arm(None)
    first.leave("killed")
    fragment = at.run.fragments[0]
    for round_ in range(2):
        a.push(fragment, draw(fragment, round_ + 1), round=round_, base_version=round_)
        assert a.fetch(fragment, round=round_)[0].outcome == "committed"
    at.tick(2 * at.run.config.rounds.lease_s)
    header, payload = anchors(joined(at, "b"), at, spool)
    assert header.version == 2
    assert torch.equal(payload.view(torch.float32), at.run.outers[0].anchor)


def test_a_spool_counts_only_what_it_can_read_again(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    spool = Spool.begin(tmp_path / "s", pb.FetchHeader(outcome="anchor", version=3, total_bytes=1000))
    for number, message in enumerate(chunks([data], 100)):
        if number < 7:
            spool.add(message)
    found = Spool.find(tmp_path / "s", 1000)
    assert found is not None
    assert (found.have, found.header.version) == (700, 3)
    assert Spool.find(tmp_path / "s", 999) is None
    assert Spool.find(tmp_path / "other", 1000) is None
    for message in chunks([data], 100, 700):
        found.add(message)
    assert torch.equal(found.finish(), data)
