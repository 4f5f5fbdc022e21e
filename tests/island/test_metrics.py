"""Metrics: no sink can stop, slow down or kill the one who records."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest

from diloco.errors import EnvironmentFault
from island.metrics import JsonLines, Metrics, Record, Wandb

BOUND_S = 30.0
"""Longest any test waits for what should happen at once."""


def promptly(action: Callable[[], object]) -> None:
    """Runs `action` in a thread that has to end by itself."""
    thread = Thread(target=action, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert not thread.is_alive()


class Memory:
    """Keeps records; `seen` is set at the first one."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.thread = current_thread()
        self.seen = Event()
        self.closed = False

    def write(self, record: Record) -> None:
        self.records.append(record)
        self.seen.set()

    def close(self) -> None:
        self.closed = True


class Stuck(Memory):
    """Hangs in every write until `release` is set."""

    release = Event()

    def write(self, record: Record) -> None:
        super().write(record)
        assert self.release.wait(BOUND_S)


class Broken(Memory):
    """Raises the next of `reasons` at each write; None means the write goes well."""

    def __init__(self, *reasons: str | None) -> None:
        super().__init__()
        self.reasons = iter(reasons)

    def write(self, record: Record) -> None:
        if reason := next(self.reasons):
            raise OSError(reason)
        super().write(record)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    """A stuck sink that lets its thread go when the test ends."""
    sink = Stuck()
    sink.release = Event()
    yield sink
    sink.release.set()


def lines(path: Path) -> list[Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_sink_gets_every_record_with_its_kind_and_time_in_a_thread_of_its_own() -> None:
    made: list[Memory] = []

    def factory() -> Memory:
        made.append(Memory())
        return made[-1]

    with Metrics([factory, factory], queue_records=10, clock=lambda: 12.5) as metrics:
        metrics.record("train", step=3, loss=0.5)
        metrics.record("eval", step=3, loss=0.4)
        metrics.close(BOUND_S)

    expected = [
        {"kind": "train", "time_s": 12.5, "step": 3, "loss": 0.5},
        {"kind": "eval", "time_s": 12.5, "step": 3, "loss": 0.4},
    ]
    assert [sink.records for sink in made] == [expected, expected]
    assert all(sink.closed for sink in made)
    assert len({sink.thread for sink in made} | {current_thread()}) == 3
    assert all(sink.thread.daemon for sink in made)


def test_a_hanging_sink_holds_up_neither_record_nor_close_nor_the_other_sink(
    stuck: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    other = Memory()
    metrics = Metrics([lambda: stuck, lambda: other], queue_records=4)

    def train() -> None:
        for step in range(3):
            metrics.record("train", step=step)
        metrics.close(timeout_s=0.1)

    promptly(train)

    assert other.seen.wait(BOUND_S)
    assert not stuck.closed
    assert "lost 3 of 3 records" in caplog.text


def test_a_hanging_sink_does_not_keep_the_process_alive() -> None:
    program = """
from threading import Event
from island.metrics import Metrics

class Hang:
    def write(self, record):
        writing.set()
        Event().wait()
    def close(self): ...

writing = Event()
metrics = Metrics([Hang], queue_records=1)
metrics.record("train")
assert writing.wait(30)
metrics.close(timeout_s=0.01)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=2 * BOUND_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Hang lost 1 of 1 records" in done.stderr


def test_a_full_queue_drops_and_counts_per_sink(stuck: Stuck) -> None:
    def Slow() -> Stuck:  # noqa: N802 - stands for a class: its name is the sink's
        return stuck

    metrics = Metrics([Slow], queue_records=2)
    metrics.record("train", step=0)
    assert stuck.seen.wait(BOUND_S)
    for step in range(1, 6):
        metrics.record("train", step=step)

    assert metrics.dropped == {"Slow": 3}
    stuck.release.set()
    metrics.close(BOUND_S)
    assert [record["step"] for record in stuck.records] == [0, 1, 2]


def test_records_after_close_are_dropped() -> None:
    metrics = Metrics([Memory], queue_records=2)
    metrics.close(BOUND_S)
    metrics.record("train")
    assert metrics.dropped == {"Memory": 1}


def test_a_sink_that_raises_goes_on_and_warns_when_the_reason_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Broken("disk full", "disk full", None, "disk gone")
    metrics = Metrics([lambda: sink], queue_records=10)
    for step in range(4):
        metrics.record("train", step=step)
    metrics.close(BOUND_S)

    assert [record["step"] for record in sink.records] == [2]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert "OSError: disk full" in warnings[0]
    assert "OSError: disk gone" in warnings[1]
    assert "lost 3 of 4 records" in warnings[2]
    assert caplog.records[0].exc_info


def test_a_factory_that_raises_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: Iterator[Exception | Memory] = iter([OSError("not yet"), Memory()])
    made: list[Memory] = []

    def factory() -> Memory:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        made.append(outcome)
        return outcome

    metrics = Metrics([factory], queue_records=10)
    metrics.record("train", step=0)
    metrics.record("train", step=1)
    metrics.close(BOUND_S)

    assert [record["step"] for record in made[0].records] == [1]
    assert "OSError: not yet" in caplog.text


def test_a_sink_that_raises_in_close_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Unclosable(Memory):
        def close(self) -> None:
            raise OSError("no")

    metrics = Metrics([Unclosable], queue_records=10)
    metrics.record("train")
    metrics.close(BOUND_S)
    assert [r.getMessage() for r in caplog.records] == ["metrics: Unclosable fails: OSError: no"]


def test_nothing_is_logged_when_all_goes_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics([partial(JsonLines, tmp_path / "a.jsonl")], queue_records=10)
    metrics.record("train", step=1)
    metrics.close(BOUND_S)
    assert not caplog.records
    assert metrics.dropped == {"JsonLines": 0}


def test_every_line_is_json_whatever_the_number(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.jsonl"
    sink = JsonLines(path)
    sink.write({"kind": "train", "a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e-300})
    assert lines(path) == [{"kind": "train", "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1e-300}]
    sink.write({"text": 'two\nlines, "quotes" and ü', "none": None, "yes": True})
    sink.close()
    assert lines(path)[1] == {"text": 'two\nlines, "quotes" and ü', "none": None, "yes": True}


def test_a_value_that_is_no_scalar_leaves_no_half_line(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(TypeError):
        sink.write({"bad": object()})  # type: ignore[dict-item]
    sink.write({"good": 1})
    sink.close()
    assert lines(tmp_path / "a.jsonl") == [{"good": 1}]


def test_a_restart_appends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for step in (1, 2):
        sink = JsonLines(path)
        sink.write({"step": step})
        sink.close()
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_a_torn_last_line_is_ended_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"st')
    sink = JsonLines(path)
    sink.write({"step": 2})
    sink.close()
    assert path.read_text() == '{"step": 1}\n{"st\n{"step": 2}\n'


def wandb_sink(folder: Path) -> Wandb:
    return Wandb("project", "run-7", "alpha", folder, {"outer": {"lr": 0.7}})


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no mode and no console, as on a fresh machine."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture
def wandb_calls(monkeypatch: pytest.MonkeyPatch, wandb_offline: None) -> list[dict[str, Any]]:
    """What `wandb.init` and `Run.log` are called with, without W&B behind them."""
    import wandb

    calls: list[dict[str, Any]] = []

    class Run:
        def log(self, values: dict[str, Any], step: int | None) -> None:
            calls.append({"values": values, "step": step})

        def finish(self) -> None:
            calls.append({"finished": True})

    def init(**options: Any) -> Run:
        calls.append(options)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    return calls


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_offline_writes_a_run_with_id_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    metrics = Metrics([wandb_sink(tmp_path / "made")], queue_records=10)
    metrics.record("train", step=1, loss=2.5)
    metrics.close(BOUND_S)

    wandb.teardown()  # waits for W&B's process, which is who writes the file
    assert not caplog.records
    [run] = (tmp_path / "made" / "wandb").glob("offline-run-*-run-7-alpha")
    [log] = run.glob("*.wandb")
    written = log.read_bytes()
    assert log.name == "run-run-7-alpha.wandb"
    assert b"run-7" in written
    assert b"train/loss" in written


def test_wandb_ids_survive_a_restart(wandb_calls: list[dict[str, Any]], tmp_path: Path) -> None:
    for _ in range(2):
        wandb_sink(tmp_path).write({"kind": "train", "step": 1})
    starts = [call for call in wandb_calls if "id" in call]
    assert [start["id"] for start in starts] == ["run-7-alpha"] * 2
    assert all(start["group"] == "run-7" and start["name"] == "alpha" for start in starts)
    assert all(start["resume"] == "allow" and start["project"] == "project" for start in starts)
    assert starts[0]["config"] == {"outer": {"lr": 0.7}}


def test_wandb_logs_values_under_their_kind_at_their_step(wandb_calls: list[dict[str, Any]], tmp_path: Path) -> None:
    sink = wandb_sink(tmp_path)
    sink.write({"kind": "train", "time_s": 9.0, "step": 4, "loss": 1.5})
    sink.write({"kind": "sync", "time_s": 9.0, "bytes": 12})
    sink.close()
    assert wandb_calls[1:] == [
        {"values": {"train/loss": 1.5}, "step": 4},
        {"values": {"sync/bytes": 12}, "step": None},
        {"finished": True},
    ]


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [
        ({}, None, "offline"),
        ({}, "machine elsewhere.example login user password secret\n", "offline"),
        ({}, "not a netrc file\n", "offline"),
        ({}, "machine api.wandb.ai login user password secret\n", None),
        ({"WANDB_API_KEY": "secret"}, None, None),
        ({"WANDB_BASE_URL": "https://wb.example"}, "machine wb.example password secret\n", None),
        ({"WANDB_BASE_URL": "https://wb.example"}, "machine api.wandb.ai password secret\n", "offline"),
        ({"WANDB_MODE": "disabled"}, None, None),
    ],
)
def test_wandb_is_offline_exactly_when_no_key_and_no_mode_is_configured(
    environment: dict[str, str],
    netrc: str | None,
    mode: str | None,
    wandb_calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / "netrc").write_text(netrc)
    wandb_sink(tmp_path).write({"kind": "train", "step": 1})
    assert wandb_calls[0]["mode"] == mode


def test_a_missing_wandb_is_said_at_once_and_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'diloco\[wandb\]'"):
        wandb_sink(tmp_path)
