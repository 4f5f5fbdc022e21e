"""Errors: one tree, one table, one page, and all three agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from diloco import errors
from diloco.errors import BY_NAME, TABLE, DilocoError, ExitCode, exit_code

PAGE = Path(__file__).parents[2] / "docs" / "exit-codes.md"
NAMES = {code: name for name, code in vars(ExitCode).items() if name.isupper()}


def tree(cls: type[DilocoError], depth: int = 0) -> Iterator[tuple[type[DilocoError], int]]:
    """Yields (class, depth) for `cls` and everything `diloco.errors` derives from it."""
    yield cls, depth
    for below in cls.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from tree(below, depth + 1)


CLASSES = [cls for cls, _ in tree(DilocoError)]


def test_the_table_covers_every_class() -> None:
    assert set(TABLE) == set(CLASSES)
    assert set(BY_NAME.values()) == set(CLASSES)
    assert all(BY_NAME[cls.__name__] is cls for cls in CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_row_is_a_real_status_and_a_documented_exit_code(cls: type[DilocoError]) -> None:
    assert hasattr(grpc.StatusCode, TABLE[cls].grpc_status)
    assert TABLE[cls].grpc_status != "OK"
    assert TABLE[cls].exit_code in NAMES
    assert exit_code(cls("why")) == TABLE[cls].exit_code != ExitCode.OK


def test_the_docstring_draws_the_tree() -> None:
    drawn = re.findall(r"^    ([ │]*)(?:[├└]── )?(\w+)(?: {2,}\S.*)?$", errors.__doc__ or "", re.MULTILINE)
    depths = [(name, len(indent) // 4 + (name != "DilocoError")) for indent, name in drawn]
    assert depths == [(cls.__name__, depth) for cls, depth in tree(DilocoError)]


def test_an_error_keeps_its_message_and_its_ids() -> None:
    error = errors.StaleEpoch("a newer lease exists", island="alpha", epoch=3)
    assert str(error) == error.message == "a newer lease exists"
    assert error.ids == {"island": "alpha", "epoch": 3}


def test_exit_codes_are_distinct() -> None:
    assert len(NAMES) == len([name for name in vars(ExitCode) if name.isupper()])


def test_the_page_explains_every_exit_code_and_names_the_errors_that_end_with_it() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if re.match(r"\|\s*\d", line)
    ]
    assert {int(code): name.strip("`") for code, name, _, _ in rows} == NAMES
    for code, _, when, action in rows:
        ending = {cls.__name__ for cls in CLASSES if TABLE[cls].exit_code == int(code)}
        assert set(re.findall(r"`(\w+)`", when)) & set(BY_NAME) == ending
        assert action
