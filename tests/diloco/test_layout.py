"""Layouts: names that no wrapper changes, and boxes that hold exactly the elements that DTensor put on a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from diloco.errors import LayoutError
from diloco.layout import Box, Kind, Layout, TensorSpec, box_of, canonical_name, local, named_tensors, natural_key

PROPERTY = settings(derandomize=True, deadline=None, max_examples=200)
MESHES = settings(derandomize=True, deadline=None, max_examples=40)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.down = nn.Linear(6, 4, bias=False)


class Tower(nn.Module):
    """A model with everything that a layout tells apart: layers beyond ten, buffers of all sorts, one frozen tensor."""

    def __init__(self, layers: int = 11) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.embed = nn.Embedding(5, 4)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("angles", torch.ones(2), persistent=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


def layout_of(module: nn.Module) -> Layout:
    return Layout(TensorSpec(name, tuple(tensor.shape), kind) for name, tensor, kind in named_tensors(module))


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a process group that sends nothing.

    DTensor caches placements by mesh, and meshes of different ranks compare equal, so the cache goes too.
    """
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        sys.excepthook = hook


def ranks(world: int) -> Iterator[int]:
    """Makes this process each rank of a group in turn."""
    for rank in range(world):
        with rank_of(rank, world):
            yield rank


def assert_tile(boxes: Sequence[Box], shape: Sequence[int], copies: int = 1) -> None:
    """Every element of a tensor is in exactly `copies` of the boxes."""
    count = torch.zeros(tuple(shape), dtype=torch.int64)
    for box in boxes:
        assert box.within(shape)
        count[box.slices] += 1
    assert torch.equal(count, torch.full_like(count, copies))


def numbered(shape: Sequence[int]) -> Tensor:
    """A tensor whose elements are their own flat indices."""
    return torch.arange(torch.Size(shape).numel()).view(tuple(shape))


# -- names and kinds ------------------------------------------------------------------------------------------------


def test_numbers_in_names_sort_by_value() -> None:
    names = ["layers.10.w", "layers.2.w", "layers.2.b", "embed", "layers.1.10.w", "layers.1.9.w"]
    assert [spec.name for spec in Layout(TensorSpec(n, (1,)) for n in names).tensors] == [
        "embed",
        "layers.1.9.w",
        "layers.1.10.w",
        "layers.2.b",
        "layers.2.w",
        "layers.10.w",
    ]
    assert natural_key("h.2") < natural_key("h.10") < natural_key("h.a")


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("_orig_mod.layers.0.up.weight", "layers.0.up.weight"),
        ("layers.0._checkpoint_wrapped_module._orig_mod.up.weight", "layers.0.up.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.up.weight", "layers.0.up.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_canonical_names_have_no_wrappers(raw: str, name: str) -> None:
    assert canonical_name(raw) == name


def test_a_model_is_what_it_learns_what_is_frozen_and_what_is_saved_with_it() -> None:
    rows = {name: (tuple(t.shape), kind) for name, t, kind in named_tensors(Tower(layers=1))}
    assert rows == {
        "embed.weight": ((5, 4), "parameter"),
        "head.weight": ((5, 4), "parameter"),
        "layers.0.down.weight": ((4, 6), "parameter"),
        "layers.0.norm.bias": ((6,), "parameter"),
        "layers.0.norm.running_mean": ((6,), "buffer"),
        "layers.0.norm.running_var": ((6,), "buffer"),
        "layers.0.norm.weight": ((6,), "parameter"),
        "layers.0.up.bias": ((6,), "parameter"),
        "layers.0.up.weight": ((6, 4), "parameter"),
        "scale": ((3,), "static"),
    }


def test_the_tensors_are_the_models_own() -> None:
    model = Tower(layers=1)
    found = {name: tensor for name, tensor, _ in named_tensors(model)}
    assert found["embed.weight"] is model.embed.weight
    assert found["layers.0.norm.running_var"] is model.layers[0].norm.running_var


@pytest.mark.parametrize("first", ["z", "a"])
def test_tied_parameters_appear_once_under_the_first_natural_name(first: str) -> None:
    model = nn.Module()
    shared = nn.Linear(3, 2, bias=False)
    for name in (first, *{"z", "a"} - {first}):
        model.add_module(name, nn.ModuleDict({"10": shared, "2": shared}))
    assert [name for name, _, _ in named_tensors(model)] == ["a.2.weight"]


def compiled(model: Tower) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def compiled_layers(model: Tower) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer)
    return model


def checkpointed(model: Tower) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    return model


def checkpointed_compiled_and_sharded(model: Tower) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for i, layer in enumerate(checkpointed(model).layers):
        model.layers[i] = torch.compile(layer)
        fully_shard(layer, mesh=mesh)
    return compiled(fully_shard(model, mesh=mesh))


def replicated(model: Tower) -> nn.Module:
    return DistributedDataParallel(model)


def compiled_replicated(model: Tower) -> nn.Module:
    return torch.compile(DistributedDataParallel(model))  # type: ignore[return-value]


def replicated_compiled(model: Tower) -> nn.Module:
    return DistributedDataParallel(compiled(model))


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        compiled_layers,
        checkpointed,
        checkpointed_compiled_and_sharded,
        replicated,
        compiled_replicated,
        replicated_compiled,
    ],
)
def test_wrappers_change_neither_names_nor_shapes_nor_kinds(wrap: object) -> None:
    plain = layout_of(Tower())
    with rank_of(1, 2):
        wrapped = layout_of(wrap(Tower()))  # type: ignore[operator]
    assert plain.difference(wrapped) == ""
    assert plain.digest == wrapped.digest


# -- layouts --------------------------------------------------------------------------------------------------------

SPECS = (
    TensorSpec("embed", (5, 4)),
    TensorSpec("layers.2.norm", (4,)),
    TensorSpec("layers.2.mean", (4,), "buffer"),
    TensorSpec("layers.10.norm", (4,)),
    TensorSpec("scale", (), "static"),
)


@given(st.permutations(SPECS))
@PROPERTY
def test_the_order_of_definition_does_not_matter(specs: list[TensorSpec]) -> None:
    assert Layout(specs).tensors == Layout(SPECS).tensors
    assert Layout(specs).digest == Layout(SPECS).digest


def test_the_digest_of_a_layout_is_frozen() -> None:
    assert Layout(SPECS).digest == "f93b1d2ed7eafbfa9f3289492f7692f0a50c1ca8b8d1b4c90b11db2502ed4315"


@pytest.mark.parametrize(
    "spec", [TensorSpec("scales", (), "static"), TensorSpec("scale", (1,), "static"), TensorSpec("scale", ())]
)
def test_the_digest_tells_names_shapes_and_kinds_apart(spec: TensorSpec) -> None:
    assert Layout([*SPECS[:-1], spec]).digest != Layout(SPECS).digest


def test_sizes_and_numbers() -> None:
    layout = Layout(SPECS)
    assert layout.numel == 20 + 4 + 4 + 4 + 1
    assert all(layout.tensors[i].name == name for name, i in layout.index.items())
    assert sorted(layout.index.values()) == [0, 1, 2, 3, 4]


def test_two_tensors_of_one_name_are_no_layout() -> None:
    with pytest.raises(LayoutError, match="same name"):
        Layout([TensorSpec("w", (1,)), TensorSpec("w", (2,))])


def test_the_buffer_policy_says_what_becomes_of_buffers() -> None:
    layout = Layout(SPECS)
    kinds = {policy: [s.kind for s in layout.under(policy).tensors] for policy in ("average", "local", "first")}
    assert kinds == {
        "average": ["parameter", "buffer", "parameter", "parameter", "static"],
        "local": ["parameter", "parameter", "parameter", "static"],
        "first": ["parameter", "static", "parameter", "parameter", "static"],
    }


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ([("w", (2, 3), "parameter")], [("w", (2, 3), "parameter")], ""),
        (
            [("w", (2, 3), "parameter")],
            [("w", (3, 2), "parameter")],
            "tensor 'w' is parameter [2, 3] here and parameter [3, 2] there",
        ),
        (
            [("w", (2,), "parameter")],
            [("w", (2,), "static")],
            "tensor 'w' is parameter [2] here and static [2] there",
        ),
        ([], [("w", (), "buffer")], "tensor 'w' is missing here and buffer [] there"),
        (
            [("h.10", (1,), "parameter"), ("h.2", (1,), "parameter")],
            [],
            "tensor 'h.2' is parameter [1] here and missing there",
        ),
    ],
)
def test_the_first_difference_in_words(
    mine: list[tuple[str, tuple[int, ...], Kind]], theirs: list[tuple[str, tuple[int, ...], Kind]], words: str
) -> None:
    assert Layout(TensorSpec(*row) for row in mine).difference(Layout(TensorSpec(*row) for row in theirs)) == words


# -- boxes ----------------------------------------------------------------------------------------------------------


@st.composite
def shaped_boxes(draw: st.DrawFn, count: int = 1) -> tuple[tuple[int, ...], list[Box]]:
    """A shape of up to four dimensions and boxes inside it, of no elements too."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    boxes = []
    for _ in range(count):
        bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)))
    return shape, boxes


@given(shaped_boxes())
@example(((), [Box((), ())]))
@example(((3, 4), [Box((0, 0), (3, 4))]))
@example(((3, 4), [Box((1, 2), (0, 2))]))
@example(((3, 4), [Box((0, 1), (3, 2))]))
@example(((2, 3, 4), [Box((0, 1, 0), (2, 2, 4))]))
@example(((2, 3, 4), [Box((1, 0, 3), (1, 3, 1))]))
@PROPERTY
def test_runs_are_the_elements_of_the_box_in_order(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [box] = case
    starts, length = box.runs(shape)
    flat = (starts[:, None] + torch.arange(length)).flatten()
    assert starts.dtype == torch.int64
    assert flat.tolist() == numbered(shape)[box.slices].flatten().tolist()
    assert flat.numel() == box.numel


@pytest.mark.parametrize(
    ("shape", "box", "count"),
    [
        ((4, 5, 6), Box((0, 0, 0), (4, 5, 6)), 1),
        ((4, 5, 6), Box((1, 0, 0), (2, 5, 6)), 1),
        ((4, 5, 6), Box((1, 2, 0), (2, 3, 6)), 2),
        ((4, 5, 6), Box((0, 0, 1), (4, 5, 2)), 20),
        ((4, 5, 6), Box((0, 0, 1), (4, 5, 0)), 0),
        ((), Box((), ()), 1),
    ],
)
def test_runs_are_as_long_as_can_be(shape: tuple[int, ...], box: Box, count: int) -> None:
    assert len(box.runs(shape)[0]) == count


@given(shaped_boxes(count=2))
@PROPERTY
def test_boxes_overlap_where_they_share_an_element(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [a, b] = case
    shared = {*numbered(shape)[a.slices].flatten().tolist()} & {*numbered(shape)[b.slices].flatten().tolist()}
    assert a.overlaps(b) is b.overlaps(a) is bool(shared)


@pytest.mark.parametrize(
    ("box", "within"),
    [
        (Box((0, 0), (3, 4)), True),
        (Box((3, 0), (0, 4)), True),
        (Box((1, 0), (3, 4)), False),
        (Box((-1, 0), (2, 4)), False),
        (Box((1, 0), (-1, 4)), False),
        (Box((0,), (3,)), False),
        (Box((0, 0), (3,)), False),
        (Box((0, 0, 0), (3, 4, 1)), False),
    ],
)
def test_a_box_lies_within_a_shape_or_not(box: Box, within: bool) -> None:
    assert box.within((3, 4)) is within


# -- what a rank holds ----------------------------------------------------------------------------------------------


def check_placement(mesh_shape: tuple[int, ...], placements: Sequence[Placement], shape: tuple[int, ...]) -> None:
    """The boxes of all ranks tile the tensor, and each names the elements that DTensor put on its rank."""
    whole, boxes = numbered(shape), []
    for _ in ranks(torch.Size(mesh_shape).numel()):
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        boxes.append(box_of(tensor, "w"))
        assert torch.equal(whole[boxes[-1].slices], local(tensor).view(boxes[-1].size))
    copies = [n for n, placement in zip(mesh_shape, placements, strict=True) if placement.is_replicate()]
    assert_tile(boxes, shape, torch.Size(copies).numel())


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [
        ((1,), [Shard(0)], (3, 2)),
        ((4,), [Shard(0)], (8, 3)),
        ((4,), [Shard(0)], (5, 3)),
        ((4,), [Shard(0)], (2, 3)),
        ((4,), [Shard(0)], (1,)),
        ((3,), [Shard(1)], (2, 7, 2)),
        ((3,), [Shard(2)], (2, 1, 2)),
        ((2,), [Replicate()], ()),
        ((2, 2), [Replicate(), Shard(0)], (3, 2)),
        ((2, 3), [Shard(0), Replicate()], (3, 2)),
        ((2, 2), [Shard(0), Shard(1)], (5, 3)),
        ((2, 2), [Shard(1), Shard(0)], (5, 3)),
        ((2, 2), [Shard(0), Shard(0)], (5, 3)),
        ((2, 2, 2), [Replicate(), Shard(0), Shard(1)], (3, 3)),
        ((2, 2, 2), [Shard(1), Shard(0), Shard(1)], (3, 5)),
    ],
)
def test_a_rank_holds_one_box(mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]) -> None:
    check_placement(mesh_shape, placements, shape)


@given(
    st.sampled_from([(2,), (5,), (2, 2), (3, 2), (2, 1, 2)]),
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.data(),
)
@MESHES
def test_any_placement_is_boxes(mesh_shape: tuple[int, ...], shape: tuple[int, ...], data: st.DataObject) -> None:
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = [data.draw(st.sampled_from(choices)) for _ in mesh_shape]
    check_placement(mesh_shape, placements, shape)


def check_sharded(
    world: tuple[int, ...], linear: tuple[int, int], style: ParallelStyle, strided: bool, copies: int
) -> None:
    """As `check_placement`, for a linear layer under FSDP on the leading dimensions of a mesh and TP on the last."""
    rows, columns = linear
    whole, boxes = numbered((rows, columns)).float(), []
    names = ("replicate", "shard", "tensor")[-len(world) :]
    for _ in ranks(torch.Size(world).numel()):
        mesh = init_device_mesh("cpu", world, mesh_dim_names=names)
        module = nn.Sequential(nn.Linear(columns, rows, bias=False))
        module[0].weight.data.copy_(whole)
        parallelize_module(module, mesh["tensor"], {"0": style}, src_data_rank=None)
        fully_shard(module, mesh=mesh[names[:-1]])
        weight = module[0].weight
        assert isinstance(weight, DTensor)
        assert any(isinstance(p, _StridedShard) for p in weight.placements) is strided
        box = box_of(weight, "w")
        boxes.append(box)
        assert torch.equal(whole[box.slices], local(weight).view(box.size))
    assert_tile(boxes, (rows, columns), copies)


@pytest.mark.parametrize(("shard", "tensor"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_fsdp_over_tensor_parallel_rows_is_boxes_of_any_size(shard: int, tensor: int) -> None:
    for rows in (1, 2, 5, 7, 8, 9, 11, 13, 17):
        check_sharded((shard, tensor), (rows, 2), ColwiseParallel(), strided=True, copies=1)


def test_fsdp_over_tensor_parallel_columns_is_boxes() -> None:
    for rows, columns in product((1, 3, 4), (1, 5, 6)):
        check_sharded((2, 2), (rows, columns), RowwiseParallel(), strided=False, copies=1)


def test_hsdp_over_tensor_parallel_is_replicated_boxes() -> None:
    check_sharded((2, 2, 2), (7, 3), ColwiseParallel(), strided=True, copies=2)
    check_sharded((2, 2, 2), (7, 3), RowwiseParallel(), strided=False, copies=2)


def test_uneven_fsdp_leaves_ranks_with_nothing() -> None:
    boxes = []
    for _ in ranks(4):
        module = fully_shard(nn.Linear(2, 5), mesh=init_device_mesh("cpu", (4,)))
        boxes.append((box_of(module.weight), box_of(module.bias)))
    assert [weight.size for weight, _ in boxes] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert_tile([weight for weight, _ in boxes], (5, 2))
    assert_tile([bias for _, bias in boxes], (5,))


def test_a_plain_tensor_is_held_whole() -> None:
    assert box_of(torch.zeros(2, 3)) == Box((0, 0), (2, 3))
    assert box_of(torch.zeros(())) == Box((), ())


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with rank_of(2, 3):
        tensor = distribute_tensor(numbered((4, 2)), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        box = box_of(tensor)
    assert box.numel == 0
    assert box.within((4, 2))


def test_partial_sums_are_refused() -> None:
    with rank_of(0, 2):
        tensor = DTensor.from_local(torch.zeros(3), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        with pytest.raises(LayoutError, match=r"'w' has partial sums .* redistribute"):
            box_of(tensor, "w")


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [((2,), [_StridedShard(0, split_factor=2)]), ((2, 2), [_StridedShard(0, split_factor=4), Shard(0)])],
)
def test_interleaved_rows_are_refused(mesh_shape: tuple[int, ...], placements: list[Placement]) -> None:
    with rank_of(0, torch.Size(mesh_shape).numel()):
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = DTensor.from_local(torch.zeros(4), mesh, placements, run_check=False)
        with pytest.raises(LayoutError, match=r"'w' is placed as .* is not one box"):
            box_of(tensor, "w")


def test_a_shard_of_another_size_than_its_placement_says_is_refused() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.zeros(1), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        with pytest.raises(LayoutError, match=r"'w' is placed as .* is not one box"):
            box_of(tensor, "w")


def test_local_shares_storage_and_leaves_autograd() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    assert not local(parameter).requires_grad
    assert local(parameter).data_ptr() == parameter.data_ptr()
    with rank_of(1, 2):
        module = fully_shard(nn.Linear(3, 4), mesh=init_device_mesh("cpu", (2,)))
        part = local(module.weight)
        assert not isinstance(part, DTensor)
        assert not part.requires_grad
        part.fill_(7.0)
        assert torch.equal(module.weight.to_local(), torch.full((2, 3), 7.0))
