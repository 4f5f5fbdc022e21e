"""The ledger: what has been written is there after any end, and what is not a ledger is refused."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import facts
from coordinator.facts import (
    Accepted,
    Admitted,
    Committed,
    Dropped,
    Entry,
    Fact,
    Gone,
    Moved,
    Phase,
    Planted,
    Skipped,
    Standing,
)
from coordinator.ledger import SCHEMA, Ledger
from diloco.errors import EnvironmentFault, InputError

ROWS: list[tuple[str, dict[str, Any]]] = [("a", {"n": 1, "text": "ä\n"}), ("b", {}), ("a", {"list": [1, [2.5, None]]})]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def contents(ledger: Ledger, after: int = 0) -> list[tuple[int, float, str, dict[str, Any]]]:
    return [(row.seq, row.at, row.kind, row.body) for row in ledger.read(after)]


def edit(path: Path, *commands: str) -> None:
    """Does something to an SQLite file by hand."""
    database = sqlite3.connect(path, isolation_level=None)
    for command in commands:
        database.execute(command)
    database.close()


# -- rows -----------------------------------------------------------------------------------------------------------


def test_facts_come_back_in_their_order_with_their_numbers(ledger: Ledger) -> None:
    assert contents(ledger) == []
    assert ledger.append(ROWS[:2], at=12.5) == 2
    assert ledger.append(ROWS[2:], at=13.0) == 3
    assert contents(ledger) == [(1, 12.5, *ROWS[0]), (2, 12.5, *ROWS[1]), (3, 13.0, *ROWS[2])]
    assert contents(ledger, after=2) == [(3, 13.0, *ROWS[2])]
    assert ledger.append([], at=14.0) == 3


def test_a_row_is_synced_before_append_returns(ledger: Ledger) -> None:
    """No call shows a sync, so the setting is what can be looked at: 2 is FULL."""
    assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    ledger.close()
    again = Ledger(ledger.path)
    assert again._db.execute("PRAGMA synchronous").fetchone() == (2,)
    again.close()


def test_rows_are_there_for_others_while_the_writer_is_open_and_after_it_is_gone(ledger: Ledger) -> None:
    ledger.append(ROWS, at=1.0)
    other = Ledger(ledger.path)
    assert contents(other) == contents(ledger)
    other.close()
    ledger.close()
    again = Ledger(ledger.path)
    assert [row[2:] for row in contents(again)] == ROWS
    assert again.append(ROWS[:1], at=2.0) == 4
    again.close()


def test_rows_survive_in_what_a_killed_writer_leaves(ledger: Ledger, tmp_path: Path) -> None:
    ledger.append(ROWS, at=1.0)
    (tmp_path / "copy").mkdir()
    for path in tmp_path.glob("ledger.sqlite*"):
        if not path.name.endswith("-shm"):
            (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    copy = Ledger(tmp_path / "copy" / "ledger.sqlite")
    assert contents(copy) == contents(ledger)
    copy.close()


# -- a disk that fails ------------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_os_error_and_none_of_the_rows_is_written(ledger: Ledger) -> None:
    ledger.append(ROWS[:1], at=1.0)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(OSError, match=r"the ledger .*ledger\.sqlite cannot be written: database or disk is full"):
        ledger.append([*ROWS[1:], ("big", {"text": "x" * 100_000})], at=2.0)
    assert contents(ledger) == [(1, 1.0, *ROWS[0])]
    ledger._db.execute("PRAGMA max_page_count=1000000")
    assert ledger.append([*ROWS[1:], ("big", {"text": "x" * 100_000})], at=3.0) == 4
    assert [row[2] for row in contents(ledger)] == ["a", "b", "a", "big"]


def test_a_ledger_that_others_hold_or_that_may_not_be_written_is_an_os_error(ledger: Ledger) -> None:
    ledger._db.execute("PRAGMA query_only=1")
    with pytest.raises(OSError, match="cannot be written"):
        ledger.append(ROWS, at=1.0)
    ledger._db.execute("PRAGMA query_only=0")
    ledger._db.execute("PRAGMA busy_timeout=1")
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OSError, match="cannot be written: database is locked"):
        ledger.append(ROWS, at=1.0)
    other.close()
    assert ledger.append(ROWS, at=1.0) == 3


# -- what is no ledger ------------------------------------------------------------------------------------------------


def test_a_newer_schema_is_refused_and_names_both(ledger: Ledger) -> None:
    ledger.close()
    edit(ledger.path, f"PRAGMA user_version={SCHEMA + 1}")
    with pytest.raises(InputError, match=f"has schema {SCHEMA + 1}, newer than {SCHEMA}, the newest this version"):
        Ledger(ledger.path)


def test_a_file_that_is_no_database_is_refused_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"To be, or not to be, that is the question.\n" * 200)
    before = path.read_bytes()
    with pytest.raises(InputError, match="is not a ledger of this project"):
        Ledger(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mark", ["", "PRAGMA application_id=7", "PRAGMA user_version=1"])
def test_a_database_of_somebody_else_is_refused_as_it_is(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "ledger.sqlite"
    edit(path, "CREATE TABLE theirs (n INTEGER)", *filter(None, [mark]))
    before = path.read_bytes()
    with pytest.raises(InputError, match="is not a ledger of this project"):
        Ledger(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_a_path_that_cannot_be_opened_is_an_environment_fault(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot open the ledger"):
        Ledger(tmp_path)
    with pytest.raises(EnvironmentFault, match="cannot open the ledger"):
        Ledger(tmp_path / "missing" / "ledger.sqlite")


def test_a_row_that_is_not_json_is_an_input_error(ledger: Ledger) -> None:
    ledger.append(ROWS, at=1.0)
    edit(ledger.path, "UPDATE facts SET body='{' WHERE seq=2")
    with pytest.raises(InputError, match="is damaged"):
        contents(ledger)


# -- facts ------------------------------------------------------------------------------------------------------------

texts = st.text(max_size=20)
counts = st.integers(0, 2**62)
where: dict[str, st.SearchStrategy[Any]] = {"fragment": counts, "round": counts}
entries = st.builds(Entry, island=texts, epoch=counts, tokens=counts)
FACTS: st.SearchStrategy[Fact] = st.one_of(
    st.builds(Admitted, island=texts, epoch=counts, reason=texts),
    st.builds(Gone, island=texts, standing=st.sampled_from(Standing), reason=texts),
    st.builds(Planted),
    st.builds(Moved, phase=st.sampled_from(Phase), reason=texts, active=st.lists(texts).map(tuple)),
    st.builds(Accepted, **where, entry=entries),
    st.builds(Dropped, **where, island=texts, reason=texts, spoiled=st.booleans()),
    st.builds(Committed, **where, version=counts, shares=st.dictionaries(texts, st.floats(0, 1)), reason=texts),
    st.builds(Skipped, **where, reason=texts),
)


def test_every_kind_of_fact_has_a_name() -> None:
    assert set(facts._KINDS.values()) == set(Fact.__args__)  # type: ignore[attr-defined]
    assert all(facts.is_fact(kind) for kind in facts._KINDS)
    assert not facts.is_fact("part")


@hypothesis.settings(deadline=None, derandomize=True)
@given(fact=FACTS)
def test_a_fact_comes_back_from_json_as_it_was(fact: Fact) -> None:
    kind, body = facts.encode(fact)
    again = facts.decode(kind, json.loads(json.dumps(body)))
    assert again == fact
    assert type(again) is type(fact)
    if isinstance(fact, Committed) and isinstance(again, Committed):
        assert list(again.shares.items()) == list(fact.shares.items())


@hypothesis.settings(deadline=None, derandomize=True)
@given(fact=FACTS)
def test_fields_of_a_later_version_are_ignored(fact: Fact) -> None:
    kind, body = facts.encode(fact)
    if "entry" in body:
        body["entry"]["later"] = 1
    assert facts.decode(kind, {**body, "later": [1, 2]}) == fact


def test_fields_that_an_earlier_version_did_not_have_take_their_defaults() -> None:
    assert facts.decode("moved", {"phase": "running", "reason": "why"}) == Moved(phase=Phase.RUNNING, reason="why")
    dropped = facts.decode("dropped", {"fragment": 0, "round": 1, "island": "a", "reason": "late"})
    assert dropped == Dropped(fragment=0, round=1, island="a", reason="late", spoiled=False)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("admitted", {"island": "a", "epoch": 1}),
        ("gone", {"island": "a", "standing": "AWAY", "reason": ""}),
        ("moved", {"phase": "resting", "reason": ""}),
        ("moved", {"phase": "done", "reason": "", "active": 3}),
        ("accepted", {"fragment": 0, "round": 0, "entry": {"island": "a", "epoch": 1}}),
        ("accepted", {"fragment": 0, "round": 0, "entry": 5}),
        ("committed", {"fragment": 0, "round": 0}),
    ],
)
def test_a_damaged_body_is_an_input_error_that_names_its_kind(kind: str, body: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"a damaged fact of kind '{kind}'"):
        facts.decode(kind, body)
