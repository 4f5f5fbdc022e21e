"""A run of scripted islands and a coordinator as processes, which a test disturbs, and what must hold of it after."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from coordinator.snapshots import load_snapshot
from diloco.digest import show
from diloco.failpoints import VARIABLE
from diloco.schedule import Schedule
from tests.chaos.nursery import CASE_S, Child, Nursery
from tests.processes import diloco_here, free_port

ROUNDS = 6
FRAGMENTS = 2
STEPS = 4 * ROUNDS
LEASE_S = 2.0
RUN = f"""
[run]
id = "chaos"
steps = {STEPS}
[sync]
strategy = "strided"
fragments = {FRAGMENTS}
every_steps = 4
overlap_steps = 1
max_steps_without_coordinator = 0
[wire]
up = "bf16"
down = "bf16"
chunk_bytes = 4096
[snapshot]
keep = 3
[model]
dim = 16
layers = 2
ffn_dim = 32
sequence_length = 16
"""
SITE = """
[island]
max_restarts = 2
[mesh]
ranks = 2
[data]
text = ["{folder}/text.txt"]
[metrics]
dir = "{folder}/metrics"
[checkpoint]
url = "{folder}/checkpoints"
every_steps = 3
"""
"""The settings of an island with a daemon, whose model is the run's."""
PATIENT = (
    "rounds.lease_s=60",
    "rounds.grace_s=60",
    "rounds.deadline_s=60",
    "rounds.start_islands=2",
    "rounds.quorum=2",
)
"""No lease ends and no round is given up: what is folded follows from the islands' data alone."""
BRISK = (f"rounds.lease_s={LEASE_S}", "rounds.grace_s=20", "rounds.deadline_s=25", "rounds.start_islands=2")
"""Leases end soon, and rounds go on with whoever is left."""
ENDS = ("committed", "skipped", "aborted")
WHICH = "CHAOS_RANK"
"""Names the one rank of a daemon that a failpoint is for."""


class Trial:
    """Processes of one run, until `stack` is closed.

    Args:
        nursery: starts them.
        folder: gets settings, state, results and logs.
        stack: ends what is still running.
        overrides: settings of the run, KEY=VALUE.
    """

    def __init__(self, nursery: Nursery, folder: Path, stack: ExitStack, *overrides: str) -> None:
        self.folder, self.state = folder, folder / "state"
        self._nursery, self._stack, self._overrides = nursery, stack, overrides
        folder.mkdir(exist_ok=True)
        (folder / "run.toml").write_text(RUN)
        (folder / "island.toml").write_text(SITE.format(folder=folder))
        (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 200)
        self.address = f"127.0.0.1:{free_port()}"
        self.alive: dict[str, Child] = {}
        self.killed: list[tuple[str, float]] = []
        """Who died by SIGKILL, and when (wall clock)."""
        self.held: set[str] = set()
        """Who is not started again before the test says so."""
        self.lives: dict[str, list[str]] = {}
        """Failpoints of those who are started again, one for each further life; none after these."""
        self._starts: dict[str, tuple[Any, ...]] = {}

    # -- processes --------------------------------------------------------------------------------------------------

    def coordinator(self, failpoint: str = "", clock_s: float = 0.0) -> Child:
        """Starts the coordinator."""
        command = ["coordinator", f"{self.folder}/run.toml", "--state", str(self.state), "--listen", self.address]
        sets = [part for setting in self._overrides for part in ("--set", setting)]
        return self._start("coordinator", "diloco", [*command, *sets, "--threads", "1"], failpoint, _clock(clock_s))

    def island(
        self, name: str, failpoint: str = "", *, address: str = "", clock_s: float = 0.0, **options: Any
    ) -> Child:
        """Starts an island."""
        args = [name, address or self.address, str(self.folder), json.dumps(options)]
        return self._start(name, "island", args, failpoint, _clock(clock_s))

    def daemon(self, name: str, failpoint: str = "", rank: int = 0) -> Child:
        """Starts an island with a daemon and two ranks. The failpoint is for the first life of one of these."""
        args = ["island", f"{self.folder}/island.toml", "--coordinator", self.address, "--set", f"island.id={name}"]
        return self._start(name, "daemon", args, failpoint, {WHICH: str(rank), "TMPDIR": str(self.folder)})

    def _start(self, name: str, kind: str, args: list[str], failpoint: str, env: dict[str, str]) -> Child:
        if name == "coordinator":
            (self.state / "address").unlink(missing_ok=True)
        child = self._nursery.start(kind, args, self.folder / f"{name}.log", {VARIABLE: failpoint, **env})
        self._stack.callback(child.end)
        self.alive[name], self._starts[name] = child, (kind, args, env)
        return child

    def again(self, name: str) -> Child:
        """Starts a process again as it was, with the next of its failpoints."""
        self.held.discard(name)
        kind, args, env = self._starts[name]
        later = self.lives.get(name)
        return self._start(name, kind, args, later.pop(0) if later else "", env)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Waits until something holds; whoever is killed meanwhile is started again, unless it is held."""
        deadline = time.monotonic() + CASE_S
        while not condition():
            self._watch()
            assert time.monotonic() < deadline, f"after {CASE_S:g} s still not: {what}\n{self.logs()}"
            time.sleep(0.02)

    def _watch(self) -> None:
        for name, child in list(self.alive.items()):
            if child.code is None and child.poll() is not None:
                assert child.code in (0, -signal.SIGKILL), f"{name} ended with {child.code}\n{self.logs()}"
                if child.code:
                    self.killed.append((name, time.time()))
                    if name not in self.held:
                        self.again(name)

    def begin(self, *, a: str = "", b: str = "", **options: Any) -> None:
        """Starts island a, and island b once a has a lease: so the first parameters are a's. With failpoints."""
        self.island("a", a, **options)
        self.until(lambda: self.rows("admitted"), "island a is admitted")
        self.island("b", b, **options)

    def finish(self) -> None:
        """Waits until both islands have ended well, then stops the coordinator, however often it is killed then."""
        self.until(lambda: all(self.alive[name].code == 0 for name in ("a", "b")), "both islands end")
        while self.alive["coordinator"].code is None:
            self.until((self.state / "address").exists, "the coordinator listens")
            self.alive["coordinator"].signal(signal.SIGTERM)
            if self.alive["coordinator"].wait() == -signal.SIGKILL:
                self.killed.append(("coordinator", time.time()))
                self.again("coordinator")
        assert self.alive["coordinator"].code == 0, self.logs()

    def logs(self) -> str:
        """What all processes have said."""
        logs = sorted(self.folder.glob("*.log"))
        return "".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in logs)

    # -- what has become of it ----------------------------------------------------------------------------------------

    def rows(self, *kinds: str) -> list[dict[str, Any]]:
        """The facts of some kinds so far, in order; all facts without one."""
        path = self.state / "events.jsonl"
        text = path.read_bytes() if path.exists() else b""
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
        return [row for row in rows if not kinds or row["kind"] in kinds]

    def result(self, name: str) -> dict[str, Any]:
        """How an island says that it went."""
        path = self.folder / "metrics" / f"{name}.jsonl"
        if not path.exists():
            found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
            return found
        end = [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == "end"][-1]
        return {"digests": end["digests"].split(), "versions": [int(version) for version in end["versions"].split()]}

    def digests(self) -> list[str]:
        """The digest of each fragment at the coordinator; both islands have the same."""
        snapshot = load_snapshot(self.state)
        assert snapshot
        digests = [show(outer.digest) for outer in snapshot.outers]
        versions = [outer.version for outer in snapshot.outers]
        for name in ("a", "b"):
            result = self.result(name)
            assert (result["digests"], result["versions"]) == (digests, versions), f"island {name}\n{self.logs()}"
        return digests

    def check(self) -> None:
        """Whatever happened, this holds of a run that has ended."""
        self.digests()
        snapshot = load_snapshot(self.state)
        assert snapshot
        schedule = Schedule.of(snapshot.config)
        for fragment in range(FRAGMENTS):
            ended = [row["round"] for row in self.rows(*ENDS) if row["fragment"] == fragment]
            folded = [row["version"] for row in self.rows("folded") if row["fragment"] == fragment]
            assert ended == list(range(schedule.rounds(fragment)))
            assert folded == list(range(1, len(folded) + 1))
        self._check_folded_once()
        self._check_inbox()
        verified = diloco_here("ledger", "verify", str(self.state))
        assert verified.code == 0, verified

    def _check_folded_once(self) -> None:
        """Every contribution that was accepted is folded once, and nothing else is."""
        given = [(r["fragment"], r["round"], r["entry"]["island"]) for r in self.rows("accepted")]
        given += [(r["fragment"], r["into"], f"{r['entry']['island']}@{r['round']}") for r in self.rows("carried")]
        folded = [(r["fragment"], r["round"], name) for r in self.rows("committed") for name in r["shares"]]
        skipped = {(r["fragment"], r["round"]) for r in self.rows("skipped")}
        assert Counter(folded) == Counter(key for key in given if key[:2] not in skipped)
        assert max(Counter(given).values()) == 1

    def _check_inbox(self) -> None:
        """The inbox holds the contributions that some snapshot kept still lacks, and nothing else."""
        oldest = load_snapshot(self.state, oldest=True)
        assert oldest
        names = [path.name for path in (self.state / "inbox").iterdir()]
        assert not [name for name in names if name.endswith((".partial", ".sums"))]
        into = {(r["fragment"], r["round"], r["entry"]["island"]): r["into"] for r in self.rows("carried")}
        parts = [(int(f[1:]), int(r[1:]), island, rank) for f, r, island, _, rank, *_ in (n.split("-") for n in names)]
        folded_in = [(part[0], into.get(part[:3], part[1])) for part in parts]
        window = oldest.config.rounds.late_window
        assert all(round_ >= oldest.rounds[fragment] - window for fragment, round_ in folded_in), names
        assert max(Counter(parts).values(), default=1) == 1, names


def _clock(by_s: float) -> dict[str, str]:
    return {"CLOCK": str(by_s)} if by_s else {}
