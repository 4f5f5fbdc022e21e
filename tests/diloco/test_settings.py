"""Settings: layers in, a checked value with origins out, and canonical TOML back."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.settings import Settings, leaves, merge, parse, parse_override, resolve, to_toml

steady = hypothesis.settings(deadline=None, derandomize=True)
"""The same examples on every machine, however slow it is."""


class Inner(Settings):
    rate: float = 0.5
    names: tuple[str, ...] = ()


class Outer(Settings):
    title: str
    count: int = 1
    flag: bool = False
    inner: Inner = Inner()


def test_the_strongest_layer_wins_and_every_value_knows_its_origin() -> None:
    layers: list[tuple[str, dict[str, Any]]] = [
        ("preset", {"count": 2, "inner": {"rate": 0.1, "names": ["a"]}}),
        ("file", {"title": "x", "count": 3}),
    ]
    resolved = resolve(Outer, layers, ["inner.rate=0.9"])
    assert list(resolved.rows()) == [
        ("title", "x", "file"),
        ("count", 3, "file"),
        ("flag", False, "default"),
        ("inner.rate", 0.9, "--set"),
        ("inner.names", ["a"], "preset"),
    ]


def test_an_empty_table_sets_nothing() -> None:
    layers: list[tuple[str, dict[str, Any]]] = [
        ("preset", {"title": "x", "inner": {"rate": 0.1}}),
        ("file", {"inner": {}}),
    ]
    assert resolve(Outer, layers).value.inner.rate == 0.1


def test_merge_leaves_its_layers_alone() -> None:
    lower: dict[str, Any] = {"inner": {}}
    merge([("file", lower), ("--set", {"inner": {"rate": 0.1}})])
    assert lower == {"inner": {}}


def test_a_key_below_a_plain_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--set: 'inner.rate' is set, but 'inner' is already a plain value"):
        merge([("file", {"inner": 3}), ("--set", {"inner": {"rate": 0.1}})])


TABLES = st.recursive(
    st.dictionaries(st.sampled_from(["leaf1", "leaf2", "leaf3"]), st.integers()),
    lambda inner: st.dictionaries(st.sampled_from(["table1", "table2"]), inner),
    max_leaves=8,
)
"""Nested tables in which a name is either always a table or never one."""


@steady
@given(st.lists(TABLES, max_size=3), TABLES)
def test_merge_keeps_every_leaf_of_the_top_layer(below: list[dict[str, Any]], top: dict[str, Any]) -> None:
    merged, origins = merge([*((f"layer {i}", table) for i, table in enumerate(below)), ("top", top)])
    result = dict(leaves(merged))
    kept = {key: value for key, value in leaves(top) if value != {}}
    assert {key: result[key] for key in kept} == kept
    assert all(origins[key] == "top" for key in kept)
    assert set(result) <= {key for table in [*below, top] for key, _ in leaves(table)}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=3", ("a.b", 3)),
        ("a=1.5", ("a", 1.5)),
        ("a=true", ("a", True)),
        ('a="3"', ("a", "3")),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a={b = 1}", ("a", {"b": 1})),
        ("a=bare-word", ("a", "bare-word")),
        ("a = b=c ", ("a", "b=c")),
        ("a=", ("a", "")),
        ("a=host:7070", ("a", "host:7070")),
    ],
)
def test_an_override_is_toml_or_a_bare_word(override: str, expected: tuple[str, Any]) -> None:
    assert parse_override(override) == expected


@pytest.mark.parametrize("override", ["a.b", "", "=3"])
def test_an_override_without_a_key_or_a_value_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError, match="is not KEY=VALUE, for example"):
        parse_override(override)


def test_a_table_as_an_override_sets_its_keys() -> None:
    layers = [("file", {"title": "x", "inner": {"names": ["a"]}})]
    value = resolve(Outer, layers, ["inner={rate = 0.2}"]).value
    assert value.inner == Inner(rate=0.2, names=("a",))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"titel": "x"}, "file: unknown key 'titel'; did you mean 'title'?"),
        ({"inner": {"rat": 1}}, "file: unknown key 'inner.rat'; did you mean 'rate'?"),
        ({"zzz": 1}, "file: unknown key 'zzz'; known keys: title, count, flag, inner"),
        ({"inner": {"more": {}}}, "file: unknown key 'inner.more'; known keys: rate, names"),
        ({}, "'title' is required: set it in the file or with --set title=VALUE"),
        ({"title": 3}, "file: 'title': input should be a valid string, not 3"),
        ({"count": "3"}, "file: 'count': input should be a valid integer, not '3'"),
        ({"count": 1.5}, "file: 'count': input should be a valid integer"),
        ({"flag": 1}, "file: 'flag': input should be a valid boolean, not 1"),
        ({"inner": 3}, "file: 'inner': input should be a valid dictionary"),
        ({"inner": {"rate": float("inf")}}, "file: 'inner.rate': input should be a finite number, not inf"),
        ({"inner": {"rate": float("nan")}}, "file: 'inner.rate': input should be a finite number, not nan"),
        ({"inner": {"names": "a"}}, "file: 'inner.names': input should be a valid tuple, not 'a'"),
        ({"inner": {"names": ["a", 3]}}, "file: 'inner.names.1': input should be a valid string, not 3"),
    ],
)
def test_a_fault_names_its_key_and_its_source(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Outer, [("file", table)])
    assert message in str(caught.value)


def test_all_faults_are_reported_at_once_each_with_its_own_source() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Outer, [("file", {"title": 3})], ["count=x", "inner.rate=y"])
    assert [line.split(": ")[:2] for line in str(caught.value).splitlines()] == [
        ["file", "'title'"],
        ["--set", "'count'"],
        ["--set", "'inner.rate'"],
    ]


def test_an_integer_is_a_number_but_nothing_else_is_converted() -> None:
    assert resolve(Outer, [("file", {"title": "x", "inner": {"rate": 1}})]).value.inner.rate == 1.0


def test_settings_cannot_be_changed() -> None:
    settings = Outer(title="x")
    with pytest.raises(ValueError, match="frozen"):
        settings.count = 2  # type: ignore[misc]


def test_text_that_is_not_toml_names_source_and_line() -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML: .*line 2, column 5"):
        parse("a = 1\nb = \n", "run.toml")


AWKWARD = st.text(list("a =#.[]{},'\"\\\n\r\t\0\x1f\x7f\x85\u2028\ufeffü😀"))


@steady
@given(
    title=AWKWARD,
    names=st.lists(AWKWARD),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    count=st.integers(-(2**63), 2**63 - 1),
)
def test_to_toml_reads_back_equal(title: str, names: list[str], rate: float, count: int) -> None:
    settings = Outer(title=title, count=count, inner=Inner(rate=rate, names=tuple(names)))
    assert resolve(Outer, [("text", parse(to_toml(settings), "text"))]).value == settings
