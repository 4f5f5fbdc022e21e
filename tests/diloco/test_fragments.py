"""Fragments: every tensor is in exactly one, layers stay whole, and no fragment is much heavier than it must be."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.config import RunSection, Strategy, SyncConfig
from diloco.errors import ConfigError
from diloco.fragments import Fragment, coordinator_of, kept, partition
from diloco.layout import Layout, TensorSpec

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)
PERIOD = 5040
"""Inner steps between two syncs; a multiple of 1 to 10, so that as many fragments go."""

STRATEGIES: list[tuple[Strategy, int]] = [("whole", 1), ("sequential", 3), ("strided", 3), ("balanced", 3)]


def llama(layers: int, frozen: bool = False) -> list[TensorSpec]:
    """The tensors of a Llama-like model in order of definition, head first."""
    specs = [TensorSpec("lm_head.weight", (32, 8)), TensorSpec("norm.weight", (8,))]
    for i in range(layers):
        specs += [
            TensorSpec(f"layers.{i}.self_attn.q_proj.weight", (8, 8)),
            TensorSpec(f"layers.{i}.self_attn.o_proj.weight", (8, 8)),
            TensorSpec(f"layers.{i}.mlp.up_proj.weight", (20, 8)),
            TensorSpec(f"layers.{i}.input_layernorm.weight", (8,)),
        ]
    specs.append(TensorSpec("embed_tokens.weight", (32, 8)))
    if frozen:
        specs += [TensorSpec("embed_positions.weight", (16, 8), "static"), TensorSpec("scale", (), "static")]
    return specs


def split(specs: Sequence[TensorSpec], strategy: Strategy, fragments: int) -> tuple[Fragment, ...]:
    return partition(Layout(specs), SyncConfig(strategy=strategy, fragments=fragments, every_steps=PERIOD))


def layers_of(fragment: Fragment) -> list[int]:
    """Layers of which a fragment has a tensor."""
    return sorted({int(found[1]) for spec in fragment.specs if (found := re.search(r"layers\.(\d+)\.", spec.name))})


def names_outside(fragment: Fragment) -> list[str]:
    """Tensors of a fragment that belong to no layer."""
    return [spec.name for spec in fragment.specs if "layers." not in spec.name]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("strategy", "count"), STRATEGIES)
def test_every_tensor_is_in_exactly_one_fragment(strategy: Strategy, count: int, frozen: bool) -> None:
    layout = Layout(llama(12, frozen))
    fragments = split(llama(12, frozen), strategy, count)
    assert len(fragments) == count + frozen
    assert [f.index for f in fragments] == list(range(len(fragments)))
    assert sorted(t for f in fragments for t in f.tensors) == list(range(len(layout.tensors)))
    for fragment in fragments:
        assert list(fragment.tensors) == sorted(fragment.tensors)
        assert fragment.specs == tuple(layout.tensors[t] for t in fragment.tensors)


@pytest.mark.parametrize(("strategy", "count"), STRATEGIES)
def test_a_fragments_flat_order_is_its_tensors_one_after_the_other(strategy: Strategy, count: int) -> None:
    for fragment in split(llama(12), strategy, count):
        ends = [start + spec.numel for start, spec in zip(fragment.starts, fragment.specs, strict=True)]
        assert fragment.starts == (0, *ends[:-1])
        assert fragment.numel == ends[-1]
        assert [fragment.tensors[fragment.place[t]] for t in fragment.tensors] == list(fragment.tensors)
        assert len(fragment.place) == len(fragment.tensors)


def test_the_static_fragment_comes_last_and_is_all_that_does_not_move() -> None:
    *moving, static = split(llama(4, frozen=True), "strided", 2)
    assert [spec.name for spec in static.specs] == ["embed_positions.weight", "scale"]
    assert static.numel == 16 * 8 + 1
    assert all(spec.kind != "static" for fragment in moving for spec in fragment.specs)


def test_whole_is_the_model_as_it_is() -> None:
    [fragment] = split(llama(11), "whole", 1)
    assert fragment.specs == Layout(llama(11)).tensors


def test_sequential_takes_runs_of_layers() -> None:
    fragments = split(llama(11), "sequential", 4)
    assert [layers_of(f) for f in fragments] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert [names_outside(f) for f in fragments] == [
        ["embed_tokens.weight"],
        [],
        [],
        ["lm_head.weight", "norm.weight"],
    ]


def test_strided_takes_every_nth_layer() -> None:
    fragments = split(llama(11), "strided", 4)
    assert [layers_of(f) for f in fragments] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7]]
    assert [names_outside(f) for f in fragments] == [
        ["embed_tokens.weight"],
        [],
        [],
        ["lm_head.weight", "norm.weight"],
    ]


@given(st.sampled_from(["sequential", "strided"]), st.integers(1, 30), st.integers(1, 10))
@PROPERTY
def test_layers_stay_whole_and_spread_evenly(strategy: Strategy, layers: int, count: int) -> None:
    if count > layers:
        count = layers
    groups = [layers_of(f) for f in split(llama(layers), strategy, count)]
    assert sorted(layer for group in groups for layer in group) == list(range(layers))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_a_layer_is_known_by_its_number_wherever_numbering_starts() -> None:
    specs = [TensorSpec(f"transformer.h.{i}.attn.weight", (2,)) for i in (3, 5, 20)]
    specs += [TensorSpec("transformer.wte.weight", (3,)), TensorSpec("transformer.ln_f.weight", (4,))]
    assert [[s.name for s in f.specs] for f in split(specs, "sequential", 3)] == [
        ["transformer.h.3.attn.weight", "transformer.wte.weight"],
        ["transformer.h.5.attn.weight"],
        ["transformer.h.20.attn.weight", "transformer.ln_f.weight"],
    ]


def test_the_settings_say_what_an_embedding_is() -> None:
    specs = [TensorSpec("tok", (2,)), TensorSpec("embed", (2,)), *(TensorSpec(f"h.{i}.w", (2,)) for i in range(2))]
    sync = SyncConfig(strategy="strided", fragments=2, every_steps=PERIOD, embeddings=("t?k",))
    assert [[s.name for s in f.specs] for f in partition(Layout(specs), sync)] == [["h.0.w", "tok"], ["embed", "h.1.w"]]


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=24)


def weighed(numels: Sequence[int]) -> list[TensorSpec]:
    return [TensorSpec(f"w{i}", (numel,)) for i, numel in enumerate(numels)]


@given(sizes, st.integers(1, 8))
@PROPERTY
def test_a_heaviest_balanced_fragment_was_the_lightest_before_its_last_tensor(numels: list[int], count: int) -> None:
    count = min(count, len(numels))
    fragments = split(weighed(numels), "balanced", count)
    heaviest = max(fragments, key=lambda f: f.numel)
    last = min(spec.numel for spec in heaviest.specs)
    assert (heaviest.numel - last) * count <= sum(numels) - last


@given(st.lists(st.integers(1, 20), min_size=3, max_size=7), st.integers(2, 3))
@PROPERTY
def test_balanced_is_at_most_a_third_above_the_best_there_is(numels: list[int], count: int) -> None:
    peak = max(f.numel for f in split(weighed(numels), "balanced", count))
    best = min(
        max(sum(n for n, g in zip(numels, groups, strict=True) if g == p) for p in range(count))
        for groups in product(range(count), repeat=len(numels))
    )
    assert 3 * count * peak <= (4 * count - 1) * best


@given(st.randoms(use_true_random=False), st.sampled_from(STRATEGIES))
@PROPERTY
def test_the_order_of_definition_does_not_matter(shuffler: random.Random, case: tuple[Strategy, int]) -> None:
    specs = llama(5, frozen=True)
    shuffler.shuffle(specs)
    assert split(specs, *case) == split(llama(5, frozen=True), *case)


@pytest.mark.parametrize(
    ("strategy", "layers", "every", "fragments", "fix"),
    [
        ("strided", 2, 6, 6, 3),
        ("sequential", 2, 6, 6, 3),
        ("strided", 4, 12, 6, 4),
        ("sequential", 4, 6, 6, 3),
        ("balanced", 0, 7, 7, 1),
        ("balanced", 1, 21, 21, 7),
        ("sequential", 0, 10, 10, 2),
    ],
)
def test_more_fragments_than_the_model_fills_says_how_many_go(
    strategy: Strategy, layers: int, every: int, fragments: int, fix: int
) -> None:
    layout = Layout(llama(layers))
    sync = SyncConfig(strategy=strategy, fragments=fragments, every_steps=every)
    with pytest.raises(ConfigError, match=f"sync.fragments={fragments} with sync.strategy='{strategy}'") as caught:
        partition(layout, sync)
    assert str(caught.value).endswith(f"; set sync.fragments={fix}")
    fixed = SyncConfig(strategy=strategy, fragments=fix, every_steps=every)
    assert len(partition(layout, fixed)) == fix


@given(st.sampled_from(["sequential", "strided", "balanced"]), st.integers(0, 6), st.integers(1, 40))
@PROPERTY
def test_the_number_it_suggests_always_goes(strategy: Strategy, layers: int, fragments: int) -> None:
    layout = Layout(llama(layers))
    sync = SyncConfig(strategy=strategy, fragments=fragments, every_steps=2 * fragments)
    try:
        found = partition(layout, sync)
    except ConfigError as error:
        fix = int(str(error).rpartition("sync.fragments=")[2])
        assert fix < fragments
        found = partition(layout, SyncConfig(strategy=strategy, fragments=fix, every_steps=2 * fragments))
        assert len(found) == fix
    else:
        assert len(found) == fragments
    assert all(fragment.tensors for fragment in found)


@pytest.mark.parametrize(
    ("strategy", "what"), [("strided", "layers"), ("sequential", "layers"), ("balanced", "tensors")]
)
def test_it_says_what_the_model_has_too_few_of(strategy: Strategy, what: str) -> None:
    with pytest.raises(ConfigError, match=f"leaves 3 fragments empty: the model has too few {what};"):
        split([TensorSpec("h.0.w", (1,))], strategy, 4)


def spread(count: int, index: int = 0) -> RunSection:
    addresses = tuple(f"host-{i}:1" for i in range(count))
    return RunSection(id="r", coordinators=addresses, coordinator_index=index)


@PROPERTY
@given(count=st.integers(1, 6), fragments=st.integers(1, 20))
def test_every_fragment_has_one_coordinator_and_none_is_without(count: int, fragments: int) -> None:
    keepers = [coordinator_of(fragment, spread(count)) for fragment in range(fragments)]
    assert set(keepers) == set(range(min(count, fragments)))
    shares = [keepers.count(index) for index in range(count)]
    assert max(shares) - min(shares) <= 1
    assert all(a != b for a, b in pairwise(keepers)) or count == 1, "neighbours are kept apart"


def test_a_coordinator_has_its_own_fragments_and_the_numbers_of_the_others() -> None:
    layout = Layout([TensorSpec(f"layers.{i}.w", (i + 1,)) for i in range(4)] + [TensorSpec("frozen", (9,), "static")])
    sync = SyncConfig(strategy="strided", fragments=4, every_steps=4)
    whole = partition(layout, sync)
    assert kept(whole, spread(0)) == kept(whole, spread(1)) == whole
    for index in (0, 1):
        mine = kept(whole, spread(2, index))
        assert [f.index for f in mine] == [0, 1, 2, 3, 4]
        assert [f.elsewhere for f in mine] == [number % 2 != index for number in range(5)]
        assert [f.numel for f in mine] == [0 if f.elsewhere else whole[f.index].numel for f in mine]
        assert all(f == whole[f.index] for f in mine if not f.elsewhere)
