"""A bare gRPC stream of raw bytes, between two processes of its own: what `benchmarks.transport` is held against.

    with Bare(TLS(...) or None, keep=False) as bare:
        seconds = bare.up(megabytes, streams)

Messages of 1 MiB, no serializer, a server with threads, default options. `keep` has both processes keep freed memory
as this system's do; without it they are as any program is.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from diloco.errors import EnvironmentFault
from diloco.tls import TLS

MESSAGE = bytes(2**20)


def _read(tls: TLS) -> tuple[bytes, bytes, bytes]:
    """CA, private key and certificate."""
    return Path(tls.ca).read_bytes(), Path(tls.key).read_bytes(), Path(tls.cert).read_bytes()


class Bare:
    """The two processes, until the end of the context."""

    def __init__(self, tls: TLS | None = None, *, keep: bool = False) -> None:
        options = json.dumps({"tls": asdict(tls) if tls else None, "keep": keep})
        self._server = _process("serve", options)
        address = _line(self._server)
        self._client = _process("call", options, address)

    def __enter__(self) -> Bare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._client, self._server):
            process.terminate()
            process.wait(timeout=30)

    def up(self, messages: int, streams: int = 1) -> float:
        """Seconds that `streams` streams of so many messages take together, to the server."""
        return self._ask("Up", messages, streams)

    def down(self, messages: int, streams: int = 1) -> float:
        """Seconds that they take from the server."""
        return self._ask("Down", messages, streams)

    def _ask(self, *words: object) -> float:
        assert self._client.stdin
        self._client.stdin.write(json.dumps(words) + "\n")
        self._client.stdin.flush()
        return float(_line(self._client))


def _process(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.bare", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline().strip()
    if not line:
        raise EnvironmentFault(f"a process of the benchmark has ended: {process.args!r}")
    return line


def serve(tls: TLS | None) -> None:
    """A server that takes and gives raw bytes, until it is terminated; prints its address."""

    def up(messages: Iterator[bytes], _: Any) -> bytes:
        return str(sum(len(message) for message in messages)).encode()

    def down(count: bytes, _: Any) -> Iterator[bytes]:
        yield from itertools.repeat(MESSAGE, int(count))

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    handlers = {"Up": grpc.stream_unary_rpc_method_handler(up), "Down": grpc.unary_stream_rpc_method_handler(down)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    if tls:
        ca, key, cert = _read(tls)
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)], ca, True))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


def call(tls: TLS | None, address: str) -> None:
    """A client that does what it reads, a line each, and prints the seconds that it takes."""
    channels: list[grpc.Channel] = []

    def channel(number: int) -> grpc.Channel:
        while len(channels) <= number:
            options = [("grpc.use_local_subchannel_pool", 1)]
            if tls:
                ca, key, cert = _read(tls)
                credentials = grpc.ssl_channel_credentials(ca, key, cert)
                target = f"localhost:{address.rpartition(':')[2]}"
                channels.append(grpc.secure_channel(target, credentials, options=options))
            else:
                channels.append(grpc.insecure_channel(address, options=options))
        return channels[number]

    def stream(way: str, number: int, messages: int) -> None:
        if way == "Up":
            channel(number).stream_unary("/bench/Up", None, None)(MESSAGE for _ in range(messages))
        else:
            sum(len(m) for m in channel(number).unary_stream("/bench/Down", None, None)(str(messages).encode()))

    with futures.ThreadPoolExecutor(max_workers=16) as pool:
        for line in sys.stdin:
            way, messages, streams = json.loads(line)
            for number in range(streams):
                grpc.channel_ready_future(channel(number)).result(timeout=30)
            begin = time.perf_counter()
            for done in [pool.submit(stream, way, number, messages) for number in range(streams)]:
                done.result()
            print(time.perf_counter() - begin, flush=True)


def main() -> None:
    """One of the two processes."""
    options = json.loads(sys.argv[2])
    if options["keep"]:
        from diloco import allocator

        allocator.keep(heap_bytes=allocator.MESSAGE_BYTES)
    tls = TLS(**options["tls"]) if options["tls"] else None
    if sys.argv[1] == "serve":
        serve(tls)
    else:
        call(tls, sys.argv[3])


if __name__ == "__main__":
    main()
