"""`diloco preflight` against coordinators that serve, that are gone, and that serve something else."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.certificates import Authority
from diloco.errors import ExitCode, InputError, RunMismatch
from diloco.layout import Layout, TensorSpec
from diloco.settings import to_toml
from island.config import IslandConfig
from island.preflight import checks, finding
from island.preflight.command import preflight
from island.preflight.finding import bounded, ok
from tests.processes import command_here, free_port
from tests.support import configure, serving, visit

CHECKS = [
    "name", "port", "tls", "round trip", "clock", "run", "code", "model", "bandwidth", "mesh", "memory", "devices",
    "island.spool_dir", "island.log_dir", "metrics.dir", "tokenizer", "data", "packages",
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    """An island file."""
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 1000)
    path = tmp_path / "island.toml"
    path.write_text(
        f'[island]\nid = "tokyo"\nlog_dir = "{tmp_path}/logs"\n[data]\ntext = ["{tmp_path}/text.txt"]\n'
        f'[metrics]\ndir = "{tmp_path}/metrics"\n'
    )
    return str(path)


def look(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the checks by name."""
    ended = command_here(preflight, *arguments, "--json")
    assert not ended.err
    report = json.loads(ended.out)
    assert report["exit_code"] == ended.code
    return ended.code, {row["check"]: row for row in report["checks"]}


def test_all_is_well(file: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(configure()))
    with serving(configure(), tmp_path / "state") as host:
        code, rows = look(file, "--coordinator", host.address, "--run", str(tmp_path / "run.toml"))
        assert not host.ask(lambda run: run.state.members), "it does not join"
    assert code == ExitCode.OK
    assert list(rows) == CHECKS
    assert {name for name, row in rows.items() if row["verdict"] == "fail"} == set()
    assert not (tmp_path / "logs").exists() and not (tmp_path / "metrics").exists()


def test_it_is_a_table_for_people(file: str, tmp_path: Path) -> None:
    with serving(configure(), tmp_path / "state") as host:
        ended = command_here(preflight, file, "--coordinator", host.address)
    assert ended.code == ExitCode.OK
    lines = ended.out.splitlines()
    assert lines[0].split() == ["check", "found", "what", "to", "do"]
    assert [name for name in CHECKS if any(line.startswith(f"{name} ") for line in lines)] == CHECKS


def test_another_model_is_found_before_any_training(file: str, tmp_path: Path) -> None:
    with (
        serving(configure(), tmp_path / "state") as host,
        visit(host.address, "oslo", Layout([TensorSpec(f"layers.{i}.w", (3, 4)) for i in range(4)])) as oslo,
    ):
        oslo.join()
        code, rows = look(file, "--coordinator", host.address)
    assert code == ExitCode.REFUSED
    assert [name for name, row in rows.items() if row["verdict"] == "fail"] == ["model"]


def test_another_run_is_found_and_the_rest_is_looked_at(file: str, tmp_path: Path) -> None:
    with serving(configure(), tmp_path / "state") as host:
        code, rows = look(file, "--coordinator", host.address, "--set", "island.run_id=other")
    assert code == ExitCode.REFUSED
    assert rows["run"]["verdict"] == "fail" and set(rows) == set(CHECKS)


def test_nobody_answers(file: str, tmp_path: Path) -> None:
    gone = f"127.0.0.1:{free_port()}"
    code, rows = look(file, "--coordinator", gone)
    assert code == ExitCode.UNREACHABLE
    assert list(rows)[:3] == ["name", "port", "model"]
    assert rows["port"]["verdict"] == "fail" and "not known" in rows["model"]["found"]
    (tmp_path / "run.toml").write_text(to_toml(configure()))
    code, rows = look(file, "--coordinator", gone, "--run", str(tmp_path / "run.toml"))
    assert code == ExitCode.UNREACHABLE
    assert rows["memory"]["verdict"] == "ok" and "not compared" in rows["model"]["found"]


def test_no_address(file: str) -> None:
    code, rows = look(file)
    assert code == ExitCode.USAGE and rows["name"]["verdict"] == "fail"
    code, rows = look(file, "--coordinator", "somewhere")
    assert code == ExitCode.USAGE and "is not HOST:PORT" in rows["name"]["found"]


def test_one_end_without_tls(file: str, tmp_path: Path) -> None:
    with serving(configure(), tmp_path / "state", tls=Authority(tmp_path).issue("coordinator")) as host:
        code, rows = look(file, "--coordinator", host.address)
    assert code == ExitCode.UNREACHABLE
    assert rows["tls"]["verdict"] == "fail" and "speaks TLS" in rows["tls"]["found"]
    assert "bandwidth" not in rows


def test_the_first_failure_gives_the_exit_code(file: str, tmp_path: Path) -> None:
    bad = ("--set", "data.text=['/none']", "--set", "mesh.device=cuda")
    with serving(configure(), tmp_path / "state") as host:
        code, rows = look(file, "--coordinator", host.address, *bad)
    assert code == ExitCode.ENVIRONMENT
    assert (rows["devices"]["code"], rows["data"]["code"]) == (ExitCode.ENVIRONMENT, ExitCode.USAGE)


def test_every_coordinator_of_a_run_is_tried(file: str, tmp_path: Path) -> None:
    here, gone = free_port(), free_port()
    spread = configure(f"run.coordinators=['127.0.0.1:{here}', '127.0.0.1:{gone}']")
    with serving(spread, tmp_path / "state", listen=f"127.0.0.1:{here}") as host:
        code, rows = look(file, "--coordinator", host.address)
        assert code == ExitCode.UNREACHABLE
        assert rows["coordinator 1"]["verdict"] == "fail"
        with serving(spread, tmp_path / "other", listen=f"127.0.0.1:{gone}"):
            code, rows = look(file, "--coordinator", host.address)
    assert code == ExitCode.OK
    assert f"127.0.0.1:{gone}: median" in rows["coordinator 1"]["found"]


def test_a_line_that_cannot_be_probed_stops_nobody(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(link: object, round_trip_s: float) -> None:
        raise finding.DilocoError("the coordinator failed: UNIMPLEMENTED")

    monkeypatch.setattr(checks.network, "bandwidth", unknown)
    with serving(configure(), tmp_path / "state") as host:
        code, rows = look(file, "--coordinator", host.address)
    assert code == ExitCode.OK and rows["bandwidth"]["verdict"] == "warn"


# -- code that the run names ------------------------------------------------------------------------------------------

NAMED = ("model.source=tests.island.preflight.named:model", "inner.optimizer=tests.island.preflight.named:Optimizer")


def test_code_is_called_only_where_the_island_allows_it(file: str, tmp_path: Path) -> None:
    sys.modules.pop("tests.island.preflight.named", None)
    with serving(configure(*NAMED), tmp_path / "state") as host:
        code, rows = look(file, "--coordinator", host.address)
        assert "tests.island.preflight.named" not in sys.modules
        assert code == ExitCode.USAGE
        assert [name for name, row in rows.items() if row["verdict"] == "fail"] == ["code"]
        assert 'set island.code=["tests' in rows["code"]["found"] and "not called" in rows["model"]["found"]
        assert "memory" not in rows
        code, rows = look(file, "--coordinator", host.address, "--set", "island.code=['tests.island.*']")
    assert code == ExitCode.OK and [*rows] == CHECKS
    assert "allowed by island.code" in rows["code"]["found"]
    assert "4,096 values" in rows["model"]["found"] and "named:Optimizer can be" in rows["packages"]["found"]


def test_code_that_fails_is_a_line(file: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(configure(NAMED[0].replace(":model", ":broken"))))
    allow = ("--set", "island.code=['tests.island.*']")
    _, rows = look(file, "--run", str(tmp_path / "run.toml"), *allow)
    assert (rows["model"]["verdict"], rows["model"]["code"]) == ("fail", ExitCode.USAGE)
    assert "named:broken' failed with ZeroDivisionError" in rows["model"]["found"]
    _, rows = look(file, "--run", str(tmp_path / "run.toml"), *allow, "--set", "mesh.ranks=2", "--set", "mesh.tensor=2")
    assert rows["mesh"]["verdict"] == "fail" and "set mesh.tensor=1" in rows["mesh"]["found"]


def test_code_in_the_folder_is_found_as_ranks_find_it(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lying_here.py").write_text("from tests.island.preflight.named import model\n")
    (tmp_path / "run.toml").write_text(to_toml(configure("model.source=lying_here:model")))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    _, rows = look(file, "--run", str(tmp_path / "run.toml"), "--set", "island.code=['lying_here:*']")
    assert "4,096 values" in rows["model"]["found"]


def test_the_folders_that_are_named_are_looked_at() -> None:
    settings = {"island": {"id": "a", "log_dir": "l"}, "metrics": {"dir": "m"}, "data": {"cache_dir": "c"}}
    layout = Layout([TensorSpec("w", (100,))])
    found = [*checks.folders(IslandConfig.model_validate(settings), layout)]
    assert found[0] == ("island.spool_dir", "", 800)
    assert [row[:2] for row in found[1:]] == [("island.log_dir", "l"), ("metrics.dir", "m"), ("data.cache_dir", "c")]


def test_a_mesh_that_does_not_fit_is_a_line(file: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(configure()))
    mesh = ("--set", "mesh.ranks=3", "--set", "mesh.tensor=3", "--set", "data.batch_sequences=6")
    _, rows = look(file, "--run", str(tmp_path / "run.toml"), *mesh)
    assert (rows["mesh"]["verdict"], rows["mesh"]["code"]) == ("fail", ExitCode.USAGE)
    assert "mesh.tensor (3) must divide model.heads (4)" in rows["mesh"]["found"] and "memory" not in rows


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_is_left_behind() -> None:
    end = threading.Event()
    found = bounded("spool", 0.05, lambda: ok("spool", str(end.wait(30))))
    end.set()
    assert (found.verdict, found.code) == ("fail", ExitCode.TIMEOUT)
    assert found.found == "did not end within 0.05 s"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunMismatch("another run"), ExitCode.REFUSED),
        (InputError("no file"), ExitCode.USAGE),
        (PermissionError(13, "Permission denied", "/spool"), ExitCode.ENVIRONMENT),
    ],
)
def test_a_foreseen_error_is_a_failure(error: Exception, code: int) -> None:
    def work() -> finding.Finding:
        raise error

    found = bounded("x", 30.0, work)
    assert (found.verdict, found.code, found.found) == ("fail", code, str(error))
    assert found.advice


def test_an_unforeseen_error_is_none() -> None:
    def work() -> finding.Finding:
        raise ZeroDivisionError("a fault of our own")

    with pytest.raises(ZeroDivisionError):
        bounded("x", 30.0, work)
