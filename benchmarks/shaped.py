"""Lines of a stated bandwidth on one machine: network namespaces, each joined to this one by a shaped pair."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from diloco.errors import EnvironmentFault

COMMAND_S = 20.0
BURST, LATENCY = "64kb", "50ms"
"""Of the token bucket: what may pass at once, and how long a packet may wait before it is dropped."""
FAR = "eth0"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A namespace and its line to this side."""

    name: str
    near: str
    """Device on this side."""
    address: str
    """IP address of this side, as the namespace sees it."""

    @property
    def prefix(self) -> list[str]:
        """What a command begins with that runs in the namespace."""
        return ["ip", "netns", "exec", self.name]

    def shape(self, mbps: float) -> None:
        """Lets no more than so many megabits per second pass, each way."""
        bucket = ["root", "tbf", "rate", f"{mbps:g}mbit", "burst", BURST, "latency", LATENCY]
        _do(["tc", "qdisc", "add", "dev", self.near, *bucket])
        _do([*self.prefix, "tc", "qdisc", "add", "dev", FAR, *bucket])


@contextmanager
def lines(count: int) -> Iterator[list[Line]]:
    """Namespaces that each have a line of their own to this one, until the end of the block.

    Raises:
        EnvironmentFault: this machine or this user cannot make any.
    """
    for program in ("ip", "tc"):
        if not shutil.which(program):
            raise EnvironmentFault(f"there is no `{program}`: install iproute2, or measure without a shaped line")
    with ExitStack() as stack:
        yield [stack.enter_context(_line(number)) for number in range(count)]


@contextmanager
def _line(number: int) -> Iterator[Line]:
    pid = os.getpid()
    line = Line(name=f"bench-{pid}-{number}", near=f"bn{pid}n{number}", address=f"10.213.{number}.1")
    _do(["ip", "netns", "add", line.name])
    try:
        _do(["ip", "link", "add", line.near, "type", "veth", "peer", "name", FAR, "netns", line.name])
        _do(["ip", "addr", "add", f"{line.address}/30", "dev", line.near])
        _do(["ip", "link", "set", line.near, "up"])
        _do([*line.prefix, "ip", "addr", "add", f"10.213.{number}.2/30", "dev", FAR])
        _do([*line.prefix, "ip", "link", "set", FAR, "up"])
        _do([*line.prefix, "ip", "link", "set", "lo", "up"])
        yield line
    finally:
        _do(["ip", "netns", "del", line.name])


def _do(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise EnvironmentFault(
            f"a shaped line needs root and network namespaces, and `{' '.join(command)}` failed "
            f"({done.stderr.strip()}): run it as root, or measure without --link-mbps"
        )
    return done.stdout
