"""A coordinator that is killed at any moment and started again ends with the same bits as one that never was."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import diloco.cli
from coordinator import facts, rounds
from coordinator.cli import ledger as command
from coordinator.snapshots import load_snapshot
from coordinator.state import Round, State, apply, begin
from diloco.errors import DigestMismatch, DilocoError, ExitCode, InputError, Refused, StaleEpoch
from diloco.fragments import Fragment, partition
from diloco.layout import Piece
from tests.coordinator.test_rounds_any_order import MOVES, event_of
from tests.processes import wait_until
from tests.support import BOUND_S, MODEL, Play, Rig, Visitor, configure, draw, folded, part, serving, whole

CONFIG = configure("rounds.start_islands=2", "rounds.quorum=2", "snapshot.every_rounds=2")
FRAGMENTS = partition(MODEL, CONFIG.sync)
FRAGMENT, OTHER, _ = FRAGMENTS


# -- the state is a fold of the facts ---------------------------------------------------------------------------------


def timeless(state: State) -> State:
    """A state without what is no fact: times and readiness."""
    members = {i: replace(m, lease_until=0.0, ready=False) for i, m in state.members.items()}

    def still(current: Round) -> Round:
        opened = None if current.opened_at is None else 0.0
        past = tuple(replace(p, opened_at=None) for p in current.past)
        return replace(
            current, past=past, progress={}, opened_at=opened, quorum_at=None if current.quorum_at is None else 0.0
        )

    return replace(state, members=members, paused_at=0.0, running_since=0.0, rounds=tuple(map(still, state.rounds)))


@hypothesis.settings(deadline=None, derandomize=True, max_examples=150)
@given(moves=st.lists(MOVES, max_size=60), quorum=st.integers(1, 3), late=st.sampled_from(["drop", "discount", "hold"]))
def test_folding_the_facts_gives_the_state_that_the_events_gave(moves: list[Any], quorum: int, late: str) -> None:
    late = f'rounds.late="{late}"'
    play = Play(f"rounds.quorum={quorum}", "rounds.lease_s=300.0", "run.steps=40", late, islands="abc")
    for move in moves:
        play.clock.now += move[-1]
        with suppress(Refused):
            play.take(event_of(play.state, move))
    start = begin(play.state.config, play.state.weights, play.state.schedule)
    folded = written = start
    for fact in play.history:
        folded = apply(folded, fact, 0.0)
        kind, body = facts.encode(fact)
        written = apply(written, facts.decode(kind, json.loads(json.dumps(body))), 0.0)
    assert timeless(folded) == timeless(play.state)
    assert timeless(written) == timeless(play.state)


# -- killed and started again -----------------------------------------------------------------------------------------

LEFT, RIGHT = ([piece for i, piece in enumerate(whole(FRAGMENT)) if i % 2 == side] for side in (0, 1))
Step = tuple[str, Fragment, int, int, Sequence[Piece]]
STEPS: list[Step] = [
    step
    for round_ in range(3)
    for step in (
        ("a", FRAGMENT, round_, 0, LEFT),
        ("b", FRAGMENT, round_, 0, whole(FRAGMENT)),
        ("a", FRAGMENT, round_, 1, RIGHT),
        ("b", OTHER, round_, 0, whole(OTHER)),
        ("a", OTHER, round_, 0, whole(OTHER)),
    )
]
"""All pushes of the run: (island, fragment, round, rank, pieces). The third and the fifth of a round complete one."""


class Cut:
    """Pulls the plug of a coordinator's disk at the first row of a kind; nothing is recorded from there on.

    Args:
        at: the coordinator.
        kind: of the row.
        after: whether that row is still recorded.
        past: rows of the kind that go through before.
    """

    def __init__(self, at: Rig, kind: str, *, after: bool, past: int) -> None:
        self.dead = False
        self._record, self._kind, self._after, self._past = at.run.store.record, kind, after, past
        at.run.store.record = self.record  # type: ignore[method-assign]

    def record(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
        hits = not self.dead and any(kind == self._kind for kind, _ in rows)
        if hits and self._past:
            self._past, hits = self._past - 1, False
        if hits and self._after:
            self._record(rows)
        self.dead |= hits
        if self.dead:
            raise OSError("the plug is pulled")
        self._record(rows)


class Kills:
    """A run that goes through `STEPS` and whose coordinator is killed on the way."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._outer = folder, stack
        self.epochs: dict[str, int] = {}
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.stack = self._outer.enter_context(ExitStack())
        self.at = Rig(CONFIG, self._folder, self.stack, killed=True)
        self.at.patience_s = 0.2
        if self.starts:
            self.islands = {name: self.at.known(name, epoch) for name, epoch in self.epochs.items()}
            for visitor in self.islands.values():
                assert visitor.beat(ready=True).phase in ("running", "done")  # under the epoch that it had
        else:
            a, b = self.at.started("a", "b")
            self.islands = {"a": a, "b": b}
            self.epochs = {name: visitor.identity.epoch for name, visitor in self.islands.items()}
        self.starts += 1

    def kill(self) -> None:
        self.stack.close()
        self.start()

    def push(self, step: Step) -> Any:
        island, fragment, round_, rank, pieces = step
        values = draw(fragment, 10 * round_ + ord(island))
        fields = {"round": round_, "base_version": round_, "rank": rank, "tokens": 100 * ord(island)}
        return self.islands[island].push(fragment, values, pieces, **fields)

    def go(self, first: int = 0, last: int = len(STEPS)) -> None:
        for step in STEPS[first:last]:
            assert not self.push(step).dropped

    def settled(self) -> bool:
        """Whether the outcome of every decided round is published."""
        run = self.at.run
        return [current.round for current in run.state.rounds] == run.ended[: len(run.state.rounds)]

    def result(self) -> tuple[Any, ...]:
        """Digests and anchors at the end, and how often each island was counted."""
        a = self.islands["a"]
        for fragment in (FRAGMENT, OTHER):
            assert a.fetch(fragment, round=2)[0].version == 3
        anchors = [a.fetch(fragment, anchor=True)[1].tolist() for fragment in FRAGMENTS]
        status = a.link.status()
        counts = [(i.id, i.contributions, i.dropped) for i in status.islands]
        return status.state.phase, [f.digest for f in status.state.fragments], anchors, counts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    with ExitStack() as stack:
        run = Kills(tmp_path_factory.mktemp("undisturbed"), stack)
        run.go()
        result = run.result()
    assert result[0] == "done"
    assert result[3] == [("a", 6, 0), ("b", 6, 0)]
    return result


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield Kills(tmp_path / "state", stack)


@pytest.mark.parametrize("acknowledged", range(9))
def test_killed_after_any_acknowledged_part(run: Kills, undisturbed: tuple[Any, ...], acknowledged: int) -> None:
    run.go(0, acknowledged)
    run.kill()
    run.go(acknowledged)
    assert run.result() == undisturbed


def test_killed_after_every_part(run: Kills, undisturbed: tuple[Any, ...]) -> None:
    for step in range(len(STEPS)):
        run.go(step, step + 1)
        run.kill()
    assert run.starts == len(STEPS) + 1
    assert run.result() == undisturbed


@pytest.mark.parametrize("past", [0, 1, 3])
@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("part", False),
        ("accepted", False),  # the part is recorded, and that it completes a contribution is not
        ("committed", False),
        ("committed", True),  # decided, not folded
        ("folded", False),  # folded and forgotten
        ("folded", True),  # folded, not published
    ],
)
def test_killed_between_two_facts(run: Kills, undisturbed: tuple[Any, ...], kind: str, after: bool, past: int) -> None:
    cut = Cut(run.at, kind, after=after, past=past)
    for step in STEPS:
        try:
            receipt = run.push(step)
        except DilocoError as error:
            assert "the plug is pulled" in error.message
            run.kill()
            receipt = run.push(step)  # as an island does that has no receipt
        assert not receipt.dropped
        wait_until(lambda: cut.dead or run.settled(), "decided rounds are folded", BOUND_S)
        if cut.dead and run.starts == 1:
            run.kill()
    assert run.starts == 2
    assert run.result() == undisturbed


def test_killed_while_a_fold_is_published_the_update_is_still_there(run: Kills, undisturbed: tuple[Any, ...]) -> None:
    run.go(0, 3)
    before = run.islands["b"].fetch(FRAGMENT)
    run.go(3, 5)
    run.islands["b"].fetch(OTHER)
    wait_until(lambda: len(manifests(run)) == 2, "a snapshot holds both rounds", BOUND_S)
    run.kill()
    header, payload = run.islands["b"].fetch(FRAGMENT)
    assert (header, payload.tolist()) == (before[0], before[1].tolist())
    run.go(5)
    assert run.result() == undisturbed


def manifests(run: Kills) -> list[Path]:
    return sorted(run.at.run.store.root.glob("manifest-*.json"))


def test_killed_before_it_was_seeded(tmp_path: Path) -> None:
    def halfway(at: Rig) -> Visitor:
        a = at.island("a")
        at.island("b")
        a.push(FRAGMENT, draw(FRAGMENT, 7), seed=True)
        return a

    with ExitStack() as stack:
        epoch = halfway(Rig(CONFIG, tmp_path, stack, killed=True)).identity.epoch
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack, killed=True)
        at.patience_s = 0.0
        a = at.known("a", epoch)
        assert a.beat().seeder == "a"
        Cut(at, "planted", after=False, past=0)
        with pytest.raises(DilocoError, match="the plug is pulled"):
            for fragment in FRAGMENTS:
                a.push(fragment, draw(fragment, 8), seed=True)
        assert not any(f.seeded for f in a.beat().fragments)
        assert len(list(tmp_path.glob("manifest-*"))) == 1
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack, killed=True)
        assert not list(tmp_path.glob("manifest-*"))
        a, b = at.known("a", epoch), at.known("b", epoch + 1)
        for fragment in FRAGMENTS:
            a.push(fragment, draw(fragment, 0), seed=True)
        assert [v.beat(ready=True).phase for v in (a, b)] == ["gathering", "running"]


def test_a_part_that_is_pushed_again_after_a_start_is_known_and_counts_once(
    run: Kills, undisturbed: tuple[Any, ...]
) -> None:
    run.go(0, 2)
    run.kill()
    for step in STEPS[:2]:
        assert run.push(step).duplicate
    run.go(2, 5)
    run.kill()
    for step in STEPS[:5]:  # their rounds have ended, and they are in
        receipt = run.push(step)
        assert (receipt.duplicate, receipt.dropped) == (True, "")
    run.go(5)
    assert run.result() == undisturbed


def test_leases_begin_anew_at_a_start_and_end_as_ever(run: Kills) -> None:
    run.kill()
    run.at.tick(29.75)
    run.islands["a"].beat()
    run.at.tick(0.25)
    with pytest.raises(StaleEpoch, match="no heartbeat for 30 s"):
        run.islands["b"].beat()
    assert [i.state for i in run.islands["a"].link.status().islands] == ["ACTIVE", "LOST"]


def test_an_island_that_left_or_was_lost_stays_so(tmp_path: Path) -> None:
    with ExitStack() as stack:
        a, b = Rig(CONFIG, tmp_path, stack, killed=True).started("a", "b")
        b.leave("finished")
        epochs = (a.identity.epoch, b.identity.epoch)
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack, killed=True)
        at.known("a", epochs[0]).beat()
        with pytest.raises(StaleEpoch, match=r"\(finished\): join again"):
            at.known("b", epochs[1]).beat()


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_that_nothing_speaks_of_are_removed_and_the_others_kept_until_a_snapshot_holds_them(
    run: Kills,
) -> None:
    run.go(0, 2)
    spoken = run.at.inbox()
    assert len(spoken) == 2
    run.at.run.store.inbox_path("f0-r0-a-e1-7-0123").write_bytes(b"no receipt")
    run.at.run.store.inbox_path("f0-r0-a-e1-7-0123.partial").write_bytes(b"half")
    run.kill()
    assert run.at.inbox() == spoken
    run.go(2, 5)  # two rounds: the second snapshot; the first is that of the first parameters
    wait_until(lambda: len(manifests(run)) == 2, "a second snapshot", BOUND_S)
    run.kill()
    assert len(run.at.inbox()) == 5
    run.go(5, 10)  # a third, and the first parameters' goes
    wait_until(lambda: len(run.at.inbox()) == 5, "what the oldest snapshot holds is removed", BOUND_S)
    assert {name[:5] for name in run.at.inbox()} == {"f0-r1", "f1-r1"}
    run.kill()
    assert len(run.at.inbox()) == 5


def test_snapshots_without_a_ledger_are_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        Rig(CONFIG, tmp_path, stack).started("a", "b")
    for path in tmp_path.glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(InputError, match="has snapshots but no ledger"), serving(CONFIG, tmp_path):
        pass
    assert list(tmp_path.glob("manifest-*"))


def test_a_ledger_without_its_snapshots_is_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        Rig(CONFIG, tmp_path, stack).started("a", "b")
    for path in tmp_path.glob("manifest-*"):
        path.unlink()
    words = "speaks of first parameters, but there is no snapshot"
    with pytest.raises(InputError, match=words), serving(CONFIG, tmp_path):
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE facts SET kind='later' WHERE seq=3", "a fact of kind 'later', which this version does not know"),
        ("UPDATE facts SET body='{}' WHERE kind='part'", "is damaged: KeyError"),
        ("UPDATE facts SET body='{}' WHERE kind='run'", "fact 1 of the ledger in .* is damaged"),
        ("UPDATE facts SET body=replace(body, '\"fragment\":0', '\"fragment\":9')", "is damaged: IndexError"),
        ("DELETE FROM facts WHERE kind='admitted'", "is damaged: KeyError"),
        ("DELETE FROM facts WHERE kind='layout'", "is damaged: IndexError"),
    ],
)
def test_a_damaged_ledger_is_refused_with_the_place(tmp_path: Path, change: str, words: str) -> None:
    with ExitStack() as stack:
        a, _ = Rig(CONFIG, tmp_path, stack, killed=True).started("a", "b")
        a.push(FRAGMENT, draw(FRAGMENT, 1))
    edit(tmp_path, change)
    with pytest.raises(InputError, match=words), serving(CONFIG, tmp_path):
        pass


def edit(state: Path, change: str) -> None:
    database = sqlite3.connect(state / "ledger.sqlite", isolation_level=None)
    database.execute(change)
    database.close()


# -- a disk that takes no row -----------------------------------------------------------------------------------------


def test_a_disk_that_takes_no_row_refuses_what_needs_one_and_changes_nothing(
    at: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    at.patience_s = 0.2
    a, b = at.started("a", "b")
    a.push(FRAGMENT, draw(FRAGMENT, 1))
    other = at.visitor("n")
    state, rows, files = at.run.state, len(list(at.run.store.ledger.read())), at.inbox()

    def full(*_: Any) -> int:
        raise OSError("the ledger cannot be written: database or disk is full")

    refused: list[Callable[[], Any]] = [
        other.join,
        lambda: b.push(FRAGMENT, draw(FRAGMENT, 2), LEFT),
        lambda: b.push(OTHER, draw(OTHER, 2)),
        lambda: b.leave("gone"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(at.run.store.ledger, "append", full)
        for ask in refused:
            with pytest.raises(DilocoError, match=r"the coordinator cannot store this: .*disk is full"):
                ask()
        assert a.beat().phase == "running"  # what needs no row goes on
        at_end = at.run.state
        assert timeless(at_end) == timeless(state)
        assert len(list(at.run.store.ledger.read())) == rows
        left = set(at.inbox()) - set(files)  # the disk may have kept their rows all the same
        assert {name.split("-")[2] for name in left} == {"b"}
    assert other.join().epoch == 3
    b.push(FRAGMENT, draw(FRAGMENT, 2), LEFT)
    b.push(FRAGMENT, draw(FRAGMENT, 2), RIGHT, rank=1)
    assert a.fetch(FRAGMENT)[0].outcome == "committed"
    for visitor in (a, b):
        visitor.push(OTHER, draw(OTHER, 3))
    assert a.fetch(OTHER)[0].outcome == "committed"
    at.served.call(at.run.snapshot())
    at.served.call(at.run.snapshot())
    assert not at.inbox()
    assert not at.run.failed.done()


def test_a_caller_that_goes_away_does_not_tear_what_is_durable_from_what_is_known(
    at: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is cancelled while its row is written: the row counts, so the state has to have it as well."""
    a, b = at.started("a", "b")
    written, go = threading.Event(), threading.Event()
    record = at.run.store.record

    def slow(rows: Any) -> None:
        record(rows)
        written.set()
        assert go.wait(BOUND_S)

    monkeypatch.setattr(at.run.store, "record", slow)

    async def cancelled() -> None:
        leaving = rounds.Leaving(island="b", epoch=b.identity.epoch, reason="gone")
        task = asyncio.create_task(at.run.take(leaving))
        await asyncio.to_thread(written.wait, BOUND_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        go.set()

    at.served.call(cancelled())
    assert a.link.status().islands[1].state == "LEFT"
    last = list(at.run.store.ledger.read())[-1]
    assert (last.kind, last.body["island"]) == ("gone", "b")


# -- diloco ledger ----------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of a run that was killed after its second round of each fragment."""
    with ExitStack() as stack:
        run = Kills(tmp_path / "state", stack)
        run.go(0, 10)
        for fragment in (FRAGMENT, OTHER):
            run.islands["a"].fetch(fragment, round=1)
    return tmp_path / "state"


def ended(*args: str) -> tuple[int, str]:
    """Exit code and output of `diloco ledger ARGS`."""
    ran = CliRunner().invoke(command, list(args), standalone_mode=False)
    if isinstance(ran.exception, DilocoError):
        return diloco.cli.exit_code(ran.exception), ran.exception.message
    assert ran.exception is None, ran.exception
    return 0, ran.output


def test_the_ledger_of_a_run_verifies(state: Path) -> None:
    code, out = ended("verify", str(state))
    assert code == ExitCode.OK
    assert out.splitlines()[-1].endswith("rounds folded again; all digests agree")
    assert "fragment 0 version 2: " in out


def test_the_ledger_is_shown_and_exported(state: Path) -> None:
    code, shown = ended("show", str(state))
    assert code == 0
    lines = shown.splitlines()
    assert lines[0].split()[2] == "run"
    code, exported = ended("export", str(state))
    assert code == 0
    rows = [json.loads(line) for line in exported.splitlines()]
    assert [row["seq"] for row in rows] == list(range(1, len(lines) + 1))
    assert {"run", "layout", "admitted", "planted", "moved", "part", "accepted", "committed", "folded"} == {
        row["kind"] for row in rows
    }
    assert [line.split()[2] for line in lines] == [row["kind"] for row in rows]


def test_a_changed_digest_in_the_ledger_is_a_digest_mismatch(state: Path) -> None:
    edit(state, "UPDATE facts SET body=replace(body, '\"digest\":\"', '\"digest\":\"f') WHERE kind='folded'")
    code, words = ended("verify", str(state))
    assert code == ExitCode.INTERNAL
    assert "folds to" in words and "the ledger says f" in words


def test_a_changed_contribution_is_a_digest_mismatch(state: Path) -> None:
    path = sorted((state / "inbox").iterdir())[-1]
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    code, words = ended("verify", str(state))
    assert code == ExitCode.INTERNAL
    assert f"{path} has digest" in words


def test_a_missing_contribution_or_ledger_is_an_input_error(state: Path, tmp_path: Path) -> None:
    path = sorted((state / "inbox").iterdir())[-1]
    path.unlink()
    assert ended("verify", str(state)) == (ExitCode.USAGE, f"{path} is missing, but the ledger speaks of it")
    for name in ("show", "export", "verify"):
        code, words = ended(name, str(tmp_path))
        assert code == ExitCode.USAGE
        assert words.startswith(f"no ledger at {tmp_path}")


def test_a_coordinator_does_not_go_on_from_a_fold_with_other_bits(state: Path) -> None:
    for path in sorted(state.glob("manifest-*"))[1:]:
        path.unlink()
    edit(state, "UPDATE facts SET body=replace(body, '\"digest\":\"', '\"digest\":\"f') WHERE kind='folded'")
    with pytest.raises(DigestMismatch, match="and the ledger says f"), serving(CONFIG, state) as served:
        wait_until(lambda: served.ask(lambda run: run.failed.done()), "the run fails", BOUND_S)


@pytest.mark.parametrize("what", ["manifest", "tensors", "missing"])
def test_a_damaged_newest_snapshot_is_passed_over_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: tuple[Any, ...], caplog: pytest.LogCaptureFixture, what: str
) -> None:
    with ExitStack() as stack:
        run = Kills(tmp_path, stack)
        run.go(0, 10)
        wait_until(lambda: run.settled() and run.at.run.totals.unsaved == 0, "the snapshot", BOUND_S)
        run.stack.close()
        newest = manifests(run)[-1]
        [tensors] = (tmp_path / "fragments").glob("f0000-v00000002-*")
        if what == "manifest":
            newest.write_bytes(newest.read_bytes()[:100])
        elif what == "tensors":
            tensors.write_bytes(tensors.read_bytes()[:-1])
        else:
            tensors.unlink()
        run.start()
        assert "going back to the snapshot before it" in caplog.text
        run.go(10)
        assert run.result() == undisturbed
        run.kill()
        assert run.result() == undisturbed


@pytest.mark.parametrize("failing", ["dump", "dump_tensors"])
def test_a_disk_that_fails_under_a_fold_delays_it_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Of an update or of a snapshot: the tensors move once all the same."""
    monkeypatch.setattr("coordinator.run.DISK_RETRY_S", 0.01)
    with ExitStack() as stack:
        rig = Rig(configure("rounds.start_islands=2", "rounds.quorum=2"), tmp_path, stack)
        islands = rig.started("a", "b")
        fragment = rig.run.fragments[0]
        sent = {name: [part(fragment, draw(fragment, seed))] for seed, name in enumerate("ab", 1)}
        config = rig.run.config.outer
        expected, _ = folded(fragment, rig.run.outers[0], sent, dict.fromkeys("ab", 0.5), config, rig.run.down)
        real, failures = getattr(rig.run.store.files, failing), []

        def fail_twice(*arguments: Any, **options: Any) -> Any:
            if len(failures) < 2:
                failures.append(failing)
                raise OSError(28, "No space left on device")
            return real(*arguments, **options)

        monkeypatch.setattr(rig.run.store.files, failing, fail_twice)
        for seed, visitor in enumerate(islands, 1):
            visitor.push(fragment, draw(fragment, seed), round=0, tokens=1)
        header, _ = islands[0].fetch(fragment, round=0)
        assert (header.outcome, header.version, header.digest) == ("committed", 1, expected.digest & (2**64 - 1))
        wait_until(lambda: rig.served.ask(lambda run: run.totals.unsaved) == 0, "the snapshot")
    snapshot = load_snapshot(tmp_path)
    assert snapshot is not None
    assert [outer.version for outer in snapshot.outers] == [1, 0, 0]
    assert failures == [failing] * 2
