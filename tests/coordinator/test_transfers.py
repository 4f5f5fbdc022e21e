"""Lines that are cut, coordinators and islands that start again, and budgets: no byte twice, no byte wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

import island.link
from coordinator.intake import Intake, Place
from coordinator.upload import Upload
from diloco.config import RunConfig
from diloco.errors import BY_NAME, Conflict, Expired, Malformed, Overload, Refused, Unreachable
from diloco.fragments import partition
from diloco.framing import RETRY_AFTER, SERVICE, Collector, chunks, piece_to_proto, unchunk
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link
from tests.processes import wait_until
from tests.proxy import Proxy, proxied
from tests.support import BOUND_S, Rig, Visitor, configure, draw, part, wait_quiet

CHUNK = 2**14
ROWS = 12
ROW_BYTES = 4 * CHUNK
OVERHEAD = 4096
"""What the protocol adds to a transfer of a row, at most: headers, frames and the question where to go on."""
LAYOUT = Layout([TensorSpec("w", (ROWS, CHUNK))])
SETTINGS = ('sync.strategy="whole"', "sync.fragments=1", f"wire.chunk_bytes={CHUNK}", "limits.retry_s=0.05")
CONFIG = configure(*SETTINGS, "rounds.start_islands=2", "rounds.quorum=2")
[FRAGMENT] = partition(LAYOUT, CONFIG.sync)
VALUES = draw(FRAGMENT, 1)
CUTS = [CHUNK * half // 2 for half in range(8)]
"""At every boundary of a row's chunks, and amid each."""


def row(number: int) -> list[Piece]:
    """What rank `number` sends: a row, four chunks."""
    return [Piece(0, Box((number, 0), (1, CHUNK)))]


def row_bytes(number: int, values: Tensor = VALUES) -> Tensor:
    return part(FRAGMENT, values, row(number)).payload


class Site:
    """Coordinators of one run, one after the other, and a line to them that can be cut."""

    def __init__(self, folder: Path, stack: ExitStack, config: RunConfig = CONFIG) -> None:
        self._folder, self._stack, self.config = folder, stack, config
        self._life = stack.enter_context(ExitStack())
        self.at = Rig(config, folder, self._life, killed=True)
        self.proxy: Proxy = stack.enter_context(proxied(self.at.address))
        self.a, self.b = (self.visitor(name, self.at.address) for name in "ab")
        for visitor in (self.a, self.b):
            visitor.join()
        self.a.push(FRAGMENT, draw(FRAGMENT, 0), seed=True)
        for visitor in (self.a, self.b):
            visitor.beat(ready=True)
        self.slow = self.visitor("a", self.proxy.address)
        self.slow.identity = self.a.identity
        self.pool = stack.enter_context(ThreadPoolExecutor(2))

    def visitor(self, name: str, address: str, **options: Any) -> Visitor:
        link = Link(address, **{"patience_s": BOUND_S, "say": lambda _: None, **options})
        self._stack.callback(link.close)
        identity = pb.HeartbeatRequest(island_id=name)
        return Visitor(link=link, layout=LAYOUT, identity=identity, chunk_bytes=CHUNK)

    def kill(self) -> None:
        """The coordinator is gone."""
        self._life.close()

    def restart(self) -> None:
        """Another one takes up its folder."""
        self._life = self._stack.enter_context(ExitStack())
        self.at = Rig(self.config, self._folder, self._life, killed=True)
        self.proxy.target = self.at.address

    def push(self, visitor: Visitor, number: int, **fields: Any) -> Future[pb.Receipt]:
        return self.pool.submit(visitor.push, FRAGMENT, VALUES, row(number), rank=number, **fields)

    def uploads(self) -> list[Upload]:
        return list(self.at.run.uploads._uploads.values())

    def have(self) -> int:
        return sum(upload.have for upload in self.uploads())

    def cut_push(self, number: int, after: int) -> Future[pb.Receipt]:
        """A push over a line that is full after byte `after`; all whole chunks before it have come."""
        self.proxy.hold_after("up", after + OVERHEAD // 4)
        pushing = self.push(self.slow, number)
        self.proxy.wait_held()
        wait_until(lambda: self.have() == after // CHUNK * CHUNK or pushing.done(), "all chunks come", BOUND_S)
        return pushing

    def stored(self, number: int) -> Tensor:
        """What the coordinator keeps of a row."""
        [path] = (self.at.run.store.root / "inbox").glob(f"*-{number}-????????????????????????????????")
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)

    def half_done(self) -> list[str]:
        return [name for name in self.at.inbox() if name.endswith((".partial", ".sums"))]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:
        yield lambda *overrides: Site(
            tmp_path / "state", stack, configure(*SETTINGS, "rounds.start_islands=2", "rounds.quorum=2", *overrides)
        )


@pytest.fixture
def site(make: Callable[..., Site]) -> Site:
    return make()


# -- up -------------------------------------------------------------------------------------------------------------


def test_a_push_goes_on_wherever_its_line_is_cut(site: Site) -> None:
    for number, after in enumerate(CUTS):
        before = site.proxy.count["up"]
        pushing = site.cut_push(number, after)
        site.proxy.cut()
        assert pushing.result(BOUND_S) == pb.Receipt()
        assert torch.equal(site.stored(number), row_bytes(number))
        again = site.proxy.count["up"] - before - ROW_BYTES
        assert again < CHUNK + OVERHEAD, f"cut after {after} bytes: {again} bytes more than the payload"
    assert site.slow.link.resumes >= len(CUTS) - 3
    assert site.half_done() == []
    assert site.at.run.admission.streams == 0


def test_a_push_goes_on_at_another_coordinator(site: Site) -> None:
    pushing = site.cut_push(0, 5 * CHUNK // 2)
    site.kill()
    site.proxy.cut()
    site.restart()
    before = site.proxy.count["up"]
    assert pushing.result(BOUND_S) == pb.Receipt()
    assert site.proxy.count["up"] - before < 2 * CHUNK + OVERHEAD
    assert torch.equal(site.stored(0), row_bytes(0))
    assert site.half_done() == []


@pytest.mark.parametrize("damage", ["flipped", "zeros", "cut", "garbage sums", "no sums"])
def test_what_a_power_loss_made_of_an_upload_is_found_and_sent_again(site: Site, damage: str) -> None:
    pushing = site.cut_push(0, 5 * CHUNK // 2)
    site.kill()
    [partial] = (site.at.run.store.root / "inbox").glob("*.partial")
    sums = partial.with_suffix(".sums")
    data = bytearray(partial.read_bytes())
    if damage == "flipped":
        data[CHUNK + 5] ^= 1
    elif damage == "zeros":
        data[CHUNK // 2 :] = bytes(len(data) - CHUNK // 2)
    elif damage == "cut":
        del data[CHUNK + 100 :]
    elif damage == "garbage sums":
        sums.write_bytes(sums.read_bytes()[:30] + b"\x55" * 60)
    else:
        sums.unlink()
    partial.write_bytes(data)
    site.proxy.cut()
    site.restart()
    assert pushing.result(BOUND_S) == pb.Receipt()
    assert torch.equal(site.stored(0), row_bytes(0))
    assert site.half_done() == []


def test_an_island_that_starts_again_goes_on_with_the_same_bytes_under_another_epoch(site: Site) -> None:
    with pytest.raises(Unreachable):
        site.slow = site.visitor("a", site.proxy.address, patience_s=0.0)
        site.slow.identity = site.a.identity
        pushing = site.cut_push(0, 5 * CHUNK // 2)
        site.proxy.cut()
        pushing.result(BOUND_S)
    again = site.visitor("a", site.proxy.address)
    epoch = again.join().epoch
    before = site.proxy.count["up"]
    header = again.header(0, row(0))
    assert again.link.push(header, lambda: [row_bytes(0)], CHUNK, resumed=True) == pb.Receipt()
    assert site.proxy.count["up"] - before < 2 * CHUNK + OVERHEAD
    assert again.link.resumes == 1
    assert torch.equal(site.stored(0), row_bytes(0))
    assert f"-e{epoch}-" in site.at.inbox()[0]
    assert again.link.push(header, lambda: [row_bytes(0)], CHUNK, resumed=True).duplicate
    with pytest.raises(Conflict):
        again.link.push(header, lambda: [-row_bytes(0)], CHUNK)


def test_a_restarted_island_with_other_bytes_starts_over(site: Site) -> None:
    site.slow = site.visitor("a", site.proxy.address, patience_s=0.0)
    site.slow.identity = site.a.identity
    pushing = site.cut_push(0, 5 * CHUNK // 2)
    site.proxy.cut()
    assert isinstance(pushing.exception(BOUND_S), Unreachable)
    again = site.visitor("a", site.proxy.address)
    again.join()
    other = row_bytes(0, draw(FRAGMENT, 2))
    assert again.link.push(again.header(0, row(0)), lambda: [other], CHUNK, resumed=True) == pb.Receipt()
    assert torch.equal(site.stored(0), other)
    assert len(site.at.inbox()) == 1


def test_first_parameters_go_on_too_and_leave_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        life = stack.enter_context(ExitStack())
        at = Rig(CONFIG, tmp_path / "state", life, killed=True)
        proxy = stack.enter_context(proxied(at.address))
        link = Link(proxy.address, patience_s=BOUND_S, say=lambda _: None)
        stack.callback(link.close)
        a = Visitor(link=link, layout=LAYOUT, identity=pb.HeartbeatRequest(island_id="a"), chunk_bytes=CHUNK)
        a.join()
        pool = stack.enter_context(ThreadPoolExecutor(1))
        proxy.hold_after("up", 5 * CHUNK)
        seeding = pool.submit(a.push, FRAGMENT, VALUES, seed=True)
        proxy.wait_held()
        uploads = at.run.uploads
        wait_until(lambda: uploads.reserved_bytes - uploads.coming_bytes == 4 * CHUNK, "four chunks come", BOUND_S)
        life.close()
        proxy.cut()
        life = stack.enter_context(ExitStack())
        at = Rig(CONFIG, tmp_path / "state", life)
        proxy.target = at.address
        assert seeding.result(BOUND_S) == pb.Receipt()
        assert link.resumes == 1
        wait_quiet(at.served)
        assert at.inbox() == []
        assert a.fetch(FRAGMENT, anchor=True)[1].view(torch.float32).equal(VALUES)


def raw(site: Site, header: pb.PushHeader, messages: list[bytes]) -> pb.Receipt:
    """A push as it lies on the wire."""
    with grpc.insecure_channel(site.at.address) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Push", None, pb.PushReply.FromString)
        try:
            *_, last = call(iter([header.SerializeToString(), *messages]), timeout=BOUND_S)
        except grpc.RpcError as error:
            raise refusal(error) from error
    return last.receipt  # type: ignore[no-any-return]


def refusal(error: Any) -> Refused:
    """The refusal that a failed call carries, with what it says of the next try."""
    metadata = dict(error.trailing_metadata())
    found = BY_NAME[metadata["diloco-error"]](error.details())
    assert isinstance(found, Refused)
    if isinstance(found, Overload):
        found.retry_after_s = int(metadata[RETRY_AFTER]) / 1000
    return found


def announced(site: Site, number: int, **fields: Any) -> pb.PushHeader:
    return site.a.header(0, row(number), rank=number, **fields)


def stream(number: int, first_byte: int = 0) -> list[bytes]:
    """What follows it."""
    return list(chunks([row_bytes(number)], CHUNK, first_byte, ended=True))


def test_a_push_that_begins_beyond_what_has_come_is_told_where_to_go_on(site: Site) -> None:
    messages = stream(0)
    with pytest.raises(Expired, match=rf"0 bytes of this push are here, not {CHUNK}: ask Resume"):
        raw(site, announced(site, 0, first_byte=CHUNK), messages[1:])
    pushing = site.cut_push(0, 5 * CHUNK // 2)
    site.proxy.cut()
    assert pushing.result(BOUND_S) == pb.Receipt()
    pushing = site.cut_push(1, 5 * CHUNK // 2)
    assert raw(site, announced(site, 1, first_byte=CHUNK), stream(1, CHUNK)) == pb.Receipt()
    site.proxy.cut()
    assert pushing.result(BOUND_S).duplicate
    assert torch.equal(site.stored(1), row_bytes(1))


def test_the_newer_of_two_streams_takes_over_and_the_older_is_refused(site: Site) -> None:
    go_on, arrived = threading.Event(), site.have
    messages = stream(0)

    def zombie() -> Iterator[bytes]:
        yield announced(site, 0).SerializeToString()
        yield from messages[:2]
        go_on.wait(BOUND_S)

    with grpc.insecure_channel(site.at.address) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Push", None, pb.PushReply.FromString)
        old = call(zombie(), timeout=BOUND_S)
        wait_until(lambda: arrived() == 2 * CHUNK, "two chunks come", BOUND_S)
        assert raw(site, announced(site, 0, first_byte=CHUNK), messages[1:]) == pb.Receipt()
        with pytest.raises(grpc.RpcError) as ended:
            list(old)
        refused = refusal(ended.value)
        go_on.set()
    assert isinstance(refused, Overload)
    assert "a newer stream of the same part has taken over" in refused.message
    assert torch.equal(site.stored(0), row_bytes(0))
    assert site.half_done() == []
    assert site.at.run.admission.streams == 0


def test_a_stream_comes_after_what_is_being_stored(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    storing, go_on, publish = threading.Event(), threading.Event(), Upload.publish

    def slow(upload: Upload, path: Path) -> Path:
        storing.set()
        assert go_on.wait(BOUND_S)
        return publish(upload, path)

    monkeypatch.setattr(Upload, "publish", slow)
    pushing = site.push(site.a, 0)
    assert storing.wait(BOUND_S)
    with pytest.raises(Overload, match="all bytes have come and are being stored: ask again"):
        raw(site, announced(site, 0), stream(0))
    go_on.set()
    assert pushing.result(BOUND_S) == pb.Receipt()
    assert raw(site, announced(site, 0), stream(0)).duplicate
    assert torch.equal(site.stored(0), row_bytes(0))


def test_a_round_that_ends_leaves_nothing_of_an_upload(make: Callable[..., Site]) -> None:
    site = make("rounds.quorum=1", "rounds.grace_s=0")
    pushing = site.cut_push(0, 5 * CHUNK // 2)
    assert len(site.half_done()) == 2
    site.b.push(FRAGMENT, VALUES)
    site.at.tick(700)
    site.proxy.cut()
    with pytest.raises(Refused):  # the clock has also ended a's lease
        pushing.result(BOUND_S)
    wait_until(lambda: not site.half_done(), "a tick removes it", BOUND_S)


def test_a_stalled_stream_is_ended_and_goes_on(site: Site) -> None:
    site.slow = site.visitor("a", site.proxy.address, idle_s=0.5)
    site.slow.identity = site.a.identity
    pushing = site.cut_push(0, 3 * CHUNK // 2)
    wait_until(lambda: site.at.run.admission.streams == 1, "it is under way", BOUND_S)
    said: list[str] = []
    site.slow.link._say = lambda line: (said.append(line), site.proxy.cut())[0]
    assert pushing.result(BOUND_S) == pb.Receipt()
    assert "moved no byte for 0.5 s" in said[0]


def test_uploads_tell_the_run_that_they_progress(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Place] = []

    async def progressed(intake: Intake, place: Place) -> None:
        told.append(place)

    monkeypatch.setattr(Intake, "progressed", progressed)
    site.a.push(FRAGMENT, VALUES, row(0), rank=0)
    assert told == [Place("a", site.a.identity.epoch, 0, 0, 0)]


# -- down -----------------------------------------------------------------------------------------------------------


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes each collector has, as they come."""
    have: list[int] = []

    class Noted(Collector):
        def add(self, message: bytes) -> None:
            super().add(message)
            have.append(self.have)

    with monkeypatch.context() as patch:
        patch.setattr(island.link, "Collector", Noted)
        yield have


def cut_fetch(site: Site, have: list[int], after: int, **fields: Any) -> Future[tuple[pb.FetchHeader, Tensor]]:
    have.clear()
    site.proxy.hold_after("down", after + OVERHEAD // 8)
    fetching = site.pool.submit(site.slow.fetch, FRAGMENT, row(0), **fields)
    site.proxy.wait_held()
    whole = after // CHUNK
    wait_until(lambda: len(have) >= whole or fetching.done(), "all chunks come", BOUND_S)
    return fetching


def test_a_fetch_goes_on_wherever_its_line_is_cut(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = row_bytes(0, draw(FRAGMENT, 0))
    with noted(monkeypatch) as have:
        for after in CUTS:
            before = site.proxy.count["down"]
            fetching = cut_fetch(site, have, after, anchor=True)
            site.proxy.cut()
            header, payload = fetching.result(BOUND_S)
            assert torch.equal(payload, expected)
            assert header.total_bytes == ROW_BYTES
            again = site.proxy.count["down"] - before - ROW_BYTES
            assert again < CHUNK + OVERHEAD, f"cut after {after} bytes: {again} bytes more than the payload"
    assert site.slow.link.resumes >= len(CUTS) - 3
    assert site.slow.link.resent_bytes == 0


def test_a_fetch_of_an_update_goes_on_at_another_coordinator(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for visitor in (site.a, site.b):
        visitor.push(FRAGMENT, VALUES)
    expected = site.b.fetch(FRAGMENT, row(0))
    with noted(monkeypatch) as have:
        fetching = cut_fetch(site, have, 5 * CHUNK // 2)
        site.kill()
        site.proxy.cut()
        site.restart()
        header, payload = fetching.result(BOUND_S)
    assert torch.equal(payload, expected[1])
    assert (header.version, header.digest) == (1, expected[0].digest)
    assert have == [CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK]


@pytest.mark.parametrize("kept", [True, False])
def test_an_anchor_that_moves_meanwhile_is_fetched_as_it_was_or_begun_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    with noted(monkeypatch) as have:
        fetching = cut_fetch(site, have, 5 * CHUNK // 2, anchor=True)
        for visitor in (site.a, site.b):
            visitor.push(FRAGMENT, VALUES)
        moved = site.b.fetch(FRAGMENT, row(0))[0]
        assert moved.version == 1
        if not kept:
            site.at.run.anchors._keep_s = -1.0
        have.clear()
        site.proxy.cut()
        header, payload = fetching.result(BOUND_S)
    assert header.version == (0 if kept else 1)
    expected = row_bytes(0, draw(FRAGMENT, 0)) if kept else site.b.fetch(FRAGMENT, row(0), anchor=True)[1]
    assert torch.equal(payload, expected)
    assert have[0] == (3 * CHUNK if kept else CHUNK)
    assert (site.slow.link.resent_bytes == 0) == kept


def ranged(site: Site, **fields: Any) -> tuple[pb.FetchHeader, bytes, int]:
    """A fetch as it lies on the wire: (header, payload, its first byte)."""
    pieces = [piece_to_proto(piece) for piece in row(1)]
    request = pb.FetchRequest(**site.a.key(), fragment=0, anchor=True, pieces=pieces, **fields)
    with grpc.insecure_channel(site.at.address) as channel:
        fetch: Any = channel.unary_stream(f"/{SERVICE}/Fetch", pb.FetchRequest.SerializeToString, None)
        try:
            first, *rest = fetch(request, timeout=BOUND_S)
        except grpc.RpcError as error:
            raise refusal(error) from error
    parts = [unchunk(message) for message in rest]
    return pb.FetchHeader.FromString(first), b"".join(part for _, _, part in parts), parts[0][0] if parts else -1


@pytest.mark.parametrize(
    ("first", "length"), [(0, 0), (1, 0), (CHUNK, CHUNK), (100, 3), (ROW_BYTES - 1, 9), (ROW_BYTES, 0)]
)
def test_any_range_may_be_asked_for_again_and_again(site: Site, first: int, length: int) -> None:
    expected = row_bytes(1, draw(FRAGMENT, 0)).numpy().tobytes()
    wanted = expected[first : first + length] if length else expected[first:]
    for _ in range(2):
        header, payload, begin = ranged(site, first_byte=first, length_bytes=length)
        assert (header.total_bytes, header.first_byte, header.version) == (ROW_BYTES, first, 0)
        assert (payload, begin) == (wanted, first if wanted else -1)


def test_a_range_beyond_the_end_is_refused(site: Site) -> None:
    with pytest.raises(Malformed, match=f"has {ROW_BYTES} bytes, and it is asked for from byte {ROW_BYTES + 1}"):
        ranged(site, first_byte=ROW_BYTES + 1)


def test_a_version_that_is_not_kept_is_answered_with_the_current_one_from_its_first_byte(site: Site) -> None:
    header, payload, begin = ranged(site, first_byte=CHUNK, version=7)
    assert (header.first_byte, header.version, begin, len(payload)) == (0, 0, 0, ROW_BYTES)


# -- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("limits.streams=1", r"the run may have 1 bulk streams \(limits.streams\)"),
        ("limits.streams_per_island=1", r"island 'a' may have 1 bulk streams .*\(limits.streams_per_island\)"),
        (f"limits.disk_bytes={ROW_BYTES + CHUNK}", rf"\(limits.disk_bytes\); {ROW_BYTES} are taken"),
    ],
)
def test_a_spent_budget_refuses_with_a_time_and_then_admits(
    make: Callable[..., Site], limit: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make()
    room = type(site.at.run.config.limits)
    limits = {key: int(value) for key, value in [limit.removeprefix("limits.").split("=")]}
    site.at.run.admission._limits = room.model_validate({"retry_s": 0.05, **limits})
    pushing = site.cut_push(0, 5 * CHUNK // 2)
    with pytest.raises(Overload, match=words) as caught:
        raw(site, announced(site, 1), stream(1))
    assert caught.value.retry_after_s == 0.05
    said: list[str] = []
    site.a.link._say = said.append
    waiting = site.push(site.a, 1)
    wait_until(lambda: said, "it is told to wait", BOUND_S)
    assert not waiting.done()
    if "disk_bytes" in limit:
        site.at.run.admission._limits = room()
    site.proxy.cut()
    assert pushing.result(BOUND_S) == pb.Receipt()
    assert waiting.result(BOUND_S) == pb.Receipt()
    assert torch.equal(site.stored(1), row_bytes(1))
    assert site.at.run.admission.streams == 0


def test_downloads_are_streams_too(site: Site) -> None:
    site.a.link._patience_s = 0.0
    site.at.run.admission._limits = site.config.limits.model_copy(update={"streams": 0})
    for fields in ({"anchor": True}, {"wait_s": 0.0}):
        with pytest.raises(Overload, match=r"limits\.streams"):
            site.a.fetch(FRAGMENT, row(0), **fields)


def test_a_disk_that_is_nearly_full_takes_no_contribution(site: Site) -> None:
    site.at.run.admission._limits = site.config.limits.model_copy(update={"disk_free_bytes": 2**62})
    with pytest.raises(Overload, match=r"\(limits.disk_free_bytes\)"):
        raw(site, announced(site, 0), stream(0))
    assert site.at.inbox() == []
    site.at.run.admission._limits = site.config.limits
    assert site.a.push(FRAGMENT, VALUES, row(0)) == pb.Receipt()


def test_an_island_too_many_waits_for_a_lease(make: Callable[..., Site]) -> None:
    site = make("limits.islands=2")
    site.a.join()
    c = site.visitor("c", site.at.address, patience_s=0.0)
    with pytest.raises(Overload, match=r"2 islands \(limits.islands\); 2 hold a lease") as caught:
        c.join()
    assert caught.value.retry_after_s == 0.05
    patient = site.visitor("c", site.at.address)
    joining = site.pool.submit(patient.join)
    site.b.leave("makes room")
    assert joining.result(BOUND_S).epoch
