"""A real run under a seeded adversary that kills, stops and resumes its processes; what must stay flat is measured.

    python -m wan.soak --minutes 5 --seed 0

A coordinator and three islands train a tiny model, as processes on this machine. At random times one of them is killed
with SIGKILL and started again, or held with SIGSTOP for some seconds. Every few seconds the descriptors, threads and
memory of every process are sampled. At the end the run is stopped, its ledger is verified, the islands' digests are
compared with the coordinator's, and `soak_judge` says whether anything grew.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import click
import psutil
from rich.console import Console
from rich.table import Table

from coordinator.ledger import Ledger
from coordinator.recovery import verify
from diloco.errors import DilocoError, ExitCode
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link
from wan.processes import Processes
from wan.soak_judge import Attack, Growth, Life, Sample, attacks, judged, longest_gap, verdict

ISLANDS = ("island-1", "island-2", "island-3")
COORDINATOR = "coordinator"
PER_MINUTE = 6.0
"""Attacks, on average."""
LONGEST_HOLD_S = 8.0
"""Longer than a lease, so that some are lost."""
SAMPLE_S = 2.0
LOOK_S = 0.1
RESTART_S = 0.5
"""Rest of the supervisor before it starts again what has ended."""
QUIET_S = 30.0
"""How often a line is printed where there is no terminal."""
PATIENCE_S = 120.0
"""How long processes may take to start, to come together again, and to end, on a busy machine."""
RUN = """
[run]
id = "soak"
steps = 1000000000
[model]
dim = 16
layers = 2
heads = 2
kv_heads = 1
ffn_dim = 32
sequence_length = 16
[sync]
strategy = "strided"
fragments = 2
every_steps = 40
overlap_steps = 2
[rounds]
start_islands = 3
lease_s = 5.0
grace_s = 1.0
progress_s = 2.0
deadline_s = 15.0
[snapshot]
every_rounds = 10
"""
ISLAND = """
[island]
id = "{name}"
max_restarts = 1000
[mesh]
threads_per_rank = 1
[data]
text = ["{folder}/text.txt"]
shard = {shard}
shards = {shards}
batch_sequences = 4
[metrics]
dir = "{folder}/metrics"
every_steps = 1000
"""


class Part:
    """The coordinator or an island: its process now, and everything that is known of those before."""

    def __init__(self, name: str, command: list[str], processes: Processes) -> None:
        self.name, self._command, self._processes = name, command, processes
        self.lives: list[Life] = []
        self.starts = 0
        self.held_until = 0.0
        """When it is let go on; 0 while it is not held."""
        self._killed = False
        self._ended_at = 0.0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self._killed, self._ended_at = False, 0.0
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return self._processes.start(f"{self.name}.{self.starts}", self._command, environment)

    @property
    def code(self) -> int | None:
        """Exit code of its process; none while it runs."""
        return self._process.poll()

    def family(self) -> list[psutil.Process]:
        """Its process, and those of its ranks."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *(p for p in root.children(recursive=True) if "island.rank" in p.cmdline())]
        except psutil.Error:
            return []

    def suffer(self, attack: Attack, now: float) -> bool:
        """Does to it what was planned, and returns whether: one that is held or starts again is left alone."""
        family = self.family()
        if self.held_until or self.code is not None or not family:
            return False
        if attack.kind == "hold":
            self.held_until = now + attack.seconds
            _send(family, signal.SIGSTOP)
            return True
        self._killed = attack.kind == "kill" or len(family) == 1
        _send(family if self._killed else family[1:], signal.SIGKILL)
        return True

    def release(self) -> None:
        """Lets it go on if it is held."""
        if self.held_until:
            self.held_until = 0.0
            _send(self.family(), signal.SIGCONT)

    def supervise(self, now: float) -> str:
        """Starts it again some time after it has ended; returns what is wrong where it was not killed."""
        code = self.code
        if code is None:
            return ""
        if not self._ended_at:
            self._ended_at = now
            return "" if self._killed else f"{self.name}.{self.starts} ended by itself with exit code {code}"
        if now - self._ended_at >= RESTART_S:
            self._process = self._start()
        return ""

    def sample(self, now: float) -> None:
        """Takes a sample of each of its processes."""
        for process in self.family():
            with suppress(psutil.Error), process.oneshot():
                sample = Sample(
                    at=now,
                    descriptors=process.num_fds(),
                    threads=process.num_threads(),
                    rss_bytes=process.memory_info().rss,
                )
                role = "" if process.pid == self._process.pid else " rank"
                self._life(process.pid, self.name + role).samples.append(sample)

    def _life(self, pid: int, name: str) -> Life:
        known = next((life for life in self.lives if life.pid == pid), None)
        if known is None:
            known = Life(name=name, pid=pid)
            self.lives.append(known)
        return known


def _send(family: list[psutil.Process], which: signal.Signals) -> None:
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(which)


@dataclass(kw_only=True)
class Results:
    """What a soak has shown."""

    minutes: float
    seed: int
    kills: int = 0
    holds: int = 0
    rounds: int = 0
    longest_gap_s: float = 0.0
    participation: float = 0.0
    """Mean over the samples: islands folded into the last commits, over those that were active."""
    state_bytes: int = 0
    """Largest state folder, without `events.jsonl`."""
    events_bytes: int = 0
    """Size of `events.jsonl` at the end."""
    verified: int = 0
    """Rounds that were folded again from the ledger at the end, to the same digests."""
    growths: list[Growth] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Soak:
    """One soak, within the context of `processes`."""

    def __init__(self, folder: Path, processes: Processes, results: Results, console: Console) -> None:
        self.folder, self.results, self._console = folder, results, console
        self._begin = self._told = time.monotonic()
        self._participation: list[float] = []
        self._sampled = 0.0
        self._ended_at = 0.0
        port = _free_port()
        address = f"127.0.0.1:{port}"
        diloco = [sys.executable, "-m", "diloco"]
        command = [*diloco, "coordinator", f"{folder}/run.toml", "--state", f"{folder}/state", "--listen", address]
        commands = {COORDINATOR: [*command, "--threads", "1"]}
        _write_settings(folder)
        for name in ISLANDS:
            commands[name] = [*diloco, "island", f"{folder}/{name}.toml", "--coordinator", address]
        self.parts = {name: Part(name, command, processes) for name, command in commands.items()}
        self.link = Link(address, patience_s=1.0, say=lambda _: None)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def run(self, status: Callable[[str], None]) -> None:
        """Lives through the planned time, then ends the run and looks at what it has left."""
        self._until(lambda: self._rounds() > 0, "the first round is committed", status)
        self._begin, self._sampled = time.monotonic(), 0.0
        for part in self.parts.values():
            part.lives.clear()
        seconds = self.results.minutes * 60
        planned = attacks(self.results.seed, seconds, [*self.parts], PER_MINUTE, LONGEST_HOLD_S)
        while self.now < seconds:
            while planned and planned[0].at <= self.now:
                attack = planned.pop(0)
                done, held = self.parts[attack.victim].suffer(attack, self.now), attack.kind == "hold"
                self.results.kills += done and not held
                self.results.holds += done and held
            self._turn(status)
        self._ended_at = time.time()
        for part in self.parts.values():
            part.release()
        self._until(self._together, "all islands are active again", status)
        self._end_run(status)
        self._look()

    def _turn(self, status: Callable[[str], None]) -> None:
        """Looks after everything once."""
        for part in self.parts.values():
            if part.held_until and self.now >= part.held_until:
                part.release()
            if fault := part.supervise(self.now):
                self.results.faults.append(fault)
        if self.now - self._sampled >= SAMPLE_S:
            self._sampled = self.now
            for part in self.parts.values():
                part.sample(self.now)
            self.results.state_bytes = max(self.results.state_bytes, _size(self.folder / "state"))
            self._rounds()
            self._tell(status)
        time.sleep(LOOK_S)

    def _tell(self, status: Callable[[str], None]) -> None:
        results = self.results
        left = max(0.0, results.minutes * 60 - self.now)
        line = f"{left:.0f} s left, {results.kills} kills, {results.holds} holds, {results.rounds} rounds"
        status(line)
        if not self._console.is_terminal and time.monotonic() - self._told >= QUIET_S:
            self._told = time.monotonic()
            self._console.print(line)

    def _status(self) -> pb.StatusReply | None:
        """How the run stands; none while nobody answers."""
        coordinator = self.parts[COORDINATOR]
        if coordinator.held_until or coordinator.code is not None:
            return None
        try:
            return self.link.status()
        except DilocoError:
            return None

    def _rounds(self) -> int:
        if reply := self._status():
            self.results.rounds = reply.rounds_committed
            if reply.participation == reply.participation:
                self._participation.append(reply.participation)
        return self.results.rounds

    def _together(self) -> bool:
        reply = self._status()
        return reply is not None and sum(island.state == "ACTIVE" for island in reply.islands) == len(ISLANDS)

    def _until(self, condition: Callable[[], bool], what: str, status: Callable[[str], None]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise DilocoError(f"after {PATIENCE_S:g} s still not: {what}; the logs are in {self.folder}/logs")
            self._turn(status)

    # -- the end --------------------------------------------------------------------------------------------------

    def _end_run(self, status: Callable[[str], None]) -> None:
        """Tells the run to stop, and waits until everybody has left by themselves."""
        status("the run is being stopped")
        self.link.command(pb.CommandRequest(verb="stop", reason="the soak is over"))
        deadline = time.monotonic() + PATIENCE_S
        while any(part.code is None for part in self.parts.values()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        for part in self.parts.values():
            if part.code != 0:
                how = "did not end" if part.code is None else f"ended with exit code {part.code}"
                self.results.faults.append(f"{part.name} {how} when the run was stopped")

    def _look(self) -> None:
        """Looks at what the run has left, and judges it."""
        results, state = self.results, self.folder / "state"
        events = [json.loads(line) for line in (state / "events.jsonl").read_text().splitlines()]
        commits = [event["at"] for event in events if event["kind"] == "committed" and event["at"] <= self._ended_at]
        results.rounds = sum(event["kind"] == "committed" for event in events)
        results.longest_gap_s = longest_gap(commits, self._ended_at)
        results.events_bytes = (state / "events.jsonl").stat().st_size
        results.participation = fmean(self._participation) if self._participation else 0.0
        ledger = Ledger(state / "ledger.sqlite")
        try:
            results.verified = sum(1 for _ in verify(ledger, state))
        except DilocoError as error:
            results.faults.append(f"the ledger does not verify: {error.message}")
        finally:
            ledger.close()
        folded = {(e["fragment"], e["version"]): e["digest"] for e in events if e["kind"] == "folded"}
        results.faults += compare(self.folder / "metrics", folded)
        results.growths = judged([life for part in self.parts.values() for life in part.lives])
        results.faults += verdict(results.growths, results.longest_gap_s, results.state_bytes)


def compare(metrics: Path, folded: dict[tuple[int, int], str]) -> Iterator[str]:
    """Says where an island's anchors, as it left, are not those that the coordinator folded at their versions."""
    for name in ISLANDS:
        path = metrics / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        ends = [row for row in rows if row["kind"] == "end"]
        if not ends:
            yield f"{name} has left no digests"
            continue
        versions, digests = ends[-1]["versions"].split(), ends[-1]["digests"].split()
        for fragment, (version, digest) in enumerate(zip(versions, digests, strict=True)):
            known = folded.get((fragment, int(version)))
            if known != digest:
                yield f"{name}: fragment {fragment} version {version} has {digest}; the coordinator folded {known}"


def _write_settings(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN)
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=5)) for _ in range(200)]
    (folder / "text.txt").write_text(" ".join(chance.choices(words, k=20_000)))
    for shard, name in enumerate(ISLANDS):
        text = ISLAND.format(name=name, folder=folder, shard=shard, shards=len(ISLANDS))
        (folder / f"{name}.toml").write_text(text)


def _size(state: Path) -> int:
    """Bytes of a state folder without `events.jsonl`. Files come and go meanwhile."""
    total = 0
    for path in state.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.name != "events.jsonl" and path.is_file() else 0
    return total


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def soak(minutes: float, seed: int, folder: Path, console: Console) -> Results:
    """Runs one soak in an empty folder and returns what it has shown."""
    results = Results(minutes=minutes, seed=seed)
    with Processes(folder / "logs") as processes, console.status("starting") as shown:
        run = Soak(folder, processes, results, console)
        try:
            run.run(shown.update)
        except DilocoError as error:
            results.faults.append(error.message)
        finally:
            run.link.close()
    return results


def table(results: Results) -> Table:
    """The results for people."""
    shown = Table("process", "pid", "lived", "descriptors", "threads", "resident", box=None)
    for g in results.growths:
        shown.add_row(
            g.name,
            str(g.pid),
            f"{g.seconds:.0f} s",
            f"{g.descriptors:+.1f}",
            f"{g.threads:+.1f}",
            f"{g.rss_bytes / 2**20:+.1f} MiB",
        )
    shown.title = "Growth over the second half of each life of a minute or more"
    return shown


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of what befalls whom, and when.")
@click.option("--json", "json_path", default="soak.json", show_default=True, help="Where the results go.")
def main(minutes: float, seed: int, json_path: str) -> None:
    """Soaks a real run; exit code 1 where something is wrong."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder = Path(tempfile.mkdtemp(prefix="diloco-soak-"))
    try:
        results = soak(minutes, seed, folder, console)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        console.print("soak: interrupted")
        raise SystemExit(ExitCode.INTERRUPTED) from None
    Path(json_path).write_text(json.dumps(asdict(results), indent=1) + "\n")
    console.print(table(results))
    console.print(
        f"longest gap between commits {results.longest_gap_s:.1f} s, participation {results.participation:.2f}, "
        f"state {results.state_bytes / 2**20:.1f} MiB, events.jsonl {results.events_bytes / 2**20:.1f} MiB, "
        f"{results.verified} rounds verified"
    )
    what = f"soak: {minutes:g} min, {results.kills} kills, {results.rounds} rounds"
    if results.faults:
        console.print(f"{what}, failed; the run is in {folder}", markup=False, soft_wrap=True)
        for fault in results.faults:
            console.print(f"  {fault}", markup=False, soft_wrap=True)
        raise SystemExit(1)
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"{what}, ok")


if __name__ == "__main__":
    main()
