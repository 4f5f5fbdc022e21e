"""What the service refuses: by which name, and that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, cast

import grpc
import pytest
import torch
import xxhash
from torch import Tensor

from coordinator import rounds
from coordinator.facts import Entry
from coordinator.run import Run
from coordinator.upload import Upload, Uploads
from diloco.codec import CODECS
from diloco.errors import (
    BY_NAME,
    TABLE,
    CodecError,
    ConfigError,
    DilocoError,
    DivergedError,
    LayoutError,
    Malformed,
    RunMismatch,
    StaleEpoch,
    Unreachable,
)
from diloco.fragments import partition
from diloco.framing import PROTOCOL, SERVICE, chunk, chunks
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.v1 import coordinator_pb2 as pb
from tests.support import BOUND_S, MODEL, Rig, configure, draw, floats, part, visit, wait_quiet, whole

FRAGMENTS = partition(MODEL, configure().sync)
FRAGMENT, OTHER, STATIC = FRAGMENTS
EMBED, MEAN, WEIGHT = FRAGMENT.tensors
FP32 = CODECS["fp32"]
HUGE = 2**62
Make = Callable[..., Rig]


def remains(at: Rig) -> tuple[Any, ...]:
    """All of a run that a refused request might have changed."""

    def read(run: Run) -> tuple[Any, ...]:
        outers = [(outer.version, outer.digest) for outer in run.outers]
        seen = tuple(replace(current, progress={}) for current in run.state.rounds)  # uploads that began
        return (
            replace(run.state, rounds=seen),
            run.layout and run.layout.digest,
            outers,
            list(run.ended),
            dict(run.outcomes),
            run.totals.committed,
        )

    return (*at.served.ask(read), at.inbox())


def raw_push(at: Rig, messages: Iterable[bytes]) -> pb.Receipt:
    """Streams messages of any kind to the coordinator."""
    with grpc.insecure_channel(at.address) as channel:
        try:
            *_, last = channel.stream_stream(f"/{SERVICE}/Push", None, pb.PushReply.FromString)(
                iter(messages), timeout=BOUND_S
            )
        except grpc.RpcError as error:
            raise named(error) from None
    return cast(pb.Receipt, last.receipt)


def named(error: Any) -> DilocoError:
    """The error that a failed call names; its status is the one of the table."""
    kind = BY_NAME[dict(error.trailing_metadata())["diloco-error"]]
    assert error.code().name == TABLE[kind].grpc_status
    return kind(error.details())


# -- joining --------------------------------------------------------------------------------------------------------

OTHER_MODEL = Layout([*MODEL.tensors[:-1], TensorSpec("positions", (8,), "static")])


def test_another_run_is_refused_with_the_digests_of_both_models(at: Rig) -> None:
    first = at.visitor("a", OTHER_MODEL)
    with pytest.raises(RunMismatch, match=r"serves run 'test' \(model layout none yet\)"):
        first.join(run_id="other")
    at.island("b")
    with pytest.raises(RunMismatch, match=r"serves run 'test' .* the island means to join run 'other'") as caught:
        first.join(run_id="other")
    assert MODEL.digest[:16] in caught.value.message
    assert OTHER_MODEL.digest[:16] in caught.value.message
    assert [i.id for i in first.link.status().islands] == ["b"]


def test_another_model_is_refused_with_both_digests_and_the_first_difference(at: Rig) -> None:
    at.island("b")
    before = remains(at)
    with pytest.raises(RunMismatch, match=r"'positions' is static \[7\] here and static \[8\] there") as caught:
        at.visitor("a", OTHER_MODEL).join()
    assert MODEL.digest[:16] in caught.value.message
    assert OTHER_MODEL.digest[:16] in caught.value.message
    assert remains(at) == before


SPEC = pb.TensorSpec(name="w", shape=[2], kind="parameter")


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"protocol_min": PROTOCOL + 1, "protocol_max": PROTOCOL + 2}, RunMismatch, "speaks protocols 6 to 7, this"),
        ({"protocol_min": 0, "protocol_max": PROTOCOL - 1}, RunMismatch, "install matching versions"),
        ({"island_id": ""}, Malformed, "an island id, 1 to 64 letters, digits, '.', '_' and '-', not ''"),
        ({"island_id": "../../etc"}, Malformed, r"not '\.\./\.\./etc'"),
        ({"island_id": "a" * 65}, Malformed, "an island id, 1 to 64 letters"),
        ({"island_id": "a\n"}, Malformed, r"not 'a\\n'"),
        ({"ranks": 0}, Malformed, "a join needs a number of ranks"),
        ({"layout_digest": "0" * 64}, Malformed, f"the tensors have layout digest {MODEL.digest}, not 0000"),
        ({"tensors": [SPEC, SPEC]}, LayoutError, "two tensors of the model have the same name"),
        ({"tensors": [pb.TensorSpec(name="w", shape=[-1], kind="parameter")]}, LayoutError, r"'w' is parameter \[-1\]"),
        ({"tensors": [pb.TensorSpec(name="w", shape=[2], kind="odd")]}, LayoutError, r"'w' is odd \[2\]"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(
    at: Rig, fields: dict[str, Any], kind: type[DilocoError], words: str
) -> None:
    before = remains(at)
    with pytest.raises(kind, match=words):
        at.visitor("a").join(**fields)
    assert remains(at) == before
    at.island("a")


def test_a_first_model_that_the_fragments_do_not_fit_is_refused_and_forgotten(at: Rig) -> None:
    flat = Layout([TensorSpec("w", (3, 3))])
    with pytest.raises(ConfigError, match=r"sync\.fragments=2 .* leaves 1 fragments empty"):
        at.visitor("a", flat).join()
    assert at.run.layout is None
    at.island("a")


def test_a_long_reason_reaches_the_caller_cut_short(at: Rig) -> None:
    at.island("a")
    long = Layout([*MODEL.tensors, TensorSpec("z" * 100_000, (1,))])
    with pytest.raises(RunMismatch, match=rf"layout {MODEL.digest[:16]}, and island 'b' has layout {long.digest[:16]}"):
        at.visitor("b", long).join()


def test_bytes_that_are_no_request_leave_the_coordinator_alone(at: Rig) -> None:
    with grpc.insecure_channel(at.address) as channel:
        for method in ("Join", "Heartbeat", "Leave"):
            call: Any = channel.unary_unary(f"/{SERVICE}/{method}", None, None)
            with pytest.raises(grpc.RpcError):
                call(b"\xff\xff\xff", timeout=BOUND_S)
    at.island("a")


def test_heartbeats_of_strangers_are_refused(at: Rig) -> None:
    a = at.island("a")
    before = remains(at)
    for key, kind in (({"run_id": "other"}, RunMismatch), ({"island_id": "z"}, StaleEpoch), ({"epoch": 7}, StaleEpoch)):
        beat = pb.HeartbeatRequest(**{**a.key(), **key}, step=99)
        with pytest.raises(kind):
            a.link.heartbeat(beat)
        with pytest.raises(kind):
            a.link.leave(pb.LeaveRequest(**{**a.key(), **key}, last=beat), BOUND_S)
    assert remains(at) == before
    assert a.link.status().islands[0].progress.step == 0


# -- pushes whose bytes are bad -------------------------------------------------------------------------------------


def body(values: Tensor, chunk_bytes: int = 64) -> list[bytes]:
    return list(chunks([part(FRAGMENT, values).payload], chunk_bytes, ended=True))


def flip(message: bytes, at: int) -> bytes:
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


GOOD = body(torch.ones(FRAGMENT.numel))
DIGEST = xxhash.xxh3_128_hexdigest(part(FRAGMENT, torch.ones(FRAGMENT.numel)).payload.numpy().data)
MORE = chunk(memoryview(b"more"), 168, xxhash.xxh3_128(part(FRAGMENT, torch.ones(FRAGMENT.numel)).payload.numpy().data))


@pytest.mark.parametrize(
    ("chunked", "words"),
    [
        pytest.param([*GOOD[:-1], MORE], "more than the 168 bytes that the header announced", id="oversize"),
        pytest.param(GOOD[:2], "the stream ended after 128 of 168 bytes", id="short"),
        pytest.param(GOOD[:-1], "ended before the digest of its payload", id="no digest"),
        pytest.param([GOOD[0], GOOD[-1]], "the stream ended after 64 of 168 bytes", id="early digest"),
        pytest.param([], "the stream ended after 0 of 168 bytes", id="none"),
        pytest.param([GOOD[0], flip(GOOD[1], 20), GOOD[2]], "a chunk of 80 bytes is damaged", id="bit flipped"),
        pytest.param([GOOD[0], flip(GOOD[1], 8), GOOD[2]], "a chunk of 80 bytes is damaged", id="checksum flipped"),
        pytest.param([GOOD[0], GOOD[1][:-1], GOOD[2]], "a chunk of 79 bytes is damaged", id="torn"),
        pytest.param([b"", *GOOD], "a chunk of 0 bytes is damaged", id="empty message"),
        pytest.param([GOOD[0], GOOD[2]], "begins at byte 128, and 64 bytes have come", id="gap"),
        pytest.param([*body(torch.zeros(FRAGMENT.numel))[:-1], GOOD[-1]], f"and {DIGEST} was announced", id="other"),
    ],
)
@pytest.mark.parametrize("seed", [False, True])
def test_a_stream_that_is_not_what_was_announced_is_refused(
    make: Make, seed: bool, chunked: Sequence[bytes], words: str
) -> None:
    at = make()
    [a] = [at.island("a")] if seed else at.started("a")
    before = remains(at)
    header = a.header(0, whole(FRAGMENT), seed=seed).SerializeToString()
    with pytest.raises(CodecError, match=words):
        raw_push(at, [header, *chunked])
    *after, begun = remains(at)
    assert after == list(before[:-1])
    assert all(name.endswith((".partial", ".sums")) for name in begun)  # what was good may be gone on with
    assert not begun or "digest" not in words
    assert raw_push(at, [header, *GOOD]) == pb.Receipt()
    assert seed or len(at.inbox()) == 1


@pytest.mark.parametrize("messages", [[], [b"\xff" * 40], [b"\x0a\xff"]])
def test_a_push_that_does_not_start_with_a_header_is_refused(at: Rig, messages: list[bytes]) -> None:
    before = remains(at)
    with pytest.raises(Malformed, match="a push starts with a PushHeader"):
        raw_push(at, messages)
    assert remains(at) == before


def test_a_chunk_in_the_place_of_a_header_is_refused(at: Rig) -> None:
    at.started("a", "b")
    before = remains(at)
    with pytest.raises(DilocoError):
        raw_push(at, GOOD)
    with pytest.raises(RunMismatch, match="serves run 'test', not ''"):
        raw_push(at, [b"", *GOOD])
    assert remains(at) == before


# -- pushes whose header is bad -------------------------------------------------------------------------------------


def box(tensor: int, offset: Sequence[int], size: Sequence[int]) -> pb.Piece:
    return pb.Piece(tensor=tensor, offset=offset, size=size)


ALL = [box(t, (0,) * len(s.shape), s.shape) for t, s in zip(FRAGMENT.tensors, FRAGMENT.specs, strict=True)]


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"run_id": "other"}, RunMismatch, "serves run 'test', not 'other'"),
        ({"run_id": ""}, RunMismatch, "serves run 'test', not ''"),
        ({"island_id": "z"}, StaleEpoch, "island 'z' has not joined this coordinator"),
        ({"epoch": 3}, StaleEpoch, "holds no lease under epoch 3"),
        ({"epoch": 2**64 - 1}, StaleEpoch, "holds no lease under epoch"),
        ({"fragment": 2}, Malformed, "there is no fragment 2 to push; the run has 2"),
        ({"fragment": 2**32 - 1}, Malformed, "there is no fragment 4294967295 to push"),
        ({"round": 1}, Malformed, "round 1 of fragment 0 is not open; round 0 is"),
        ({"round": 2**64 - 1}, Malformed, "the fragment's last is round 2"),
        ({"base_version": 1}, Malformed, "is based on version 1 .* round 0 continues from version 0"),
        ({"codec_id": 0}, CodecError, r"contributions are coded as fp32 \(id 1, version 1\), not as id 0 version 1"),
        ({"codec_id": 2**32 - 1}, CodecError, "not as id 4294967295"),
        ({"codec_version": 9}, CodecError, "not as id 1 version 9"),
        ({"codec_id": 2}, CodecError, "not as id 2 version 1"),
        ({"total_bytes": 167}, Malformed, "167 bytes announced; fp32 of these pieces takes 168"),
        ({"total_bytes": 0}, Malformed, "0 bytes announced"),
        ({"total_bytes": 2**64 - 1}, Malformed, "18446744073709551615 bytes announced"),
        ({"fragment": 1}, Malformed, f"tensor {EMBED} is not part of fragment 1"),
        ({"pieces": [*ALL, box(WEIGHT, (0, 0), (1, 3))]}, Malformed, "the pieces are more than fragment 0 is"),
        ({"pieces": [box(OTHER.tensors[0], (), ())]}, Malformed, "is not part of fragment 0"),
        ({"pieces": [box(99, (0,), (1,))]}, LayoutError, "no piece of the model: tensor 99"),
        ({"pieces": [box(2**32 - 1, (0,), (1,))]}, LayoutError, "no piece of the model"),
        ({"pieces": [box(EMBED, (5, 0), (2, 4))]}, LayoutError, "no piece of the model"),
        ({"pieces": [box(EMBED, (0, 0), (HUGE, HUGE))]}, LayoutError, "no piece of the model"),
        ({"pieces": [box(EMBED, (2**63 - 1, 0), (1, 4))]}, LayoutError, "no piece of the model"),
        ({"pieces": [box(EMBED, (-1, 0), (2, 4))]}, LayoutError, "no piece of the model"),
        ({"pieces": [box(EMBED, (0, 0), (-1, 4))]}, LayoutError, "no piece of the model"),
        ({"pieces": [box(EMBED, (0,), (6,))]}, LayoutError, "no piece of the model"),
        ({"pieces": [box(EMBED, (0, 0), (6,))]}, LayoutError, "no piece of the model"),
        ({"pieces": [box(EMBED, (), ())]}, LayoutError, "no piece of the model"),
    ],
)
def test_a_header_that_cannot_be_meant_is_refused_before_anything_is_received(
    at: Rig, fields: dict[str, Any], kind: type[DilocoError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = at.started("a", "b")
    before = remains(at)
    monkeypatch.setattr(Upload, "add", None)
    with pytest.raises(kind, match=words):
        raw_push(at, [a.header(0, whole(FRAGMENT), **fields).SerializeToString(), *GOOD])
    monkeypatch.undo()
    assert remains(at) == before
    for visitor in (a, b):
        assert visitor.push(FRAGMENT, draw(FRAGMENT, 1)) == pb.Receipt()
    assert a.fetch(FRAGMENT)[0].version == 1


def test_a_part_that_overlaps_itself_or_another_ranks_is_refused_and_not_kept(at: Rig) -> None:
    a, b = at.started("a", "b")
    rows = [Piece(EMBED, Box((start, 0), (2, 4))) for start in (0, 2, 4)]
    rest = [Piece(MEAN, Box((0,), (3,))), Piece(WEIGHT, Box((0, 0), (5, 3)))]
    gradient = draw(FRAGMENT, 1)
    before = remains(at)
    with pytest.raises(Malformed, match=f"tensor {EMBED}: .* has come already, from another rank"):
        a.push(FRAGMENT, gradient, [rows[0], rows[0]], rank=0)
    assert remains(at) == before
    a.push(FRAGMENT, gradient, rows[:2], rank=0)
    before = remains(at)
    with pytest.raises(Malformed, match="from another rank"):
        a.push(FRAGMENT, -gradient, rows[1:], rank=1)
    assert remains(at) == before
    a.push(FRAGMENT, gradient, [rows[2], *rest], rank=1)
    b.push(FRAGMENT, gradient)
    fetched = a.fetch(FRAGMENT, rows[1:2])[1]
    torch.testing.assert_close(floats(fetched), 0.7 * 1.9 * gradient[8:16])


@pytest.mark.parametrize("value", [1.0, torch.nan])
@pytest.mark.parametrize("seeded", [False, True])
def test_before_the_run_has_started_no_contribution_is_taken(make: Make, seeded: bool, value: float) -> None:
    at = make("rounds.start_islands=2")
    a, b = at.island("a"), at.island("b")
    seeds = [(fragment, draw(fragment, 0)) for fragment in FRAGMENTS]
    for fragment, values in seeds if seeded else ():
        a.push(fragment, values, seed=True)
    wait_quiet(at.served)
    before = remains(at)
    contribution = torch.full((FRAGMENT.numel,), value)
    with pytest.raises(Malformed, match="round 0 of fragment 0 is not open: the run has not started"):
        a.push(FRAGMENT, contribution)
    assert remains(at) == before
    for fragment, values in () if seeded else seeds:
        a.push(fragment, values, seed=True)
    a.beat(ready=True), b.beat(ready=True)
    for visitor in (a, b):
        assert visitor.push(FRAGMENT, torch.ones(FRAGMENT.numel)) == pb.Receipt()
    assert a.fetch(FRAGMENT)[0].version == 1


def test_first_parameters_that_are_not_finite_or_foreign_are_refused(at: Rig) -> None:
    a = at.island("a")
    before = remains(at)
    bad = draw(STATIC, 0)
    bad[3] = torch.nan
    with pytest.raises(DivergedError, match=f"tensor {STATIC.tensors[0]} of the contribution has values that are not"):
        a.push(STATIC, bad, seed=True)
    with pytest.raises(Malformed, match=f"tensor {EMBED} is not part of fragment 2"):
        a.push(FRAGMENT, draw(FRAGMENT, 0), seed=True, fragment=2)
    with pytest.raises(Malformed, match="there is no fragment 3 to push; the run has 3"):
        a.push(STATIC, draw(STATIC, 0), seed=True, fragment=3)
    assert remains(at) == before
    for fragment in FRAGMENTS:
        a.push(fragment, draw(fragment, 0), seed=True)
    assert torch.equal(floats(a.fetch(STATIC, anchor=True)[1]), draw(STATIC, 0))


# -- pushes that do not reach their end -----------------------------------------------------------------------------


def test_a_push_that_its_sender_gives_up_goes_on_where_it_stopped(at: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = at.started("a", "b")
    arrived, ended, go_on = Event(), Event(), Event()
    add, end = Upload.add, Uploads.end

    def noted_add(upload: Upload, message: bytes) -> bool:
        new = add(upload, message)
        arrived.set()
        return new

    def noted_end(uploads: Uploads, upload: Upload) -> None:
        end(uploads, upload)
        ended.set()

    def messages() -> Iterator[bytes]:
        yield a.header(0, whole(FRAGMENT)).SerializeToString()
        yield GOOD[0]
        go_on.wait(BOUND_S)

    monkeypatch.setattr(Upload, "add", noted_add)
    monkeypatch.setattr(Uploads, "end", noted_end)
    with grpc.insecure_channel(at.address) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Push", None, None)
        future = call(messages(), timeout=BOUND_S)
        assert arrived.wait(BOUND_S)
        assert len(at.inbox()) == 2
        assert future.cancel()
        assert ended.wait(BOUND_S)
        go_on.set()
    rest = a.header(0, whole(FRAGMENT), first_byte=64).SerializeToString()
    assert raw_push(at, [rest, *GOOD[1:]]) == pb.Receipt()
    assert len(at.inbox()) == 1


@pytest.mark.parametrize("meanwhile", ["left", "round ended"])
def test_what_changes_while_a_push_is_made_durable_is_seen(
    make: Make, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    at = make("rounds.start_islands=2", "rounds.quorum=1", "rounds.grace_s=0.0")
    a, b = at.started("a", "b")
    publish = Upload.publish

    def slow(upload: Upload, path: Path) -> Path:
        """Publishes once the loop has seen something else."""
        if meanwhile == "left":
            leaving = rounds.Leaving(island="a", epoch=a.identity.epoch, reason="gone")
            at.served.call(at.run.take(leaving))
        else:
            entry = Entry(island="b", epoch=b.identity.epoch, tokens=1)
            spoiled = rounds.Spoiled(fragment=0, round=0, island="b", epoch=entry.epoch, reason="not finite")
            at.served.call(at.run.take(spoiled))
            at.clock.now += at.run.config.rounds.deadline_s
            at.served.call(at.run.take(rounds.Beat(island="b", epoch=entry.epoch, ready=True)))
        return publish(upload, path)

    monkeypatch.setattr(Upload, "publish", slow)
    if meanwhile == "left":
        with pytest.raises(StaleEpoch, match=r"\(gone\): join again"):
            a.push(FRAGMENT, draw(FRAGMENT, 1))
    else:
        assert a.push(FRAGMENT, draw(FRAGMENT, 1)).dropped == "late: round 0 has ended, round 1 is open"
    assert at.inbox() == []


def test_a_full_disk_is_said_to_the_caller_and_the_run_goes_on(at: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    at.patience_s = 0.2
    a, b = at.started("a", "b")
    before = remains(at)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for method in ("add", "publish"):
        with monkeypatch.context() as patch:
            patch.setattr(Upload, method, full)
            with pytest.raises(DilocoError, match=r"the coordinator cannot store this: .*No space left on device"):
                a.push(FRAGMENT, draw(FRAGMENT, 1))
        assert remains(at) == before
    for visitor in (a, b):
        visitor.push(FRAGMENT, draw(FRAGMENT, 1))
    assert a.fetch(FRAGMENT)[0].version == 1


# -- fetches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"run_id": "other"}, RunMismatch, "serves run 'test', not 'other'"),
        ({"epoch": 3}, StaleEpoch, "holds no lease under epoch 3"),
        ({"fragment": 2}, Malformed, "fragment 2 has no rounds; there are 2 fragments"),
        ({"fragment": 3, "anchor": True}, Malformed, "fragment 3 has no anchor: the run has 3 seeded fragments"),
        ({"fragment": 2**32 - 1}, Malformed, "has no rounds"),
        ({"fragment": 1, "anchor": True}, Malformed, f"tensor {EMBED} is not part of fragment 1"),
        ({"pieces": [*ALL, ALL[0]], "anchor": True}, Malformed, "the pieces are more than fragment 0 is"),
        ({"pieces": [*ALL, ALL[0]]}, Malformed, "the pieces are more than fragment 0 is"),
        ({"pieces": [box(EMBED, (0, 0), (HUGE, 4))], "anchor": True}, LayoutError, "no piece of the model"),
        ({"pieces": [box(99, (0,), (1,))]}, LayoutError, "no piece of the model: tensor 99"),
    ],
)
def test_a_fetch_of_what_there_is_not_is_refused(
    at: Rig, fields: dict[str, Any], kind: type[DilocoError], words: str
) -> None:
    a, b = at.started("a", "b")
    for visitor in (a, b):
        visitor.push(FRAGMENT, draw(FRAGMENT, 1))
    a.fetch(FRAGMENT)
    before = remains(at)
    with pytest.raises(kind, match=words):
        a.fetch(FRAGMENT, **fields)
    assert remains(at) == before


def test_there_are_no_anchors_before_there_are_first_parameters(at: Rig) -> None:
    a = at.island("a")
    with pytest.raises(Malformed, match="fragment 0 has no anchor: the run has 0 seeded fragments"):
        a.fetch(FRAGMENT, anchor=True)
    assert a.fetch(FRAGMENT, wait_s=0)[0].outcome == "open"


@pytest.mark.parametrize("wait_s", [0.0, -1.0, float("nan"), float("-inf")])
def test_a_fetch_that_waits_no_time_is_answered_at_once(at: Rig, wait_s: float) -> None:
    a, b = at.started("a", "b")
    request = pb.FetchRequest(**a.key(), wait_s=wait_s).SerializeToString()
    with grpc.insecure_channel(at.address) as channel:
        fetch: Any = channel.unary_stream(f"/{SERVICE}/Fetch", None, pb.FetchHeader.FromString)
        assert [header.outcome for header in fetch(request, timeout=BOUND_S)] == ["open"]
        for visitor in (a, b):
            visitor.push(FRAGMENT, draw(FRAGMENT, 1))
        a.fetch(FRAGMENT)
        assert next(fetch(request, timeout=BOUND_S)).outcome == "committed"


def test_an_update_that_cannot_be_read_is_said_to_the_caller(at: Rig) -> None:
    a, b = at.started("a", "b")
    for visitor in (a, b):
        visitor.push(FRAGMENT, draw(FRAGMENT, 1))
    a.fetch(FRAGMENT)
    at.run.store.update_path(0, 0).unlink()
    with pytest.raises(DilocoError, match=r"the coordinator cannot read this: .*No such file"):
        a.fetch(FRAGMENT)
    assert a.fetch(FRAGMENT, anchor=True)[0].version == 1


def test_a_visitor_that_nobody_answers_says_so(tmp_path: Path) -> None:
    with visit("127.0.0.1:1", "a") as visitor:
        visitor.identity.run_id = "test"
        with pytest.raises(Unreachable, match=r"no coordinator answers at 127\.0\.0\.1:1"):
            visitor.beat()
