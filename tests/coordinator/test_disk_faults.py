"""A disk that fails at any operation costs time and nothing else: the run ends with the bits it would have had."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from coordinator.files import Files
from coordinator.recovery import verify
from coordinator.snapshots import load_snapshot
from diloco.errors import DilocoError
from diloco.fragments import Fragment, partition
from tests.processes import wait_until
from tests.support import BOUND_S, MODEL, Rig, Visitor, configure, draw

T = TypeVar("T")
CONFIG = configure("rounds.start_islands=2", "rounds.quorum=2", "snapshot.keep=1")
FRAGMENTS = partition(MODEL, CONFIG.sync)
FULL, BROKEN = (28, "No space left on device"), (5, "Input/output error")
TRIES = 200

FAULTS = [
    ("dump", "before", FULL),
    ("dump", "torn", FULL),
    ("dump_tensors", "before", FULL),
    ("dump_tensors", "after", BROKEN),
    ("sync", "before", BROKEN),
    ("rename", "before", BROKEN),
    ("rename", "after", BROKEN),
    ("append", "before", FULL),
    ("append", "torn", FULL),
    ("remove", "before", BROKEN),
    ("map", "before", BROKEN),
    ("read", "before", BROKEN),
    ("transact", "before", FULL),
    ("transact", "after", BROKEN),
]
"""Operation, whether it fails before or after it is done or half done, and how."""


class Faulty(Files):
    """A disk whose operations of one kind fail.

    Args:
        operation: which.
        when: "before" or "after" it is done, or "torn": half done.
        error: errno and text.
        fails: whether the operation of a number (from 0) fails.
    """

    def __init__(self, operation: str, when: str, error: tuple[int, str], fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.armed, self.calls, self.failures = False, itertools.count(), 0
        real = getattr(self, operation)

        def faulty(*arguments: Any) -> Any:
            if not self.armed or not fails(next(self.calls)):
                return real(*arguments)
            self.failures += 1
            if when == "torn":
                path, data = arguments
                real(path, bytes(memoryview(data).cast("B"))[: memoryview(data).nbytes // 2])
            elif when == "after":
                real(*arguments)
            raise OSError(*error)

        setattr(self, operation, faulty)


def insist(work: Callable[[], T]) -> T:
    """What an island does: it asks again until the coordinator can store it."""
    for _ in range(TRIES):
        try:
            return work()
        except DilocoError as error:
            assert "the coordinator cannot" in error.message, error
    raise AssertionError("the coordinator never recovers")


def planted(at: Rig) -> list[Visitor]:
    """Two islands of a run that has started, whatever the disk does."""
    visitors = [at.visitor(name) for name in "ab"]
    for visitor in visitors:
        insist(visitor.join)
    for _ in range(TRIES):
        for fragment in FRAGMENTS:
            if not at.run.state.seeded:
                insist(lambda f=fragment: visitors[0].push(f, draw(f, 0), seed=True))  # type: ignore[misc]
        if at.run.state.seeded:
            break
    for visitor in visitors:
        insist(lambda v=visitor: v.beat(ready=True))  # type: ignore[misc]
    return visitors


def one_round(visitors: list[Visitor], fragment: Fragment, round_: int) -> None:
    for seed, visitor in enumerate(visitors):
        fields = {"round": round_, "base_version": round_, "tokens": 10 + seed}
        receipt = insist(lambda v=visitor, s=seed, k=fields: v.push(fragment, draw(fragment, s), **k))  # type: ignore[misc]
        assert not receipt.dropped
    for visitor in visitors:
        header, _ = insist(lambda v=visitor: v.fetch(fragment, round=round_))  # type: ignore[misc]
        assert (header.outcome, header.version) == ("committed", round_ + 1)


def play(folder: Path, files: Files) -> tuple[Any, ...]:
    """A short run on a disk that fails from when the coordinator serves, killed on the way; how it ends."""
    with ExitStack() as stack:
        at = Rig(CONFIG, folder, stack, killed=True, files=files)
        at.patience_s = 0.0
        if isinstance(files, Faulty):
            files.armed = True
        visitors = planted(at)
        for fragment, round_ in ((FRAGMENTS[0], 0), (FRAGMENTS[1], 0), (FRAGMENTS[0], 1)):
            one_round(visitors, fragment, round_)
        wait_until(lambda: at.served.ask(lambda run: run.totals.unsaved) == 0, "the snapshot", BOUND_S)
        epochs = [visitor.identity.epoch for visitor in visitors]
        assert not at.run.failed.done()
        if isinstance(files, Faulty):
            files.armed = False
    with ExitStack() as stack:
        at = Rig(CONFIG, folder, stack, killed=True)
        visitors = [at.known(name, epoch) for name, epoch in zip("ab", epochs, strict=True)]
        for visitor in visitors:
            visitor.beat(ready=True)
        one_round(visitors, FRAGMENTS[1], 1)
        wait_until(lambda: at.served.ask(lambda run: run.totals.unsaved) == 0, "the snapshot", BOUND_S)
        assert list(verify(at.run.store.ledger, folder)) == []
        status = visitors[0].link.status()
        counts = [(i.id, i.contributions, i.dropped) for i in status.islands]
        anchors = [visitors[0].fetch(fragment, anchor=True)[1].tolist() for fragment in FRAGMENTS]
        lines = len((folder / "events.jsonl").read_text().splitlines())
        assert not list(folder.glob("*/*.partial"))
        assert lines == at.run.store.shown
    return [f.digest for f in status.state.fragments], anchors, counts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    result = play(tmp_path_factory.mktemp("undisturbed"), Files())
    assert result[2] == [("a", 4, 0), ("b", 4, 0)]
    return result


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.run.DISK_RETRY_S", 0.001)
    monkeypatch.setattr("coordinator.keeper.COMPACT_ROWS", 1)


@pytest.mark.parametrize(("operation", "when", "error"), FAULTS)
@pytest.mark.parametrize("pattern", ["first", "odd", "even"])
def test_nothing_is_lost_and_nothing_counts_twice(
    tmp_path: Path, undisturbed: tuple[Any, ...], operation: str, when: str, error: tuple[int, str], pattern: str
) -> None:
    fails: Callable[[int], bool] = {
        "first": lambda n: n < 5,
        "odd": lambda n: n % 2 == 1 and n < 40,
        "even": lambda n: n % 2 == 0 and n < 40,
    }[pattern]
    files = Faulty(operation, when, error, fails)
    assert play(tmp_path, files) == undisturbed
    assert files.failures


def test_a_snapshot_that_takes_long_delays_no_round(tmp_path: Path) -> None:
    """Rounds are folded and served while one is written; of those that wait, the newest is written next."""
    held, entered = threading.Event(), threading.Event()
    seen: list[str] = []

    class Slow(Files):
        slow = False

        def write(self, path: Path, data: Any) -> None:
            if self.slow and path.name.startswith("manifest"):
                seen.append(path.name)
                entered.set()
                assert held.wait(BOUND_S)
            super().write(path, data)

    files = Slow()
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack, killed=True, files=files)
        stack.callback(held.set)
        visitors = at.started("a", "b")
        files.slow = True
        one_round(visitors, FRAGMENTS[0], 0)
        assert entered.wait(BOUND_S)
        for fragment, round_ in ((FRAGMENTS[1], 0), (FRAGMENTS[0], 1), (FRAGMENTS[1], 1), (FRAGMENTS[0], 2)):
            one_round(visitors, fragment, round_)
        assert seen == ["manifest-00000002.json"]
        loaded = load_snapshot(tmp_path)
        assert loaded is not None
        assert [outer.version for outer in loaded.outers] == [0, 0, 0]
        held.set()
        wait_until(lambda: at.served.ask(lambda run: run.totals.unsaved) == 0, "the newest", BOUND_S)
    loaded = load_snapshot(tmp_path)
    assert loaded is not None
    assert [outer.version for outer in loaded.outers] == [3, 2, 0]
    assert seen == ["manifest-00000002.json", "manifest-00000003.json"]
