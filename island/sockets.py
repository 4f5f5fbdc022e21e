"""Bytes as the kernel counts them: what this process has sent and received on its connections to one address."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes on the wire, TLS and HTTP/2 framing included, TCP and IP headers not."""

    sent: int
    received: int


# struct tcp_info of Linux: tcpi_bytes_acked and tcpi_bytes_received, and since 4.19 tcpi_bytes_sent.
_TCP_INFO_BYTES = 232
_ACKED_AT, _RECEIVED_AT, _SENT_AT = 120, 128, 200


class SocketCounter:
    """Adds up the traffic of all TCP connections of this process to one port.

    Connections are found among the process's descriptors, since gRPC does not hand its sockets out. Sample it now
    and then: the last bytes of a connection that closes between two samples are not counted.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: dict[int, Traffic] = {}
        self._lock = threading.Lock()

    def sample(self) -> Traffic:
        """Traffic so far over all connections seen, open or closed."""
        with self._lock:
            for inode, traffic in _connections(self._port):
                self._seen[inode] = traffic
            return Traffic(sum(t.sent for t in self._seen.values()), sum(t.received for t in self._seen.values()))


def _connections(port: int) -> list[tuple[int, Traffic]]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            duplicate = os.dup(int(entry.name))
        except OSError:
            continue  # closed meanwhile
        try:
            with socket.socket(fileno=duplicate) as sock:
                if sock.type != socket.SOCK_STREAM or sock.getpeername()[1] != port:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                found.append((os.fstat(duplicate).st_ino, _traffic(info)))
        except (OSError, IndexError, TypeError):
            continue  # not connected, or no TCP socket
    return found


def _traffic(info: bytes) -> Traffic:
    sent_at = _SENT_AT if len(info) >= _SENT_AT + 8 else _ACKED_AT
    return Traffic(struct.unpack_from("=Q", info, sent_at)[0], struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
