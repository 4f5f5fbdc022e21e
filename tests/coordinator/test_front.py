"""One port for lanes and for gRPC: who knocks is told apart by the first bytes, and nobody can hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.certificates import HERE, Authority
from coordinator import front
from coordinator.front import Front
from coordinator.lanes import Lanes as Served
from diloco.errors import Untrusted
from diloco.lane import ALPN, HELLO, Encryption, Lane
from diloco.v1 import coordinator_pb2 as pb
from island.lanes import _context
from tests.lanes import called, framed, held, lane_to, pushed, say, wait_held
from tests.processes import wait_until
from tests.support import BOUND_S, MODEL, Serving, Visitor, configure, draw, floats, serving, visit, wait_quiet

IPV6 = socket.has_dualstack_ipv6()
WITH_IPV6 = pytest.mark.skipif(not IPV6, reason="this machine has no IPv6")


class Port:
    """A coordinator, and ways to its port."""

    def __init__(self, folder: Path, stack: ExitStack, authority: Authority | None, listen: str) -> None:
        names = [*HERE, "::1"]
        server = authority.issue("coordinator", names=names) if authority else None
        self.tls = authority.issue("tokyo") if authority else None
        self.served: Serving = stack.enter_context(serving(configure(), folder / "state", listen=listen, tls=server))
        self.port = int(self.served.address.rpartition(":")[2])
        self._stack = stack

    def visitor(self, host: str = "127.0.0.1", island: str = "tokyo") -> Visitor:
        """An island that has yet to join."""
        return self._stack.enter_context(visit(f"{host}:{self.port}", island, MODEL, tls=self.tls))

    def knock(self, data: bytes = b"") -> socket.socket:
        """A connection over which some bytes go."""
        sock = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port), BOUND_S))
        sock.sendall(data)
        return sock

    def lane(self) -> Lane:
        return self._stack.enter_context(lane_to(f"127.0.0.1:{self.port}", self.tls))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["plain", "tls"])
def make(request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack) -> Callable[..., Port]:
    authority = Authority(tmp_path) if request.param == "tls" else None
    return lambda listen="127.0.0.1:0": Port(tmp_path, stack, authority, listen)


@pytest.fixture
def at(make: Callable[..., Port]) -> Port:
    return make()


def end(sock: Any) -> None:
    """Says that no more comes; to another side that may have ended the connection already."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def rest(sock: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    come = bytearray()
    try:
        while data := sock.recv(65536):
            come += data
    except ConnectionResetError:
        pass
    return bytes(come)


def works(at: Port, island: Visitor) -> None:
    """Bulk and control pass for an island that has joined."""
    for fragment in at.served.run.fragments:
        if not at.served.ask(lambda run: run.state.seeded):
            assert not island.push(fragment, draw(fragment, 0), seed=True).dropped
    for fragment in at.served.run.fragments:
        assert floats(island.fetch(fragment, anchor=True)[1]).equal(draw(fragment, 0))
    assert island.beat(ready=True).phase == "running"


# -- gRPC ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "hosts"),
    [
        ("127.0.0.1:0", ["127.0.0.1"]),
        ("localhost:0", ["localhost"]),
        ("0.0.0.0:0", ["127.0.0.1"]),
        pytest.param("[::1]:0", ["[::1]"], marks=WITH_IPV6),
        pytest.param("[::]:0", ["127.0.0.1", "[::1]"], marks=WITH_IPV6),
    ],
)
def test_control_and_bulk_pass_and_a_command_is_known_by_its_host(
    make: Callable[..., Port], listen: str, hosts: list[str]
) -> None:
    at = make(listen)
    for host in hosts:
        island = at.visitor(host)
        island.join()
        works(at, island)
        island.link.command(pb.CommandRequest(verb="pause", reason="to look"))
        who = "127.0.0.1" if host == "localhost" else host.strip("[]")
        assert f"by an operator at {who}: to look" in island.beat().paused
        island.link.command(pb.CommandRequest(verb="resume"))


def test_who_passes_through_is_forgotten(at: Port) -> None:
    with ExitStack() as stack:
        link = stack.enter_context(visit(f"127.0.0.1:{at.port}", "x", MODEL, tls=at.tls)).link
        link.status()
        assert set(at.served.front._origins.values()) == {"127.0.0.1"}
    wait_until(lambda: not at.served.front._origins, "the connection has ended", BOUND_S)


class Words:
    """Stands for a gRPC server: says something, takes no more than it must, and ends."""

    def __init__(self, words: bytes) -> None:
        self._words, self.heard = words, b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)

    async def start(self) -> None:
        self._thread.start()

    async def stop(self, grace: float | None) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with self._listener.accept()[0] as sock:
            sock.settimeout(BOUND_S)
            sock.sendall(self._words)
            sock.shutdown(socket.SHUT_WR)
            self.heard = rest(sock)

    def join(self) -> None:
        self._thread.join(BOUND_S)


def test_the_last_words_of_a_server_arrive_at_who_has_yet_to_listen() -> None:
    """As where gRPC says why it refuses a handshake, while its client goes on to send."""
    words, sent = random.Random(1).randbytes(2**20), bytes(4 * 2**20)
    server = Words(words)

    async def pass_on() -> bytes:
        made = Front(None)
        port = await made.begin("127.0.0.1:0", server, server.port, Served({}))  # type: ignore[arg-type]
        try:
            return await asyncio.to_thread(speak, port)
        finally:
            await made.stop(None)

    def speak(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), BOUND_S) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            return rest(sock)

    assert asyncio.run(pass_on()) == words
    server.join()
    assert server.heard == sent


# -- who says nothing, or something else --------------------------------------------------------------------------

RECORD = b"\x16\x03\x01\x02\x00"
BEGUN = [b"", HELLO[:1], HELLO[:4], RECORD[:3], RECORD, RECORD + bytes(17), RECORD + bytes([len(ALPN)]) + ALPN.encode()]


@pytest.mark.parametrize("said", BEGUN, ids=range(len(BEGUN)))
def test_who_does_not_go_on_is_not_waited_for(at: Port, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    island = at.visitor()
    island.join()
    monkeypatch.setattr(front, "HELLO_S", 0.05)
    monkeypatch.setattr("coordinator.lanes.LAST_S", 0.05)
    sock = at.knock(said)
    if at.tls or not said.startswith(RECORD):  # a plain gRPC server has it then, and waits as long as it likes
        assert rest(sock) == b""
    sock.close()
    monkeypatch.undo()
    works(at, island)


def test_half_a_greeting_is_not_waited_for(at: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a lane by its first bytes, or its handshake, and then says no more."""
    monkeypatch.setattr("coordinator.lanes.LAST_S", 0.2)
    sock = at.knock()
    encryption = Encryption(_context(at.tls), "127.0.0.1") if at.tls else None
    if encryption:
        encryption.shake_hands(sock)
    lane = Lane(sock, encryption)
    say(lane, HELLO[:-1])
    assert lane.receive() is None


@pytest.mark.parametrize("said", [bytes(64), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\xff" * 9000])
def test_who_speaks_something_else_is_left_to_grpc(at: Port, said: bytes) -> None:
    sock = at.knock(said)
    sock.shutdown(socket.SHUT_WR)
    rest(sock)
    island = at.visitor()
    island.join()
    works(at, island)


def test_a_lane_without_tls_is_none_where_there_is_tls(tmp_path: Path, stack: ExitStack) -> None:
    at = Port(tmp_path, stack, Authority(tmp_path), "127.0.0.1:0")
    assert not rest(at.knock(HELLO)).startswith(HELLO)
    with pytest.raises(AssertionError, match="there is no lane"), lane_to(f"127.0.0.1:{at.port}"):
        pass


def test_a_lane_with_tls_is_none_where_there_is_none(tmp_path: Path, stack: ExitStack) -> None:
    at = Port(tmp_path, stack, None, "127.0.0.1:0")
    tls = Authority(tmp_path).issue("tokyo")
    with pytest.raises(AssertionError, match="there is no lane"), lane_to(f"127.0.0.1:{at.port}", tls):
        pass


def test_a_lane_needs_a_certificate_that_is_trusted(tmp_path: Path, stack: ExitStack) -> None:
    authority = Authority(tmp_path)
    at = Port(tmp_path, stack, authority, "127.0.0.1:0")
    before = held()
    context = ssl.create_default_context(cafile=str(authority.path))
    context.set_alpn_protocols([ALPN])
    for foreign in (None, Authority(tmp_path, "foreign").issue("stranger")):
        if foreign:
            context.load_cert_chain(foreign.cert, foreign.key)
        with socket.create_connection(("127.0.0.1", at.port), BOUND_S) as sock:
            encryption = Encryption(context, "127.0.0.1")
            encryption.shake_hands(sock)
            assert encryption.protocol == ALPN
            with pytest.raises(ssl.SSLError):
                Lane(sock, encryption).greeted()
    wait_held(before)
    island = at.visitor()
    island.join()
    works(at, island)


def test_an_island_that_is_not_trusted_is_told_so_by_grpc(tmp_path: Path, stack: ExitStack) -> None:
    """Where there is no lane for it, gRPC has the words."""
    at = Port(tmp_path, stack, Authority(tmp_path), "127.0.0.1:0")
    foreign = Authority(tmp_path, "foreign").issue("stranger")
    link = stack.enter_context(visit(f"127.0.0.1:{at.port}", "x", MODEL, patience_s=0.0, tls=foreign)).link
    with pytest.raises(Untrusted, match="no authority in"):
        link.probe(1, 1, BOUND_S)


# -- coming and going ---------------------------------------------------------------------------------------------


def test_connections_that_could_not_be_taken_are_taken_later(at: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where descriptors have run out for a while."""
    monkeypatch.setattr(front, "PAUSE_S", 0.01)
    made, tries = at.served.front, list[OSError]()

    class Exhausted:
        """A listener that has nothing to give for some times."""

        def __init__(self) -> None:
            self.fileno = listener.fileno

        def accept(self) -> tuple[socket.socket, Any]:
            if len(tries) < 3:
                tries.append(OSError(errno.EMFILE, "Too many open files"))
                raise tries[-1]
            return listener.accept()

    listener = made._listener
    monkeypatch.setattr(made, "_listener", Exhausted())
    island = at.visitor()
    island.join()
    works(at, island)
    assert len(tries) == 3
    monkeypatch.undo()


def test_who_comes_while_the_port_is_closed_leaves_nothing(tmp_path: Path, stack: ExitStack) -> None:
    """Whether it was taken already or not: a socket that nobody has closed is an error here."""
    for number in range(5):
        with ExitStack() as life:
            at = Port(tmp_path / str(number), life, None, "127.0.0.1:0")
            where = ("127.0.0.1", at.port)
            knocks = [stack.enter_context(socket.create_connection(where, BOUND_S)) for _ in range(8)]
            for sock in knocks:
                sock.sendall(HELLO)
        assert all(HELLO.startswith(rest(sock)) for sock in knocks)
    gc.collect()


# -- fuzz ---------------------------------------------------------------------------------------------------------


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Some bits turned, and perhaps not all of it."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out[: chance.randint(1, len(out))]) if chance.random() < 0.3 else bytes(out)


def test_no_bytes_at_the_port_bring_it_down(at: Port) -> None:
    chance, island = random.Random(17), at.visitor()
    island.join()
    fragment = at.served.run.fragments[0]
    push = called("Push", *pushed(island, fragment, draw(fragment, 0), seed=True))
    probe = called("Probe", pb.ProbeRequest(down_bytes=3).SerializeToString(), b"ab")
    fetch = called("Fetch", pb.FetchRequest(**island.key(), anchor=True).SerializeToString())
    assert island.link.probe(1, 1, BOUND_S) > 0
    before = held()
    for _ in range(30):
        noise = chance.randbytes(chance.choice((1, 4, 5, 64, 3000)))
        begun = chance.choice((b"", b"", RECORD, HELLO[:5]))
        sock = at.knock(flipped(begun + noise, chance))
        if chance.random() < 0.5:
            end(sock)
            rest(sock)
        sock.close()
    for _ in range(40):
        with lane_to(f"127.0.0.1:{at.port}", at.tls) as lane:
            data = chance.choice((push + probe, probe + push, fetch + probe, chance.randbytes(400), framed(2, b"x")))
            say(lane, flipped(data, chance))
            if chance.random() < 0.5:
                end(lane._sock)
                lane.drain()
    wait_quiet(at.served)
    wait_held(before)
    works(at, island)
