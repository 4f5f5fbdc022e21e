"""What the up codec dropped, on disk: an island that is started again goes on with it.

    <name>.json                what is kept of a fragment, and in which files
    <name>.<n>.safetensors     values of its pieces, each file written once

Files are written on a thread of their own, after the fact: nothing waits for them, and nothing is synced. That is
safe, since the coordinator knows in which rounds the island's contributions count: what is older than the last of them
is forgotten (`Feedback.rejoin`), so nothing is ever sent twice. A file that is damaged counts as none.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.feedback import Fate, Kept

log = logging.getLogger("diloco.island")
CLOSE_S = 5.0
"""How long the end waits for what is being written."""


class Residuals:
    """Keeps the newest of each fragment.

    Args:
        names: of each fragment's files, without endings; they say whose pieces they hold.
    """

    def __init__(self, names: Sequence[Path]) -> None:
        self._names = names
        self._written: dict[int, dict[str, Mapping[int, Tensor]]] = {f: {} for f in range(len(names))}
        """By fragment, the files there are and what is in them."""
        self._serial = 0
        self._waiting: dict[int, Kept] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="residuals", daemon=True)
        self._thread.start()

    def put(self, fragment: int, kept: Kept) -> None:
        """Has this written, in place of what still waits of the fragment."""
        with self._changed:
            self._waiting[fragment] = kept
            self._changed.notify_all()

    def settle(self, within_s: float) -> bool:
        """Waits until nothing waits any more, and returns whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, within_s)

    def close(self) -> None:
        """Writes what waits, for `CLOSE_S` at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        trouble = ""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                fragment = next(iter(self._waiting))
                kept = self._waiting[fragment]
            try:
                self._write(fragment, kept)
                trouble = ""
            except (OSError, SafetensorError) as error:
                if str(error) != trouble:
                    log.warning("what the codec dropped will not outlive this process: %s", error)
                trouble = str(error)
            with self._changed:
                if self._waiting[fragment] is kept:
                    del self._waiting[fragment]
                self._changed.notify_all()

    def _write(self, fragment: int, kept: Kept) -> None:
        name = self._names[fragment]
        name.parent.mkdir(parents=True, exist_ok=True)
        files = {"residuals": self._file(fragment, kept.residuals), "left": self._file(fragment, kept.left)}
        record = {"round": kept.round, "fate": kept.fate.name, **files}
        partial = _ending(name, ".partial")
        partial.write_text(json.dumps(record))
        partial.replace(_ending(name, ".json"))
        for file in set(self._written[fragment]) - {file for file, _ in files.values()}:
            del self._written[fragment][file]
            (name.parent / file).unlink(missing_ok=True)

    def _file(self, fragment: int, values: Mapping[int, Tensor]) -> tuple[str, dict[str, str]]:
        """Where values are: in a file that has them already, or a new one. And their digests."""
        digests = {str(piece): _digest(value) for piece, value in values.items()}
        for file, known in self._written[fragment].items():
            if known.keys() == values.keys() and all(known[piece] is values[piece] for piece in values):
                return file, digests
        name = self._names[fragment]
        self._serial += 1
        file = f"{name.name}.{self._serial}.safetensors"
        save_file({str(piece): value for piece, value in values.items()}, name.parent / file)
        self._written[fragment][file] = values
        return file, digests

    def load(self, fragment: int, numels: Sequence[int]) -> Kept | None:
        """What an earlier process has kept of a fragment whose pieces have so many values; none where there is nothing
        that is whole. Files of which nothing speaks any more are removed."""
        name = self._names[fragment]
        kept = self._load(fragment, name, numels)
        for path in name.parent.glob(f"{name.name}.*.safetensors"):
            if path.name not in self._written[fragment]:
                path.unlink()
        return kept

    def _load(self, fragment: int, name: Path, numels: Sequence[int]) -> Kept | None:
        path = _ending(name, ".json")
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_text())
            kept = Kept(
                round=int(record["round"]),
                fate=Fate[record["fate"]],
                residuals=_values(name.parent, *record["residuals"]),
                left=_values(name.parent, *record["left"]),
            )
            for piece, value in (*kept.residuals.items(), *kept.left.items()):
                if value.shape != (numels[piece],) or value.dtype != torch.float32:
                    raise ValueError(f"piece {piece} has {list(value.shape)} {value.dtype}")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
            log.warning(
                "%s is passed over, and the residuals of fragment %d begin with none: %s", name, fragment, error
            )
            return None
        self._written[fragment] = {record["residuals"][0]: kept.residuals, record["left"][0]: kept.left}
        self._serial = max(self._serial, *(int(file.split(".")[-2]) for file in self._written[fragment]))
        return kept


def _values(folder: Path, file: str, digests: Mapping[str, str]) -> dict[int, Tensor]:
    values = load_file(folder / file)
    if {piece: _digest(value) for piece, value in values.items()} != digests:
        raise ValueError(f"{file} is damaged")
    return {int(piece): value for piece, value in values.items()}


def _digest(value: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(value.view(torch.uint8).numpy().data)


def _ending(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
