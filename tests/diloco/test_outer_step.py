"""The outer step of a tensor: the compiled kernel and the eager definition give the same bits, whatever the layout."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.codec import CODECS, Codec, base, by_name, native
from diloco.digest import digest
from diloco.errors import CodecError
from diloco.layout import Box
from diloco.merge import Addend, Runs, shares, weighted_sum
from diloco.outer import Optimizer, OuterState, step
from tests.diloco.codecs import eager, same_bits
from tests.support import tiles

PROPERTY = settings(derandomize=True, deadline=None, max_examples=25)
built = pytest.mark.skipif(native.library is None, reason="the kernels are not built: python setup.py build_ext -i")
CHOICE = {**CODECS, "topk-5-fp32": by_name("topk-5-fp32")}
"""The last has no kernel."""
NESTEROV, MEAN = Optimizer(0.7, 0.9), Optimizer(1.0, 0.0)
START = 2**33 + 7


def numbers(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(scale)


def state_of(numel: int, seed: int) -> OuterState:
    return OuterState(numbers(numel, seed), numbers(numel, seed + 1, 1e-2), numbers(numel, seed + 2, 1e-4))


def addends_of(
    shape: Sequence[int], given: dict[str, float], chance: random.Random, codecs: Sequence[Codec]
) -> list[Addend]:
    """Contributions of some islands, each cut into pieces at random."""
    found = []
    for share in given.values():
        values = numbers(torch.Size(shape).numel(), chance.randrange(2**31), 1e-2).view(tuple(shape))
        for box in tiles(shape, chance):
            codec = chance.choice(codecs)
            found.append(Addend(share, codec, box, codec.pack(values[box.slices])))
    return found


def stepped(
    shape: Sequence[int], addends: Sequence[Addend], down: Codec, optimizer: Optimizer, seed: int
) -> tuple[OuterState, Tensor, int]:
    """The state, the update and the digest after a step."""
    numel = torch.Size(shape).numel()
    state, update = state_of(numel, seed), torch.zeros(down.size(numel), dtype=torch.uint8)
    return state, update, step(shape, START, addends, state, update, down, optimizer)


def assert_same(one: tuple[OuterState, Tensor, int], other: tuple[OuterState, Tensor, int]) -> None:
    assert torch.equal(one[1], other[1])
    for a, b in zip(one[0], other[0], strict=True):
        assert same_bits(a, b)
    assert one[2] == other[2]


@contextmanager
def at_once(values: int) -> Iterator[None]:
    """Within it, eager definitions work on so many values at a time."""
    before, base.AT_ONCE = base.AT_ONCE, values
    try:
        yield
    finally:
        base.AT_ONCE = before


@built
@pytest.mark.parametrize("down", CHOICE)
@pytest.mark.parametrize("up", CHOICE)
@given(
    shape=st.one_of(st.just(()), st.lists(st.integers(0, 40), min_size=1, max_size=4), st.tuples(st.integers(0, 9000))),
    islands=st.integers(0, 5),
    seed=st.integers(0, 2**20),
    optimizer=st.sampled_from([NESTEROV, MEAN]),
)
@settings(PROPERTY, max_examples=4)
def test_kernel_and_definition_agree(
    up: str, down: str, shape: Sequence[int], islands: int, seed: int, optimizer: Optimizer
) -> None:
    chance = random.Random(seed)
    shape = [*shape]
    while torch.Size(shape).numel() > 30_000:
        shape.pop()
    given_ = shares({f"island-{i}": chance.random() for i in range(islands)}) if islands else {}
    decayed = {island: share * 0.5**i for i, (island, share) in enumerate(given_.items())}
    addends = addends_of(shape, decayed, chance, [CHOICE[up]])
    fused = stepped(shape, addends, CHOICE[down], optimizer, seed)
    with eager(), at_once(4096):
        assert_same(fused, stepped(shape, addends, CHOICE[down], optimizer, seed))


@built
@given(seed=st.integers(0, 2**20), islands=st.sampled_from([0, 1, 2, 17, 64]))
@settings(PROPERTY, max_examples=12)
def test_they_agree_on_any_number_of_islands_with_any_codecs(seed: int, islands: int) -> None:
    chance = random.Random(seed)
    shape = (chance.randrange(60), chance.randrange(150))
    given_ = dict.fromkeys(map(str, range(islands)), 1 / max(1, islands))
    addends = addends_of(shape, given_, chance, [*CODECS.values()])
    fused = stepped(shape, addends, CODECS["int8"], NESTEROV, seed)
    with eager():
        assert_same(fused, stepped(shape, addends, CODECS["int8"], NESTEROV, seed))


@built
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_they_agree_on_any_number_of_threads(threads: int) -> None:
    shape, chance = (701, 523), random.Random(threads)
    boxes = [Box((0, 0), (300, 523)), Box((300, 0), (401, 100)), Box((300, 100), (401, 423))]
    values = numbers(701 * 523, 5).view(shape)
    names = ("int8", "bf16", "topk-int8")
    addends = [
        Addend(0.25, CODECS[name], box, CODECS[name].pack(values[box.slices]))
        for name, box in zip(chance.sample(names, 3), boxes, strict=True)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fused = stepped(shape, addends, CODECS["int4"], NESTEROV, 3)
    finally:
        torch.set_num_threads(before)
    with eager():
        assert_same(fused, stepped(shape, addends, CODECS["int4"], NESTEROV, 3))


@built
def test_steps_in_several_threads_at_once_do_not_meet() -> None:
    addends = [Addend(1.0, CODECS["int8"], Box.whole((200_000,)), CODECS["int8"].pack(numbers(200_000, 1)))]
    found: dict[int, tuple[OuterState, Tensor, int]] = {}

    def work(seed: int) -> None:
        found[seed] = stepped((200_000,), addends, CODECS["int8"], NESTEROV, seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    for seed in range(3):
        assert_same(found[seed], stepped((200_000,), addends, CODECS["int8"], NESTEROV, seed))


@pytest.mark.parametrize("down", CHOICE)
def test_working_block_by_block_leaves_no_trace(down: str) -> None:
    shape, chance = (90, 113), random.Random(4)
    addends = addends_of(shape, {"a": 0.3, "b": 0.7}, chance, [*CODECS.values()])
    with eager():
        whole = stepped(shape, addends, CHOICE[down], NESTEROV, 1)
        with at_once(256):
            assert_same(whole, stepped(shape, addends, CHOICE[down], NESTEROV, 1))


@pytest.mark.parametrize("down", CHOICE)
def test_the_state_moves_by_what_the_update_decodes_to(down: str) -> None:
    codec, numel = CHOICE[down], 9001
    addends = [Addend(1.0, CODECS["fp32"], Box.whole((numel,)), CODECS["fp32"].pack(numbers(numel, 9)))]
    before = state_of(numel, 1)
    after, update, found = stepped((numel,), addends, codec, NESTEROV, 1)
    applied = codec.unpack(update, (numel,))
    wanted = 0.7 * (numbers(numel, 9) + 0.9 * after.momentum) + before.residual
    assert same_bits(after.anchor, before.anchor - applied)
    torch.testing.assert_close(after.momentum, 0.9 * before.momentum + numbers(numel, 9))
    torch.testing.assert_close(applied + after.residual, wanted)
    assert found == digest(after.anchor, START, (numel,), Box.whole((numel,)))


def test_nothing_beside_the_tensor_is_written() -> None:
    numel = 5000
    wide = [torch.full((numel + 2,), 5.0) for _ in range(3)]
    codec = CODECS["int8"]
    room = torch.full((codec.size(numel) + 64,), 77, dtype=torch.uint8)
    addend = Addend(1.0, codec, Box.whole((numel,)), codec.pack(numbers(numel, 1)))
    step((numel,), 0, [addend], OuterState(*(x[1:-1] for x in wide)), room[32:-32], codec, NESTEROV)
    assert room[:32].eq(77).all() and room[-32:].eq(77).all()
    assert all((x[0], x[-1]) == (5.0, 5.0) for x in wide)


@pytest.mark.parametrize("up", [name for name, codec in CODECS.items() if codec.block > 1])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_payload_that_does_not_decode_is_found_beforehand(up: str, compiled: bool) -> None:
    codec, numel = CODECS[up], 2 * CODECS[up].block + 3
    good = codec.pack(numbers(numel, 1))
    bad = good.clone()
    bad[codec.size(codec.block) :][: 4 if codec.kernel and codec.kernel.keep else 2] = 255
    with nullcontext() if compiled else eager():
        codec.verify(good, numel)
        for payload in (bad, good[:-1]):
            with pytest.raises(CodecError, match=codec.name):
                codec.verify(payload, numel)
        with pytest.raises(CodecError, match="damaged"):
            stepped((numel,), [Addend(1.0, codec, Box.whole((numel,)), bad)], CODECS["int8"], NESTEROV, 1)


@pytest.mark.parametrize("name", CHOICE)
@pytest.mark.parametrize("compiled", [True, False])
@given(seed=st.integers(0, 2**20), numel=st.integers(1, 9000))
@settings(PROPERTY, max_examples=5)
def test_the_largest_magnitude_is_found(name: str, compiled: bool, seed: int, numel: int) -> None:
    codec = CHOICE[name]
    payload = codec.pack(numbers(numel, seed))
    with nullcontext() if compiled else eager():
        assert codec.largest(payload, numel) == codec.unpack(payload, (numel,)).abs().max()
    assert codec.largest(codec.pack(torch.empty(0)), 0) == 0


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_the_largest(name: str, value: float) -> None:
    values = numbers(9000, 1)
    values[8999] = value
    assert not CODECS[name].largest(CODECS[name].pack(values), 9000) < float("inf")


@given(seed=st.integers(0, 2**20))
@PROPERTY
def test_runs_are_where_a_box_lies(seed: int) -> None:
    chance = random.Random(seed)
    shape = [chance.randrange(1, 7) for _ in range(chance.randrange(5))]
    numel = torch.Size(shape).numel()
    for box in tiles(shape, chance):
        if not box.numel:
            continue
        where = torch.arange(numel).view(shape)[box.slices].flatten()
        runs = Runs.of(box, shape)
        assert runs.count * runs.length == box.numel
        assert torch.equal(runs.positions(0, box.numel), where)
        at = chance.randrange(numel + 1)
        assert runs.before(at) == int((where < at).sum())


def test_a_sum_begins_with_zero() -> None:
    assert weighted_sum([], 3, 6).tolist() == [0.0] * 3


@built
def test_pieces_and_steps_that_make_no_sense_are_refused() -> None:
    good = [0, 0, 0, 9, 0, 0, 0, 1, 0, *[0] * (2 * native.DIMS)]
    kernel = CODECS["int8"].kernel
    assert kernel is not None
    state = [torch.zeros(0)] * 3
    for place, value in ((3, 11), (3, 5), (7, 0), (8, native.DIMS + 1), (8, -1)):
        pieces = [*good]
        pieces[place] = value
        with pytest.raises(ValueError, match=r"no such (kernel|piece)"):
            kernel.step(state, torch.zeros(0), 0, 0, 1.0, 0.0, pieces)
    for numel in (-256, 255):
        with pytest.raises(ValueError, match="no such step"):
            kernel.step(state, torch.zeros(0), numel, 0, 1.0, 0.0, good)
    with pytest.raises(ValueError, match="no such box"):
        native.library.digest(0, 0, -1, 1, 1)
    with pytest.raises(ValueError, match="no such payload"):
        native.library.sound(0, 0, -1, 0, 1)
