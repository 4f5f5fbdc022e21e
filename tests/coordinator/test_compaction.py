"""A compacted ledger says what the whole one does, whenever it is compacted and whatever happens meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import facts, rounds
from coordinator.compaction import behind, compact, replacement
from coordinator.files import Files, ReadOnly
from coordinator.ledger import Ledger, Row
from coordinator.recovery import Recovered, layout_row, recover, replay, run_row, stored, verify
from coordinator.store import Store
from diloco.config import RunConfig
from diloco.errors import ExitCode, Refused
from tests.coordinator.test_recovery import CONFIG, STEPS, Kills, ended
from tests.coordinator.test_rounds_any_order import MOVES, event_of
from tests.processes import wait_until
from tests.support import BOUND_S, MODEL, Play, configure

Rows = list[Row]


def numbered(rows: Sequence[tuple[float, str, dict[str, Any]]], last: int) -> Rows:
    """Rows as they come back from a file."""
    texts = [(at, kind, json.loads(json.dumps(body))) for at, kind, body in rows]
    first = last - len(texts) + 1
    return [Row(seq=seq, at=at, kind=kind, body=body) for seq, (at, kind, body) in enumerate(texts, first)]


def compacted(rows: Rows, config: RunConfig, oldest: Sequence[int], root: Path) -> Rows:
    """Rows behind a snapshot as one state, and the rest."""
    count = behind(rows, oldest)
    if not count:
        return rows
    found = replacement(rows[:count], config, root, lambda body: stored(body, root, ReadOnly()), oldest)
    assert len(found) <= count
    return numbered(found, rows[count - 1].seq) + rows[count:]


def ends(rows: Rows) -> list[int]:
    """Rounds ended of each fragment."""
    done = [0, 0, 0]
    for row in rows:
        if row.kind in ("committed", "skipped"):
            done[row.body["fragment"]] += 1
    return done


def said(rows: Rows, config: RunConfig, oldest: Sequence[int], snapshot: Sequence[int], root: Path) -> dict[str, Any]:
    """All that replaying rows over a snapshot says."""
    found: Recovered = replay(rows, config, root, lambda body: stored(body, root, ReadOnly()))
    found.forget(oldest)
    found.over((), snapshot)
    least = {end.fragment: end.version for end in reversed(found.pending) if isinstance(end, rounds.Committed)}
    return {
        "state": found.state,
        "layout": found.layout.digest if found.layout else "",
        "pending": found.pending,
        "past": list(found.past()),
        "digests": {key: d for key, d in found.digests.items() if key[1] >= least.get(key[0], 2**62)},
        "inbox": {
            key: {island: (i.epoch, i.tokens, i.parts, i.coverage.whole) for island, i in islands.items()}
            for key, islands in found.inbox._rounds.items()
            if islands
        },
    }


CUTS = st.lists(st.floats(0, 1), min_size=3, max_size=3)
OVERRIDES = ("rounds.quorum=2", "rounds.lease_s=300.0", "run.steps=40")


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@given(moves=st.lists(MOVES, min_size=20, max_size=80), cuts=st.lists(CUTS, min_size=2, max_size=2))
def test_any_history_compacts_to_the_same_state(moves: list[Any], cuts: list[list[float]]) -> None:
    """Also behind snapshots whose fragments are of different moments."""
    play = Play(*OVERRIDES, islands="abc")
    for move in moves:
        play.clock.now += move[-1]
        with suppress(Refused):
            play.take(event_of(play.state, move))
    config = configure("rounds.grace_s=10.0", "rounds.deadline_s=60.0", "rounds.start_islands=3", *OVERRIDES)
    config = config.model_copy(update={"rounds": play.state.config})
    history = [facts.encode(fact) for fact in play.history]
    rows = numbered([(1.0, *row) for row in [run_row(config), layout_row(MODEL), *history]], 2 + len(history))
    of_each = zip(*(sorted(cut) for cut in cuts), strict=True)
    first, second, newest = (
        [*(ends(rows[: round(cut * len(rows))])[fragment] for fragment, cut in enumerate(together)), 0]
        for together in of_each
    )
    once = compacted(rows, config, first, Path())
    twice = compacted(once, config, second, Path())
    straight = compacted(rows, config, second, Path())
    for oldest, others in ((first, [once]), (second, [twice, straight])):
        for snapshot in (oldest, newest):
            whole = said(rows, config, oldest, snapshot, Path())
            for other in others:
                assert said(other, config, oldest, snapshot, Path()) == whole


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed on the way, whose ledger is whole."""
    folder = tmp_path_factory.mktemp("compaction") / "state"
    with ExitStack() as stack:
        run = Kills(folder, stack)
        for first, last in ((0, 4), (4, 8), (8, 12)):
            run.go(first, last)
            wait_until(lambda: run.settled() and run.at.run.totals.unsaved < 2, "folds and snapshots", BOUND_S)
            run.kill()
    return folder


@pytest.fixture
def copy(state: Path, tmp_path: Path) -> Path:
    shutil.copytree(state, tmp_path / "state")
    return tmp_path / "state"


def read(path: Path) -> Rows:
    ledger = Ledger(path)
    rows = list(ledger.read())
    ledger.close()
    return rows


def test_a_ledger_with_contributions_says_the_same_wherever_it_is_compacted(state: Path) -> None:
    rows = read(state / "ledger.sqlite")
    together = {tuple(ends(rows[:n])) for n in range(len(rows) + 1)}
    assert len(together) >= 5
    points = sorted(product(*(range(most + 1) for most in ends(rows))))  # also of different moments
    for i, oldest in enumerate(points):
        compact_rows = compacted(rows, CONFIG, oldest, state)
        assert oldest not in together or len(compact_rows) < len(rows)
        for snapshot in points[i:]:
            if all(a <= b for a, b in zip(oldest, snapshot, strict=True)):
                assert said(compact_rows, CONFIG, oldest, snapshot, state) == said(
                    rows, CONFIG, oldest, snapshot, state
                )


def looked(root: Path) -> tuple[Any, ...]:
    """What a coordinator that starts on a folder finds."""
    ledger = Ledger(root / "ledger.sqlite")
    found = recover(ledger, CONFIG, root, files=ReadOnly())
    agreed = list(verify(ledger, root))
    ledger.close()
    inbox = {k: {i: (x.epoch, x.parts) for i, x in v.items()} for k, v in found.inbox._rounds.items() if v}
    digests = [outer.digest for outer in found.outers]
    return found.state, found.ended, found.pending, list(found.past()), digests, inbox, agreed


class Interrupted(Files):
    """Files that do something before or after a transaction of the ledger."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()
        self.before, self.after = before, after

    def transact(self, work: Any) -> Any:
        self.before()
        done = work()
        self.after()
        return done


def fail() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_disk_that_fails_leaves_the_ledger_as_it_was_or_compacted(copy: Path, when: str) -> None:
    known, rows = looked(copy), read(copy / "ledger.sqlite")
    store = Store(copy, Interrupted(fail if when == "before" else int, fail if when == "after" else int))
    if when == "never":
        assert compact(store, CONFIG, len(rows)) == 0
        assert compact(store, CONFIG, 1) > 3
        assert compact(store, CONFIG, 1) == 0
    else:
        with pytest.raises(OSError, match="No space"):
            compact(store, CONFIG, 1)
    after = read(copy / "ledger.sqlite")
    assert (after == rows) == (when == "before")
    assert after[-1] == rows[-1]
    assert looked(copy) == known
    store.close()


def test_a_kill_within_the_transaction_leaves_the_ledger_as_it_was(copy: Path, tmp_path: Path) -> None:
    known = looked(copy)
    store = Store(copy)
    count = len(read(copy / "ledger.sqlite"))
    copied: list[Path] = []

    class Stops:
        """A connection whose process is copied as it stands before a commit, as a kill leaves it."""

        def __init__(self, db: Any) -> None:
            self._db = db

        def __getattr__(self, name: str) -> Any:
            return getattr(self._db, name)

        def execute(self, command: str, *rest: Any) -> Any:
            if command == "COMMIT":
                target = tmp_path / f"killed-{len(copied)}"
                shutil.copytree(copy, target, ignore=shutil.ignore_patterns("*-shm", "lock"))
                copied.append(target)
            return self._db.execute(command, *rest)

    store.ledger._db = Stops(store.ledger._db)  # type: ignore[assignment]
    assert compact(store, CONFIG, 1)
    [killed] = copied
    assert len(read(killed / "ledger.sqlite")) == count
    moved = looked(killed)
    assert moved[:5] == known[:5]
    store.close()


def test_rows_that_come_meanwhile_are_kept(copy: Path) -> None:
    gone = facts.encode(rounds.Gone(island="a", standing=rounds.Standing.LEFT, reason="meanwhile"))
    rows = read(copy / "ledger.sqlite")
    store = Store(copy)

    def meanwhile() -> None:
        store.files.before = int  # type: ignore[attr-defined]
        store.record([gone])

    store.files = Interrupted(meanwhile, int)
    assert compact(store, CONFIG, 1)
    after = read(copy / "ledger.sqlite")
    assert (after[-1].kind, after[-1].seq) == ("gone", rows[-1].seq + 1)
    assert looked(copy)[0].members["a"].standing is rounds.Standing.LEFT
    store.record([gone])
    assert read(copy / "ledger.sqlite")[-1].seq == rows[-1].seq + 2
    store.close()


def test_a_run_whose_ledger_is_compacted_all_the_time_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        plain = Kills(tmp_path / "plain", stack)
        plain.go()
        expected = plain.result()
    monkeypatch.setattr("coordinator.keeper.COMPACT_ROWS", 1)
    with ExitStack() as stack:
        run = Kills(tmp_path / "state", stack)
        for step in range(0, len(STEPS), 3):
            run.go(step, step + 3)
            wait_until(run.settled, "decided rounds are folded", BOUND_S)
            run.kill()
        assert run.result() == expected
        wait_until(
            lambda: "state" in {r.kind for r in read(tmp_path / "state" / "ledger.sqlite")}, "compaction", BOUND_S
        )
    code, out = ended("verify", str(tmp_path / "state"))
    assert code == ExitCode.OK
    assert out.splitlines()[-1].endswith("all digests agree")
    code, out = ended("show", str(tmp_path / "state"))
    assert [line.split()[2] for line in out.splitlines()][:3] == ["run", "layout", "state"]
    code, out = ended("export", str(tmp_path / "state"))
    assert json.loads(out.splitlines()[2])["kind"] == "state"


def test_the_lines_for_people_are_the_whole_history(copy: Path, tmp_path: Path) -> None:
    """From them alone, contributions and snapshots given, a run is found where it stands."""
    known = looked(copy)
    store = Store(copy)
    assert compact(store, CONFIG, 1)
    store.close()
    assert looked(copy) == known
    for path in copy.glob("ledger.sqlite*"):
        path.unlink()
    rebuilt = Ledger(copy / "ledger.sqlite")
    for line in (copy / "events.jsonl").read_text().splitlines():
        body = json.loads(line)
        seq, at, kind = body.pop("seq"), body.pop("at"), body.pop("kind")
        assert rebuilt.append([(kind, body)], at) == seq
    rebuilt.close()
    assert looked(copy) == known


def test_a_state_from_before_a_field_was_added_takes_its_default(copy: Path) -> None:
    rows = read(copy / "ledger.sqlite")
    found = compacted(rows, CONFIG, ends(rows), copy)
    [row] = [row for row in found if row.kind == "state"]
    for member in row.body["state"]["members"].values():
        del member["dropped"]
        member["later"] = 1
    there = replay(found, CONFIG, copy, lambda body: stored(body, copy, ReadOnly())).state
    whole = replay(rows, CONFIG, copy, lambda body: stored(body, copy, ReadOnly())).state
    assert there == replace(whole, members={i: replace(m, dropped=0) for i, m in whole.members.items()})


def test_verification_goes_on_from_the_next_snapshot_where_a_coordinator_replaces_the_oldest(copy: Path) -> None:
    oldest, newest = sorted(copy.glob("manifest-*.json"))
    rounds_held = [row["round"] for row in json.loads(newest.read_text())["fragments"]]
    ledger = Ledger(copy / "ledger.sqlite")
    whole = list(verify(ledger, copy))
    agreed = verify(ledger, copy)
    first = next(agreed)
    assert whole == [first, *whole[1:]]
    assert len(whole) >= 2
    oldest.unlink()
    for path in (copy / "inbox").iterdir():
        fragment, round_ = (int(word[1:]) for word in path.name.split("-")[:2])
        if round_ < rounds_held[fragment]:
            path.unlink()
    assert list(agreed) == [(f, v, d) for f, v, d in whole[1:] if v > rounds_held[f]]
    ledger.close()
