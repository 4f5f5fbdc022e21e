"""`diloco bench`: what each stage does beside what this machine, or this link, can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diloco.cli import tls_options
from diloco.errors import InputError

if TYPE_CHECKING:
    from benchmarks.record import Record
    from diloco.tls import TLS
    from island.config_mesh import AnchorPolicy

Say = Callable[[str], None]
Records = Iterable["Record"]

_STATE = click.option("--state", metavar="DIR", help="Where the coordinator keeps its state; a temporary folder else.")
_SECURE = click.option("--tls", "encrypted", is_flag=True, help="Over mutual TLS, with certificates for this once.")
_CODECS = click.option(
    "--codec", "codecs", multiple=True, metavar="NAME", help="Only this one; may be given repeatedly."
)


def _elements(mebi: int) -> Callable[[Any], Any]:
    return click.option(
        "--elements",
        type=click.IntRange(1),
        default=mebi * 2**20,
        show_default=f"{mebi} Mi",
        metavar="N",
        help="fp32 values.",
    )


@click.group()
def bench() -> None:
    """Measure this machine, or a link: each stage beside its limit, taken in the same run.

    Prints a table of records; --json writes them as a list. A record has a name, a value, a unit, the limit in the same
    unit, and the ratio of the two; those of codecs also codec, direction and bits_per_parameter.
    """


def _measures(work: Callable[..., Records]) -> Callable[..., None]:
    """Makes a command of what yields records: with --json and --threads, a line on its progress, and a table."""

    @click.option("--json", "file", metavar="FILE", help="Write the records to this file.")
    @click.option("--threads", type=click.IntRange(1), metavar="N", help="Threads of each process; all cores else.")
    @wraps(work)
    def command(*args: Any, file: str | None, threads: int | None, **options: Any) -> None:
        path = Path(file) if file else None
        if path and not path.parent.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {path.parent}")
        import torch

        from benchmarks.record import report

        if threads:
            torch.set_num_threads(threads)
        found = []
        with _alone() as say:
            for record in work(*args, say=say, threads=threads or 0, **options):
                found.append(record)
                say(f"{record.name}: {record.value:.3g} {record.unit}")
        if found:
            report(found, path)

    return command


@contextmanager
def _alone() -> Iterator[Say]:
    """Ends what the benchmark has started, however it ends itself; shows a line of progress on a terminal's stderr."""
    from tempfile import TemporaryDirectory

    from rich.console import Console
    from rich.markup import escape

    from wan.processes import Processes

    console = Console(stderr=True)
    with TemporaryDirectory(prefix="diloco-bench-") as folder, Processes(Path(folder)):
        if not console.is_terminal:
            yield lambda line: click.echo(line, err=True)
            return
        with console.status("starting") as status:
            yield lambda line: status.update(escape(line))


@bench.command()
@_elements(64)
@_CODECS
@click.option("--eager", is_flag=True, help="Without the compiled kernels.")
@_measures
def codec(say: Say, threads: int, elements: int, codecs: tuple[str, ...], eager: bool) -> Records:
    """Encoding and decoding, beside copying the same values."""
    from benchmarks.codec import measure
    from diloco.codec import native

    native.ENABLED = native.ENABLED and not eager
    return measure(elements, codecs)


@bench.command()
@_elements(64)
@click.option("--contributions", type=click.IntRange(1), default=8, show_default=True, metavar="M", help="To fold.")
@click.option("--up", default="int8", show_default=True, metavar="CODEC", help="Of contributions.")
@click.option("--down", default="int8", show_default=True, metavar="CODEC", help="Of the update.")
@_measures
def outer(say: Say, threads: int, elements: int, contributions: int, up: str, down: str) -> Records:
    """The coordinator's outer step, beside the memory traffic it needs."""
    from benchmarks.outer import measure

    return measure(elements, contributions, up, down)


@bench.command()
@_elements(16)
@click.option("--listen", metavar="HOST:PORT", help="Serve another machine that connects, until Ctrl-C.")
@click.option("--connect", metavar="HOST:PORT", help="Measure the link to a machine that listens.")
@_STATE
@_SECURE
@tls_options
@_measures
def transport(
    say: Say,
    threads: int,
    elements: int,
    listen: str | None,
    connect: str | None,
    state: str | None,
    encrypted: bool,
    tls: TLS | None,
) -> Records:
    """Bulk streams of one island and of eight, beside bare gRPC streams; on this machine, or on a link of your own.

    For a link say --listen 0.0.0.0:PORT on one machine, and --connect HOST:PORT on the other. It takes this port and
    the next one. For mutual TLS on it give both ends their --tls-cert, --tls-key and --tls-ca; on this machine --tls.
    """
    if listen and connect:
        raise click.UsageError("--listen is for one machine and --connect for the other")
    from benchmarks import reach

    if listen:
        reach.listen(listen, tls, lambda line: click.echo(line, err=True))
    if connect:
        return reach.connect(connect, elements, tls)
    from benchmarks.transport import measure

    return measure(max(2, elements // 2**18), state=Path(state) if state else None, encrypted=encrypted)


@bench.command()
@_elements(64)
@click.option("--codec", "name", default="int8", show_default=True, metavar="NAME", help="Of wire.up and wire.down.")
@click.option("--fragments", type=click.IntRange(1), default=1, show_default=True, help="Parts in flight at once.")
@click.option("--link-mbps", type=click.FloatRange(0), default=0.0, help="Over shaped lines; needs root.")
@_STATE
@_SECURE
@_measures
def sync(
    say: Say,
    threads: int,
    elements: int,
    name: str,
    fragments: int,
    link_mbps: float,
    state: str | None,
    encrypted: bool,
) -> Records:
    """A whole sync of two islands, beside its slowest stage; or on a shaped line, beside the time its bytes take."""
    from benchmarks.sync import measure

    return measure(
        elements,
        codec=name,
        fragments=fragments,
        threads=threads,
        encrypted=encrypted,
        state=Path(state) if state else None,
        link_mbps=link_mbps,
        say=say,
    )


@bench.command()
@_elements(16)
@click.option("--link-mbps", type=click.FloatRange(0), default=0.0, help="Over shaped lines; needs root.")
@_measures
def peers(say: Say, threads: int, elements: int, link_mbps: float) -> Records:
    """A sync of two sites by this system, torchft's DiLoCo and hivemind's averager, beside the fastest of them."""
    from benchmarks.peers.measure import measure

    return measure(elements, link_mbps=link_mbps, say=say)


@bench.command()
@click.option("--parameters", type=click.IntRange(4096), default=4 * 2**20, show_default="4 Mi", metavar="N")
@_measures
def islands(say: Say, threads: int, parameters: int) -> Records:
    """A coordinator of 1, 8 and 64 islands, beside one of a single island."""
    return _islands(parameters)


def _islands(parameters: int) -> Iterator[Record]:
    from benchmarks.islands import records
    from benchmarks.record import Record

    yield from (Record(**row) for row in records(parameters))


@bench.command()
@click.option("--dim", type=click.IntRange(64), default=256, show_default=True, metavar="N", help="Width of the model.")
@click.option(
    "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Of the island; 2 or more are FSDP."
)
@click.option(
    "--anchors", type=click.Choice(["cpu", "device"]), default="cpu", show_default=True, help="Where anchors are kept."
)
@_measures
def overhead(say: Say, threads: int, dim: int, ranks: int, anchors: AnchorPolicy) -> Records:
    """A training step of an island that does not sync, beside one outside of any run; and what memory it takes."""
    from benchmarks.overhead import measure

    return measure(dim, ranks=ranks, threads=threads, anchors=anchors, say=say)


@bench.command("all")
@click.option("--elements", type=click.IntRange(1), metavar="N", help="fp32 values of each; its own default else.")
@_measures
def everything(say: Say, threads: int, elements: int | None) -> Iterator[Record]:
    """All of them on this machine, one after the other; transport and sync plain and over TLS."""
    from benchmarks import codec, outer, overhead, sync, transport

    large, small = elements or 64 * 2**20, elements or 16 * 2**20
    yield from codec.measure(large)
    yield from outer.measure(large)
    for secure in (False, True):
        yield from transport.measure(max(2, small // 2**18), encrypted=secure)
        yield from sync.measure(large, threads=threads, encrypted=secure, say=say)
    yield from overhead.measure(say=say)
    yield from _islands(min(small, 4 * 2**20))
