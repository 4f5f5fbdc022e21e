"""Metrics: one call that never blocks training, and the sinks behind it.

`Metrics.record` puts a flat record into a bounded queue per sink; each sink has its own thread, so neither a
full disk nor a lost network reaches the inner loop or the other sink. What does not get through is counted.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import netrc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from diloco.errors import EnvironmentFault

Scalar = str | int | float | bool | None
Record = Mapping[str, Scalar]

log = logging.getLogger(__name__)

WANDB_FINISH_S = 10.0
"""How long W&B may go on uploading at the end. What is left stays on disk for `wandb sync`."""


class Sink(Protocol):
    """Where records go. Only the sink's own thread calls it; whatever it raises costs one record."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends one JSON object per line to a file and flushes each line.

    A restart appends to the same file; a last line that a crash tore is ended first. Numbers that JSON lacks
    become the strings "NaN", "Infinity" and "-Infinity".
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - 1))
        if self._file.read() not in (b"", b"\n"):
            self._file.write(b"\n")

    def write(self, record: Record) -> None:
        """Writes one line. Raises `OSError` from the disk and `TypeError` for a value that is no scalar."""
        line = {key: _json(value) for key, value in record.items()}
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _json(value: Scalar) -> Scalar:
    """JSON has no NaN and no infinities: they travel as strings that `float` reads."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@dataclass
class Wandb:
    """Weights & Biases: one run per island, grouped by `run_id`; a restarted island continues its own.

    Values are logged as `<kind>/<name>` at the record's `step`; W&B ignores a step below one it has seen.
    Without an API key W&B records offline, under `dir`; WANDB_MODE overrides that.

    Constructing one is cheap and happens in the caller; it is its own factory for `Metrics`. W&B is imported
    and started in the sink's thread.

    Raises:
        EnvironmentFault: wandb is not installed.
    """

    project: str
    run_id: str
    island_id: str
    dir: str | Path
    config: Mapping[str, object]
    _run: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise EnvironmentFault(
                "metrics.wandb_project is set, but wandb is not installed: pip install 'diloco[wandb]'"
            )

    def __call__(self) -> Self:
        return self

    def write(self, record: Record) -> None:
        """Logs one record; the first one starts the run."""
        if self._run is None:
            self._run = self._start()
        kind, step = record.get("kind"), record.get("step")
        values = {f"{kind}/{k}": v for k, v in record.items() if k not in ("kind", "step", "time_s")}
        self._run.log(values, step=step)

    def close(self) -> None:
        """Uploads what is left, for `WANDB_FINISH_S` at most."""
        if self._run is not None:
            self._run.finish()

    def _start(self) -> Any:
        import wandb

        Path(self.dir).mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self.project,
            group=self.run_id,
            name=self.island_id,
            id=f"{self.run_id}-{self.island_id}",
            resume="allow",
            dir=self.dir,
            config=dict(self.config),
            mode=None if "WANDB_MODE" in os.environ or _has_api_key() else "offline",
            settings=wandb.Settings(silent=True, console="off", reinit="create_new", finish_timeout=WANDB_FINISH_S),
        )


def _has_api_key() -> bool:
    """Whether W&B would find a key without asking: in WANDB_API_KEY or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    try:
        path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Metrics:
    """Sends records to every sink. Any thread may record; no call waits for a sink or raises because of one.

    Args:
        sinks: one factory per sink; it is called in the sink's thread at the first record, and again at the
            next one if it failed. `functools.partial(JsonLines, path)` and a `Wandb` are factories.
        queue_records: records that may wait for one sink; more are dropped and counted.
        clock: wall clock, seconds since the epoch.
    """

    def __init__(
        self,
        sinks: Sequence[Callable[[], Sink]],
        queue_records: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._lanes = [_Lane(sink, queue_records) for sink in sinks]

    def record(self, kind: str, **values: Scalar) -> None:
        """Queues `values` with `kind` and the time (`time_s`, seconds since the epoch) for every sink."""
        record = {"kind": kind, "time_s": self._clock(), **values}
        for lane in self._lanes:
            lane.offer(record)

    @property
    def dropped(self) -> dict[str, int]:
        """Records dropped because a queue was full, by the class name of the sink."""
        dropped: Counter[str] = Counter()
        for lane in self._lanes:
            dropped[lane.name] += lane.dropped
        return dict(dropped)

    def close(self, timeout_s: float = 2.0) -> None:
        """Drains the queues and closes the sinks, within `timeout_s` seconds for all of them together.

        A sink that is not done by then is left behind on its daemon thread. The log says how many records
        were lost: dropped, failed or still waiting.
        """
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.finish()
        for lane in self._lanes:
            lane.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lane:
    """One sink, the records that wait for it, and the thread that takes them there."""

    def __init__(self, factory: Callable[[], Sink], limit: int) -> None:
        named = factory.func if isinstance(factory, partial) else factory
        self.name = getattr(named, "__name__", type(named).__name__)
        self.dropped = 0
        self._factory = factory
        self._limit = limit
        self._offered = self._written = 0
        self._finished = False
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[Record | None] = SimpleQueue()
        self._last_reason = ""
        self._thread = threading.Thread(target=self._drain, name=f"metrics-{self.name}", daemon=True)
        self._thread.start()

    def offer(self, record: Record) -> None:
        """Takes a record, or counts it as dropped where too many wait or the lane is finished."""
        with self._lock:
            self._offered += 1
            if self._finished or self._waiting.qsize() >= self._limit:
                self.dropped += 1
            else:
                self._waiting.put(record)

    def finish(self) -> None:
        """Lets the thread end once it has written what waits."""
        with self._lock:
            self._finished = True
            self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, at most `timeout_s`, and logs what was lost."""
        self._thread.join(timeout_s)
        if lost := self._offered - self._written:
            log.warning("metrics: %s lost %d of %d records", self.name, lost, self._offered)

    def _drain(self) -> None:
        sink: Sink | None = None
        while (record := self._waiting.get()) is not None:
            with self._forgiving():
                sink = sink or self._factory()
                sink.write(record)
                self._written += 1
        if sink is not None:
            with self._forgiving():
                sink.close()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Keeps the lane going whatever the sink raises; the log speaks when the reason changes."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if reason != self._last_reason:
                log.warning("metrics: %s fails: %s", self.name, reason, exc_info=True)
            self._last_reason = reason
