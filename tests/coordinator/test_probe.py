"""The probe of a line is answered to the byte, bounded, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from coordinator import probe
from coordinator.admission import PROBES, Admission
from diloco.config import LimitsConfig
from diloco.errors import DeadlineExceeded, Malformed, Overload
from diloco.framing import PROBE_BYTES, PROBE_CHUNK_BYTES, SERVICE
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link
from tests.support import Serving, configure, serving


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Serving]:
    with serving(configure(), tmp_path / "state") as served:
        yield served


@pytest.fixture
def link(host: Serving) -> Iterator[Link]:
    made = Link(host.address, patience_s=0.0, say=print)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("up", "down"), [(0, 0), (1, 0), (0, 1), (PROBE_CHUNK_BYTES + 1, 3 * PROBE_CHUNK_BYTES - 1), (2**20, 2**20)]
)
def test_every_byte_goes_and_comes(up: int, down: int, host: Serving, link: Link) -> None:
    assert link.probe(up, down, 30.0) > 0
    assert not host.ask(lambda run: run.admission.streams)
    assert not host.ask(lambda run: run.state.members)


def test_no_more_is_taken_or_given_than_a_probe_may_move(link: Link) -> None:
    for up, down in ((PROBE_BYTES + 1, 0), (0, PROBE_BYTES + 1)):
        with pytest.raises(Malformed, match=f"at most {PROBE_BYTES} bytes each way, not"):
            link.probe(up, down, 60.0)


@pytest.mark.parametrize("messages", [[], [b"\xff\xff\xff"]])
def test_a_probe_begins_with_its_request(messages: list[bytes], host: Serving) -> None:
    with grpc.insecure_channel(host.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Probe", None, None)(iter(messages), timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a probe starts with a ProbeRequest" in caught.value.details()


def test_a_probe_that_takes_too_long_ends(host: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_S", 0.2)
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield pb.ProbeRequest().SerializeToString()
        over.wait(30)

    with grpc.insecure_channel(host.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Probe", None, None)(messages(), timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        over.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "a probe of the line may take 0.2 s" in caught.value.details()


def test_probes_are_few_at_a_time_and_within_the_streams_of_the_run() -> None:
    admission = Admission(LimitsConfig())
    with admission.probe(), admission.probe():
        assert admission.streams == PROBES
        with pytest.raises(Overload, match="2 probes of the line at a time"), admission.probe():
            pass
    with admission.probe():
        assert admission.streams == 1
    tight = Admission(LimitsConfig(streams=1))
    with tight.stream("tokyo"), pytest.raises(Overload, match=r"limits\.streams"), tight.probe():
        pass


def test_a_probe_of_too_many_is_told_to_come_later(host: Serving, link: Link) -> None:
    with ExitStack() as held:
        host.ask(lambda run: [held.enter_context(run.admission.probe()) for _ in range(PROBES)])
        with pytest.raises(Overload) as caught:
            link.probe(1, 1, 30.0)
        assert caught.value.retry_after_s > 0
    assert link.probe(1, 1, 30.0) > 0


def test_a_line_that_is_too_slow_is_given_up(link: Link) -> None:
    with pytest.raises(DeadlineExceeded):
        link.probe(PROBE_BYTES, 0, 1e-6)
