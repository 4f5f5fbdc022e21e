"""Lanes by hand: frames as a test likes them, and what the coordinator makes of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from torch import Tensor

from diloco.fragments import Fragment
from diloco.framing import chunks
from diloco.lane import HEAD_BYTES, Kind, Lane
from diloco.tls import TLS
from diloco.v1 import coordinator_pb2 as pb
from island.lanes import LaneError, Lanes
from tests.processes import wait_until
from tests.support import BOUND_S, Visitor, part


def framed(kind: int, content: bytes = b"") -> bytes:
    """The bytes of a frame, which may be none."""
    return len(content).to_bytes(HEAD_BYTES - 1, "little") + bytes([kind]) + content


def called(name: str, *messages: bytes) -> bytes:
    """The bytes of a call to its end."""
    frames = [framed(Kind.CALL, name.encode()), *(framed(Kind.MESSAGE, m) for m in messages), framed(Kind.END)]
    return b"".join(frames)


@contextmanager
def lane_to(address: str, tls: TLS | None = None) -> Iterator[Lane]:
    """A lane on which nothing is called yet, until the end of the block."""
    host, _, port = address.rpartition(":")
    lanes = Lanes(host, int(port), tls, BOUND_S)
    lane = lanes.open()
    assert lane is not None, f"there is no lane to {address}"
    try:
        yield lane
    finally:
        lane.close()


def say(lane: Lane, data: bytes) -> None:
    """Sends bytes as they are, in one write."""
    lane._write([data])


def answers(lane: Lane) -> list[bytes]:
    """What comes until the end of a call. Raises `LaneError` where it has failed."""
    got: list[bytes] = []
    while True:
        frame = lane.receive()
        assert frame is not None, "the lane was closed within a call"
        kind, content = frame[0], bytes(frame[1])
        if kind is Kind.END:
            return got
        if kind is Kind.ERROR:
            told = pb.CallError.FromString(content)
            raise LaneError(grpc.StatusCode[told.status], told.details, dict(told.metadata))
        assert kind is Kind.MESSAGE
        got.append(content)


def pushed(
    visitor: Visitor, fragment: Fragment, values: Tensor, chunk_bytes: int = 16, **fields: object
) -> list[bytes]:
    """The messages of a push of all of a fragment: header, chunks, digest."""
    sent = part(fragment, values)
    header = visitor.header(fragment.index, sent.pieces, **fields)
    return [header.SerializeToString(), *chunks([sent.payload], chunk_bytes, ended=True)]


def receipt(messages: Iterable[bytes]) -> pb.Receipt:
    """The receipt at the end of the answers to a push."""
    *_, last = (pb.PushReply.FromString(message) for message in messages)
    assert last.HasField("receipt")
    return last.receipt


def held() -> tuple[list[str], int]:
    """Threads of lanes that run, and descriptors that are open."""
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("lane"))
    descriptors = Path("/proc/self/fd")
    return names, len(list(descriptors.iterdir())) if descriptors.is_dir() else 0


def wait_held(before: tuple[list[str], int]) -> None:
    """Returns once no more threads and descriptors are left than there were."""

    def back() -> bool:
        names, descriptors = held()
        return not Counter(names) - Counter(before[0]) and descriptors <= before[1]

    wait_until(back, f"no more than {before} is left", BOUND_S)
