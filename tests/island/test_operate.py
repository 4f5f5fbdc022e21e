"""The operators' commands against a served run: what they print, how they end, what they ask before."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
from rich.console import Console

from coordinator.rounds import Kick, Stop
from diloco.errors import ExitCode
from diloco.v1 import coordinator_pb2 as pb
from island import operate, show
from island.cli import status
from tests.processes import Ended, command_here, free_port
from tests.support import Rig, Serving, Visitor, configure, draw, serving, visit

SETTINGS = ("rounds.start_islands=3", "rounds.quorum=2", "rounds.grace_s=20.0", "run.steps=1000")
COMMANDS = [
    operate.explain, operate.health, operate.pause, operate.resume, operate.drain, operate.kick, operate.snapshot,
    operate.stop,
]  # fmt: skip


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(configure(*SETTINGS), tmp_path / "state", stack)


@pytest.fixture
def islands(at: Rig) -> list[Visitor]:
    """Three islands, one of whose contribution round 0 of fragment 0 waits for."""
    visitors = at.started("tokyo", "oslo", "lima")
    f = at.run.fragments[0]
    for visitor in visitors[:2]:
        visitor.push(f, draw(f, 1))
    at.clock.now += 5
    return visitors


def do(at: Rig, command: click.Command, *args: str) -> Ended:
    return command_here(command, at.address, *args)


def lines(at: Rig, command: click.Command, *args: str) -> list[str]:
    """What a command prints that does what it was asked."""
    ended = do(at, command, *args)
    assert (ended.code, ended.err) == (ExitCode.OK, ""), ended
    return ended.out.splitlines()


# -- looking --------------------------------------------------------------------------------------------------------


def test_explain_prints_the_coordinators_sentences(at: Rig, islands: list[Visitor]) -> None:
    at.served.call(at.served.health.look())
    said = lines(at, operate.explain, "--fragment", "0")
    assert said == [
        "The run is running.",
        "Fragment 0 is at version 0; round 0 is open for 5 s: oslo, tokyo contributed, the quorum is 2.",
        "  It waits for lima, ACTIVE, last heard 5 s ago.",
        "  It ends without them in 15 s (20 s of grace), in any case in 595 s.",
    ]
    assert json.loads("".join(lines(at, operate.explain, "--fragment", "0", "--json"))) == {"lines": said}
    assert any(line.startswith("Fragment 1") for line in lines(at, operate.explain))
    wrong = do(at, operate.explain, "--fragment", "9")
    assert (wrong.code, wrong.out) == (ExitCode.REFUSED, "")
    assert wrong.err == "error: there is no fragment 9 with rounds; the run has 2, from 0\n"


def test_health_ends_with_0_only_where_the_coordinator_is_ready(at: Rig) -> None:
    at.served.call(at.served.health.look())
    assert lines(at, operate.health) == ["ready"]
    at.served.call(at.served.health.close())
    ended = do(at, operate.health)
    assert (ended.code, ended.out) == (1, "The coordinator is not ready: shutdown: it is shutting down.\n")


def test_health_tells_a_living_coordinator_from_a_ready_one(at: Rig) -> None:
    at.served.ask(lambda run: run._waits("fold", "the run waits for its disk: it is full"))
    at.served.call(at.served.health.look())
    assert lines(at, operate.health, "--live") == ["alive"]
    ended = do(at, operate.health)
    assert (ended.code, ended.out) == (
        1,
        "The coordinator is not ready: disk: the run waits for its disk: it is full.\n",
    )


def test_the_status_shows_the_rounds_and_the_standing_of_islands(at: Rig, islands: list[Visitor]) -> None:
    lines(at, operate.pause, "--reason", "a new cable")
    islands[0].leave("enough for today")
    out = "\n".join(lines(at, status))
    assert out.startswith("run test is running; 0 rounds committed\nthe run is paused: by an operator at 127.0.0.1: a ")
    assert "tokyo is LEFT: enough for today" in out
    [row] = [line.split() for line in out.splitlines() if line.split()[:2] == ["0", "0"]]
    assert row[3:] == ["0", "oslo", "tokyo", "lima", "5", "s", "its", "clock", "stands", "still"]
    assert do(at, status).out == command_here(status, "--coordinator", at.address).out


def test_the_status_as_json_has_what_the_page_shows(at: Rig, islands: list[Visitor]) -> None:
    found = json.loads("".join(lines(at, status, "--json")))
    assert (found["phase"], found["paused"], found["rounds_aborted"], found["participation"]) == (
        "running",
        "",
        0,
        None,
    )
    first, second, _ = found["fragments"]
    assert (first["contributed"], first["missing"]) == (["oslo", "tokyo"], ["lima"])
    assert (first["open_s"], first["soft_s"], first["hard_s"]) == (5, 15, 595)
    assert (second["contributed"], second["missing"], second["soft_s"], second["hard_s"]) == ([], [], None, None)


def page(reply: pb.StatusReply, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(show.page(reply))
    return out.getvalue()


def test_the_status_page_keeps_every_value_on_a_narrow_terminal(at: Rig, islands: list[Visitor]) -> None:
    names = ["a-data-centre-with-a-long-name", "another-one-in-the-far-north"]
    for name in names:
        at.island(name)
    reply = islands[0].link.status()
    reply.state.fragments[0].missing.extend(names)
    for island in reply.islands:
        island.progress.bytes_up, island.progress.bytes_down, island.progress.step = 123_456_789_012, 98_765_432, 999
        island.progress.tokens_per_second = 1_234_567
    shown = page(reply, 100)
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown
    assert shown.count("123.5 GB") == shown.count("1,234,567") == shown.count("999/1000") == 5
    assert "in 15 s, 595 s at most" in page(reply, 160)


def test_a_round_below_quorum_shows_when_it_is_skipped(at: Rig) -> None:
    a, *_ = at.started("a", "b", "c")
    a.push(at.run.fragments[0], draw(at.run.fragments[0], 1))
    assert "skipped in 600 s" in do(at, status).out


def test_watching_draws_again_until_ctrl_c(at: Rig, islands: list[Visitor], capsys: pytest.CaptureFixture[str]) -> None:
    looks = 0

    def look() -> pb.StatusReply:
        nonlocal looks
        looks += 1
        return islands[0].link.status()

    def pause(seconds: float) -> None:
        if looks == 3:
            raise KeyboardInterrupt

    show.watch(look, pause)
    assert looks == 3
    assert "run test is running" in capsys.readouterr().out


def test_the_status_needs_one_address_and_one_form(at: Rig) -> None:
    for args in ([], [at.address, "--coordinator", at.address], [at.address, "--json", "--watch"]):
        assert command_here(status, *args).code == ExitCode.USAGE


# -- doing ----------------------------------------------------------------------------------------------------------


def test_each_command_does_what_it_says(at: Rig, islands: list[Visitor]) -> None:
    def ask(question: Callable[..., object]) -> object:
        return at.served.ask(lambda run: question(run.state))

    assert lines(at, operate.pause, "--reason", "lunch")[0].startswith("the run is paused")
    assert ask(lambda state: state.paused) == "by an operator at 127.0.0.1: lunch"
    assert lines(at, operate.resume) == ["the run goes on; it was paused by an operator at 127.0.0.1: lunch"]
    assert lines(at, operate.drain, "oslo") == ["asked to leave: oslo"]
    assert ask(lambda state: state.members["oslo"].standing) == "DRAINING"
    assert lines(at, operate.kick, "tokyo", "--yes") == ["the lease of island tokyo has ended; no round waits for it"]
    assert lines(at, operate.drain, "--all") == ["asked to leave: lima"]
    assert lines(at, operate.snapshot)[0].startswith("a snapshot is taken, of versions ")
    assert lines(at, operate.stop, "--yes") == ["the coordinator ends once these have left: lima, oslo"]


def test_what_the_coordinator_refuses_ends_with_its_message(at: Rig, islands: list[Visitor]) -> None:
    ended = do(at, operate.drain, "paris")
    assert (ended.code, ended.out) == (ExitCode.REFUSED, "")
    assert ended.err == ("error: island 'paris' holds no lease in this run; those that do: lima, oslo, tokyo\n")


@pytest.mark.parametrize(("command", "args"), [(operate.kick, ["oslo"]), (operate.stop, [])])
def test_what_cannot_be_taken_back_is_asked_on_a_terminal_and_needs_yes_elsewhere(
    at: Rig, islands: list[Visitor], command: click.Command, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def stand() -> list[str]:
        return at.served.ask(
            lambda run: [] if run.state.stopping else [m.id for m in run.state.members.values() if m.present]
        )

    before = stand()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    ended = do(at, command, *args)
    assert ended.code == ExitCode.USAGE
    assert "There is no terminal to ask on: say --yes" in ended.err
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    ended = do(at, command, *args)
    assert (ended.code, ended.err) == (ExitCode.REFUSED, "error: nothing was done\n")
    assert stand() == before
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert do(at, command, *args).code == ExitCode.OK
    assert stand() != before


def test_waiting_for_a_stop_has_a_bound(at: Rig, islands: list[Visitor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "LOOK_S", 0.01)
    ended = do(at, operate.stop, "--yes", "--wait", "--within", "0.05")
    assert ended.code == ExitCode.TIMEOUT
    assert "error: the coordinator still runs: ending (" in ended.err


# -- several coordinators -------------------------------------------------------------------------------------------


@pytest.fixture
def both(tmp_path: Path) -> Iterator[list[Serving]]:
    """The two coordinators of a run, where an island has joined."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with ExitStack() as stack:
        hosts = []
        for index, address in enumerate(addresses):
            config = configure(f"run.coordinators={json.dumps(addresses)}", f"run.coordinator_index={index}")
            hosts.append(stack.enter_context(serving(config, tmp_path / str(index), listen=address)))
            visitor = stack.enter_context(visit(address, "oslo"))
            visitor.join()
            for fragment in (f for f in hosts[-1].run.fragments if not f.elsewhere):
                visitor.push(fragment, draw(fragment, 0), seed=True)
        yield hosts


@pytest.mark.parametrize("given", [0, 1])
def test_what_changes_a_run_is_done_at_all_of_its_coordinators(given: int, both: list[Serving]) -> None:
    def done(command: click.Command, *args: str) -> list[str]:
        ended = command_here(command, both[given].address, *args)
        assert (ended.code, ended.err) == (ExitCode.OK, ""), ended
        return ended.out.splitlines()

    def paused() -> list[bool]:
        return [bool(host.ask(lambda run: run.state.paused)) for host in both]

    said = done(operate.pause)
    assert [line.partition(" is ")[0] for line in said] == [f"coordinator {i}: the run" for i in (0, 1)]
    assert paused() == [True, True]
    assert done(operate.resume, "--here")[0].startswith("the run goes on")
    assert paused() == [given == 1, given == 0]
    assert done(operate.resume)[given] == f"coordinator {given}: the run is not paused"
    assert done(operate.drain, "oslo") == [f"coordinator {i}: asked to leave: oslo" for i in (0, 1)]
    taken = [line.partition(" is ")[0] for line in done(operate.snapshot)]
    assert taken == [f"coordinator {i}: a snapshot" for i in (0, 1)]
    done(operate.stop, "--yes")
    assert [bool(host.ask(lambda run: run.state.stopping)) for host in both] == [True, True]


def test_a_coordinator_that_fails_is_named_and_the_others_do_as_they_are_told(both: list[Serving]) -> None:
    both[0].call(both[0].run.take(Kick(island="oslo", reason="gone")))
    ended = command_here(operate.kick, both[1].address, "oslo", "--yes")
    assert ended.code == ExitCode.REFUSED
    assert ended.out == "coordinator 1: the lease of island oslo has ended; no round waits for it\n"
    assert ended.err == "error: coordinator 0: island 'oslo' holds no lease in this run; those that do: none\n"
    both[0].call(both[0].run.take(Stop(reason="x")))


def test_waiting_for_a_stop_waits_for_each_coordinator(both: list[Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "LOOK_S", 0.01)
    ended = command_here(operate.stop, both[0].address, "--yes", "--wait", "--within", "0.05")
    assert ended.code == ExitCode.TIMEOUT
    assert [line for line in ended.out.splitlines() if "ends once" in line] == [
        f"coordinator {i}: the coordinator ends once these have left: oslo" for i in (0, 1)
    ]
    assert "coordinator 1: the coordinator still runs" in ended.err


def test_the_status_says_what_a_coordinator_keeps_and_where_the_others_are(both: list[Serving]) -> None:
    for index, keeps in ((0, "0, 2"), (1, "1")):
        ended = command_here(status, both[index].address)
        assert (
            f"coordinator {index} of 2 keeps fragments {keeps}; {1 - index} at {both[1 - index].address}" in ended.out
        )
        found = json.loads(command_here(status, both[index].address, "--json").out)
        assert found["coordinators"] == [host.address for host in both]
        assert (found["coordinator_index"], [f["fragment"] for f in found["fragments"]]) == (
            index,
            [int(f) for f in keeps.split(", ")],
        )


@pytest.mark.parametrize("args", [[], ["oslo", "--all"]])
def test_drain_needs_an_island_or_all(at: Rig, args: list[str]) -> None:
    ended = do(at, operate.drain, *args)
    assert ended.code == ExitCode.USAGE
    assert "name an island, or say --all" in ended.err


@pytest.mark.parametrize("command", [*COMMANDS, status], ids=lambda command: command.name)
def test_a_coordinator_that_is_not_there_is_unreachable(command: click.Command) -> None:
    address = f"127.0.0.1:{free_port()}"
    extra = {"drain": ["oslo"], "kick": ["oslo", "--yes"], "stop": ["--yes"]}.get(str(command.name), [])
    ended = command_here(command, address, *extra, "--timeout", "0")
    assert ended.code == ExitCode.UNREACHABLE
    assert f"error: no coordinator answers at {address}" in ended.err
    assert command_here(command, "nowhere", *extra).code == ExitCode.USAGE
