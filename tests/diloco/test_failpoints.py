"""Steps at which a test can have a process killed: what a setting asks for, and where they are in the code."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco import failpoints
from diloco.errors import ConfigError, ExitCode
from diloco.failpoints import COORDINATOR, ISLAND, arm, failpoint, trap
from island import worker
from tests.processes import diloco_here

ROOT = Path(__file__).parents[2]


def used(folder: str) -> Iterator[str]:
    """The names that are passed in a folder's files."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "failpoint":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno} passes no name"
                yield str(node.args[0].value)


@pytest.mark.parametrize(("folder", "names"), [("coordinator", COORDINATOR), ("island", ISLAND)])
def test_every_step_is_at_one_place(folder: str, names: dict[str, str]) -> None:
    assert Counter(used(folder)) == Counter(names.keys())


def test_no_other_room_has_steps() -> None:
    assert not [*used("diloco"), *used("wan")]
    assert not set(COORDINATOR) & set(ISLAND)


@pytest.mark.parametrize(
    ("setting", "at", "signal"),
    [("mixed", 1, "SIGKILL"), ("mixed:3", 3, "SIGKILL"), ("mixed:2:stop", 2, "SIGSTOP"), ("mixed::stop", 1, "SIGSTOP")],
)
def test_it_strikes_once_at_the_passing_that_is_named(setting: str, at: int, signal: str) -> None:
    struck: list[tuple[int, str]] = []
    passed: list[int] = []
    arm(trap(setting, lambda which: struck.append((len(passed), which))))
    try:
        for passing in range(1, 6):
            passed.append(passing)
            failpoint("ready")
            failpoint("mixed")
    finally:
        arm(None)
    failpoint("mixed")
    assert struck == [(at, signal)]


def test_nothing_is_armed_without_a_setting() -> None:
    assert trap("", lambda _: pytest.fail("struck")) is None
    assert failpoints._hook is None
    failpoint("mixed")


@pytest.mark.parametrize("setting", ["mxed", "mixed:0", "mixed:-1", "mixed:x", "mixed:1:go", "mixed:1:stop:2", ":1"])
def test_other_settings_are_errors(setting: str) -> None:
    with pytest.raises(ConfigError, match="DILOCO_FAILPOINT"):
        trap(setting, lambda _: None)


def test_a_coordinator_refuses_a_step_that_it_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text('[run]\nid = "x"\nsteps = 500\n')
    monkeypatch.setenv(failpoints.VARIABLE, "nowhere")
    state = tmp_path / "state"
    ended = diloco_here("coordinator", str(tmp_path / "run.toml"), "--state", str(state), "--listen", "127.0.0.1:0")
    assert ended.code == ExitCode.USAGE
    assert "there is no step 'nowhere'" in ended.err
    assert not state.exists()


def test_a_rank_refuses_a_step_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "island.toml").write_text('[island]\nid = "x"\ncoordinator = "127.0.0.1:1"\n')
    monkeypatch.setenv(failpoints.VARIABLE, "nowhere")
    monkeypatch.setattr(worker, "Departure", lambda: None)  # it would take this process's signals
    assert worker.main(str(tmp_path / "island.toml")) == ExitCode.USAGE
    assert "there is no step 'nowhere'" in capsys.readouterr().err
