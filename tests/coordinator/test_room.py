"""A disk budget below what old snapshots need delays contributions, and blocks nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.admission import Admission
from coordinator.store import UPDATES_KEPT
from diloco.fragments import partition
from tests.support import MODEL, Rig, configure, draw

ROUNDS = 10


def test_snapshots_are_taken_where_contributions_need_the_room(tmp_path: Path) -> None:
    size = 4 * partition(MODEL, configure().sync)[0].numel
    config = configure(
        "run.steps=40",
        "rounds.lease_s=1000.0",
        "snapshot.every_rounds=1000",
        f"limits.disk_bytes={(UPDATES_KEPT + 4) * size}",
        "limits.disk_free_bytes=0",
        "limits.retry_s=0.01",
    )
    with ExitStack() as stack:
        at = Rig(config, tmp_path, stack)
        [a] = at.started("a")
        fragment = at.run.fragments[0]
        for round_ in range(ROUNDS):
            a.push(fragment, draw(fragment, round_), round=round_, base_version=round_)
            assert a.fetch(fragment, round=round_)[0].version == round_ + 1
        assert at.run.store.kept_bytes <= config.limits.disk_bytes
        assert len(at.inbox()) < ROUNDS - 4


def test_files_to_be_written_over_make_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 * partition(MODEL, configure().sync)[0].numel
    config = configure("run.steps=80", "rounds.lease_s=1000.0", "snapshot.every_rounds=1", "limits.disk_free_bytes=0")
    with ExitStack() as stack:
        at = Rig(config, tmp_path, stack)
        [a] = at.started("a")
        fragment, files = at.run.fragments[0], at.run.store.files
        for round_ in range(ROUNDS):
            a.push(fragment, draw(fragment, round_), round=round_, base_version=round_)
            assert a.fetch(fragment, round=round_)[0].version == round_ + 1
            at.served.call(at.run.snapshot())
        before = files.spared_bytes
        assert before
        spared = tmp_path / "spare"
        spared.write_bytes(bytes(3 * size))
        files.retire(spared)
        monkeypatch.setattr(
            at.run, "admission", Admission(config.limits.model_copy(update={"disk_bytes": at.run.store.kept_bytes}))
        )
        a.push(fragment, draw(fragment, ROUNDS), round=ROUNDS, base_version=ROUNDS)
        assert a.fetch(fragment, round=ROUNDS)[0].version == ROUNDS + 1
        assert files.spared_bytes <= before
