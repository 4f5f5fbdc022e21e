"""Copies of snapshots elsewhere: complete or not there, never in a round's way, and a run goes on from them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from coordinator import copies
from coordinator.copies import EPOCH_STEP, Copies, restore, upload
from coordinator.snapshots import Snapshot, load_snapshot
from coordinator.store import Store
from diloco.config import RunConfig
from diloco.errors import ConfigError, EnvironmentFault, InputError, StaleEpoch
from tests.coordinator.test_recovery import ended
from tests.coordinator.test_snapshots import same, save, snapshot
from tests.processes import wait_until
from tests.support import Rig, configure, draw


@pytest.fixture(params=["memory", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "remote")
        return
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://bucket"


def with_url(url: str, *overrides: str) -> RunConfig:
    return configure("rounds.start_islands=2", "rounds.quorum=2", f'snapshot.url="{url}"', *overrides)


def saved(store: Store, versions: tuple[int, int], config: RunConfig) -> tuple[Snapshot, Path]:
    taken = snapshot(versions, config)
    return taken, save(store, taken, keep=2)[0]


def there(url: str, run: str = "test") -> set[str]:
    fs, base = fsspec.core.url_to_fs(f"{url}/{run}")
    return {path.removeprefix(base).lstrip("/") for path in fs.find(base)}


def test_copies_are_complete_and_only_so_many_are_kept(url: str, tmp_path: Path) -> None:
    config, store = with_url(url), Store(tmp_path / "state")
    for version in range(1, 6):
        taken, manifest = saved(store, (version, 1), config)
        upload(manifest, f"{url}/test", keep=3)
    found = there(url)
    assert {name for name in found if "manifest" in name} == {f"manifest-{n:08d}.json" for n in (3, 4, 5)}
    assert sorted(name[10:25] for name in found if "fragments" in name) == [
        *(f"f0000-v{n:08d}" for n in (3, 4, 5)),
        "f0001-v00000001",
        "f0002-v00000000",
    ]
    store.close()
    again = restore(url, tmp_path / "again", 0.0)
    assert same(again, taken)
    loaded = load_snapshot(tmp_path / "again")
    assert loaded is not None
    assert same(loaded, taken)
    assert (tmp_path / "again" / "manifest-00000005.json").exists()
    with pytest.raises(InputError, match="has a ledger already"):
        restore(url, tmp_path / "again", 0.0)


def test_what_is_torn_or_damaged_there_is_passed_over(url: str, tmp_path: Path) -> None:
    config, store = with_url(url), Store(tmp_path / "state")
    first, manifest = saved(store, (1, 1), config)
    upload(manifest, f"{url}/test", keep=5)
    fs, base = fsspec.core.url_to_fs(f"{url}/test")
    for version in (2, 3, 4):
        _, manifest = saved(store, (version, version), config)
        upload(manifest, f"{url}/test", keep=5)
    [two] = [p for p in fs.find(base) if "f0000-v00000002" in p]
    fs.rm_file(two)
    [three] = [p for p in fs.find(base) if "f0001-v00000003" in p]
    fs.pipe_file(three, fs.cat_file(three)[:-1] + b"\x01")
    fs.pipe_file(f"{base}/manifest-00000004.json", b'{"format": 1, "fra')
    assert same(restore(f"{url}/test", tmp_path / "again", 0.0), first)
    _, manifest = saved(store, (5, 5), config)
    upload(manifest, f"{url}/test", keep=5)  # a torn one is no snapshot, and goes
    assert "manifest-00000004.json" not in there(url)
    store.close()


def test_a_url_that_cannot_be_meant_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"snapshot\.url 'nosuch://x'"):
        Copies(tmp_path, with_url("nosuch://x"))
    with pytest.raises(InputError, match="no snapshot at"):
        restore(url, tmp_path / "again", 0.0)
    store = Store(tmp_path / "state")
    for run in ("one", "two"):
        _, manifest = saved(store, (1, 1), configure(run_id=run))
        upload(manifest, f"{url}/{run}", keep=1)
    store.close()
    with pytest.raises(InputError, match=r"several runs or coordinators \(one, two\)"):
        restore(url, tmp_path / "again", 0.0)
    code, out = ended("restore", f"{url}/two", str(tmp_path / "again"))
    assert (code, out) == (0, f"run two restored to {tmp_path / 'again'}; versions of its fragments: 1, 1, 0\n")


def test_a_run_does_not_mix_its_copies_with_those_of_another_life(url: str, tmp_path: Path) -> None:
    config = with_url(url)
    old, new = Store(tmp_path / "old"), Store(tmp_path / "new")
    for version in (1, 2):
        _, manifest = saved(old, (version, 1), config)
        upload(manifest, f"{url}/test", keep=2)
    before = there(url)
    _, manifest = saved(new, (0, 0), config)
    with pytest.raises(InputError, match="restore from it, or name another"):
        upload(manifest, f"{url}/test", keep=2)
    assert there(url) == before
    old.close(), new.close()


def test_a_store_that_fails_is_tried_again_and_speaks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, done = [], threading.Event()

    def fails(manifest: Path, url: str, keep: int) -> None:
        calls.append((manifest.name, url, keep))
        if len(calls) < 4:
            raise RuntimeError("what a store raises")
        done.set()

    monkeypatch.setattr(copies, "upload", fails)
    manifest = tmp_path / "manifest-00000001.json"
    manifest.touch()
    running = Copies(tmp_path, with_url("memory://bucket"), retry_s=(0.001, 0.002))
    running.offer(manifest)
    assert done.wait(30)
    running.close()
    assert calls == [(manifest.name, "memory://bucket/test", 3)] * 4
    assert caplog.text.count("is not copied to memory://bucket/test yet: what a store raises") == 1


def test_a_store_that_hangs_delays_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    seen: list[Path] = []

    def hangs(manifest: Path, url: str, keep: int) -> None:
        seen.append(manifest)
        held.wait(30)

    monkeypatch.setattr(copies, "upload", hangs)
    with ExitStack() as stack:
        stack.callback(held.set)
        at = Rig(with_url("memory://bucket"), tmp_path, stack)
        islands = at.started("a", "b")
        for round_ in range(3):
            for visitor in islands:
                visitor.push(at.run.fragments[0], draw(at.run.fragments[0], 1), round=round_, base_version=round_)
            assert islands[0].fetch(at.run.fragments[0], round=round_)[0].version == round_ + 1
        wait_until(lambda: at.served.ask(lambda run: run.totals.unsaved) == 0, "snapshots go on")
        assert len(seen) == 1
        held.set()


def test_a_run_whose_machine_is_lost_goes_on_from_its_copy(url: str, tmp_path: Path) -> None:
    config = with_url(url)
    with ExitStack() as stack:
        at = Rig(config, tmp_path / "lost", stack)
        islands = at.started("a", "b")
        epochs = [visitor.identity.epoch for visitor in islands]
        fragment = at.run.fragments[0]
        for seed, visitor in enumerate(islands):
            visitor.push(fragment, draw(fragment, seed), tokens=5)
        assert islands[0].fetch(fragment)[0].version == 1
        kept = islands[0].fetch(fragment, anchor=True)
    restore(url, tmp_path / "again", 0.0)
    with ExitStack() as stack:
        at = Rig(config, tmp_path / "again", stack)
        for name, epoch in zip("ab", epochs, strict=True):
            with pytest.raises(StaleEpoch, match="has not joined this coordinator: join again"):
                at.known(name, epoch).beat()
        islands = [at.island(name) for name in "ab"]
        assert [v.identity.epoch for v in islands] == [EPOCH_STEP + 3, EPOCH_STEP + 4]
        header, payload = islands[0].fetch(fragment, anchor=True)
        assert (header.version, header.round, header.digest) == (1, 1, kept[0].digest)
        assert payload.tolist() == kept[1].tolist()
        assert [v.beat(ready=True).phase for v in islands] == ["running"] * 2
        for seed, visitor in enumerate(islands):
            visitor.push(fragment, draw(fragment, seed), round=1, base_version=1, tokens=5)
        assert islands[0].fetch(fragment, round=1)[0].version == 2
    assert "manifest-00000003.json" in there(url)


def test_a_copy_that_an_earlier_life_did_not_come_to_is_made_at_a_start(url: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        Rig(configure("rounds.start_islands=2", "rounds.quorum=2"), tmp_path / "state", stack).started("a", "b")
    assert not there(url)
    with ExitStack() as stack:
        Rig(with_url(url), tmp_path / "state", stack)
    assert "manifest-00000001.json" in there(url)


def test_a_folder_that_cannot_be_written_is_an_environment_fault(url: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    _, manifest = saved(store, (1, 1), configure())
    upload(manifest, f"{url}/test", keep=1)
    store.close()
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault):
        restore(url, tmp_path / "file" / "state", 0.0)
