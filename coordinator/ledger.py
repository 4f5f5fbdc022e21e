"""The ledger: every fact of a run, in order, durable before anybody hears of it.

SQLite in WAL mode with `synchronous=FULL`: a transaction that has returned survives a power loss. The coordinator's
state is a deterministic fold over the facts (`rounds.apply`) and the contributions they name (`fold`). Facts that every
snapshot kept holds are replaced by the state they came to (`compaction`).
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import EnvironmentFault, InputError

SCHEMA = 2
"""1 has facts alone; in 2 a row of kind `state` may stand for those before it."""
_APPLICATION_ID = 0x44694C6F  # "DiLo"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fact: its number, when it was written (wall clock, for people), its kind, and its values."""

    seq: int
    at: float
    kind: str
    body: dict[str, Any]


class Ledger:
    """The facts of one run.

    Args:
        path: the SQLite file; made where there is none.

    Raises:
        InputError: the file is no ledger, or was written by a newer version.
        EnvironmentFault: it cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        """Held for a transaction: a compaction has a thread of its own."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise EnvironmentFault(f"cannot open the ledger {path}: {error}") from error
        try:
            self._open()
        except sqlite3.OperationalError as error:
            self._db.close()
            raise EnvironmentFault(f"cannot open the ledger {path}: {error}") from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise InputError(f"{path} is not a ledger of this project: {error}") from error
        except InputError:
            self._db.close()
            raise

    def _open(self) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        schema = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if (application, schema, tables) == (0, 0, 0):
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "CREATE TABLE facts (seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL, "
                "body TEXT NOT NULL) STRICT"
            )
            self._db.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version={SCHEMA}")
            self._db.execute("COMMIT")
            self._schema = SCHEMA
            return
        if application != _APPLICATION_ID:
            raise InputError(f"{self.path} is not a ledger of this project")
        if schema > SCHEMA:
            raise InputError(
                f"{self.path} has schema {schema}, newer than {SCHEMA}, the newest this version reads: "
                "start the version that wrote it"
            )
        self._schema = int(schema)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def append(self, facts: Iterable[tuple[str, dict[str, Any]]], at: float, after: int | None = None) -> int:
        """Writes facts in one transaction; durable on return.

        Args:
            facts: (kind, JSON-able body) of each.
            at: seconds since the epoch, for people.
            after: number of the last fact that anybody has heard of. Later ones are of a transaction whose answer was
                lost; they go.

        Returns:
            The number of the last one.

        Raises:
            OSError: the disk is full or failed; none of the facts counts.
        """
        bodies = [(at, kind, _dump(body)) for kind, body in facts]
        with self._transaction():
            if after is not None:
                self._db.execute("DELETE FROM facts WHERE seq > ?", (after,))
            last = self._last()
            rows = [(seq, *body) for seq, body in enumerate(bodies, last + 1)]
            self._db.executemany("INSERT INTO facts (seq, at, kind, body) VALUES (?, ?, ?, ?)", rows)
        return last + len(rows)

    def replace(self, upto: int, rows: Sequence[tuple[float, str, dict[str, Any]]]) -> None:
        """Puts `rows` (at, kind, body) in the place of all up to number `upto`, in one transaction.

        There are to be no more of them than of those. Later rows stay as they are, also such as are appended meanwhile.

        Raises:
            OSError: the disk is full or failed; all rows are as they were.
        """
        numbered = [(seq, at, kind, _dump(body)) for seq, (at, kind, body) in enumerate(rows, upto - len(rows) + 1)]
        with self._transaction():
            self._db.execute("DELETE FROM facts WHERE seq <= ?", (upto,))
            self._db.executemany("INSERT INTO facts (seq, at, kind, body) VALUES (?, ?, ?, ?)", numbered)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                if self._schema < SCHEMA:
                    self._db.execute(f"PRAGMA user_version={SCHEMA}")
                yield
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                raise OSError(f"the ledger {self.path} cannot be written: {error}") from error
            self._schema = SCHEMA

    def _last(self) -> int:
        return int(self._db.execute("SELECT max(seq) FROM facts").fetchone()[0] or 0)

    def last(self) -> int:
        """The number of the last fact; 0 where there is none. Raises `InputError` where the file is damaged."""
        try:
            return self._last()
        except sqlite3.DatabaseError as error:
            raise InputError(f"the ledger {self.path} is damaged: {error}") from error

    def read(self, after: int = 0) -> Iterator[Row]:
        """Yields the facts numbered above `after`, in order. Raises `InputError` where the file is damaged."""
        try:
            cursor = self._db.execute("SELECT seq, at, kind, body FROM facts WHERE seq > ? ORDER BY seq", (after,))
            for seq, at, kind, body in cursor:
                yield Row(seq=seq, at=at, kind=kind, body=json.loads(body))
        except (sqlite3.DatabaseError, ValueError) as error:
            raise InputError(f"the ledger {self.path} is damaged: {error}") from error


def _dump(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))
