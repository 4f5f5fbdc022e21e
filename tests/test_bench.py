"""`diloco bench`: records as scripts read them, through real processes, of which none is left behind."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overhead, shaped
from benchmarks.certificates import Authority
from benchmarks.cli import bench
from benchmarks.peers import measure
from benchmarks.sync import STAGES
from diloco.errors import EnvironmentFault, ExitCode
from tests.processes import Ended, Process, background, command_here, diloco, free_port, wait_until

FIELDS = {"name", "value", "unit", "limit", "ratio", "codec", "direction", "bits_per_parameter"}
SMALL = ["--elements", str(2**18)]


def records(file: Path) -> list[dict[str, Any]]:
    """What a benchmark wrote, each record as the interface says."""
    found: list[dict[str, Any]] = json.loads(file.read_text())
    for record in found:
        assert set(record) == FIELDS
        assert record["value"] > 0
        assert record["ratio"] == record["value"] / record["limit"]
    assert found
    return found


def measured(tmp_path: Path, *args: str) -> list[dict[str, Any]]:
    ended = diloco("bench", *args, "--json", f"{tmp_path}/bench.json")
    assert ended.code == ExitCode.OK, ended
    found = records(tmp_path / "bench.json")
    assert all(re.search(rf"^ {re.escape(r['name'][:40])}", ended.out, re.MULTILINE) for r in found), ended.out
    return found


def test_codecs_are_measured_both_ways(tmp_path: Path) -> None:
    found = measured(tmp_path, "codec", *SMALL, "--codec", "int4", "--codec", "topk-coded", "--threads", "1")
    assert [(r["codec"], r["direction"]) for r in found] == [
        (codec, way) for codec in ("int4", "topk-coded") for way in ("encode", "decode")
    ]
    assert [round(r["bits_per_parameter"], 2) for r in found[1:3]] == [4.06, 0.15]


def test_a_sync_is_measured_by_stages_and_as_a_whole(tmp_path: Path) -> None:
    found = measured(tmp_path, "sync", *SMALL, "--tls", "--fragments", "2", "--codec", "auto")
    stages, (whole, work, *held) = found[: len(STAGES)], found[len(STAGES) :]
    assert [stage in record["name"] for stage, record in zip(STAGES, stages, strict=True)] == [True] * len(STAGES)
    assert max(record["value"] for record in stages) == whole["limit"] == stages[0]["limit"]
    assert work["limit"] > 0
    assert work["value"] == whole["value"]
    assert ["held to" in record["name"] for record in held] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("anchors", ["cpu", "device"])
def test_taking_part_is_measured_beside_a_bare_loop(tmp_path: Path, anchors: str) -> None:
    found = measured(tmp_path, "overhead", "--dim", "64", "--ranks", "2", "--anchors", anchors)
    step, edge, memory, between, within = found
    assert (step["unit"], memory["unit"]) == ("s", "MiB")
    assert edge["limit"] == step["limit"]
    assert edge["value"] < step["value"]
    assert between["value"] == between["limit"] == within["limit"], "its anchors, and no other tensor"
    assert within["value"] > 0


@pytest.mark.parametrize(
    ("anchors", "device", "limits"),
    [
        ("cpu", 800, {"host memory": 1400, "peak device memory": 800}),
        ("device", 800, {"host memory": 1000, "peak device memory": 1200}),
        ("cpu", 0, {"host memory": 1400}),
        ("device", 0, {"host memory": 1400}),
    ],
)
def test_memory_is_held_to_anchors_where_they_are(anchors: Any, device: int, limits: dict[str, int]) -> None:
    """Of a rank that holds 100 Mi parameters, in MiB; a device that is the CPU takes nothing of its own."""
    bare, joined = ([m * 2**20 for m in (host, peak, 100)] for host, peak in ((1000, device), (1500, device + 4)))
    found = list(overhead.memory("small", bare, joined, anchors))
    assert {r.name.partition(",")[0]: r.limit for r in found} == limits
    assert [r.value for r in found] == [1500, 804][: len(limits)]
    assert ["anchors of 4 bytes" in r.name for r in found] == [limit in (1400, 1200) for limit in limits.values()]


@pytest.mark.slow
def test_a_link_is_measured_between_two_that_know_each_other(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("bench")
    files = ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca]
    address = f"127.0.0.1:{free_port()}"
    with background("bench", "transport", "--listen", address, *files, log=tmp_path / "log") as listening:
        wait_until(lambda: "listening on" in listening.output or not listening.running, "it listens")
        up, down = measured(tmp_path, "transport", "--connect", address, *SMALL, *files)
        assert (up["direction"], down["direction"]) == ("up", "down")
        other = diloco("bench", "transport", "--connect", address, "--elements", "4096", *files)
        assert (other.code, "use the same --elements" in other.err) == (ExitCode.REFUSED, True), other
        ends_with_nothing_left(listening, signal.SIGTERM)


def ends_with_nothing_left(process: Process, which: signal.Signals) -> None:
    process.signal(which)
    assert process.wait() == ExitCode.INTERRUPTED
    assert process.family() == []
    assert "Traceback" not in process.output


@pytest.mark.slow
def test_an_interrupted_benchmark_leaves_nothing_running(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    with background("bench", "sync", "--json", str(file), *SMALL, log=tmp_path / "log") as process:
        wait_until(lambda: "whole, turn" in process.output or not process.running, "a sync is under way")
        assert len(process.family()) > 3
        ends_with_nothing_left(process, signal.SIGINT)
    assert not file.exists()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["codec", "--codec", "int9"], ExitCode.USAGE, "unknown codec 'int9'; known: fp32"),
        (["sync", "--codec", "int9"], ExitCode.USAGE, "unknown codec 'int9'; known: fp32"),
        (["codec", "--json", "/nowhere/x"], ExitCode.USAGE, "there is no folder /nowhere"),
        (["transport", "--connect", "here"], ExitCode.USAGE, "'here' is not HOST:PORT"),
        (["transport", "--connect", "a:1", "--listen", "b:1"], ExitCode.USAGE, "--connect for the other"),
    ],
)
def test_a_fault_is_said_before_anything_runs(args: list[str], code: int, message: str) -> None:
    ended: Ended = command_here(bench, *args)
    assert (ended.code, message in ended.err) == (code, True), ended


def test_other_systems_are_measured_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "find_spec", lambda name: None if name == "torchft" else object())
    ended = command_here(bench, "peers")
    assert (ended.code, ended.out) == (ExitCode.ENVIRONMENT, "")
    assert ended.err.endswith("error: torchft not installed: pip install 'diloco[peers]'\n")


# -- shaped lines -------------------------------------------------------------------------------------------------


@contextmanager
def possible() -> Iterator[list[shaped.Line]]:
    """Two lines, where this machine and this user can make some."""
    try:
        made = shaped.lines(2)
        lines = made.__enter__()
    except EnvironmentFault as fault:
        pytest.skip(fault.message)
    try:
        yield lines
    finally:
        made.__exit__(None, None, None)


def test_lines_are_made_shaped_and_taken_away() -> None:
    with possible() as lines:
        assert len({line.hub for line in lines} | {line.address for line in lines}) == 4
        for line in lines:
            line.shape(10.0)
            assert "rate 10Mbit" in shaped._do([*line.prefix, "tc", "qdisc", "show", "dev", shaped.FAR])
    assert not set(shaped._do(["ip", "netns", "list"]).split()) & {line.name for line in lines}


def test_what_cannot_be_shaped_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped.shutil, "which", lambda _: None)
    with pytest.raises(EnvironmentFault, match="install iproute2, or measure without"), shaped.lines(1):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(shaped, "_namespace", lambda _: shaped._do(["sh", "-c", "echo no way >&2; false"]))
    with pytest.raises(EnvironmentFault, match=r"needs root and network namespaces, .*\(no way\): run it as root"):
        shaped.lines(1).__enter__()
