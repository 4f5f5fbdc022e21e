"""The processes of a benchmark: a coordinator, and workers that do what they are told, a line each."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import EnvironmentFault
from diloco.tls import TLS

START_S = 60.0
ANSWER_S = 600.0
"""Longest that a worker may be at one thing."""
CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """A coordinator process."""

    address: str
    pid: int
    state: Path
    """Its state folder."""


@contextmanager
def coordinator(
    folder: Path,
    run: str,
    *,
    listen: str = "127.0.0.1:0",
    threads: int = 0,
    tls: TLS | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Host]:
    """A coordinator of the run with these settings (TOML), its state in `folder`, until the end of the block.

    `prefix` is what its command begins with, for example to run it in a network namespace.

    Raises:
        EnvironmentFault: it did not start; with the end of its log.
    """
    (folder / "run.toml").write_text(run)
    state, log = folder / "state", folder / "coordinator.log"
    options = ["--state", str(state), "--listen", listen, "--threads", str(threads), "--grace", "0"]
    secure = ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca] if tls else []
    command = [*prefix, sys.executable, "-m", "diloco", "coordinator", str(folder / "run.toml"), *options, *secure]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "DILOCO_PARENT_PID": str(os.getpid())},
        )
    try:
        deadline = time.monotonic() + START_S
        while not (state / "address").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise EnvironmentFault(f"the coordinator did not start:\n{_tail(log)}")
            time.sleep(0.05)
        yield Host(address=(state / "address").read_text(), pid=process.pid, state=state)
    finally:
        process.kill()  # nobody needs its last snapshot
        process.wait()


class Worker:
    """A process that answers each line of JSON on its stdin with one on its stdout, and ends when there are no more.

    Args:
        module: what it runs.
        arguments: of its command line, as JSON.
        log: file for what it writes on stderr.
        prefix: what its command begins with, for example to run it in a network namespace.
    """

    def __init__(self, module: str, arguments: dict[str, Any], log: Path, prefix: Sequence[str] = ()) -> None:
        self._log = log
        command = [*prefix, sys.executable, "-m", module, json.dumps(arguments)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process, where nothing comes before the command."""
        return self._process.pid

    def ask(self, *words: object) -> Any:
        """Has it do something; its answer."""
        self.tell(*words)
        return self.answer()

    def tell(self, *words: object) -> None:
        """Has it begin something."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error

    def answer(self) -> Any:
        """What it says when it is done. Raises `EnvironmentFault` where it has ended, or is not done in time."""
        stdout = self._process.stdout
        assert stdout
        ready, _, _ = select.select([stdout], [], [], ANSWER_S)
        line = stdout.readline() if ready else ""
        if not line:
            raise self._gone()
        return json.loads(line)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _gone(self) -> EnvironmentFault:
        return EnvironmentFault(
            f"a process of the benchmark has failed or hangs; the end of its log:\n{_tail(self._log)}"
        )


def serve(actor: object) -> None:
    """The worker's side: says that it is ready, then has `actor` do what it is told, until there is no more."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    for answer in _answers(actor):
        print(json.dumps(answer), file=lines, flush=True)


def _answers(actor: object) -> Iterator[Any]:
    yield "ready"
    for line in sys.stdin:
        what, *words = json.loads(line)
        yield getattr(actor, what)(*words)


def together(workers: Sequence[Worker], *words: object) -> list[Any]:
    """Has all workers do the same at once; their answers."""
    for worker in workers:
        worker.tell(*words)
    return [worker.answer() for worker in workers]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])
