"""State folders of every format with a ledger: later versions read them, and come to the same bits."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from coordinator.compaction import compact
from coordinator.facts import Standing
from coordinator.ledger import Ledger
from coordinator.recovery import recorded_config, recover, verify
from coordinator.store import Store
from diloco.fragments import partition
from tests.processes import wait_until
from tests.support import MODEL, Rig, Visitor, configure, draw, whole

GOLDEN = Path(__file__).parents[1] / "golden"
VERIFIED = {"state-1": [(0, 1), (1, 1), (0, 2)], "state-2": [(0, 2)]}
"""Per folder, what can still be folded again: all facts of the first are there, and the second is compacted."""
CONFIG = configure("rounds.start_islands=2", "rounds.quorum=2", "snapshot.every_rounds=1", run_id="golden")
FRAGMENT, OTHER, _ = partition(MODEL, CONFIG.sync)
LEFT, RIGHT = ([piece for i, piece in enumerate(whole(FRAGMENT)) if i % 2 == side] for side in (0, 1))


@pytest.fixture(params=list(VERIFIED))
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a state folder that an earlier version wrote."""
    folder = tmp_path / str(request.param)
    shutil.copytree(GOLDEN / request.param, folder)
    for name in ("updates", "inbox", "fragments"):
        (folder / name).mkdir(exist_ok=True)
    return folder


def test_the_golden_ledgers_are_of_each_schema() -> None:
    for name, schema, kinds in (("state-1", 1, {"accepted", "planted"}), ("state-2", 2, {"state"})):
        database = sqlite3.connect(GOLDEN / name / "ledger.sqlite")
        assert database.execute("PRAGMA user_version").fetchone() == (schema,)
        assert kinds <= {kind for (kind,) in database.execute("SELECT kind FROM facts")}
        database.close()


def test_a_golden_ledger_is_read_and_verifies(golden: Path) -> None:
    opened = Ledger(golden / "ledger.sqlite")
    config = recorded_config(opened)
    assert config.run.id == "golden"
    found = recover(opened, config, golden)
    assert [(r.version, r.round, sorted(r.entries)) for r in found.state.rounds] == [(2, 2, ["b"]), (1, 2, [])]
    assert {m.id: (m.standing, m.epoch) for m in found.state.members.values()} == {
        "a": (Standing.ACTIVE, 4),
        "b": (Standing.ACTIVE, 2),
        "c": (Standing.LEFT, 3),
    }
    assert [(f, v) for f, v, _ in verify(opened, golden)] == VERIFIED[golden.name]
    opened.close()


def test_a_golden_state_is_taken_up_and_ends_with_the_bits_it_always_had(golden: Path) -> None:
    digests = json.loads((golden / "digests.json").read_text())
    opened = Store(golden)
    config = recorded_config(opened.ledger)
    opened.close()
    with ExitStack() as stack:
        at = Rig(config, golden, stack)
        a, b = at.known("a", 4), at.known("b", 2)
        assert finish_golden(a, b) == digests


def finish_golden(a: Visitor, b: Visitor) -> list[str]:
    """The last rounds of the golden run; returns the digests of all fragments in hexadecimal."""
    a.push(FRAGMENT, draw(FRAGMENT, 21), round=2, base_version=2, tokens=300)
    for visitor, values in ((a, 22), (b, 23)):
        visitor.push(OTHER, draw(OTHER, values), round=2, base_version=1, tokens=values)
    for fragment in (FRAGMENT, OTHER):
        assert a.fetch(fragment, round=2)[0].outcome == "committed"
    state = a.beat()
    assert state.phase == "done"
    return [f"{f.digest:016x}" for f in state.fragments]


def write_golden(folder: Path) -> None:
    """Writes the golden state, which later versions only read: python -m tests.coordinator.test_golden FOLDER."""
    with ExitStack() as stack:
        at = Rig(CONFIG, folder, stack, killed=True)

        def saved() -> None:
            wait_until(
                lambda: at.served.ask(lambda run: not run.totals.unsaved and not run._ends.qsize()), "a snapshot"
            )

        a, b = at.started("a", "b")
        c = at.island("c")
        bad = torch.full((FRAGMENT.numel,), torch.inf)
        assert c.push(FRAGMENT, bad).dropped
        c.leave("does not converge")
        a.push(FRAGMENT, draw(FRAGMENT, 1), LEFT, rank=0, tokens=100)
        a.push(FRAGMENT, draw(FRAGMENT, 1), RIGHT, rank=1, tokens=100)
        b.push(FRAGMENT, draw(FRAGMENT, 2), tokens=200)
        a.fetch(FRAGMENT), saved()
        for visitor, values in ((b, 3), (a, 4)):
            visitor.push(OTHER, draw(OTHER, values), tokens=values)
        a.fetch(OTHER), saved()
        a.push(OTHER, draw(OTHER, 5), round=1, base_version=1)
        for visitor in (b, a):
            visitor.push(FRAGMENT, draw(FRAGMENT, 6), round=1, base_version=1)
        a.fetch(FRAGMENT, round=1), saved()
        for _ in range(60):
            at.clock.now += 10
            a.beat(), b.beat()
        assert a.fetch(OTHER, round=1)[0].outcome == "skipped"
        a.join()
        a.push(OTHER, draw(OTHER, 9), round=1, base_version=1, rank=3)
        b.push(FRAGMENT, draw(FRAGMENT, 20), round=2, base_version=2, tokens=100)
        assert compact(at.run.store, CONFIG, 1)
    for name in ("lock", "address", "events.jsonl"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "updates")
    with ExitStack() as stack:
        copy = folder.parent / "copy"
        shutil.copytree(folder, copy)
        at = Rig(CONFIG, copy, stack)
        digests = finish_golden(at.known("a", 4), at.known("b", 2))
    shutil.rmtree(copy)
    (folder / "digests.json").write_text(json.dumps(digests) + "\n")


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
