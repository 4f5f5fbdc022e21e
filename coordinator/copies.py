"""Copies of snapshots at any fsspec URL, for a machine that is lost with its disk.

Under <url>/<run id>/ lie the same files as in a state folder: fragment files first, the manifest last. Where a run has
several coordinators, each has a folder of its own: <url>/<run id>~<index>/.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from coordinator.facts import Phase
from coordinator.recovery import Recovered, layout_row, run_row, state_row
from coordinator.snapshots import Snapshot, load, number_of
from coordinator.state import Round, begin
from coordinator.store import Store
from diloco.config import RunConfig
from diloco.errors import ConfigError, DigestMismatch, EnvironmentFault, InputError
from diloco.schedule import Schedule

log = logging.getLogger("diloco.coordinator")
RETRY_S = (1.0, 300.0)
"""A store that fails is left alone for this long, twice as long each time, up to the second."""
CLOSE_S = 30.0
"""How long a coordinator that stops waits for its last copy."""
EPOCH_STEP = 1_000_000


class Copies:
    """Uploads snapshots in a thread of its own, the newest that is complete first; a round never waits for it.

    Args:
        root: the state folder.
        config: the run's settings, with `snapshot.url`.
        retry_s: how long a store that fails is left alone, at first and at most.

    Raises:
        ConfigError: no kind of store has such a URL.
        EnvironmentFault: the package for it is not installed.
    """

    def __init__(self, root: Path, config: RunConfig, retry_s: tuple[float, float] = RETRY_S) -> None:
        self._root, self._keep, self._retry_s = root, config.snapshot.url_keep, retry_s
        self.url = f"{config.snapshot.url.rstrip('/')}/{folder(config)}"
        _check(config.snapshot.url)
        self._news = threading.Condition()
        self._wanted: Path | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def offer(self, manifest: Path) -> None:
        """Names a complete snapshot to copy, in place of an older one that waits."""
        with self._news:
            self._wanted = manifest
            self._news.notify()

    def close(self) -> None:
        """Ends the thread, after the copy that is wanted where that takes no longer than `CLOSE_S`."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() or self._wanted:
            log.error("the last snapshot is not copied to %s", self.url)

    def _work(self) -> None:
        trouble, pause = "", self._retry_s[0]
        while True:
            with self._news:
                self._news.wait_for(lambda: self._wanted or self._closing)
                manifest = self._wanted
            if manifest is None:
                return
            try:
                upload(manifest, self.url, self._keep)
            except Exception as error:  # noqa: BLE001 - what a store raises is not known here, and no round waits for it
                if manifest.exists():
                    if str(error) != trouble:
                        log.error("%s is not copied to %s yet: %s", manifest.name, self.url, error or repr(error))
                    trouble = str(error)
                    with self._news:
                        if self._closing:
                            return
                        self._news.wait_for(lambda: self._wanted is not manifest or self._closing, pause)  # noqa: B023
                    pause = min(2 * pause, self._retry_s[1])
                    continue
            else:
                trouble, pause = "", self._retry_s[0]
            with self._news:  # copied, or gone because newer ones are complete
                if self._wanted is manifest:
                    self._wanted = None


def folder(config: RunConfig) -> str:
    """The folder of a coordinator's copies."""
    run = config.run
    return f"{run.id}~{run.coordinator_index}" if run.coordinator_count > 1 else run.id


def _check(url: str) -> None:
    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        fsspec.get_filesystem_class(protocol.partition("::")[0])
    except ValueError as error:
        raise ConfigError(f"snapshot.url {url!r}: {error}") from error
    except ImportError as error:
        raise EnvironmentFault(f"snapshot.url {url!r} needs a package that is not installed: {error}") from error


def upload(manifest: Path, url: str, keep: int) -> None:
    """Copies a complete snapshot: files that are not there yet, then the manifest; then removes old ones there.

    Raises:
        Exception: whatever the store raises; what was there before is still complete.
    """
    content = manifest.read_bytes()
    fs, base = url_to_fs(url)
    fs.makedirs(f"{base}/fragments", exist_ok=True)
    there = _manifests(fs, base)
    newest = max(there, default=0)
    if newest > number_of(manifest):
        raise InputError(
            f"it has snapshot {newest}, newer than {manifest.name}, of another life of this run: "
            "restore from it, or name another snapshot.url"
        )
    sizes = {info["name"].rpartition("/")[2]: info["size"] for info in fs.ls(f"{base}/fragments", detail=True)}
    for name in _named(content):
        path = manifest.parent / "fragments" / name
        if sizes.get(name) != path.stat().st_size:
            fs.put_file(str(path), f"{base}/fragments/{name}")
    fs.pipe_file(f"{base}/{manifest.name}", content)
    _prune(fs, base, {**there, number_of(manifest): f"{base}/{manifest.name}"}, keep)


def _prune(fs: Any, base: str, there: dict[int, str], keep: int) -> None:
    """Removes old snapshots, and files that none that is kept names."""
    contents = {number: fs.cat_file(path) for number, path in there.items()}
    complete = [number for number in sorted(there) if _named(contents[number])]
    kept = complete[-keep:]
    for number, path in there.items():
        if number not in kept:
            fs.rm_file(path)
    named = {name for number in kept for name in _named(contents[number])}
    for info in fs.ls(f"{base}/fragments", detail=True):
        if info["name"].rpartition("/")[2] not in named:
            fs.rm_file(info["name"])


def _manifests(fs: Any, base: str) -> dict[int, str]:
    """Number -> path of the manifests in a folder of a store."""
    if not fs.exists(base):
        return {}
    fs.invalidate_cache()
    names = [info["name"] for info in fs.ls(base, detail=True)]
    paths = {Path(name).name: name for name in names}
    return {number_of(Path(n)): p for n, p in paths.items() if n.startswith("manifest-") and n.endswith(".json")}


def _named(content: bytes) -> list[str]:
    """The fragment files that a manifest names; none where it was torn."""
    try:
        return [str(row["file"]) for row in json.loads(content)["fragments"]]
    except (ValueError, KeyError, TypeError):
        return []


# -- restoring ------------------------------------------------------------------------------------------------------


def restore(url: str, state: Path, now: float) -> Snapshot:
    """Makes a state folder from the newest complete snapshot at a URL.

    Versions and rounds go on from the snapshot. Epochs jump, so that no lease from before is valid and every island
    joins again, fetching the anchors.

    Args:
        url: `snapshot.url` of a run, or the run's folder in it.
        state: a folder without a ledger.
        now: seconds since the epoch; one more bound below which no epoch is given again, for a second restoration.

    Raises:
        InputError: no complete snapshot, several runs, or a folder that has a ledger.
        DigestMismatch: all snapshots there are damaged.
        EnvironmentFault: the store or the folder cannot be used.
    """
    _check(url)
    try:
        fs, base = url_to_fs(url.rstrip("/"))
        there = _manifests(fs, base)
        if not there and fs.exists(base):
            runs = [info["name"] for info in fs.ls(base, detail=True) if info["type"] == "directory"]
            runs = [run for run in runs if _manifests(fs, run)]
            if len(runs) > 1:
                names = ", ".join(Path(run).name for run in runs)
                raise InputError(
                    f"{url} has snapshots of several runs or coordinators ({names}): name one as {url.rstrip('/')}/NAME"
                )
            base, there = (runs[0], _manifests(fs, runs[0])) if runs else (base, {})
        if not there:
            raise InputError(f"no snapshot at {url}: name the snapshot.url of a run")
        store = Store(state)
        try:
            return _restore(fs, base, there, store, now)
        finally:
            store.close()
    except OSError as error:
        raise EnvironmentFault(f"cannot restore {url} to {state}: {error}") from error


def _restore(fs: Any, base: str, there: dict[int, str], store: Store, now: float) -> Snapshot:
    if store.ledger.last():
        raise InputError(f"{store.root} has a ledger already: name a folder that no coordinator has used")
    failed: InputError | DigestMismatch | None = None
    for number in sorted(there, reverse=True):
        manifest = store.root / f"manifest-{number:08d}.json"
        try:
            snapshot = _download(fs, base, there[number], manifest, store)
        except (InputError, DigestMismatch) as error:
            store.files.unlink(manifest)
            log.warning("%s cannot be used: %s", there[number], error.message)
            failed = failed or error
            continue
        epoch = max(snapshot.last_epoch + EPOCH_STEP, int(now))
        store.record([run_row(snapshot.config), layout_row(snapshot.layout), state_row(_restored(snapshot, epoch), ())])
        return snapshot
    assert failed is not None
    raise failed


def _download(fs: Any, base: str, source: str, manifest: Path, store: Store) -> Snapshot:
    content = fs.cat_file(source)
    for name in _named(content):
        path = store.root / "fragments" / Path(name).name
        try:
            store.files.write(path, fs.cat_file(f"{base}/fragments/{name}"))
        except FileNotFoundError:
            raise InputError(f"{base}/fragments/{name} is missing") from None
    store.files.write(manifest, content)
    return load(manifest, store.files)


def _restored(snapshot: Snapshot, epoch: int) -> Recovered:
    """The run as it stands in a snapshot, without islands."""
    config = snapshot.config
    state = begin(config.rounds, config.merge.weights, Schedule.kept(config), config.shards, epoch=epoch)
    moved = zip(snapshot.outers, snapshot.rounds, strict=True)
    current = [Round(version=outer.version, round=ended) for outer, ended in moved][: len(state.rounds)]
    phase = Phase.RUNNING if any(snapshot.rounds) else Phase.GATHERING
    return Recovered(state=replace(state, seeded=True, phase=phase, rounds=tuple(current)))
