"""`diloco coordinator` and `diloco ledger`."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diloco.errors import ConfigError, EnvironmentFault, ExitCode, InputError

if TYPE_CHECKING:
    import grpc

    from coordinator.ledger import Ledger
    from coordinator.run import Run
    from diloco.config import RunConfig

log = logging.getLogger("diloco.coordinator")


@click.command()
@click.argument("run_file", metavar="RUN.TOML")
@click.option("--state", required=True, metavar="DIR", help="Folder of the run's durable state.")
@click.option("--listen", required=True, metavar="HOST:PORT", help="Address to listen on; port 0 takes a free one.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting of the run.")
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
def coordinator(
    run_file: str, state: str, listen: str, overrides: tuple[str, ...], threads: int, network_filesystem: bool
) -> int:
    """Run the coordinator of one run, until SIGTERM or Ctrl-C.

    The connection is not encrypted: listen on an address that only your islands reach.
    """
    from diloco.cli import read_text
    from diloco.config import load_run

    config = load_run(read_text(run_file), run_file, overrides).value
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen {listen!r} is not HOST:PORT, for example 0.0.0.0:29400 or 127.0.0.1:0")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s")
    import torch

    from coordinator import filesystem

    filesystem.check(Path(state), allowed=network_filesystem)
    if threads:
        torch.set_num_threads(threads)
    return asyncio.run(serve(config, Path(state), listen))


async def serve(config: RunConfig, state: Path, listen: str) -> int:
    """Serves a run until a signal, then takes a last snapshot. Returns the exit code.

    Raises:
        EnvironmentFault: the address cannot be listened on, or the state folder cannot be used.
        RunMismatch: the state folder belongs to another run.
    """
    from coordinator.run import Run
    from coordinator.store import Store

    store = Store(state)
    try:
        run = Run(config, store, time.monotonic)
        server, port = await listen_on(run, listen)
        run.begin()
        address = f"{listen.rpartition(':')[0]}:{port}"
        store.files.write(state / "address", address.encode())
        log.info("run %s: coordinator listens on %s, state in %s", config.run.id, address, state)
        received = await _until_signal(run)
        log.info("stopping: %s", received.name)
        await server.stop(grace=1.0)
        await run.finish()
        return ExitCode.OK if received is signal.SIGTERM else ExitCode.INTERRUPTED
    finally:
        store.close()


async def listen_on(run: Run, listen: str) -> tuple[grpc.aio.Server, int]:
    """Starts a gRPC server for a run; returns it and its port."""
    import grpc

    from coordinator.service import OPTIONS, Service

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((Service(run).handler(),))
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"cannot listen on {listen}: the port is in use or the address is not this machine's; "
            "name another with --listen HOST:PORT"
        ) from error
    await server.start()
    return server, port


async def _until_signal(run: Run) -> signal.Signals:
    """Waits for SIGTERM or SIGINT, or for the run to fail."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def stop(which: signal.Signals) -> None:
        if not received.done():
            received.set_result(which)

    def fail(failed: asyncio.Future[None]) -> None:
        error = None if failed.cancelled() else failed.exception()
        if error and not received.done():
            received.set_exception(error)

    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, stop, which)
    run.failed.add_done_callback(fail)
    return await received


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
