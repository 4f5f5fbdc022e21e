"""The state folder: what is written comes back with the same bits, or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from coordinator import store
from coordinator.fold import Outer, fold
from coordinator.store import UPDATES_KEPT, Snapshot, Store, check_same_run, load_snapshot, read_payload
from diloco.codec import CODECS
from diloco.config import OuterConfig, RunConfig
from diloco.errors import DigestMismatch, DilocoError, EnvironmentFault, InputError, RunMismatch
from diloco.fragments import partition
from tests.support import MODEL, configure, part

CONFIG = configure('wire.down="bf16"')
FRAGMENTS = partition(MODEL, CONFIG.sync)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state")
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
    state.save(saved, keep=2)
    loaded = load_snapshot(state.root)
    assert loaded is not None
    assert same(loaded, saved)


def test_bits_that_compare_equal_and_those_that_do_not_survive(state: Store) -> None:
    odd = snapshot().outers[0].anchor.clone()
    odd[:4] = torch.tensor([-0.0, 1e-45, torch.inf, torch.nan])
    first = Outer.first(FRAGMENTS[0], odd)
    saved = replace(snapshot(), outers=(first, *snapshot().outers[1:]))
    state.save(saved, keep=1)
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
        state.save(snapshot((version, 1)), keep=2)
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
    state.save(snapshot((0, 0)), keep=1)
    before = {path.name: path.stat().st_ino for path in (state.root / "fragments").iterdir()}
    state.save(snapshot((1, 0)), keep=1)
    after = {path.name: path.stat().st_ino for path in (state.root / "fragments").iterdir()}
    assert [name[:15] for name, _ in sorted(before.items() & after.items())] == ["f0001-v00000000", "f0002-v00000000"]


def test_a_snapshot_whose_manifest_was_not_written_is_not_seen(state: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, data: Any) -> None:
        raise OSError(28, "No space left on device")

    assert load_snapshot(state.root) is None
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomic", fails)
        with pytest.raises(OSError, match="No space left"):
            state.save(snapshot((1, 1)), keep=2)
    assert load_snapshot(state.root) is None
    state.save(snapshot((1, 1)), keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomic", fails)
        with pytest.raises(OSError, match="No space left"):
            state.save(snapshot((2, 2)), keep=1)
    loaded = load_snapshot(state.root)
    assert loaded is not None
    assert same(loaded, snapshot((1, 1)))


def test_what_an_interrupted_snapshot_left_is_removed_by_the_next(state: Store) -> None:
    (state.root / "fragments" / "f0000-v00000009-0.partial").write_bytes(b"half")
    (state.root / "manifest-00000001.json.partial").write_bytes(b"half")
    assert load_snapshot(state.root) is None
    state.save(snapshot(), keep=1)
    assert [name[:5] for name in names(state.root / "fragments")] == ["f0000", "f0001", "f0002"]
    assert load_snapshot(state.root) is not None


def test_no_folder_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no state folder at .*nowhere"):
        load_snapshot(tmp_path / "nowhere")


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", ["anchor", "momentum", "residual"])
def test_one_flipped_bit_of_any_tensor_is_found(state: Store, tensor: str) -> None:
    state.save(snapshot((1, 1)), keep=1)
    [path] = (state.root / "fragments").glob("f0001-*")
    data = bytearray(path.read_bytes())
    needle = getattr(snapshot((1, 1)).outers[1], tensor)[-1:].numpy().tobytes()
    assert data.count(needle) == 1
    data[data.index(needle)] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatch, match=rf"{path.name} .*damaged") as caught:
        load_snapshot(state.root)
    assert caught.value.ids == {"fragment": 1}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * len(path.read_bytes()))


def swap(path: Path) -> None:
    """Another version of the same fragment under this one's name."""
    outer_now = snapshot((2, 1)).outers[0]
    tensors = {name: getattr(outer_now, name) for name in ("anchor", "momentum", "residual")}
    save_file(tensors, path, metadata={"xxh3_128": "of another version"})


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
    state.save(snapshot((1, 1)), keep=1)
    [path] = (state.root / "fragments").glob("f0000-*")
    damage(path)
    with pytest.raises(kind, match=words):
        load_snapshot(state.root)


def test_a_newer_format_is_refused(state: Store) -> None:
    state.save(snapshot(), keep=1)
    [path] = state.root.glob("manifest-*.json")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": store.FORMAT + 1}))
    with pytest.raises(InputError, match=f"has format {store.FORMAT + 1}, newer than {store.FORMAT}, the newest this"):
        load_snapshot(state.root)


# -- whose folder ---------------------------------------------------------------------------------------------------


def test_a_folder_belongs_to_one_run_with_one_set_of_settings(tmp_path: Path) -> None:
    saved = snapshot()
    check_same_run(saved.config, configure('wire.down="bf16"'), tmp_path)
    for other, words in (
        (configure(run_id="other"), "holds run 'test' .* not 'other'"),
        (configure("outer.lr=0.5"), "was written with settings .* a run keeps its settings"),
    ):
        with pytest.raises(RunMismatch, match=words) as caught:
            check_same_run(saved.config, other, tmp_path)
        assert saved.config.digest[:12] in caught.value.message
        assert other.digest[:12] in caught.value.message
        assert saved.config.digest[:12] != other.digest[:12]


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


def test_a_line_for_people_that_cannot_be_written_undoes_nothing(state: Store) -> None:
    (state.root / "events.jsonl").mkdir()
    state.record([("a", {})])
    assert [row.kind for row in state.ledger.read()] == ["a"]


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
        path = state.write_update(1, round_, torch.full((5,), round_, dtype=torch.uint8))
        assert path == state.update_path(1, round_)
        assert read_payload(path).tolist() == [round_] * 5
    assert names(state.root / "updates") == [f"f0001-r{r:08d}.bin" for r in range(3, UPDATES_KEPT + 3)]
    state.write_update(0, UPDATES_KEPT + 2, torch.zeros(1, dtype=torch.uint8))
    assert len(names(state.root / "updates")) == UPDATES_KEPT + 1


def test_a_payload_of_no_bytes_is_an_empty_tensor(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_payload(tmp_path / "empty").shape == (0,)
    assert read_payload(tmp_path / "empty").dtype == torch.uint8


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    store.write_atomic(tmp_path / "file", b"old")
    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        store.write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
