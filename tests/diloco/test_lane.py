"""Frames go over a lane as they are sent, plain and encrypted; what is no frame or not trusted is found out."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.certificates import Authority
from coordinator.tls import server as secured
from diloco.errors import Malformed
from diloco.framing import CONTROL_LIMIT_BYTES, FRAME_BYTES, Placed
from diloco.lane import ALPN, HEAD_BYTES, HELLO, PARTS, SMALL_BYTES, Encryption, Kind, Lane
from diloco.tls import TLS
from island.lanes import _context
from tests.support import BOUND_S

HOST = "127.0.0.1"
HEAD = struct.Struct("<IB")
CLOSE = socket.SHUT_RDWR


class Ends:
    """Two ends of a connection, and threads to work at both."""

    def __init__(self, stack: ExitStack) -> None:
        self.pool = stack.enter_context(ThreadPoolExecutor(4))
        self.socks = socket.socketpair()
        for sock in self.socks:
            stack.callback(sock.close)
            sock.settimeout(BOUND_S)

    def both(self, near: Callable[[], Any], far: Callable[[], Any]) -> tuple[Future[Any], Future[Any]]:
        """Runs something at each end, and returns once both are over."""
        tasks = self.pool.submit(near), self.pool.submit(far)
        for task in tasks:
            task.exception(BOUND_S)
        return tasks


class Secrets:
    """Certificates, made once."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.coordinator, self.island = self.authority.issue("coordinator"), self.authority.issue("tokyo")
        self.foreign = Authority(folder, "foreign").issue("stranger")

    def server(self, tls: TLS | None = None) -> Encryption:
        found = secured(tls or self.coordinator)
        assert found is not None
        return Encryption(found.lanes, None)

    def client(self, tls: TLS | None = None, name: str = HOST) -> Encryption:
        return Encryption(_context(tls or self.island), name)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets(tmp_path_factory.mktemp("secrets"))


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)


Pair = tuple[Lane, Lane]


def paired(ends: Ends, near: Encryption, far: Encryption) -> Pair:
    for task in ends.both(lambda: near.shake_hands(ends.socks[0]), lambda: far.shake_hands(ends.socks[1])):
        task.result()
    return Lane(ends.socks[0], near), Lane(ends.socks[1], far)


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, ends: Ends, secrets: Secrets) -> Iterator[Pair]:
    """A lane's two ends."""
    lanes = (
        (Lane(ends.socks[0]), Lane(ends.socks[1]))
        if request.param == "plain"
        else paired(ends, secrets.client(), secrets.server())
    )
    yield lanes
    for lane in lanes:
        lane.close()


def taken(frame: tuple[Kind, memoryview | Placed] | None) -> tuple[Kind, bytes]:
    assert frame is not None
    return frame[0], bytes(frame[1])


def raw(lane: Lane, data: bytes) -> None:
    """Sends bytes that are no frame of the lane's making."""
    lane._write([data])


# -- frames -------------------------------------------------------------------------------------------------------

LARGE = random.Random(7).randbytes(2**20 + 3)
CONTENTS = [(), (b"",), (b"x",), (b"", b"ab", bytearray(b"c"), memoryview(b"def")), (LARGE,), (b"head", LARGE, b"")]
MANY = tuple(bytes([i % 256]) * 3 for i in range(3 * PARTS))


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(
    "parts", [*CONTENTS, MANY], ids=["none", "empty", "byte", "parts", "large", "large-parts", "more than go at once"]
)
def test_a_frame_comes_as_it_is_sent(pair: Pair, ends: Ends, kind: Kind, parts: tuple[bytes, ...]) -> None:
    for one, other in (pair, pair[::-1]):
        sending, receiving = ends.both(partial(one.send, kind, *parts), other.receive)
        sending.result()
        assert taken(receiving.result()) == (kind, b"".join(parts))


def test_a_lane_says_what_can_be_done_without_waiting(pair: Pair) -> None:
    near, far = pair
    assert near.takes_at_once(SMALL_BYTES)
    assert not near.takes_at_once(SMALL_BYTES + 1)
    assert not far.stirs()
    near.send(Kind.MESSAGE, b"x")
    assert far.stirs(BOUND_S)
    assert taken(far.receive()) == (Kind.MESSAGE, b"x")
    assert not far.stirs()
    near.close()
    assert far.stirs(BOUND_S), "its end"
    assert near.stirs()
    assert near.takes_at_once(1)
    with pytest.raises(OSError):
        near.send(Kind.MESSAGE, b"x")


def test_a_lane_that_is_full_takes_nothing_at_once(ends: Ends) -> None:
    ends.socks[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        while ends.socks[0].send(LARGE):
            pass
    assert not Lane(ends.socks[0]).takes_at_once(1)


def test_frames_of_one_write_come_one_by_one(pair: Pair) -> None:
    """In one record of TLS: what is left of it waits in memory, where no socket shows it."""
    near, far = pair
    raw(near, b"".join(HEAD.pack(len(text), Kind.MESSAGE) + text for text in (b"one", b"", b"three")))
    assert not far.pending
    assert taken(far.receive()) == (Kind.MESSAGE, b"one")
    assert far.pending == (far._encryption is not None)
    assert taken(far.receive()) == (Kind.MESSAGE, b"")
    assert taken(far.receive()) == (Kind.MESSAGE, b"three")
    assert not far.pending


def test_a_frame_that_comes_byte_by_byte_is_whole(pair: Pair) -> None:
    near, far = pair
    for byte in HEAD.pack(3, Kind.CALL) + b"abc":
        raw(near, bytes([byte]))
    assert taken(far.receive()) == (Kind.CALL, b"abc")


def test_payloads_come_where_there_is_room_and_everything_else_in_memory_of_its_own(pair: Pair) -> None:
    near, far = pair
    payload, asked = bytearray(8), list[int]()

    def room(count: int) -> memoryview | None:
        asked.append(count)
        return memoryview(payload)[:4] if count == FRAME_BYTES + 4 else None

    head = bytes(range(FRAME_BYTES))
    near.send(Kind.MESSAGE, head, b"abcd")
    near.send(Kind.MESSAGE, b"no chunk")
    near.send(Kind.CALL, head, b"efgh")
    near.send(Kind.ERROR, head, b"ijkl")
    frame = far.receive(room)
    assert frame is not None
    assert isinstance(frame[1], Placed)
    assert (bytes(frame[1].frame), bytes(payload)) == (head, b"abcd\0\0\0\0")
    assert len(frame[1]) == FRAME_BYTES + 4
    for expected in ((Kind.MESSAGE, b"no chunk"), (Kind.CALL, head + b"efgh"), (Kind.ERROR, head + b"ijkl")):
        assert taken(far.receive(room)) == expected
    assert bytes(payload) == b"abcd\0\0\0\0"
    assert asked == [FRAME_BYTES + 4, len(b"no chunk")]


def test_both_directions_carry_much_at_once(pair: Pair, ends: Ends) -> None:
    chance = random.Random(3)
    said = [[LARGE[chance.randrange(2**19) :] for _ in range(8)] + [b"", LARGE[:1]] for _ in pair]

    def send(lane: Lane, messages: list[bytes]) -> None:
        for message in messages:
            lane.send(Kind.MESSAGE, message[:1], message[1:])
        lane.send(Kind.END)

    def receive(lane: Lane) -> list[bytes]:
        got = []
        while (frame := taken(lane.receive()))[0] is Kind.MESSAGE:
            got.append(frame[1])
        assert frame == (Kind.END, b"")
        return got

    sending = [ends.pool.submit(send, *which) for which in zip(pair, said, strict=True)]
    heard = [ends.pool.submit(receive, lane) for lane in pair]
    assert [task.result(BOUND_S) for task in heard] == said[::-1]
    for task in sending:
        task.result(BOUND_S)


def test_several_threads_send_whole_frames(pair: Pair, ends: Ends) -> None:
    near, far = pair
    texts = [bytes([number]) * 2**18 for number in range(3)]
    sending = [ends.pool.submit(near.send, Kind.MESSAGE, text[:9], text[9:]) for text in texts]
    assert sorted(taken(far.receive())[1] for _ in texts) == texts
    for task in sending:
        task.result(BOUND_S)


# -- ends ---------------------------------------------------------------------------------------------------------


def test_a_lane_that_is_closed_between_two_frames_is_over(pair: Pair) -> None:
    near, far = pair
    near.send(Kind.END)
    near.close()
    assert taken(far.receive()) == (Kind.END, b"")
    assert far.receive() is None
    assert far.receive() is None


@pytest.mark.parametrize("torn", [b"\x05", HEAD.pack(5, 2), HEAD.pack(5, 2) + b"four", HEAD.pack(40, 2) + bytes(17)])
@pytest.mark.parametrize("placed", [False, True])
def test_a_lane_that_is_closed_within_a_frame_is_cut(pair: Pair, torn: bytes, placed: bool) -> None:
    near, far = pair
    raw(near, torn)
    near.close()
    room = memoryview(bytearray(24))
    with pytest.raises(ConnectionResetError, match="ended within a frame"):
        far.receive((lambda count: room if count == 40 else None) if placed else (lambda count: None))


@pytest.mark.parametrize(
    ("length", "kind"), [(0, 0), (0, 5), (3, 255), (CONTROL_LIMIT_BYTES + 1, 2), (2**32 - 1, 2), (2**32 - 1, 0)]
)
def test_what_is_no_frame_is_refused_before_there_is_memory_for_it(
    pair: Pair, length: int, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    raw(near, HEAD.pack(length, kind))

    def nothing(*_: object) -> Any:
        raise AssertionError("memory was taken")

    monkeypatch.setattr("diloco.lane.numpy.empty", nothing)
    with pytest.raises(Malformed, match=rf"no frame \(kind {kind}, {length} bytes\)"):
        far.receive(nothing)


def test_the_largest_frame_passes(pair: Pair, ends: Ends) -> None:
    near, far = pair
    largest = bytes(CONTROL_LIMIT_BYTES)
    sending, receiving = ends.both(lambda: near.send(Kind.MESSAGE, largest), far.receive)
    sending.result()
    assert taken(receiving.result()) == (Kind.MESSAGE, largest)


def test_closing_a_lane_wakes_who_waits_in_it(pair: Pair, ends: Ends) -> None:
    """Both who receives and who sends to somebody that takes nothing."""
    near, _ = pair
    begun = threading.Event()

    def send() -> None:
        begun.set()
        while True:
            near.send(Kind.MESSAGE, LARGE)

    receiving, sending = ends.pool.submit(near.receive), ends.pool.submit(send)
    assert begun.wait(BOUND_S)
    near.close()
    assert isinstance(sending.exception(BOUND_S), OSError)
    error = receiving.exception(BOUND_S)
    assert isinstance(error, OSError) if error else receiving.result() is None
    near.close()


def test_draining_ends_with_the_other_side(pair: Pair, ends: Ends) -> None:
    near, far = pair
    draining = ends.pool.submit(far.drain)
    for _ in range(4):
        near.send(Kind.MESSAGE, LARGE)
    near.close()
    draining.result(BOUND_S)


def test_a_timeout_of_the_socket_is_an_error_of_the_lane(pair: Pair, ends: Ends) -> None:
    near, far = pair
    for sock in ends.socks:
        sock.settimeout(0.01)
    with pytest.raises(TimeoutError):
        far.receive()
    with pytest.raises(TimeoutError):
        for _ in range(16):
            near.send(Kind.MESSAGE, LARGE)


# -- who is there -------------------------------------------------------------------------------------------------


def test_lanes_greet_each_other(pair: Pair) -> None:
    near, far = pair
    near.greet()
    near.send(Kind.CALL, b"x")
    assert far.greeted()
    assert taken(far.receive()) == (Kind.CALL, b"x")
    far.greet()
    assert near.greeted()


@pytest.mark.parametrize("said", [b"", HELLO.upper(), b"PRI * HTTP/2.0\r\n\r\n", HELLO[:-1] + b"\0"])
def test_who_greets_otherwise_has_no_lane(pair: Pair, said: bytes) -> None:
    near, far = pair
    raw(near, said)
    near.close()
    assert not far.greeted()


def test_half_a_greeting_is_a_cut_line(pair: Pair) -> None:
    near, far = pair
    raw(near, HELLO[:-1])
    near.close()
    with pytest.raises(ConnectionResetError):
        far.greeted()


def test_both_sides_name_the_protocol(ends: Ends, secrets: Secrets) -> None:
    near, far = secrets.client(), secrets.server()
    paired(ends, near, far)
    assert near.protocol == far.protocol == ALPN


def shaken(ends: Ends, near: Encryption, far: Encryption) -> tuple[BaseException | None, BaseException | None]:
    """What each side's handshake raises, or the greeting that a client waits for: in TLS 1.3 it is done before it
    is looked at."""

    def side(sock: socket.socket, encryption: Encryption) -> None:
        try:
            encryption.shake_hands(sock)
            lane = Lane(sock, encryption)
            if encryption is far:
                lane.greet()
            else:
                assert lane.greeted()
        finally:
            sock.shutdown(CLOSE)

    tasks = ends.both(lambda: side(ends.socks[0], near), lambda: side(ends.socks[1], far))
    return tasks[0].exception(), tasks[1].exception()


def test_who_trusts_each_other_shakes_hands(ends: Ends, secrets: Secrets) -> None:
    assert shaken(ends, secrets.client(), secrets.server()) == (None, None)


def test_a_client_that_is_not_trusted_is_refused_on_both_sides(ends: Ends, secrets: Secrets) -> None:
    stranger = replace(secrets.foreign, ca=str(secrets.authority.path))
    near, far = shaken(ends, secrets.client(stranger), secrets.server())
    assert isinstance(far, ssl.SSLCertVerificationError)
    assert isinstance(near, ssl.SSLError)
    assert "UNKNOWN_CA" in str(near)


def test_a_client_without_a_certificate_is_refused_on_both_sides(ends: Ends, secrets: Secrets) -> None:
    context = ssl.create_default_context(cafile=str(secrets.authority.path))
    near, far = shaken(ends, Encryption(context, HOST), secrets.server())
    assert isinstance(far, ssl.SSLError)
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(far)
    assert isinstance(near, ssl.SSLError)


def test_a_server_that_is_not_trusted_is_refused_on_both_sides(ends: Ends, secrets: Secrets) -> None:
    for client, match in ((secrets.client(secrets.foreign), "UNKNOWN_CA"), (secrets.client(name="tokyo"), "BAD_CERT")):
        with ExitStack() as stack:
            near, far = shaken(Ends(stack), client, secrets.server())
        assert isinstance(near, ssl.SSLCertVerificationError)
        assert isinstance(far, ssl.SSLError)
        assert match in str(far)


@pytest.mark.parametrize("said", [b"", HELLO, b"\x16\x03\x01\x00\x05abcde", bytes(64)])
def test_a_side_that_speaks_no_tls_is_an_error(secrets: Secrets, said: bytes) -> None:
    for encryption in (secrets.client(), secrets.server()):
        with ExitStack() as stack:
            here, there = Ends(stack).socks
            there.sendall(said)
            there.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError, match=r"\w"):
                encryption.shake_hands(here)


def test_a_record_that_was_changed_on_the_way_is_an_error(ends: Ends, secrets: Secrets) -> None:
    near, far = paired(ends, secrets.client(), secrets.server())
    sent = socket.socketpair()
    for sock in sent:
        sock.settimeout(BOUND_S)
    near._sock = sent[0]
    near.send(Kind.MESSAGE, b"one")
    record = bytearray(sent[1].recv(4096))
    record[-1] ^= 1
    ends.socks[0].sendall(record)
    with pytest.raises(ssl.SSLError):
        far.receive()
    for sock in sent:
        sock.close()


def test_the_head_of_a_frame_is_five_bytes() -> None:
    assert (HEAD_BYTES, HEAD.size, len(HELLO)) == (5, 5, 14)
