"""Updates on their way out: sent while the fold still makes them, from the file that keeps them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from torch import Tensor

from coordinator.files import WRITE_BYTES, Files
from diloco.errors import Overload

WAIT_S = 120.0
"""How long a reader waits for bytes that the fold or the disk holds up."""
RETRY_S = 1.0


class Update:
    """The update of a committed round as its fold makes it: its first `have` bytes never change.

    One thread writes it, others read it. It counts once the ledger has the digest that it leads to: until then whoever
    is sent its bytes does nothing with them.

    Args:
        files: how the disk is written.
        path: where it is to be; until then it has another name.
        size: its bytes.
        version: of the anchor that it leads to.
        reason: why its round has ended.

    Raises:
        OSError: the disk does not take it.
    """

    def __init__(self, files: Files, path: Path, size: int, version: int, reason: str) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self.version, self.reason, self.have = version, reason, 0
        self._files, self._changed, self._over = files, threading.Condition(), False
        files.reuse(self.partial, size)
        self._descriptor = files.create(self.partial, size)
        try:
            self.payload: Tensor = files.map(self.partial)
        except OSError:
            os.close(self._descriptor)
            raise

    def take(self, made: Tensor, until: int) -> None:
        """Writes what is new of a payload (uint8) that is made up to byte `until`. Raises what the disk does."""
        while self.have < until:
            end = min(self.have + WRITE_BYTES, until)
            self._files.write_at(self._descriptor, [made[self.have : end].numpy().data], self.have)
            with self._changed:
                self.have = end
                self._changed.notify_all()

    def close(self) -> None:
        """Nothing more comes: readers of what has not come are told so."""
        with self._changed:
            over, self._over = self._over, True
            self._changed.notify_all()
        if not over:
            os.close(self._descriptor)

    def reach(self, byte: int) -> None:
        """Returns once it is made up to a byte. Raises `Overload` where it is not going to be, or not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self.have >= byte or self._over, WAIT_S)
            if self.have < byte:
                raise Overload("the update is not made to its end yet: ask for the rest", retry_after_s=RETRY_S)
