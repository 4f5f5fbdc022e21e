"""The outer state is moved in place, and nobody reads it half-way: fetches and snapshots wait for the fold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coordinator.files import Files
from coordinator.fold import Outer
from coordinator.snapshots import load_snapshot
from coordinator.store import Store
from diloco.codec import CODECS
from diloco.fragments import partition
from tests.processes import wait_until
from tests.support import BOUND_S, MODEL, Rig, Visitor, configure, draw, folded, part

CONFIG = configure("rounds.start_islands=2", "rounds.quorum=2", "snapshot.every_rounds=100")
FRAGMENT, OTHER, _ = partition(MODEL, CONFIG.sync)


class Held(Files):
    """A disk that takes the next update only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go, self.refused = threading.Event(), threading.Event(), threading.Event()
        self.broken = False

    def dump(self, path: Path, data: Any) -> None:
        """Waits in the middle of a fold that has moved the tensors."""
        if path.parent.name == "updates":
            self.reached.set()
            assert self.go.wait(BOUND_S)
        if path.parent.name == "anchors" and self.broken:
            self.refused.set()
            raise OSError(28, "No space left on device")
        super().dump(path, data)


class Folding:
    """Two islands of a run whose first fold is under way: the tensors have moved, and nobody has heard of it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.files = Held()
        self.at = Rig(CONFIG, folder, stack, killed=True, files=self.files)
        stack.callback(self.files.go.set)
        self.a, self.b = self.at.started("a", "b")
        self.pool = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(self.files.go.set)

    def begin(self) -> None:
        """Has both contribute, and waits until the fold is half-way."""
        for seed, visitor in enumerate((self.a, self.b), 1):
            visitor.push(FRAGMENT, draw(FRAGMENT, seed), tokens=1)
        assert self.files.reached.wait(BOUND_S)

    @property
    def waiting(self) -> int:
        """Who waits for the fragment."""
        return len(self.at.run._locks[FRAGMENT.index]._waiters or ())


@pytest.fixture
def folding(tmp_path: Path) -> Iterator[Folding]:
    with ExitStack() as stack:
        yield Folding(tmp_path, stack)


def anchor(visitor: Visitor) -> tuple[int, Tensor]:
    header, payload = visitor.fetch(FRAGMENT, anchor=True)
    return header.version, payload.view(torch.float32).clone()


def after_the_fold() -> Tensor:
    sent = {name: [part(FRAGMENT, draw(FRAGMENT, seed))] for seed, name in enumerate("ab", 1)}
    first = Outer.first(FRAGMENT, draw(FRAGMENT, 0))
    return folded(FRAGMENT, first, sent, dict.fromkeys("ab", 0.5), CONFIG.outer, CODECS["fp32"])[0].anchor


def test_an_anchor_that_was_fetched_before_is_served_while_the_fold_goes_on(folding: Folding) -> None:
    assert anchor(folding.a)[0] == 0
    folding.begin()
    version, values = anchor(folding.b)
    assert version == 0
    assert torch.equal(values, draw(FRAGMENT, 0))
    assert [p.name for p in (folding.at.run.store.root / "anchors").iterdir()] == ["f0000-v00000000.bin"]


def test_one_that_was_not_is_served_once_the_fold_is_published(folding: Folding) -> None:
    folding.begin()
    fetching = folding.pool.submit(anchor, folding.b)
    wait_until(lambda: folding.at.served.ask(lambda run: folding.waiting) == 1, "the fetch to wait", BOUND_S)
    assert not fetching.done()
    folding.files.go.set()
    version, values = fetching.result(BOUND_S)
    assert version == 1
    assert torch.equal(values, after_the_fold())


def test_a_snapshot_waits_for_the_fold(folding: Folding) -> None:
    folding.begin()
    writing = folding.pool.submit(folding.at.served.call, folding.at.run.snapshot())
    wait_until(lambda: folding.at.served.ask(lambda run: folding.waiting) == 1, "the snapshot to wait", BOUND_S)
    folding.files.go.set()
    assert writing.result(BOUND_S) == [1, 0, 0]
    loaded = load_snapshot(folding.at.run.store.root)
    assert loaded is not None
    assert torch.equal(loaded.outers[0].anchor, after_the_fold())
    assert loaded.rounds == (1, 0, 0)


def test_a_disk_that_takes_no_anchor_delays_the_fetch_and_no_round(folding: Folding) -> None:
    folding.files.broken = True
    folding.files.go.set()
    fetching = folding.pool.submit(anchor, folding.a)
    assert folding.files.refused.wait(BOUND_S)
    folding.begin()
    assert folding.b.fetch(FRAGMENT)[0].version == 1
    assert not fetching.done()
    folding.files.broken = False
    version, values = fetching.result(BOUND_S)
    assert version == 1
    assert torch.equal(values, after_the_fold())


def test_anchors_of_an_earlier_life_are_removed(tmp_path: Path) -> None:
    Store(tmp_path).close()
    (tmp_path / "anchors" / "f0000-v00000003.bin").write_bytes(b"old")
    Store(tmp_path).close()
    assert not list((tmp_path / "anchors").iterdir())
