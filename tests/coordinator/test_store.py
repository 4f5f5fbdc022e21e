"""The state folder: what is written comes back with the same bits, or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.files import REAL, Files
from coordinator.store import UPDATES_KEPT, Store, check_same_run
from coordinator.updates import Update
from diloco.errors import EnvironmentFault, RunMismatch
from tests.support import configure


def keep_update(store: Store, fragment: int, round_: int, payload: torch.Tensor) -> Path:
    """Keeps an update as a fold does that makes it at once."""
    update = Update(store.files, store.update_path(fragment, round_), payload.numel(), 1, "")
    update.take(payload, payload.numel())
    update.close()
    return store.keep_update(fragment, round_, update)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state")
    yield opened
    opened.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- whose folder ---------------------------------------------------------------------------------------------------


def test_a_folder_belongs_to_one_run_with_one_set_of_settings(tmp_path: Path) -> None:
    config = configure('wire.down="bf16"')
    check_same_run(config, configure('wire.down="bf16"'), tmp_path)
    for other, words in (
        (configure(run_id="other"), "holds run 'test' .* not 'other'"),
        (configure("outer.lr=0.5"), "was written with settings .* a run keeps its settings"),
    ):
        with pytest.raises(RunMismatch, match=words) as caught:
            check_same_run(config, other, tmp_path)
        assert config.digest[:12] in caught.value.message
        assert other.digest[:12] in caught.value.message
        assert config.digest[:12] != other.digest[:12]


def test_a_folder_in_use_is_refused_until_it_is_given_back(state: Store) -> None:
    with pytest.raises(EnvironmentFault, match=r"is in use by another coordinator: stop it or name another --state"):
        Store(state.root)
    state.close()
    Store(state.root).close()


HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"


def test_a_folder_in_use_by_another_process_is_refused_until_that_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(EnvironmentFault, match="is in use by another coordinator"):
            Store(tmp_path)
        process.kill()
    Store(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=r"cannot write the state folder .*file.*: Not a directory"):
        Store(tmp_path / "file" / "state")


def test_what_is_recorded_is_in_the_ledger_and_for_people_in_a_file(tmp_path: Path) -> None:
    for start in range(2):
        opened = Store(tmp_path)
        opened.record([("a", {"n": start}), ("b", {"n": start})])
        rows = list(opened.ledger.read())
        opened.close()
    assert [(row.seq, row.kind, row.body) for row in rows] == [
        (1, "a", {"n": 0}),
        (2, "b", {"n": 0}),
        (3, "a", {"n": 1}),
        (4, "b", {"n": 1}),
    ]
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines == [{"seq": row.seq, "at": row.at, "kind": row.kind, **row.body} for row in rows]


def shown(root: Path) -> list[int]:
    return [json.loads(line)["seq"] for line in (root / "events.jsonl").read_text().splitlines()]


def test_a_line_for_people_that_cannot_be_written_undoes_nothing_and_is_written_later(state: Store) -> None:
    (state.root / "events.jsonl").mkdir()
    state.record([("a", {})])
    assert [row.kind for row in state.ledger.read()] == ["a"]
    assert state.shown == -1
    (state.root / "events.jsonl").rmdir()
    state.record([("b", {})])
    assert shown(state.root) == [1, 2]
    assert state.shown == 2


@pytest.mark.parametrize(
    "torn", ["", "\n", '{"seq": 3, "at": 1.0, "ki', '{"seq": 4, "kind": "x"}\n', '{"seq": 3}\n[]\n', "x" * 200_000]
)
def test_lines_for_people_are_made_whole_at_a_start(tmp_path: Path, torn: str) -> None:
    opened = Store(tmp_path)
    opened.record([("a", {"n": 1}), ("b", {})])
    lines = (tmp_path / "events.jsonl").read_bytes()
    opened.record([("c", {"long": "x" * 70_000})])
    whole = (tmp_path / "events.jsonl").read_bytes()
    opened.close()
    (tmp_path / "events.jsonl").write_bytes(lines + torn.replace('"seq": 3}', '"seq": 9}').encode())
    Store(tmp_path).close()
    assert (tmp_path / "events.jsonl").read_bytes() == whole
    (tmp_path / "events.jsonl").write_bytes(whole[:-1])
    Store(tmp_path).close()
    assert (tmp_path / "events.jsonl").read_bytes() == whole


def test_a_row_whose_answer_was_lost_is_replaced_by_the_next(tmp_path: Path) -> None:
    class Deaf(Files):
        deaf = False

        def transact(self, work: Any) -> Any:
            done = work()
            if self.deaf:
                raise OSError(5, "Input/output error")
            return done

    files = Deaf()
    opened = Store(tmp_path, files)
    opened.record([("a", {})])
    files.deaf = True
    with pytest.raises(OSError, match="Input/output"):
        opened.record([("b", {}), ("c", {})])
    files.deaf = False
    opened.record([("d", {})])
    assert [(row.seq, row.kind) for row in opened.ledger.read()] == [(1, "a"), (2, "d")]
    assert shown(tmp_path) == [1, 2]
    opened.close()


def test_bytes_that_are_kept_are_counted(tmp_path: Path) -> None:
    opened = Store(tmp_path)
    assert opened.kept_bytes == 0
    keep_update(opened, 0, 0, torch.zeros(7, dtype=torch.uint8))
    keep_update(opened, 0, 0, torch.zeros(5, dtype=torch.uint8))
    keep_update(opened, 0, 1, torch.zeros(10, dtype=torch.uint8))
    opened.files.write(opened.inbox_path("part"), b"abc")
    opened.files.write(tmp_path / "address", b"not one of them")
    assert opened.kept_bytes == 18
    opened.close()
    again = Store(tmp_path)
    assert again.kept_bytes == 18
    again.files.unlink(again.inbox_path("part"))
    again.files.unlink(again.inbox_path("part"))
    keep_update(again, 0, UPDATES_KEPT, torch.zeros(1, dtype=torch.uint8))
    assert (again.kept_bytes, again.files.spared_bytes) == (16, 5)
    again.files.drop_spares()
    assert again.kept_bytes == 11
    assert 0 < again.files.free_bytes(tmp_path) < 2**60
    again.close()


def test_updates_are_written_over_those_that_nobody_reads(tmp_path: Path) -> None:
    store, seven = Store(tmp_path), torch.arange(7, dtype=torch.uint8)
    old = [keep_update(store, 0, round_, seven + round_) for round_ in range(2)]
    numbers = [path.stat().st_ino for path in old]
    read = store.files.map(old[0])
    with store.reading(0, 0):
        keep_update(store, 0, UPDATES_KEPT, seven)
        assert store.files.spared_bytes == 0
        keep_update(store, 0, UPDATES_KEPT + 1, seven)
        assert store.files.spared_bytes == 7
        again = keep_update(store, 0, UPDATES_KEPT + 2, seven + 9)
        assert again.stat().st_ino == numbers[1]
        assert again.read_bytes() == bytes(range(9, 16))
        assert read.tolist() == seven.tolist()
    store.close()


def test_a_start_removes_what_was_half_written_but_no_upload(tmp_path: Path) -> None:
    opened = Store(tmp_path)
    for folder in ("inbox", "updates", "fragments"):
        (tmp_path / folder / "half.partial").write_bytes(b"half")
    opened.inbox_path("whole").write_bytes(b"whole")
    opened.close()
    Store(tmp_path).close()
    assert names(tmp_path / "inbox") == ["half.partial", "whole"]
    assert names(tmp_path / "updates") == names(tmp_path / "fragments") == []


# -- updates and payloads -------------------------------------------------------------------------------------------


def test_the_last_updates_are_kept_and_older_ones_are_not(state: Store) -> None:
    for round_ in range(UPDATES_KEPT + 3):
        path = keep_update(state, 1, round_, torch.full((5,), round_, dtype=torch.uint8))
        assert path == state.update_path(1, round_)
        assert REAL.map(path).tolist() == [round_] * 5
    assert names(state.root / "updates") == [f"f0001-r{r:08d}.bin" for r in range(3, UPDATES_KEPT + 3)]
    keep_update(state, 0, UPDATES_KEPT + 2, torch.zeros(1, dtype=torch.uint8))
    assert len(names(state.root / "updates")) == UPDATES_KEPT + 1


def test_a_payload_of_no_bytes_is_an_empty_tensor(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert REAL.map(tmp_path / "empty").shape == (0,)
    assert REAL.map(tmp_path / "empty").dtype == torch.uint8


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    REAL.write(tmp_path / "file", b"old")
    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        REAL.write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
