"""The command line: a message and an exit code for every failure, a traceback only for a surprise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest

import diloco.cli
from diloco.errors import TABLE, DilocoError, ExitCode

Diloco = Callable[..., tuple[int, str, str]]


@pytest.fixture
def diloco_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Diloco:
    """Runs `diloco ARGS` as the console does: (exit code, stdout, stderr)."""
    monkeypatch.delenv("DILOCO_TRACEBACK", raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["diloco", *args])
        with pytest.raises(SystemExit) as leave:
            diloco.cli.main()
        out, err = capsys.readouterr()
        assert isinstance(leave.value.code, int)
        return leave.value.code, out, err

    return run


def raising(error: BaseException) -> click.Command:
    """A command that ends with `error`."""

    @click.command()
    def command() -> None:
        raise error

    return command


@pytest.fixture
def run_toml(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text('preset = "streaming"\n[run]\nid = "r"\n[outer]\nlr = 0.5\n')
    return str(path)


@pytest.fixture
def island_toml(tmp_path: Path) -> str:
    path = tmp_path / "island.toml"
    path.write_text('[island]\nid = "alpha"\n')
    return str(path)


def test_check_accepts_a_run_and_an_island(diloco_: Diloco, run_toml: str, island_toml: str) -> None:
    assert diloco_("config", "check", run_toml) == (0, f"{run_toml}: a correct RunConfig\n", "")
    assert diloco_("config", "check", island_toml) == (0, f"{island_toml}: a correct IslandConfig\n", "")


def test_check_reports_every_fault_at_once(diloco_: Diloco, run_toml: str) -> None:
    code, out, err = diloco_("config", "check", run_toml, "--set", "model.dmi=3", "--set", "outer.lr=-1")
    assert (code, out) == (ExitCode.USAGE, "")
    assert err.startswith("error: --set: ")
    assert "unknown key 'model.dmi'; did you mean 'dim'?" in err
    assert "'outer.lr': input should be greater than 0, not -1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[run\n", "not valid TOML: "),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[model]\ndim = 64\n", "needs exactly one of the tables [island], [run]"),
        (b'[run]\nid = "r"\n[island]\nid = "a"\n', "needs exactly one of the tables [island], [run]"),
        (b"run = 3\n", "'run': input should be a valid dictionary"),
        (b"[run]\n", "'run.id' is required"),
    ],
)
def test_a_file_of_the_wrong_kind_is_an_error(content: bytes, message: str, diloco_: Diloco, tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(content)
    code, out, err = diloco_("config", "check", str(path))
    assert (code, out) == (ExitCode.USAGE, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_missing_file_or_a_folder_is_an_error(command: str, diloco_: Diloco, tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert diloco_("config", command, str(missing)) == (
        ExitCode.USAGE,
        "",
        f"error: cannot read {missing}: No such file or directory\n",
    )
    code, _, err = diloco_("config", command, str(tmp_path))
    assert (code, err) == (ExitCode.USAGE, f"error: cannot read {tmp_path}: Is a directory\n")


def test_show_says_where_every_value_comes_from(diloco_: Diloco, run_toml: str) -> None:
    code, out, err = diloco_("config", "show", run_toml, "--json", "--set", "run.steps=200")
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown["run.steps"] == {"value": 200, "origin": "--set"}
    assert shown["outer.lr"] == {"value": 0.5, "origin": run_toml}
    assert shown["sync.fragments"] == {"value": 2, "origin": "preset streaming"}
    assert shown["model.dim"] == {"value": 64, "origin": "default"}


def test_show_is_a_table_with_values_as_they_are(diloco_: Diloco, run_toml: str) -> None:
    code, out, _ = diloco_("config", "show", run_toml, "--set", "sync.embeddings=['[red]*', ':smile:']")
    assert code == 0
    [row] = [line for line in out.splitlines() if line.strip().startswith("sync.embeddings")]
    assert re.split(r" {2,}", row.strip()) == ["sync.embeddings", '["[red]*", ":smile:"]', "--set"]


def test_a_wrong_command_line_shows_the_usage(diloco_: Diloco) -> None:
    code, out, err = diloco_("confg")
    assert (code, out) == (ExitCode.USAGE, "")
    assert err.startswith("error: No such command 'confg'.")
    assert "Usage: diloco " in err

    code, _, err = diloco_("config", "check")
    assert code == ExitCode.USAGE
    assert err == "error: Missing argument 'FILE'.\nUsage: diloco config check [OPTIONS] FILE\n"

    code, _, err = diloco_("config", "show", "--jason", "x")
    assert code == ExitCode.USAGE
    assert err.startswith("error: No such option")


def test_without_a_command_the_help_is_shown_once(diloco_: Diloco) -> None:
    code, out, err = diloco_("config")
    assert (code, out) == (ExitCode.USAGE, "")
    assert err.startswith("Usage: diloco config")
    assert err.count("Usage:") == 1


def test_help_lists_the_commands(diloco_: Diloco, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = entry_points(group="diloco.commands", name="config")
    monkeypatch.setattr(diloco.cli, "entry_points", lambda group: ours)
    code, out, err = diloco_("--help")
    assert (code, err) == (0, "")
    assert "Check and show the settings of a run or an island." in out
    code, out, _ = diloco_("--version")
    assert (code, out.startswith("diloco, version ")) == (0, True)


@pytest.mark.parametrize("kind", TABLE)
def test_every_error_ends_as_its_message_and_its_exit_code(
    kind: type[DilocoError], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DILOCO_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as leave:
        diloco.cli.run(raising(kind("what happened", island="alpha")), [])
    assert leave.value.code == TABLE[kind].exit_code
    assert capsys.readouterr() == ("", "error: what happened\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupt_is_no_traceback(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        diloco.cli.run(raising(error), [])
    assert leave.value.code == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.strip() == "error: interrupted"


def test_a_traceback_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_TRACEBACK", "1")
    with pytest.raises(SystemExit) as leave:
        diloco.cli.run(raising(DilocoError("what happened")), [])
    err = capsys.readouterr().err
    assert leave.value.code == ExitCode.INTERNAL
    assert err.startswith("Traceback")
    assert err.endswith("error: what happened\n")


def test_what_nobody_foresaw_ends_as_internal_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        diloco.cli.run(raising(ZeroDivisionError("surprise")), [])
    assert leave.value.code == ExitCode.INTERNAL
    assert "ZeroDivisionError: surprise" in capsys.readouterr().err


def test_run_returns_what_the_command_returns() -> None:
    @click.command()
    @click.argument("number", type=int)
    def command(number: int) -> int:
        return number

    assert diloco.cli.run(command, ["7"]) == 7
