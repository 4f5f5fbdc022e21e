"""What operators do to a run: explain, health, pause, resume, drain, kick, snapshot, stop.

What looks at a run asks the coordinator at the address; what changes it is done at all of its coordinators.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from diloco.cli import tls_options
from diloco.errors import DeadlineExceeded, DilocoError, ExitCode, Refused, Unreachable

if TYPE_CHECKING:
    from diloco.tls import TLS
    from diloco.v1 import coordinator_pb2 as pb
    from island.link import Link

Everywhere = dict[str, "Link"]
"""Connections to coordinators, by what to call each before what it says."""
R = TypeVar("R")
LOOK_S = 0.5
"""Seconds between two looks at a run that is to stop."""
NOT_READY = "The coordinator is not ready: "

_ADDRESS = click.argument("address", metavar="HOST:PORT")
_REASON = click.option("--reason", default="", metavar="TEXT", help="Why; it is logged, and islands are told.")
_HERE = click.option("--here", is_flag=True, help="Only this coordinator, where the run has several.")
_YES = click.option("--yes", is_flag=True, help="Do not ask.")


def reach(command: Callable[..., R]) -> Callable[..., R]:
    """Gives a command the options of how to reach a coordinator; it is called with `timeout_s` and `tls`."""
    command = click.option(
        "--tls-server-name", default="", metavar="NAME", help="Name in the coordinator's, where it is not the HOST."
    )(tls_options(command))
    return click.option(
        "--timeout", "timeout_s", default=5.0, show_default=True, help="Seconds to look for the coordinator."
    )(command)


@contextmanager
def linked(address: str, timeout_s: float, tls: TLS | None = None) -> Iterator[Link]:
    """A connection for one command; it says on stderr when it has to wait.

    Args:
        address: HOST:PORT.
        timeout_s: how long to look for the coordinator.
        tls: files to speak mutual TLS with.
    """
    from island.link import Link

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    link = Link(address, patience_s=timeout_s, say=lambda line: click.echo(line, err=True), tls=tls)
    try:
        yield link
    finally:
        link.close()


# -- looking --------------------------------------------------------------------------------------------------------


@click.command()
@_ADDRESS
@click.option("--fragment", type=click.IntRange(0), metavar="N", help="Only this fragment and its round.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@reach
def explain(address: str, fragment: int | None, as_json: bool, timeout_s: float, tls: TLS | None) -> None:
    """Say in words why a run is as it is: what its rounds wait for, for whom, and until when."""
    with linked(address, timeout_s, tls) as link:
        lines = _explained(link, fragment)
    click.echo(json.dumps({"lines": lines}, indent=2) if as_json else "\n".join(lines))


def _explained(link: Link, fragment: int | None = None) -> list[str]:
    from diloco.v1 import coordinator_pb2 as pb

    return list(link.explain(pb.ExplainRequest(fragment=fragment or 0, all=fragment is None)).lines)


@click.command()
@_ADDRESS
@click.option("--live", is_flag=True, help="Only whether the process lives, not whether it is ready.")
@reach
def health(address: str, live: bool, timeout_s: float, tls: TLS | None) -> int:
    """Ask whether a coordinator is ready, and say why not: for probes. Ends with 0 if it is, else with another code."""
    from diloco.framing import SERVICE

    with linked(address, timeout_s, tls) as link:
        reply = link.health("" if live else SERVICE)
        if reply.status == reply.SERVING:
            click.echo("alive" if live else "ready")
            return ExitCode.OK
        reasons = [line for line in _explained(link) if line.startswith(NOT_READY)]
    click.echo("\n".join(reasons) or f"{NOT_READY}{reply.ServingStatus.Name(reply.status)}.")
    return ExitCode.REFUSED


# -- doing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _each(address: str, timeout_s: float, here: bool, tls: TLS | None) -> Iterator[Everywhere]:
    """Connections to every coordinator of a run, or only to the one at an address, by what to call it."""
    from diloco.config import load_run

    with ExitStack() as stack:
        link = stack.enter_context(linked(address, timeout_s, tls))
        run = load_run(link.status().config_toml, "the coordinator").value.run
        found = {"": link}
        if run.coordinator_count > 1 and not here:
            others = {i: link.sibling(a) for i, a in enumerate(run.coordinators) if i != run.coordinator_index}
            for other in others.values():
                stack.callback(other.close)
            found = {f"coordinator {i}: ": others.get(i, link) for i in range(run.coordinator_count)}
        yield found


def _at(everywhere: Everywhere, act: Callable[[str, Link], None]) -> None:
    """Acts at each coordinator. Raises what the first that failed has raised, once all have been asked."""
    failed: list[DilocoError] = []
    for name, link in everywhere.items():
        try:
            act(name, link)
        except DilocoError as error:
            failed.append(type(error)(name + error.message))
            if len(failed) > 1:
                click.echo(f"{name}{error.message}", err=True)
    if failed:
        raise failed[0]


def _command(everywhere: Everywhere, verb: str, island: str = "", reason: str = "") -> None:
    from diloco.v1 import coordinator_pb2 as pb

    request = pb.CommandRequest(verb=verb, island_id=island, reason=reason)
    _at(everywhere, lambda name, link: click.echo(name + link.command(request).message))


def _confirm(question: str, yes: bool) -> None:
    """Asks before something that cannot be taken back."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is no terminal to ask on: say --yes")
    if not click.confirm(question):
        raise Refused("nothing was done")


@click.command()
@_ADDRESS
@_REASON
@_HERE
@reach
def pause(address: str, reason: str, here: bool, timeout_s: float, tls: TLS | None) -> None:
    """Hold a run: islands stop at their next step, and no round ends by a deadline."""
    with _each(address, timeout_s, here, tls) as everywhere:
        _command(everywhere, "pause", reason=reason)


@click.command()
@_ADDRESS
@_REASON
@_HERE
@reach
def resume(address: str, reason: str, here: bool, timeout_s: float, tls: TLS | None) -> None:
    """Let a paused run go on."""
    with _each(address, timeout_s, here, tls) as everywhere:
        _command(everywhere, "resume", reason=reason)


@click.command()
@_ADDRESS
@click.argument("island", required=False)
@click.option("--all", "everybody", is_flag=True, help="All islands.")
@_REASON
@_HERE
@reach
def drain(
    address: str, island: str | None, everybody: bool, reason: str, here: bool, timeout_s: float, tls: TLS | None
) -> None:
    """Ask an island to leave in good order: it finishes what is in flight, and no round waits for it."""
    if bool(island) == everybody:
        raise click.UsageError("name an island, or say --all")
    with _each(address, timeout_s, here, tls) as everywhere:
        _command(everywhere, "drain", island or "*", reason)


@click.command()
@_ADDRESS
@click.argument("island")
@_REASON
@_YES
@_HERE
@reach
def kick(address: str, island: str, reason: str, yes: bool, here: bool, timeout_s: float, tls: TLS | None) -> None:
    """End an island's lease now. What it has not sent is lost; `drain` is the gentle way."""
    _confirm(f"End the lease of island {island}, and lose what it has not sent?", yes)
    with _each(address, timeout_s, here, tls) as everywhere:
        _command(everywhere, "kick", island, reason)


@click.command()
@_ADDRESS
@_HERE
@reach
def snapshot(address: str, here: bool, timeout_s: float, tls: TLS | None) -> None:
    """Take a snapshot now."""
    with _each(address, timeout_s, here, tls) as everywhere:
        _command(everywhere, "snapshot")


@click.command()
@_ADDRESS
@_REASON
@_YES
@click.option("--wait", is_flag=True, help="Wait until the coordinator has ended.")
@click.option("--within", "within_s", default=3600.0, show_default=True, help="Seconds to wait at most.")
@_HERE
@reach
def stop(
    address: str, reason: str, yes: bool, wait: bool, within_s: float, here: bool, timeout_s: float, tls: TLS | None
) -> None:
    """End a run in good order: all islands leave, decided rounds are folded, a last snapshot is taken."""
    _confirm("Ask all islands to leave, and end the coordinator?", yes)
    with _each(address, timeout_s, here, tls) as everywhere:
        _command(everywhere, "stop", reason=reason)
        if wait:
            deadline = time.monotonic() + within_s
            _at(everywhere, lambda name, link: _until_gone(name, link.status, deadline))


def _until_gone(name: str, look: Callable[[], pb.StatusReply], deadline: float) -> None:
    """Waits until nobody answers any more; says whom the run waits for. Raises `DeadlineExceeded` past the deadline."""
    told: Any = None
    while time.monotonic() < deadline:
        try:
            reason = look().state.reason
        except Unreachable:
            click.echo(f"{name}the coordinator has ended")
            return
        if reason != told:
            click.echo(f"{name}the run is {reason}")
        told = reason
        time.sleep(LOOK_S)
    raise DeadlineExceeded(f"the coordinator still runs: {told}")
