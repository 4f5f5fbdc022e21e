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
from coordinator.updates import Update
from diloco.codec import CODECS
from diloco.errors import Overload
from diloco.fragments import partition
from diloco.framing import piece_to_proto
from diloco.v1 import coordinator_pb2 as pb
from tests.processes import wait_until
from tests.support import BOUND_S, MODEL, Rig, Visitor, configure, draw, folded, part, whole

CONFIG = configure("rounds.start_islands=2", "rounds.quorum=2", "snapshot.every_rounds=100")
FRAGMENT, OTHER, _ = partition(MODEL, CONFIG.sync)


class Held(Files):
    """A disk that takes the next update only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go, self.refused = threading.Event(), threading.Event(), threading.Event()
        self.broken = False

    def rename(self, old: Path, new: Path) -> None:
        """Waits in the middle of a fold that has moved the tensors."""
        if new.parent.name == "updates":
            self.reached.set()
            assert self.go.wait(BOUND_S)
        super().rename(old, new)

    def dump(self, path: Path, data: Any) -> None:
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


def test_an_update_goes_out_while_it_is_made_and_ends_once_it_is_published(folding: Folding) -> None:
    folding.begin()
    whole_came = threading.Event()

    def follow(payload: Tensor, have: int) -> None:
        if have == payload.numel():
            whole_came.set()

    request = pb.FetchRequest(**folding.a.key(), pieces=[piece_to_proto(piece) for piece in whole(FRAGMENT)])
    fetching = folding.pool.submit(folding.a.link.fetch, request, 4 * FRAGMENT.numel, follow=follow)
    assert whole_came.wait(BOUND_S)
    assert not folding.at.served.ask(lambda run: run.outcomes)
    assert not fetching.done()
    folding.files.go.set()
    header, payload = fetching.result(BOUND_S)
    assert (header.outcome, header.version) == ("committed", 1)
    assert header.digest == folding.at.served.ask(lambda run: run.outers[0].digest) & (2**64 - 1)
    again, same = folding.b.fetch(FRAGMENT)
    assert again == header
    assert torch.equal(same, payload)


def test_an_update_whose_fold_comes_to_no_end_is_asked_for_again(folding: Folding) -> None:
    """Bytes that have come stay; their end does not come before the round is published."""
    update = Update(folding.files, folding.at.run.store.update_path(0, 7), 8, 1, "")
    made = torch.arange(8, dtype=torch.uint8)
    update.take(made, 4)
    update.reach(4)
    assert update.payload[:4].tolist() == [0, 1, 2, 3]
    update.close()
    update.close()
    update.reach(4)
    with pytest.raises(Overload, match="not made to its end"):
        update.reach(5)
    update.partial.unlink()


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


class Noting(Files):
    """A disk that notes what becomes durable, and when a manifest is written."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def sync(self, path: Path) -> None:
        self.notes.append(path.name)
        super().sync(path)


def test_an_update_is_durable_before_the_manifest_of_the_snapshot_that_holds_its_round(tmp_path: Path) -> None:
    files = Noting()
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack, files=files)
        a, b = at.started("a", "b")
        notes = files.notes
        notes.clear()
        for seed, visitor in enumerate((a, b), 1):
            visitor.push(FRAGMENT, draw(FRAGMENT, seed), tokens=1)
        a.fetch(FRAGMENT)
        update = at.run.store.update_path(FRAGMENT.index, 0).name
        assert update not in notes
        at.served.call(at.run.snapshot())
        [manifest] = [number for number, note in enumerate(notes) if note.startswith("manifest")]
        assert notes.index(update) < notes.index("updates") < manifest
        notes.clear()
        at.served.call(at.run.snapshot())
        assert update not in notes


def test_an_update_that_a_power_loss_takes_is_made_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack, killed=True)
        a, b = at.started("a", "b")
        for seed, visitor in enumerate((a, b), 1):
            visitor.push(FRAGMENT, draw(FRAGMENT, seed), tokens=1)
        header, payload = a.fetch(FRAGMENT)
        path, epochs = at.run.store.update_path(FRAGMENT.index, 0), [v.identity.epoch for v in (a, b)]
        found = payload.clone()
    path.write_bytes(bytes(path.stat().st_size))
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack, killed=True)
        again, payload = at.known("a", epochs[0]).fetch(FRAGMENT)
        assert (again.digest, again.version) == (header.digest, header.version)
        assert torch.equal(payload, found)
        assert path.read_bytes() == found.numpy().tobytes()
