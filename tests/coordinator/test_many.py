"""One of several coordinators: it keeps, serves and speaks of its own fragments, and its folder is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.copies import folder, restore
from coordinator.snapshots import load_snapshot
from diloco.config import RunConfig
from diloco.errors import InputError, Malformed, RunMismatch
from diloco.fragments import partition
from diloco.v1 import coordinator_pb2 as pb
from tests.support import MODEL, Rig, configure, draw
from wan.checkpoint import load

WHOLE = partition(MODEL, configure().sync)
"""Two that move, and a static one."""
OTHERS = "run.coordinators=['here:1', 'there:2']"


def one_of_two(index: int, *overrides: str) -> RunConfig:
    return configure(OTHERS, f"run.coordinator_index={index}", *overrides)


@pytest.fixture(params=[0, 1])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(one_of_two(request.param), tmp_path / "state", stack)


def test_it_is_seeded_by_its_own_fragments_and_speaks_of_them_alone(rig: Rig) -> None:
    index = rig.run.config.run.coordinator_index
    island = rig.island("a")
    mine = [f for f in WHOLE if f.index % 2 == index]
    for fragment in mine:
        assert island.beat().phase == "gathering"
        island.push(fragment, draw(fragment, 0), seed=True)
    state = island.beat(ready=True)
    assert state.phase == "running"
    assert [f.fragment for f in state.fragments] == [f.index for f in mine]
    lines = island.link.explain(pb.ExplainRequest(all=True)).lines
    other = 1 - index
    assert f"This is coordinator {index} of 2; {other} at {'here:1' if index else 'there:2'}." in lines
    assert [line[:10] for line in lines if line.startswith("Fragment")] == [f"Fragment {index}"]
    assert len(rig.served.call(rig.run.snapshot())) == len(mine)


def test_what_belongs_to_another_is_refused_with_its_address(rig: Rig) -> None:
    index = rig.run.config.run.coordinator_index
    [island] = rig.started("a")
    theirs = WHOLE[1 - index]
    refusal = rf"coordinator {1 - index} \(.*\) keeps fragment {theirs.index}, and this is coordinator {index}: ask"
    for request in (
        lambda: island.push(theirs, draw(theirs, 1), round=0),
        lambda: island.fetch(theirs, round=0),
        lambda: island.fetch(theirs, anchor=True),
        lambda: island.link.decline(pb.DeclineRequest(**island.key(), fragment=theirs.index, reason="x")),
        lambda: island.link.explain(pb.ExplainRequest(fragment=theirs.index)),
    ):
        with pytest.raises(Malformed, match=refusal):
            request()


def test_its_run_is_done_when_its_own_rounds_have_ended(rig: Rig) -> None:
    index = rig.run.config.run.coordinator_index
    [island] = rig.started("a")
    for round_ in range(3):
        island.push(WHOLE[index], draw(WHOLE[index], round_), round=round_, base_version=round_, tokens=1)
        assert island.fetch(WHOLE[index], round=round_)[0].outcome == "committed"
    assert island.beat().phase == "done"


def test_it_is_taken_up_where_it_was_and_its_ledger_verifies(tmp_path: Path) -> None:
    config = one_of_two(1, "snapshot.every_rounds=1")
    with ExitStack() as stack:
        rig = Rig(config, tmp_path / "state", stack)
        [island] = rig.started("a")
        for round_ in range(2):
            island.push(WHOLE[1], draw(WHOLE[1], round_), round=round_, base_version=round_, tokens=1)
            assert island.fetch(WHOLE[1], round=round_)[0].outcome == "committed"
        before = island.beat().fragments
    snapshot = load_snapshot(tmp_path / "state")
    assert snapshot is not None
    assert list(snapshot.tensors()) == [spec.name for spec in WHOLE[1].specs]
    with ExitStack() as stack:
        rig = Rig(config, tmp_path / "state", stack)
        assert rig.known("a", 1).beat().fragments == before


@pytest.mark.parametrize(
    "other",
    [one_of_two(0), configure(), configure("run.coordinators=['a:1']"), configure(*[OTHERS], run_id="other")],
    ids=["index", "one", "one-named", "run"],
)
def test_the_folder_of_another_is_refused(other: RunConfig, tmp_path: Path) -> None:
    with ExitStack() as stack:
        Rig(one_of_two(1), tmp_path / "state", stack)
    message = "holds run" if other.run.id == "other" else r"is of coordinator 1 of 2, and this is coordinator 0 of [12]"
    with ExitStack() as stack, pytest.raises(RunMismatch, match=message):
        Rig(other, tmp_path / "state", stack)


def test_addresses_may_change_when_it_is_started_again(tmp_path: Path) -> None:
    for addresses in ("['here:1', 'there:2']", "['moved:1', 'away:2']"):
        with ExitStack() as stack:
            rig = Rig(configure(f"run.coordinators={addresses}", "run.coordinator_index=1"), tmp_path / "state", stack)
            assert rig.run.config.run.coordinators == tuple(eval(addresses))


def test_copies_of_several_coordinators_lie_apart_and_each_restores_its_own(tmp_path: Path) -> None:
    url = str(tmp_path / "remote")
    for index in (0, 1):
        with ExitStack() as stack:
            rig = Rig(one_of_two(index, f"snapshot.url='{url}'"), tmp_path / f"state-{index}", stack)
            rig.started("a")
    assert sorted(path.name for path in Path(url).iterdir()) == ["test~0", "test~1"]
    with pytest.raises(InputError, match=r"several runs or coordinators \(test~0, test~1\)"):
        restore(url, tmp_path / "again", 0.0)
    found = restore(f"{url}/test~1", tmp_path / "again", 0.0)
    assert found.config.run.coordinator_index == 1
    with ExitStack() as stack:
        rig = Rig(one_of_two(1), tmp_path / "again", stack)
        assert [f.fragment for f in rig.island("b").beat().fragments] == [1]
    assert folder(configure()) == "test"


def test_a_checkpoint_needs_the_folders_of_all(tmp_path: Path) -> None:
    folders = [tmp_path / f"state-{index}" for index in (0, 1)]
    for index, path in enumerate(folders):
        with ExitStack() as stack:
            Rig(one_of_two(index), path, stack).started("a")
    for given in ([folders[1]], [folders[0], folders[0]]):
        with pytest.raises(InputError, match="must be those of all 2 coordinators of run 'test'"):
            load(*given)
    found = load(*folders)
    assert sorted(found.tensors) == sorted(spec.name for spec in MODEL.tensors)
    assert found.versions == (0, 0, 0)
