"""Checkpoints: whole or none, the newest that is whole, as many as are kept, and on any number of ranks."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from diloco.errors import ConfigError, EnvironmentFault, InputError, LayoutError
from diloco.layout import Box
from island.checkpoint import Checkpoints, Manifest, Piece, State, inner, load, random_state, values
from island.checkpoint.planning import rows, share_out
from island.checkpoint.store import Store
from island.config_checkpoint import CheckpointConfig
from island.group import Group
from tests.diloco.test_layout import rank_of
from tests.island.ranks import on_ranks

ABOUT = {"run": "r", "island": "a", "config": "c", "layout": "l"}
WHOLE = torch.arange(35, dtype=torch.float32).view(7, 5)
COUNT = torch.tensor(3.0)


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{tmp_path}"
        fsspec.filesystem("memory").store.clear()
    else:
        yield f"file://{tmp_path}" if request.param == "file" else str(tmp_path)


class Metrics:
    """What was recorded."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def __call__(self, kind: str, **values: Any) -> None:
        self.records.append({"kind": kind, **values})


def taker(url: str, group: Group, metrics: Metrics | None = None, **settings: Any) -> Checkpoints:
    chosen = CheckpointConfig(url=url, **{"every_steps": 1, **settings})
    return Checkpoints(chosen, ABOUT, group, metrics or Metrics())


def slab(group: Group, whole: Tensor = WHOLE, dim: int = 0) -> Piece:
    """This rank's rows (or columns) of a tensor; ranks hold different numbers of them."""
    parts = [part.clone() for part in whole.tensor_split(group.size, dim)]
    offset = [0, 0]
    offset[dim] = sum(part.shape[dim] for part in parts[: group.rank])
    mine = parts[group.rank].contiguous()
    return Piece(source=mine, box=Box(tuple(offset), tuple(mine.shape)), shape=tuple(whole.shape))


def state(group: Group, step: int) -> State:
    pieces = {"sharded": slab(group, WHOLE + step), "count": Piece.of(COUNT + step), "same": Piece.of(WHOLE * step)}
    return State(pieces=pieces, island={"step": step}, rank={"rank": group.rank})


def take(url: str, group: Group, *steps: int, **settings: Any) -> Checkpoints:
    checkpoints = taker(url, group, **settings)
    for step in steps:
        checkpoints.edge(step, lambda: state(group, step))  # noqa: B023
        checkpoints.settle()
    return checkpoints


def empty(group: Group, dim: int = 0) -> dict[str, Piece]:
    return {
        "sharded": slab(group, torch.full_like(WHOLE, -1), dim),
        "count": Piece.of(torch.tensor(-1.0)),
        "same": Piece.of(torch.full_like(WHOLE, -1)),
    }


def names(url: str) -> list[str]:
    return Store(f"{url}/r/a").folders()


# -- whole or none ----------------------------------------------------------------------------------------------------


def test_what_was_taken_is_found_again(url: str) -> None:
    group = Group()
    take(url, group, 1, 2)
    found = taker(url, group).find()
    assert found is not None
    assert (found.step, found.island, found.about) == (2, {"step": 2}, ABOUT)
    pieces = empty(group)
    load(Store(f"{url}/r/a"), found, pieces)
    assert torch.equal(pieces["sharded"].tensor, WHOLE + 2)
    assert torch.equal(pieces["count"].tensor, COUNT + 2)
    assert values(Store(f"{url}/r/a"), found, 0) == {"rank": 0}
    assert values(Store(f"{url}/r/a"), found, 1) is None


def test_where_none_was_taken_none_is_found(url: str) -> None:
    assert taker(url, Group()).find() is None


def test_a_rank_s_file_is_a_safetensors_file(tmp_path: Path) -> None:
    take(str(tmp_path), Group(), 4)
    (file,) = tmp_path.rglob("*.safetensors")
    assert torch.equal(load_file(file)["sharded"], WHOLE + 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8])
def test_every_type_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    group, whole = Group(), torch.arange(12).view(3, 4).to(dtype)
    checkpoints = taker(str(tmp_path), group)
    checkpoints.edge(1, lambda: State(pieces={"x": Piece.of(whole)}, island={}))
    checkpoints.settle()
    found, target = taker(str(tmp_path), group).find(), torch.zeros_like(whole)
    assert found is not None
    load(checkpoints.store, found, {"x": Piece.of(target)})
    assert torch.equal(target.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize(
    "harm", ["no manifest", "torn manifest", "no file", "short file", "flipped bit", "other format"]
)
def test_one_that_is_not_whole_is_passed_over(tmp_path: Path, harm: str) -> None:
    group = Group()
    take(str(tmp_path), group, 1, 2)
    folder = tmp_path / "r/a" / names(str(tmp_path))[-1]
    manifest, file = folder / "manifest.json", folder / "rank-00000.safetensors"
    if harm == "no manifest":
        manifest.unlink()
    elif harm == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:-9])
    elif harm == "no file":
        file.unlink()
    elif harm == "short file":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "flipped bit":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    found = taker(str(tmp_path), group).find()
    assert found is not None
    assert found.step == 1


def test_what_was_damaged_does_not_count_as_kept(tmp_path: Path) -> None:
    group = Group()
    take(str(tmp_path), group, 1, 2)
    bad = tmp_path / "r/a" / names(str(tmp_path))[-1] / "rank-00000.safetensors"
    bad.write_bytes(bytes(len(bad.read_bytes())))
    checkpoints = taker(str(tmp_path), group)
    found = checkpoints.find()
    assert found is not None
    assert found.step == 1
    checkpoints.edge(3, lambda: state(group, 3))
    checkpoints.settle()
    assert [name.partition("-step-")[2] for name in names(str(tmp_path))] == ["1", "3"]


def test_one_of_another_model_or_run_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    take(str(tmp_path), Group(), 1)
    settings = CheckpointConfig(url=str(tmp_path))
    assert Checkpoints(settings, {**ABOUT, "layout": "x"}, Group(), Metrics()).find() is None
    assert "another layout" in caplog.text
    assert Checkpoints(settings, {**ABOUT, "run": "x"}, Group(), Metrics()).find() is None


def test_a_load_says_what_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    group = Group()
    checkpoints = take(str(tmp_path), group, 1)
    found = checkpoints.find()
    assert found is not None
    with pytest.raises(InputError, match="has no other"):
        load(checkpoints.store, found, {"other": Piece.of(WHOLE)})
    with pytest.raises(InputError, match="of another model"):
        load(checkpoints.store, found, {"same": Piece.of(WHOLE.clone()[:3])})


# -- retention --------------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_what_was_never_finished_goes(url: str) -> None:
    group = Group()
    take(url, group, 1, 2, keep=3)
    Store(f"{url}/r/a").write("00000002-step-9", "rank-00000.json", [b"{}"])
    take(url, group, 3, 4, keep=2)
    assert names(url) == ["00000003-step-3", "00000004-step-4"]


def test_a_serial_is_never_used_twice(url: str) -> None:
    group = Group()
    take(url, group, 5)
    take(url, group, 5)
    found = taker(url, group).find()
    assert found is not None
    assert (found.serial, names(url)) == (1, ["00000000-step-5", "00000001-step-5"])


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "read"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_number_of_ranks_reads_what_others_have_written(url: str, written: int, read: int, dim: int) -> None:
    on_ranks(written, lambda group: take(url, group, 7))

    def back(group: Group) -> dict[str, Piece]:
        found = taker(url, group).find()
        assert found is not None
        assert found.ranks == written
        pieces = empty(group, dim)
        load(Store(f"{url}/r/a"), found, pieces)
        return pieces

    ranks = on_ranks(read, back)
    assert torch.equal(torch.cat([pieces["sharded"].tensor for pieces in ranks], dim), WHOLE + 7)
    assert all(torch.equal(pieces["same"].tensor, WHOLE * 7) for pieces in ranks)


def test_what_several_hold_is_written_once_and_shared_out() -> None:
    same = [{f"t{n}": Piece.of(torch.zeros(n + 1)) for n in range(6)} for _ in range(2)]
    plans = [share_out([rows(pieces) for pieces in same], rank) for rank in range(2)]
    written = [[item.index.fqn for item in plan.mine.items] for plan in plans]
    assert sorted(written[0] + written[1]) == [f"t{n}" for n in range(6)]
    assert all(written)
    assert plans[0].tensors == plans[1].tensors


def test_boxes_that_do_not_make_up_a_tensor_are_refused() -> None:
    half = Piece(source=torch.zeros(2), box=Box((0,), (2,)), shape=(4,))
    with pytest.raises(LayoutError, match="do not make it up"):
        share_out([rows({"x": half})], 0)


def test_a_type_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(LayoutError, match="complex64"):
        rows({"x": Piece.of(torch.zeros(2, dtype=torch.complex64))})


def test_what_one_rank_does_not_see_no_rank_takes(tmp_path: Path) -> None:
    for where in ("0", "1"):
        take(str(tmp_path / where), Group(), 1)
    take(str(tmp_path / "0"), Group(), 2)
    steps = on_ranks(2, lambda group: taker(str(tmp_path / str(group.rank)), group).find())
    assert [found and found.step for found in steps] == [1, 1]


# -- beside training --------------------------------------------------------------------------------------------------


class Gate:
    """A piece whose values are there once it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self) -> Tensor:
        assert self.opened.wait(60)
        return WHOLE

    def piece(self) -> Piece:
        return Piece(source=self, box=Box.whole(WHOLE.shape), shape=tuple(WHOLE.shape), fixed=True)


def test_training_goes_on_while_one_is_written_and_what_it_changes_is_not_in_it(tmp_path: Path) -> None:
    gate, group, moving = Gate(), Group(), WHOLE.clone()
    checkpoints = taker(str(tmp_path), group, every_steps=2)
    pieces = {"late": gate.piece(), "moving": Piece.of(moving)}
    checkpoints.edge(2, lambda: State(pieces=pieces, island={}))
    moving.zero_()
    for step in (3, 4, 5):
        checkpoints.edge(step, lambda: State(pieces=pieces, island={}))
    assert checkpoints.find() is None
    gate.opened.set()
    checkpoints.settle()
    found, target = checkpoints.find(), torch.zeros_like(WHOLE)
    assert found is not None
    assert found.step == 2
    load(checkpoints.store, found, {"moving": Piece.of(target)})
    assert torch.equal(target, WHOLE)


def test_what_was_due_meanwhile_is_taken_at_the_next_edge(tmp_path: Path) -> None:
    gate, group = Gate(), Group()
    checkpoints = taker(str(tmp_path), group, every_steps=2)
    checkpoints.edge(2, lambda: State(pieces={"late": gate.piece()}, island={}))
    checkpoints.edge(4, lambda: state(group, 4))
    gate.opened.set()
    checkpoints.settle()
    checkpoints.edge(5, lambda: state(group, 5))
    checkpoints.settle()
    assert [name.partition("-step-")[2] for name in names(str(tmp_path))] == ["2", "5"]


def test_it_is_put_off_while_it_cannot_be_taken(tmp_path: Path) -> None:
    group = Group()
    checkpoints = taker(str(tmp_path), group, every_steps=3)
    for step, able in ((3, False), (4, False), (5, True)):
        checkpoints.edge(step, lambda: state(group, step), able=able)  # noqa: B023
    checkpoints.settle()
    assert names(str(tmp_path)) == ["00000000-step-5"]


def test_with_no_thread_of_its_own_it_is_complete_at_once(tmp_path: Path) -> None:
    group = Group()
    checkpoints = taker(str(tmp_path), group, asynchronous=False)
    checkpoints.edge(1, lambda: state(group, 1))
    assert checkpoints.completed == 1
    assert checkpoints.find() is not None


def test_the_last_one_is_taken_out_of_turn_and_waited_for(tmp_path: Path) -> None:
    group = Group()
    checkpoints = taker(str(tmp_path), group, every_steps=3)
    for step, last in ((3, False), (3, True), (4, False), (5, True)):
        checkpoints.edge(step, lambda: state(group, step), last=last)  # noqa: B023
        if last:
            assert names(str(tmp_path))[-1].endswith(f"-step-{step}")
    assert checkpoints.completed == 2
    checkpoints.edge(6, lambda: state(group, 6), last=True, able=False)
    assert checkpoints.completed == 2


# -- trouble ----------------------------------------------------------------------------------------------------------


def broken() -> Tensor:
    raise OSError("the disk is full")


def breaking(group: Group, on: int) -> State:
    source: Callable[[], Tensor] = broken if group.rank == on else lambda: torch.zeros(1)
    piece = Piece(source=source, box=Box((group.rank,), (1,)), shape=(group.size,), fixed=True)
    return State(pieces={"x": piece}, island={})


def test_one_that_fails_is_reported_and_the_next_one_is_good(tmp_path: Path) -> None:
    def work(group: Group) -> tuple[Checkpoints, Metrics, Manifest | None]:
        metrics = Metrics()
        checkpoints = taker(str(tmp_path), group, metrics)
        checkpoints.edge(1, lambda: breaking(group, on=1))
        checkpoints.settle()
        checkpoints.edge(2, lambda: state(group, 2))
        checkpoints.settle()
        return checkpoints, metrics, checkpoints.find()

    for checkpoints, metrics, found in on_ranks(2, work):
        assert (checkpoints.completed, checkpoints.failed) == (1, 1)
        assert found is not None
        assert found.step == 2
        assert [record["complete"] for record in metrics.records] == [False, True]
        assert "the disk is full" in metrics.records[0]["reason"]


def test_where_too_many_fail_in_a_row_the_island_ends(tmp_path: Path) -> None:
    checkpoints = taker(str(tmp_path), Group(), failures=1)
    checkpoints.edge(1, lambda: breaking(Group(), on=0))
    checkpoints.settle()
    checkpoints.edge(2, lambda: breaking(Group(), on=0))
    with pytest.raises(EnvironmentFault, match=r"2 checkpoints in a row have failed.*the disk is full"):
        checkpoints.settle()


def test_one_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    gate, metrics = Gate(), Metrics()
    checkpoints = taker(str(tmp_path), Group(), metrics, timeout_s=1e-6)
    checkpoints.edge(1, lambda: State(pieces={"late": gate.piece()}, island={}))
    checkpoints.settle()
    checkpoints.edge(2, lambda: state(Group(), 2))  # the thread is still at it
    assert [record["reason"] for record in metrics.records] == [
        "it takes longer than 1e-06 s",
        "the one before is still being written",
    ]
    gate.opened.set()


def test_a_url_that_no_store_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.url"):
        taker("nosuchstore://x", Group())


def test_a_store_that_cannot_be_listed_says_so(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("a file where a folder should be")
    checkpoints, metrics = taker(str(tmp_path), Group(), metrics := Metrics()), metrics
    checkpoints.edge(1, lambda: state(Group(), 1))
    checkpoints.settle()
    assert [record["complete"] for record in metrics.records] == [False]


# -- model, optimizer, random numbers ---------------------------------------------------------------------------------


class Net(nn.Module):
    """A tied, a frozen and a plain parameter, and buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.b.weight = self.a.weight
        self.c.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_a_model_has_each_tensor_once_and_its_saved_buffers() -> None:
    names = {"model.a.weight", "model.c.weight", "model.seen", "model.scale"}
    assert set(inner.of_model(Net())) == names
    compiled: Any = torch.compile(Net())
    assert set(inner.of_model(compiled)) == names


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop, torch.optim.Adagrad])
def test_an_optimizer_goes_on_to_the_same_bits(tmp_path: Path, kind: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model, group = nn.Linear(4, 4), Group()
    optimizer = kind(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step))).square().sum().backward()
            optimizer.step()

    def captured() -> State:
        pieces, numbers = inner.of_optimizer(model, optimizer)
        return State(pieces=inner.of_model(model) | pieces, island={"numbers": numbers})

    train(model, optimizer, range(3))
    checkpoints = taker(str(tmp_path), group)
    checkpoints.edge(1, captured)
    checkpoints.settle()
    train(model, optimizer, range(3, 6))
    again = nn.Linear(4, 4)
    other = kind(again.parameters(), lr=0.1)
    found = checkpoints.find()
    assert found is not None
    inner.prepare(other)
    load(checkpoints.store, found, inner.of_model(again) | inner.of_optimizer(again, other)[0])
    inner.set_numbers(again, other, found.island["numbers"])
    train(again, other, range(3, 6))
    assert torch.equal(again.weight, model.weight)
    assert other.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_parameter_has_its_state_where_it_is_itself(rank: int) -> None:
    with rank_of(rank, 2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None))
        model = nn.Module()
        model.weight = weight
        optimizer = torch.optim.SGD([weight], lr=0.1)
        rows = weight.to_local().shape[0]
        state = {"placed": torch.zeros_like(weight), "plain": torch.zeros(rows, 3), "step": torch.zeros(())}
        optimizer.state[weight] = state
        pieces, _ = inner.of_optimizer(model, optimizer)
        boxes = {name.rpartition(".")[2]: (piece.box, piece.shape) for name, piece in pieces.items()}
        part = Box((3 * rank, 0), (rows, 3)), (5, 3)
        assert boxes == {"placed": part, "plain": part, "step": (Box((), ()), ())}
        state["other"] = torch.zeros(7)
        with pytest.raises(LayoutError, match=r"weight\.other is a plain tensor \[7\] of a sharded parameter"):
            inner.of_optimizer(model, optimizer)


def test_random_numbers_go_on_where_they_were() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(), float(np.random.randn()), float(torch.rand(()))]

    draw()
    kept = json.loads(json.dumps(random_state.capture()))
    drawn = draw()
    random_state.restore(kept)
    assert draw() == drawn


def test_a_rank_without_a_state_gets_one_of_its_own_the_same_each_time() -> None:
    drawn = []
    for rank in (0, 1, 0):
        random_state.derive("run", "island", 7, rank)
        drawn.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
    assert drawn[0] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])
