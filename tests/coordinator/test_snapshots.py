"""Snapshots: what is written comes back with the same bits, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import snapshots
from coordinator.files import Files
from coordinator.fold import Outer, fold
from coordinator.snapshots import Draft, Snapshot, load_newest_good, load_snapshot
from coordinator.store import Store
from diloco.codec import CODECS
from diloco.config import OuterConfig, RunConfig
from diloco.errors import DigestMismatch, DilocoError, InputError
from diloco.fragments import partition
from tests.support import MODEL, configure, part

CONFIG = configure('wire.down="bf16"')
FRAGMENTS = partition(MODEL, CONFIG.sync)


class Failing(Files):
    """Files that may refuse to write some."""

    full = False

    def dump(self, path: Path, data: Any) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().dump(path, data)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state", Failing())
    yield opened
    opened.close()


def snapshot(versions: tuple[int, int] = (0, 0), config: RunConfig = CONFIG) -> Snapshot:
    """The outer state after so many rounds of each moving fragment; with a residual, the updates being bf16."""
    return Snapshot(
        config=config,
        layout=MODEL,
        fragments=FRAGMENTS,
        outers=tuple(outer(index, version) for index, version in enumerate((*versions, 0))),
        rounds=tuple(version + 1 for version in (*versions, -1)),
    )


def outer(index: int, version: int) -> Outer:
    fragment = FRAGMENTS[index]
    numbers = torch.Generator().manual_seed(index)
    current = Outer.first(fragment, torch.randn(fragment.numel, generator=numbers))
    for _ in range(version):
        sent = {"a": [part(fragment, torch.randn(fragment.numel, generator=numbers))]}
        current, _ = fold(fragment, current, sent, {"a": 1.0}, OuterConfig(), CODECS["bf16"])
    return current


def save(store: Store, taken: Snapshot, keep: int) -> tuple[Path, tuple[int, ...]]:
    """Writes a snapshot of outer states that stand still."""
    draft = Draft(store.root, taken.config, taken.layout, taken.fragments, taken.last_epoch, store.files)
    for current, ended in zip(taken.outers, taken.rounds, strict=True):
        draft.add(current, ended)
    return draft.finish(keep)


def same(a: Snapshot, b: Snapshot) -> bool:
    tensors = ("anchor", "momentum", "residual")
    return (
        (a.config, a.layout.digest, a.fragments, a.rounds) == (b.config, b.layout.digest, b.fragments, b.rounds)
        and [(o.version, o.digest) for o in a.outers] == [(o.version, o.digest) for o in b.outers]
        and all(
            torch.equal(getattr(x, n).view(torch.int32), getattr(y, n).view(torch.int32))
            for x, y in zip(a.outers, b.outers, strict=True)
            for n in tensors
        )
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_comes_back_bit_for_bit(state: Store) -> None:
    saved = snapshot((2, 3))
    assert all(o.momentum.any() and o.residual.any() for o in saved.outers[:2])
    save(state, saved, keep=2)
    loaded = load_snapshot(state.root)
    assert loaded is not None
    assert same(loaded, saved)


def test_bits_that_compare_equal_and_those_that_do_not_survive(state: Store) -> None:
    odd = snapshot().outers[0].anchor.clone()
    odd[:4] = torch.tensor([-0.0, 1e-45, torch.inf, torch.nan])
    first = Outer.first(FRAGMENTS[0], odd)
    saved = replace(snapshot(), outers=(first, *snapshot().outers[1:]))
    save(state, saved, keep=1)
    loaded = load_snapshot(state.root)
    assert loaded is not None
    assert same(loaded, saved)


def test_a_snapshot_knows_its_tensors_by_name(state: Store) -> None:
    saved = snapshot((1, 1))
    tensors = saved.tensors()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {s.name: s.shape for s in MODEL.tensors}
    embed = FRAGMENTS[0].starts[[s.name for s in FRAGMENTS[0].specs].index("embed.weight")]
    assert torch.equal(tensors["embed.weight"].flatten(), saved.outers[0].anchor[embed : embed + 24])


def test_the_newest_snapshot_is_loaded_and_only_so_many_are_kept(state: Store) -> None:
    for version in range(4):
        save(state, snapshot((version, 1)), keep=2)
        loaded = load_snapshot(state.root)
        assert loaded is not None
        assert [o.version for o in loaded.outers] == [version, 1, 0]
    assert [path.name for path in sorted(state.root.glob("manifest-*"))] == [
        "manifest-00000003.json",
        "manifest-00000004.json",
    ]
    files = names(state.root / "fragments")
    assert [name[:15] for name in files] == ["f0000-v00000002", "f0000-v00000003", "f0001-v00000001", "f0002-v00000000"]
    (state.root / "manifest-00000004.json").unlink()
    older = load_snapshot(state.root)
    assert older is not None
    assert same(older, snapshot((2, 1)))


def test_a_fragment_that_has_not_changed_is_not_written_again(state: Store) -> None:
    save(state, snapshot((0, 0)), keep=1)
    before = {path.name: path.stat().st_ino for path in (state.root / "fragments").iterdir()}
    save(state, snapshot((1, 0)), keep=1)
    after = {path.name: path.stat().st_ino for path in (state.root / "fragments").iterdir()}
    assert [name[:15] for name, _ in sorted(before.items() & after.items())] == ["f0001-v00000000", "f0002-v00000000"]


def test_a_snapshot_whose_manifest_was_not_written_is_not_seen(state: Store) -> None:
    files = state.files
    assert isinstance(files, Failing)
    assert load_snapshot(state.root) is None
    for before, after in ((None, (1, 1)), ((1, 1), (2, 2))):
        files.full = True
        with pytest.raises(OSError, match="No space left"):
            save(state, snapshot(after), keep=2)
        loaded = load_snapshot(state.root)
        assert loaded is None if before is None else loaded is not None and same(loaded, snapshot(before))
        files.full = False
        save(state, snapshot(after), keep=2)
        loaded = load_snapshot(state.root)
        assert loaded is not None
        assert same(loaded, snapshot(after))


def test_what_an_interrupted_snapshot_left_is_removed_by_the_next(state: Store) -> None:
    (state.root / "fragments" / "f0000-v00000009-0.partial").write_bytes(b"half")
    (state.root / "manifest-00000001.json.partial").write_bytes(b"half")
    assert load_snapshot(state.root) is None
    save(state, snapshot(), keep=1)
    assert [name[:5] for name in names(state.root / "fragments")] == ["f0000", "f0001", "f0002"]
    assert load_snapshot(state.root) is not None


def test_no_folder_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no state folder at .*nowhere"):
        load_snapshot(tmp_path / "nowhere")


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", ["anchor", "momentum", "residual"])
def test_one_flipped_bit_of_any_tensor_is_found(state: Store, tensor: str) -> None:
    save(state, snapshot((1, 1)), keep=1)
    [path] = (state.root / "fragments").glob("f0001-*")
    data = bytearray(path.read_bytes())
    needle = getattr(snapshot((1, 1)).outers[1], tensor)[-1:].numpy().tobytes()
    assert data.count(needle) == 1
    data[data.index(needle)] ^= 1
    path.write_bytes(data)
    words = rf"{path.name} is damaged: the {tensor} of 'layers\.1\.w' is not as it was written"
    with pytest.raises(DigestMismatch, match=words) as caught:
        load_snapshot(state.root)
    assert caught.value.ids == {"fragment": 1}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * len(path.read_bytes()))


def swap(path: Path) -> None:
    """Another version of the same fragment under this one's name."""
    other = Store(path.parents[1] / "other")
    save(other, snapshot((2, 1)), keep=1)
    [theirs] = (other.root / "fragments").glob("f0000-*")
    path.write_bytes(theirs.read_bytes())
    other.close()


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (cut, DigestMismatch, "damaged"),
        (scribble, DigestMismatch, "damaged"),
        (swap, DigestMismatch, "has digest [0-9a-f]{16}, but its manifest says [0-9a-f]{16}"),
        (Path.unlink, InputError, "is missing, but a manifest in .* names it"),
    ],
)
def test_a_damaged_or_missing_file_is_refused(
    state: Store, damage: Callable[[Path], None], kind: type[DilocoError], words: str
) -> None:
    save(state, snapshot((1, 1)), keep=1)
    [path] = (state.root / "fragments").glob("f0000-*")
    damage(path)
    with pytest.raises(kind, match=words):
        load_snapshot(state.root)


def test_a_newer_format_is_refused(state: Store) -> None:
    save(state, snapshot(), keep=1)
    [path] = state.root.glob("manifest-*.json")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": snapshots.FORMAT + 1}))
    with pytest.raises(
        InputError, match=f"has format {snapshots.FORMAT + 1}, newer than {snapshots.FORMAT}, the newest this"
    ):
        load_snapshot(state.root)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: "{",
        lambda m: "",
        lambda m: "[]",
        lambda m: json.dumps({k: v for k, v in m.items() if k != "fragments"}),
        lambda m: json.dumps({k: v for k, v in m.items() if k != "config_toml"}),
        lambda m: json.dumps({**m, "config_toml": "run ="}),
        lambda m: json.dumps({**m, "layout": m["layout"][1:]}),
        lambda m: json.dumps({**m, "fragments": m["fragments"][1:]}),
        lambda m: json.dumps({**m, "fragments": [{**row, "round": None} for row in m["fragments"]]}),
    ],
)
def test_a_damaged_manifest_is_refused_by_name_and_the_one_before_it_is_taken(
    state: Store, change: Callable[[dict[str, Any]], str]
) -> None:
    for version in (1, 2):
        save(state, snapshot((version, 1)), keep=2)
    path = state.root / "manifest-00000002.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises((InputError, DigestMismatch), match="damaged"):
        load_snapshot(state.root)
    loaded = load_newest_good(state.root)
    assert loaded is not None
    assert same(loaded, snapshot((1, 1)))
    assert path.with_suffix(".damaged").exists()
    save(state, snapshot((2, 1)), keep=2)
    again = load_snapshot(state.root)
    assert again is not None
    assert same(again, snapshot((2, 1)))


def test_a_damaged_file_is_written_anew_once_the_snapshot_before_it_is_taken(
    state: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2):
        save(state, snapshot((version, 1)), keep=2)
    [path] = (state.root / "fragments").glob("f0000-v00000002*")
    scribble(path)
    loaded = load_newest_good(state.root)
    assert loaded is not None
    assert same(loaded, snapshot((1, 1)))
    assert "going back to the snapshot before it, manifest-00000001.json" in caplog.text
    save(state, snapshot((2, 1)), keep=2)
    again = load_snapshot(state.root)
    assert again is not None
    assert same(again, snapshot((2, 1)))


def test_snapshots_that_are_all_damaged_are_left_as_they_are_and_refused(state: Store) -> None:
    for version in (1, 2):
        save(state, snapshot((version, 1)), keep=2)
    [shared] = (state.root / "fragments").glob("f0001-*")
    scribble(shared)
    before = names(state.root)
    with pytest.raises(DigestMismatch, match="damaged"):
        load_newest_good(state.root)
    assert names(state.root) == before


def test_a_damaged_older_manifest_keeps_no_newer_one_from_being_written(state: Store) -> None:
    save(state, snapshot((1, 1)), keep=2)
    (state.root / "manifest-00000001.json").write_text("{")
    assert save(state, snapshot((2, 2)), keep=2)[1] == (3, 3, 0)
    loaded = load_newest_good(state.root)
    assert loaded is not None
    assert same(loaded, snapshot((2, 2)))


def test_a_newer_format_is_never_passed_over(state: Store) -> None:
    for version in (1, 2):
        save(state, snapshot((version, 1)), keep=2)
    path = state.root / "manifest-00000002.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": snapshots.FORMAT + 1}))
    with pytest.raises(InputError, match="newer than"):
        load_newest_good(state.root)
    assert path.exists()
