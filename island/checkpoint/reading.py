"""Which checkpoint an island goes on with, as all of its ranks agree, and what lies in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from diloco.errors import DilocoError, InputError
from island.checkpoint import manifest as manifests
from island.checkpoint.manifest import Manifest, serial_of, values_of
from island.checkpoint.pieces import Piece
from island.checkpoint.storage import Loading, Reader
from island.checkpoint.store import Store
from island.group import Group

log = logging.getLogger("diloco.island")


def complete(store: Store, folder: str) -> Manifest | None:
    """The manifest of a folder whose files are there, as long as they should be; None of one that is torn.

    Raises:
        EnvironmentFault: the store fails.
    """
    content = store.read(folder, manifests.NAME)
    if content is None:
        return None
    try:
        manifest = Manifest.parse(folder, content)
    except InputError as error:
        log.warning("%s", error.message)
        return None
    sizes = store.sizes(folder)
    wrong = [name for name, (size, _) in manifest.files.items() if sizes.get(name) != size]
    if wrong:
        log.warning("%s/%s lacks files, or parts of them: %s", store.url, folder, ", ".join(wrong))
    return None if wrong else manifest


def some(store: Store) -> bool:
    """Whether there is any complete checkpoint, of whatever model. Raises `EnvironmentFault` where the store fails."""
    return any(serial_of(folder) >= 0 and complete(store, folder) for folder in store.folders())


def choose(store: Store, group: Group, about: Mapping[str, str]) -> tuple[Manifest | None, set[str]]:
    """The newest complete checkpoint of this run and model that all ranks see, with undamaged files. Collective.

    Every file is read once for that, each by one of the ranks.

    Args:
        store: of the island's checkpoints.
        group: the island's ranks.
        about: of what it is to be.

    Returns:
        It, or None; and the folders that were found damaged.

    Raises:
        EnvironmentFault: the store fails.
    """
    seen: dict[str, Manifest] = {}
    error: DilocoError | None = None
    try:
        folders = [folder for folder in store.folders() if serial_of(folder) >= 0]
        seen = {m.folder: m for folder in folders if (m := complete(store, folder))}
    except DilocoError as found:
        error = found
    group.raise_first(error)
    shared = set.intersection(*(set(row) for row in group.gather(sorted(seen))))
    damaged = set[str]()
    for folder in sorted(shared, key=serial_of, reverse=True):
        manifest = seen[folder]
        other = {what for what, value in about.items() if manifest.about.get(what) != value}
        if other:
            log.warning("%s/%s is passed over: it has another %s", store.url, folder, " and ".join(sorted(other)))
            continue
        trouble = [line for line in group.gather(_damage(store, manifest, group)) if line]
        if not trouble:
            return manifest, damaged
        log.warning("%s/%s is passed over: %s", store.url, folder, "; ".join(trouble))
        damaged.add(folder)
    return None, damaged


def _damage(store: Store, manifest: Manifest, group: Group) -> str:
    """What is wrong with this rank's share of a checkpoint's files."""
    for name, known in sorted(manifest.files.items())[group.rank :: group.size]:
        try:
            if store.digest(manifest.folder, name) != known:
                return f"{name} is damaged"
        except DilocoError as error:
            return error.message
    return ""


def load(store: Store, manifest: Manifest, pieces: Mapping[str, Piece]) -> None:
    """Fills pieces with what a checkpoint has of them, however they were cut when it was written.

    Raises:
        InputError: it has not, or in another shape, or its files are damaged.
        EnvironmentFault: the store fails.
    """
    wanted = {name: piece for name, piece in pieces.items() if piece.box.numel}
    missing = [name for name in wanted if name not in manifest.tensors]
    if missing:
        raise InputError(f"{store.url}/{manifest.folder} has no {', '.join(missing)}")
    reader, planner = Reader(store, manifest.folder, manifest.tensors), Loading()
    described = reader.read_metadata()
    planner.set_up_planner(wanted, described)
    reader.set_up_storage_reader(described, is_coordinator=False)
    try:
        plan = planner.create_local_plan()
    except ValueError as error:
        raise InputError(f"{store.url}/{manifest.folder} is of another model: {error}") from error
    reader.read_data(plan, planner)


def values(store: Store, manifest: Manifest, rank: int) -> dict[str, Any] | None:
    """What is no tensor and of one rank; None of a rank that the island did not have.

    Raises:
        InputError: the file is damaged.
        EnvironmentFault: the store fails.
    """
    if rank >= manifest.ranks:
        return None
    try:
        found = json.loads(store.read(manifest.folder, values_of(rank)) or b"")
    except ValueError as error:
        raise InputError(f"{store.url}/{manifest.folder}/{values_of(rank)} is damaged: {error}") from error
    return dict(found)
