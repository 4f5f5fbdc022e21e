"""Lines of a stated bandwidth on one machine: network namespaces, each joined to a hub by a pair of shaped devices.

Nothing is changed outside the namespaces, and they are taken away at the end.
"""

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
    """A site in a namespace of its own, and its line to the hub."""

    name: str
    near: str
    """Device at the hub."""
    hub: str
    """IP address of the hub, as the site sees it."""
    address: str
    """IP address of the site; sites reach each other through the hub."""
    hub_prefix: Sequence[str]

    @property
    def prefix(self) -> list[str]:
        """What a command begins with that runs at the site."""
        return _inside(self.name)

    def shape(self, mbps: float) -> None:
        """Lets no more than so many megabits per second pass, each way."""
        bucket = ["root", "tbf", "rate", f"{mbps:g}mbit", "burst", BURST, "latency", LATENCY]
        _do([*self.hub_prefix, "tc", "qdisc", "add", "dev", self.near, *bucket])
        _do([*self.prefix, "tc", "qdisc", "add", "dev", FAR, *bucket])


@contextmanager
def lines(count: int) -> Iterator[list[Line]]:
    """Sites with a line each to a hub, until the end of the block. What runs at the hub begins with `hub_prefix`.

    Raises:
        EnvironmentFault: this machine or this user cannot make any.
    """
    for program in ("ip", "tc"):
        if not shutil.which(program):
            raise EnvironmentFault(f"there is no `{program}`: install iproute2, or measure without a shaped line")
    with ExitStack() as stack:
        hub = stack.enter_context(_namespace("hub"))
        _do([*_inside(hub), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        yield [stack.enter_context(_line(number, hub)) for number in range(count)]


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    name = f"bench-{os.getpid()}-{name}"
    _do(["ip", "netns", "add", name])
    try:
        _do([*_inside(name), "ip", "link", "set", "lo", "up"])
        yield name
    finally:
        _do(["ip", "netns", "del", name])


@contextmanager
def _line(number: int, hub: str) -> Iterator[Line]:
    near, here, there = f"site{number}", f"10.213.{number}.1", f"10.213.{number}.2"
    with _namespace(f"site-{number}") as name:
        line = Line(name=name, near=near, hub=here, address=there, hub_prefix=_inside(hub))
        for command in (
            [*line.hub_prefix, "ip", "link", "add", near, "type", "veth", "peer", "name", FAR, "netns", name],
            [*line.hub_prefix, "ip", "addr", "add", f"{here}/30", "dev", near],
            [*line.hub_prefix, "ip", "link", "set", near, "up"],
            [*line.prefix, "ip", "addr", "add", f"{there}/30", "dev", FAR],
            [*line.prefix, "ip", "link", "set", FAR, "up"],
            [*line.prefix, "ip", "route", "add", "default", "via", here],
        ):
            _do(command)
        yield line


def _inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _do(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise EnvironmentFault(
            f"a shaped line needs root and network namespaces, and `{' '.join(command)}` failed "
            f"({done.stderr.strip()}): run it as root, or measure without --link-mbps"
        )
    return done.stdout
