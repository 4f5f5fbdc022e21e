"""The state folder: contributions and updates as files, facts in a ledger, outer state as snapshots.

lock                     held while a coordinator uses the folder
address                  where the coordinator listens, or last did
ledger.sqlite            the facts of the run, in order, behind the state that those before a snapshot came to
events.jsonl             every fact of the run since its beginning, for people to follow
inbox/                   parts of contributions of open rounds; *.partial and *.sums are uploads under way
updates/                 payloads of the last updates
anchors/                 anchors that are being fetched; nothing needs them after a start
spares/                  contributions and updates that nothing needs any more, to be written over by others
fragments/               outer state of one fragment at one version (safetensors)
manifest-NNNNNNNN.json   a snapshot: which fragment files, which layout, which run
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from coordinator.files import Files
from coordinator.ledger import Ledger, Row
from coordinator.updates import Update
from diloco.config import RunConfig
from diloco.errors import DilocoError, EnvironmentFault, RunMismatch

log = logging.getLogger("diloco.coordinator")
UPDATES_KEPT = 8


class Store:
    """A coordinator's state folder, locked for as long as the store is open.

    Args:
        root: the folder; made where there is none.
        files: how its files are changed and read.
        disk_bytes: most of `kept_bytes` while there are files to be written over; 0 for no such limit.

    Raises:
        EnvironmentFault: another coordinator uses the folder, or it cannot be written.
    """

    def __init__(self, root: Path, files: Files | None = None, disk_bytes: int = 0) -> None:
        self.root = root
        self.files = files or Files()
        self._fresh: set[Path] = set()
        """Updates that are not durable yet."""
        self._lock_fresh = threading.Lock()
        self._readers: Counter[Path] = Counter()
        try:
            for name in ("inbox", "updates", "anchors", "spares", "fragments"):
                (root / name).mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (root / "lock").open("w")
        except OSError as error:
            raise EnvironmentFault(f"cannot write the state folder {root}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise EnvironmentFault(
                f"the state folder {root} is in use by another coordinator: stop it or name another --state"
            ) from None
        stale = (
            "updates/*.partial",
            "fragments/*.partial",
            "anchors/*",
            "spares/*",
        )  # in the inbox they are uploads that go on
        for path in (path for pattern in stale for path in root.glob(pattern)):
            path.unlink()
        self.files.spare(root / "spares", disk_bytes)
        try:
            self.ledger = Ledger(root / "ledger.sqlite")
            self._last = self._shown = self.ledger.last()
            self.recount()
            self._show(mend=True)
        except DilocoError:
            self._lock.close()
            raise

    def close(self) -> None:
        """Gives the folder back."""
        self.ledger.close()
        self._lock.close()

    # -- facts ----------------------------------------------------------------------------------------------------

    def record(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Makes rows of the ledger durable, and shows them to people in `events.jsonl`.

        Raises:
            OSError: the disk is full or failed; none of the rows counts. Where they were written all the same and
                only the answer was lost, the next rows take their place.
        """
        at = time.time()
        self._last = self.files.transact(lambda: self.ledger.append(rows, at, self._last))
        self._show(mend=self._shown != self._last - len(rows), rows=rows, at=at)

    @property
    def shown(self) -> int:
        """Number of the last row of the ledger that is in `events.jsonl`."""
        return self._shown

    def _show(self, *, mend: bool, rows: Sequence[tuple[str, dict[str, Any]]] = (), at: float = 0.0) -> None:
        """Adds lines to `events.jsonl`; `mend` writes all that it lacks of the ledger, after its last whole line.

        It is for people and is not synced: a line that a power loss takes is written at the next start.
        """
        path, first = self.root / "events.jsonl", self._last - len(rows) + 1
        found = [Row(seq=seq, at=at, kind=kind, body=body) for seq, (kind, body) in enumerate(rows, first)]
        try:
            if mend:
                self._shown = self._whole_lines(path)
                found = list(self.ledger.read(self._shown))
            lines = [json.dumps({"seq": row.seq, "at": row.at, "kind": row.kind, **row.body}) + "\n" for row in found]
            if lines:
                self.files.append(path, "".join(lines).encode())
            self._shown = self._last
        except OSError as error:  # the rows are in the ledger; this is for people only
            self._shown = -1
            log.warning("events.jsonl cannot be written: %s", error)

    def _whole_lines(self, path: Path) -> int:
        """Cuts off a torn last line, or what the ledger does not have; returns the number of the last fact."""
        size = path.stat().st_size if path.exists() else 0
        start, last, window = size, 0, 2**16
        while start and not last:
            start, window = max(0, size - window), window * 16
            content = self.files.read(path, start)
            end = content.rfind(b"\n") + 1
            while end and not last:
                begin = content.rfind(b"\n", 0, end - 1) + 1
                number = _number(content[begin:end])
                if 0 < number <= self._last:
                    last = number
                else:
                    end = begin
        if last and end < len(content):
            self.files.truncate(path, start + end)
        elif size and not last:
            self.files.truncate(path, 0)
        return last

    # -- contributions and updates --------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes of contributions and updates that are kept, and of files to be written over."""
        return self.files.counted_bytes + self.files.spared_bytes

    def recount(self) -> None:
        """Counts the bytes of contributions and updates anew."""
        self.files.count(self.root / "inbox", self.root / "updates")

    def sweep(self, fragment: int, before: int, holds: Callable[[Path], bool]) -> None:
        """Removes files of rounds of a fragment before round `before` that no contribution holds.

        They are parts that were refused because the disk failed: it may have kept their row in the ledger all the same.
        """
        for path in self.root.glob(f"inbox/f{fragment}-r*"):
            if int(path.name.split("-")[1][1:]) < before and not holds(path):
                with contextlib.suppress(OSError):  # it goes another time
                    self.files.unlink(path)

    def inbox_path(self, name: str) -> Path:
        """Where a part of a contribution is kept until its round has ended."""
        return self.root / "inbox" / name

    def update_path(self, fragment: int, round_: int) -> Path:
        """Where the update that ended a round is kept."""
        return self.root / "updates" / f"f{fragment:04d}-r{round_:08d}.bin"

    def keep_update(self, fragment: int, round_: int, update: Update) -> Path:
        """Keeps an update that is whole, and forgets the one that is `UPDATES_KEPT` rounds older.

        It is not durable before `sync_updates`: until a snapshot holds its round, a start folds it again.
        """
        if update.partial.exists():  # it has its name already where what follows has failed
            self.files.rename(update.partial, update.path)
        self.files.take_note(update.path)
        with self._lock_fresh:
            self._fresh.add(update.path)
        old = self.update_path(fragment, round_ - UPDATES_KEPT)
        (self.files.unlink if self._readers[old] else self.files.retire)(old)
        return update.path

    @contextlib.contextmanager
    def reading(self, fragment: int, round_: int) -> Iterator[None]:
        """Nothing is written over the update of a round while the block lasts."""
        path = self.update_path(fragment, round_)
        self._readers[path] += 1
        try:
            yield
        finally:
            self._readers[path] -= 1
            self._readers += Counter()  # forgets those at zero

    def sync_updates(self) -> None:
        """Makes the updates durable that are kept; before the manifest of a snapshot that holds their rounds."""
        with self._lock_fresh:
            fresh = set(self._fresh)
        for path in fresh:
            with contextlib.suppress(FileNotFoundError):  # older than those that are kept
                self.files.sync(path)
        if fresh:
            self.files.sync(self.root / "updates")
        with self._lock_fresh:
            self._fresh -= fresh

    def write_anchor(self, fragment: int, version: int, anchor: Tensor) -> Tensor:
        """Puts an anchor (fp32) aside for as long as somebody fetches it; returns it as a memory map of its file."""
        path = self._anchor_path(fragment, version)
        partial = path.with_suffix(".partial")
        self.files.dump(partial, anchor.numpy())
        self.files.rename(partial, path)
        return self.files.map(path).view(torch.float32)

    def drop_anchor(self, fragment: int, version: int) -> None:
        """Removes the file of an anchor; whoever has it mapped goes on. The next start removes one that stays."""
        with contextlib.suppress(OSError):
            self.files.unlink(self._anchor_path(fragment, version))

    def _anchor_path(self, fragment: int, version: int) -> Path:
        return self.root / "anchors" / f"f{fragment:04d}-v{version:08d}.bin"


def _number(line: bytes) -> int:
    """The number of the fact in a line; 0 where it is none."""
    try:
        return int(json.loads(line)["seq"])
    except (ValueError, KeyError, TypeError):
        return 0


def check_same_run(old: RunConfig, config: RunConfig, root: Path) -> None:
    """Raises `RunMismatch` where a state folder belongs to another run or other settings than `config`."""
    if old.run.id != config.run.id:
        raise RunMismatch(
            f"{root} holds run '{old.run.id}' (settings {old.digest[:12]}), not '{config.run.id}' "
            f"(settings {config.digest[:12]}): name another --state"
        )
    was, now = (f"{run.coordinator_index} of {run.coordinator_count}" for run in (old.run, config.run))
    if was != now:
        raise RunMismatch(
            f"{root} is of coordinator {was}, and this is coordinator {now}: start it with the --index and as many "
            "run.coordinators as before, or name another --state"
        )
    if old.digest != config.digest:
        raise RunMismatch(
            f"{root} was written with settings {old.digest[:12]}, and these are {config.digest[:12]}: "
            "a run keeps its settings; restore the run file or name another --state"
        )
