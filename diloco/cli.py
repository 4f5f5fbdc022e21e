"""The `diloco` command: finds its subcommands by entry point, turns every error into a message and exit code.

Subcommands live in the rooms above and register in the entry-point group `diloco.commands`; settings classes
register in `diloco.configs` under the table that tells their files apart. Nothing here imports those rooms.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from diloco.errors import ConfigError, DilocoError, ExitCode, InputError, exit_code
from diloco.settings import Resolved, Settings, parse
from diloco.tls import TLS

R = TypeVar("R")
_PR_SET_PDEATHSIG = 1


class _Lazy(click.Group):
    """A group whose commands are imported only when they are called: `--help` stays quick."""

    def _found(self) -> dict[str, EntryPoint]:
        return {e.name: e for e in entry_points(group="diloco.commands")}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._found())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._found().get(cmd_name)
        return entry.load() if entry else None


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("diloco"), prog_name="diloco")
def cli() -> None:
    """Train one model on islands of GPUs that hardly talk.

    Start with `diloco demo`. A real run is one `diloco coordinator` in the cloud and one `diloco island` per
    data centre.
    """


def read_text(path: str | Path) -> str:
    """The text of a file a user named. Raises `InputError` where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: not UTF-8 text") from error


def tls_options(command: Callable[..., R]) -> Callable[..., R]:
    """Gives a command the options of mutual TLS; it is called with `tls`, the files, or None where there are none."""

    @click.option("--tls-cert", default="", metavar="FILE", help="Certificate to show (PEM); both ends show one then.")
    @click.option("--tls-key", default="", metavar="FILE", help="Private key of --tls-cert (PEM).")
    @click.option("--tls-ca", default="", metavar="FILE", help="Authorities that sign the other end's certificate.")
    @wraps(command)
    def with_tls(*args: Any, tls_cert: str, tls_key: str, tls_ca: str, tls_server_name: str = "", **others: Any) -> R:
        given = [bool(path) for path in (tls_cert, tls_key, tls_ca)]
        if any(given) is not all(given) or (tls_server_name and not all(given)):
            raise click.UsageError("--tls-cert, --tls-key and --tls-ca go together: name three files, or none")
        tls = TLS(cert=tls_cert, key=tls_key, ca=tls_ca, server_name=tls_server_name) if all(given) else None
        return command(*args, tls=tls, **others)

    return with_tls


def load_any(path: str, overrides: tuple[str, ...]) -> Resolved[Settings]:
    """Reads a run file or an island file, told apart by its [run] or [island] table."""
    text = read_text(path)
    kinds = {e.name: e for e in entry_points(group="diloco.configs")}
    table = parse(text, path)
    found = [name for name in kinds if name in table]
    if len(found) != 1:
        raise ConfigError(f"{path}: needs exactly one of the tables {', '.join(f'[{k}]' for k in sorted(kinds))}")
    return kinds[found[0]].load()(text, path, overrides)  # type: ignore[no-any-return]


@click.group()
def config() -> None:
    """Check and show the settings of a run or an island."""


_SET = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting.")


@config.command()
@click.argument("file")
@_SET
def check(file: str, overrides: tuple[str, ...]) -> None:
    """Check FILE (a run.toml or an island.toml) and say what is wrong with it."""
    kind = type(load_any(file, overrides).value).__name__
    click.echo(f"{file}: a correct {kind}")


@config.command()
@click.argument("file")
@_SET
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def show(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show every setting of FILE as resolved, and where each value comes from."""
    rows = list(load_any(file, overrides).rows())
    if as_json:
        click.echo(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "origin", box=None)
    for key, value, origin in rows:
        table.add_row(key, json.dumps(value), origin)
    Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False).print(table)


def fail(message: str, code: int) -> NoReturn:
    """Prints `message` on stderr and ends the process with `code`."""
    click.echo(f"error: {message}", err=True)
    sys.stderr.flush()
    raise SystemExit(code)


def run(command: click.Command, args: list[str] | None = None) -> Any:
    """Runs a command; every foreseen failure ends as a message and a documented exit code.

    What nobody foresaw ends as a traceback and `ExitCode.INTERNAL`; DILOCO_TRACEBACK=1 shows one for every
    error.
    """
    try:
        return command.main(args=args, prog_name="diloco", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", ExitCode.INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        raise SystemExit(ExitCode.USAGE) from None
    except click.UsageError as error:
        usage = f"\n{error.ctx.get_usage()}" if error.ctx else ""
        fail(error.format_message() + usage, ExitCode.USAGE)
    except click.ClickException as error:
        fail(error.format_message(), ExitCode.USAGE)
    except DilocoError as error:
        if os.environ.get("DILOCO_TRACEBACK"):
            traceback.print_exc()
        fail(error.message, exit_code(error))
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(ExitCode.INTERNAL) from error


def _tie_to_parent() -> None:
    """Ends this process by SIGTERM when the one that started it is gone, where that one asked for it (Linux)."""
    parent = os.environ.pop("DILOCO_PARENT_PID", "")
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            raise SystemExit(ExitCode.INTERRUPTED)


def main() -> None:
    """Entry point of the console command."""
    _tie_to_parent()
    result = run(cli)
    raise SystemExit(result if isinstance(result, int) else ExitCode.OK)
