"""`diloco coordinator` and `diloco ledger`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diloco import failpoints
from diloco.cli import read_text, tls_options
from diloco.errors import ConfigError, EnvironmentFault, ExitCode, InputError

if TYPE_CHECKING:
    from coordinator.front import Front
    from coordinator.gate import Gate
    from coordinator.health import Health
    from coordinator.ledger import Ledger
    from coordinator.run import Run
    from coordinator.tls import Secured
    from diloco.config import RunConfig
    from diloco.tls import TLS

log = logging.getLogger("diloco.coordinator")
GRACE_S = 10.0
LAST_S = 600.0
"""Longest that a last snapshot may take."""


@click.command()
@click.argument("run_file", metavar="RUN.TOML")
@click.option("--state", required=True, metavar="DIR", help="Folder of the run's durable state.")
@click.option("--listen", required=True, metavar="HOST:PORT", help="Address to listen on; port 0 takes a free one.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting of the run.")
@click.option(
    "--index",
    type=click.IntRange(0),
    metavar="K",
    help="Which of run.coordinators this one is; 0 where there is one.",
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="CPU threads of the outer step; 0 takes all cores.",
)
@click.option(
    "--network-filesystem",
    is_flag=True,
    help="Take a --state on a network file system, though a ledger there can be lost.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0),
    default=GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long transfers under way may take to finish when it is to end.",
)
@tls_options
def coordinator(
    run_file: str,
    state: str,
    listen: str,
    overrides: tuple[str, ...],
    index: int | None,
    threads: int,
    network_filesystem: bool,
    grace_s: float,
    tls: TLS | None,
) -> int:
    """Run the coordinator of one run, or one of several, until SIGTERM, Ctrl-C or `diloco stop`.

    Without --tls-cert, --tls-key and --tls-ca nothing is encrypted and nobody is authenticated: listen on an address
    that only your islands reach.
    """
    from diloco.config import load_run

    chosen = () if index is None else (f"run.coordinator_index={index}",)
    config = load_run(read_text(run_file), run_file, (*overrides, *chosen)).value
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen {listen!r} is not HOST:PORT, for example 0.0.0.0:29400 or 127.0.0.1:0")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s")
    from coordinator import filesystem
    from coordinator.tls import server
    from diloco import allocator

    secured = server(tls)
    allocator.keep(heap_bytes=allocator.MESSAGE_BYTES, arenas=allocator.ARENAS)
    import torch

    filesystem.check(Path(state), allowed=network_filesystem)
    if threads:
        torch.set_num_threads(threads)
    return asyncio.run(serve(config, Path(state), listen, grace_s, secured))


async def serve(
    config: RunConfig,
    state: Path,
    listen: str,
    grace_s: float = GRACE_S,
    secured: Secured | None = None,
) -> int:
    """Serves a run until a signal, or until it was told to stop and all islands have left. Returns the exit code.

    Then nobody new is let in, transfers under way may finish within `grace_s`, decided rounds are folded within as long
    again, and a last snapshot is taken. A second signal ends the process at once, which is safe: the ledger has
    everything that was acknowledged, and files get their names only when they are whole.

    Raises:
        ConfigError: `DILOCO_FAILPOINT` names no step.
        EnvironmentFault: the address cannot be listened on, or the state folder cannot be used.
        RunMismatch: the state folder belongs to another run.
    """
    from coordinator.gate import Gate
    from coordinator.health import Health
    from coordinator.run import Run
    from coordinator.store import Store

    setting = os.environ.get(failpoints.VARIABLE, "")
    failpoints.arm(failpoints.trap(setting, lambda which: os.kill(os.getpid(), signal.Signals[which])))
    store = Store(state, disk_bytes=config.limits.disk_bytes)
    try:
        run = Run(config, store, time.monotonic)
        health, gate = Health(run, time.monotonic), Gate()
        server, port = await listen_on(run, listen, health, gate, secured)
        run.begin()
        health.begin()
        address = f"{listen.rpartition(':')[0]}:{port}"
        store.files.write(state / "address", address.encode())
        which = f"coordinator {config.run.coordinator_index}" if config.run.coordinators else "coordinator"
        log.info("run %s: %s listens on %s, state in %s", config.run.id, which, address, state)
        signals = _signals()
        received = await _until_over(run, signals)
        code = ExitCode.INTERRUPTED if received is signal.SIGINT else ExitCode.OK
        log.info("stopping: %s", received.name if received else "every island has left")
        ending = asyncio.create_task(end(run, server, health, gate, grace_s))
        again = asyncio.create_task(signals.get())
        await asyncio.wait({ending, again}, timeout=2 * grace_s + LAST_S, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            log.warning("stopping at once%s", f": {again.result().name} again" if again.done() else "")
            logging.shutdown()
            os._exit(code)
        again.cancel()
        await ending
        return code
    finally:
        store.close()


async def listen_on(
    run: Run,
    listen: str,
    health: Health | None = None,
    gate: Gate | None = None,
    secured: Secured | None = None,
) -> tuple[Front, int]:
    """Opens a port for a run; returns what is behind it, and the port."""
    import grpc

    from coordinator.front import Front
    from coordinator.gate import Gate
    from coordinator.health import Health
    from coordinator.lanes import Lanes
    from coordinator.service import OPTIONS, Service
    from diloco.framing import SERVICE

    server = grpc.aio.server(options=OPTIONS)
    health = health or Health(run, time.monotonic)
    await health.serve(server)
    front = Front(secured.lanes if secured else None)
    methods = Service(run, health, gate or Gate(), front.origin).methods()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    here = "127.0.0.1:0"
    behind = server.add_secure_port(here, secured.grpc) if secured else server.add_insecure_port(here)
    try:
        return front, await front.begin(listen, server, behind, Lanes(methods))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot listen on {listen}: the port is in use or the address is not this machine's; "
            "name another with --listen HOST:PORT"
        ) from error


async def end(run: Run, server: Front, health: Health, gate: Gate, grace_s: float) -> None:
    """Ends a coordinator in good order. Raises what made the run fail meanwhile."""
    await health.close()
    gate.close()
    await run.hurry()
    if not await gate.quiet(grace_s):
        log.warning("%d transfers are cut off after %g s; islands go on where they stopped", gate.under_way, grace_s)
    await server.stop(grace=1.0)
    if not await run.settle(grace_s):
        log.warning("rounds are decided and not folded after %g s; they are when it is started again", grace_s)
    await run.finish()
    if run.failed.done():
        run.failed.result()


def _signals() -> asyncio.Queue[signal.Signals]:
    """SIGTERM and SIGINT as they come."""
    loop, received = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()
    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, received.put_nowait, which)
    return received


async def _until_over(run: Run, signals: asyncio.Queue[signal.Signals]) -> signal.Signals | None:
    """Waits for a signal, and returns it; or for a run that was told to stop to be left, or for the run to fail."""
    received, stopped = asyncio.create_task(signals.get()), asyncio.create_task(run.stopped.wait())
    waits: set[asyncio.Future[Any]] = {received, stopped, run.failed}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in (received, stopped):
        task.cancel()
    if run.failed.done():
        run.failed.result()
    return received.result() if received.done() and not received.cancelled() else None


@click.group()
def ledger() -> None:
    """Look into a coordinator's ledger: show it, export it, verify that it folds to the same bits."""


def _open_ledger(state: str) -> Ledger:
    from coordinator.ledger import Ledger

    path = Path(state) / "ledger.sqlite"
    if not path.is_file():
        raise InputError(f"no ledger at {path}: name the --state folder of a coordinator")
    return Ledger(path)


def _rows(state: str) -> Iterator[dict[str, Any]]:
    opened = _open_ledger(state)
    try:
        for row in opened.read():
            yield {"seq": row.seq, "at": row.at, "kind": row.kind, **row.body}
    finally:
        opened.close()


@ledger.command()
@click.argument("state")
def show(state: str) -> None:
    """Print every fact in the ledger of STATE, a line each, for people."""
    for row in _rows(state):
        at = datetime.fromtimestamp(row["at"], UTC).isoformat(timespec="milliseconds")
        left_out = {"seq", "at", "kind", "pieces", "tensors", "config_toml"}
        values = " ".join(f"{key}={json.dumps(value)}" for key, value in row.items() if key not in left_out)
        click.echo(f"{row['seq']:>8}  {at}  {row['kind']:<10} {values}")


@ledger.command()
@click.argument("state")
def export(state: str) -> None:
    """Print the ledger of STATE as JSON lines."""
    for row in _rows(state):
        click.echo(json.dumps(row))


@ledger.command()
@click.argument("state")
def verify(state: str) -> None:
    """Fold again what the oldest snapshot in STATE does not hold, and compare the digests with the ledger's.

    Works beside a running coordinator as well, for the rounds that are kept when it comes to them.
    """
    from coordinator.recovery import verify as refold

    opened = _open_ledger(state)
    try:
        count = 0
        for fragment, version, digest in refold(opened, Path(state)):
            click.echo(f"fragment {fragment} version {version}: {digest} agrees")
            count += 1
        click.echo(f"{count} rounds folded again; all digests agree")
    finally:
        opened.close()


@ledger.command()
@click.argument("url")
@click.argument("state")
def restore(url: str, state: str) -> None:
    """Make a state folder STATE from the newest complete snapshot at URL.

    URL is `snapshot.url` of the run, or the run's folder in it. Start a coordinator on STATE with the same run file;
    islands join it again. What was committed after the snapshot is lost: make sure that the old coordinator is.
    """
    from coordinator.copies import restore as fetch

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    snapshot = fetch(url, Path(state), time.time())
    versions = ", ".join(str(outer.version) for outer in snapshot.outers)
    click.echo(f"run {snapshot.config.run.id} restored to {state}; versions of its fragments: {versions}")
