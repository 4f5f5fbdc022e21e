"""The digest: the same for every tiling, another one for every other tensor, and the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.digest import combine, digest, show
from diloco.layout import Box

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)


def whole(values: Tensor, start: int = 0) -> int:
    """The digest of a tensor in one piece."""
    return digest(values, start, tuple(values.shape), Box.whole(values.shape))


def reference(values: Tensor, start: int = 0) -> int:
    """The digest as its definition says: the sum of h + 2^32 g, in NumPy's unsigned integers."""
    bits = values.flatten().numpy().view(np.uint32)
    index = np.arange(start, start + len(bits), dtype=np.uint64) * np.uint64(0x9E3779B9)
    h = fold(fold(index.astype(np.uint32) + bits, 0x85EBCA6B), 0xC2B2AE35)
    g = fold(h, 0x27D4EB2F)
    low, high = (int(x.view(np.int32).sum(dtype=np.int64)) for x in (h, g))
    return combine(low + (high << 32))


def fold(x: np.ndarray, multiplier: int) -> np.ndarray:
    """One round of the mix."""
    x = x * np.uint32(multiplier)
    return x ^ x >> np.uint32(16)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    numel = torch.Size(shape).numel()
    return torch.tensor(draw(st.lists(st.floats(width=32), min_size=numel, max_size=numel)), dtype=torch.float32).view(
        shape
    )


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a shape, in any order: the whole, cut a few times wherever it pleases."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.size[dim]))
        low, high = list(box.size), list(box.size)
        low[dim], high[dim] = cut, box.size[dim] - cut
        moved = list(box.offset)
        moved[dim] += cut
        boxes += [Box(box.offset, tuple(low)), Box(tuple(moved), tuple(high))]
    return draw(st.permutations(boxes))


@given(tensors(), st.integers(0, 2**40), st.data())
@PROPERTY
def test_the_parts_of_any_tiling_add_up_to_the_whole(values: Tensor, start: int, data: st.DataObject) -> None:
    shape = tuple(values.shape)
    boxes = data.draw(tilings(shape))
    assert combine(*(digest(values[box.slices], start, shape, box) for box in boxes)) == whole(values, start)


@given(tensors(), st.integers(0, 2**40))
@PROPERTY
def test_it_is_the_sum_of_its_definition(values: Tensor, start: int) -> None:
    assert whole(values, start) == reference(values, start)


@pytest.mark.parametrize("shape", [(3, 70_001), (70_001, 3), (5, 32_768), (2, 32_767), (9, 32_769)])
def test_large_tensors_have_no_seams(shape: tuple[int, int]) -> None:
    rows, columns = shape
    values = torch.arange(rows * columns, dtype=torch.float32).view(shape)
    box = Box((1, 0), (rows - 1, columns - 1))
    others = (Box((0, 0), (1, columns)), Box((1, columns - 1), (rows - 1, 1)))
    assert whole(values, 5) == reference(values, 5)
    assert combine(*(digest(values[b.slices], 5, shape, b) for b in (box, *others))) == reference(values, 5)


@pytest.mark.parametrize(
    ("values", "start", "golden"),
    [
        (torch.zeros(0), 0, "0000000000000000"),
        (torch.zeros(0, 3), 7, "0000000000000000"),
        (torch.tensor(1.0), 0, "010df49c57bffb3f"),
        (torch.tensor([0.0, -0.0, 1.5, -2.0]), 0, "456f23c80c48c136"),
        (torch.arange(6, dtype=torch.float32).view(2, 3), 0, "50785f2480dd60ba"),
        (torch.arange(6, dtype=torch.float32).view(2, 3), 2**33 + 1, "40d11120a74682b5"),
        (torch.tensor([float("inf"), float("-inf"), 1e-45, 3.4e38]), 10, "80bbce214269291f"),
    ],
)
def test_known_digests_stay(values: Tensor, start: int, golden: str) -> None:
    assert show(whole(values, start)) == golden


def test_strides_do_not_matter() -> None:
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert not values.t().is_contiguous()
    assert whole(values.t()) == whole(values.t().contiguous())


@given(tensors().filter(lambda t: t.numel() > 0), st.data())
@PROPERTY
def test_one_flipped_bit_shows(values: Tensor, data: st.DataObject) -> None:
    before = whole(values)
    bits = values.view(torch.int32).view(-1)
    bit = data.draw(st.integers(0, 31))
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << bit if bit < 31 else -(2**31)
    assert whole(values) != before


def test_swapped_moved_and_signed_values_show() -> None:
    digests = [
        whole(torch.tensor(numbers))
        for numbers in (
            [1.0, 2.0, 0.0],
            [2.0, 1.0, 0.0],
            [0.0, 1.0, 2.0],
            [1.0, 2.0, -0.0],
            [1.0, 2.0],
            [1.0, 2.0, 0.0, 0.0],
        )
    ]
    assert len(set(digests)) == len(digests)
    assert whole(torch.tensor([1.0, 2.0]), start=1) != whole(torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ((), 0),
        ((2**63 - 1, 1), -(2**63)),
        ((-(2**63), -1), 2**63 - 1),
        ((2**63 - 1, 2**63 - 1, 2), 0),
        ((-5, 3), -2),
        ((2**64 + 7,), 7),
    ],
)
def test_parts_add_modulo_2_to_the_64_as_signed_integers(parts: tuple[int, ...], total: int) -> None:
    assert combine(*parts) == total


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0" * 16), (-1, "f" * 16), (-(2**63), "8" + "0" * 15), (255, "0" * 14 + "ff")]
)
def test_people_see_sixteen_digits(value: int, shown: str) -> None:
    assert show(value) == shown
