"""Files of checkpoints, in a folder or at any fsspec URL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from diloco.errors import ConfigError, EnvironmentFault

AT_ONCE = 2**23
"""Bytes that are read or written at a time."""


@contextmanager
def answering(what: str) -> Iterator[None]:
    """Has whatever a store raises be an `EnvironmentFault` that says what was tried: its errors are its own."""
    try:
        yield
    except (EnvironmentFault, ConfigError):
        raise
    except Exception as error:
        raise EnvironmentFault(f"{what}: {error or repr(error)}") from error


class Store:
    """Folders of files under a URL. Any thread may use it.

    Every method raises `EnvironmentFault` where the store fails.

    Args:
        url: a folder, or an fsspec URL.

    Raises:
        ConfigError: no kind of store has such a URL.
        EnvironmentFault: the package for it is not installed.
    """

    def __init__(self, url: str) -> None:
        protocol = url.partition("://")[0] if "://" in url else "file"
        try:
            fsspec.get_filesystem_class(protocol.partition("::")[0])
        except ValueError as error:
            raise ConfigError(f"checkpoint.url {url!r}: {error}") from error
        except ImportError as error:
            raise EnvironmentFault(f"checkpoint.url {url!r} needs a package that is not installed: {error}") from error
        self.url = url.rstrip("/")
        with answering(f"checkpoint.url {url!r} cannot be used"):
            self._fs, self._base = url_to_fs(self.url)
        self._disk = isinstance(self._fs, LocalFileSystem)

    @classmethod
    def of(cls, url: str, run_id: str, island_id: str) -> Store:
        """Where an island keeps its checkpoints of a run, under `checkpoint.url`; raises as making one does."""
        return cls(f"{url.rstrip('/')}/{run_id}/{island_id}")

    def _path(self, *parts: str) -> str:
        return "/".join((self._base, *parts))

    def folders(self) -> list[str]:
        """Names of the folders there."""
        with answering(f"{self.url} cannot be listed"):
            self._fs.invalidate_cache()
            if not self._fs.exists(self._base):
                return []
            found = self._fs.ls(self._base, detail=True)
            return sorted(Path(one["name"].rstrip("/")).name for one in found if one["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        """Files of a folder, and their bytes."""
        with answering(f"{self.url}/{folder} cannot be listed"):
            self._fs.invalidate_cache()
            found = self._fs.ls(self._path(folder), detail=True)
            return {Path(one["name"]).name: int(one["size"]) for one in found if one["type"] == "file"}

    def write(self, folder: str, name: str, parts: Iterable[Any]) -> tuple[int, str]:
        """Writes a file, durably where the store is a disk; returns its bytes and their XXH3-128 (hex)."""
        size, digest = 0, xxhash.xxh3_128()
        with answering(f"{self.url}/{folder}/{name} cannot be written"):
            self._fs.makedirs(self._path(folder), exist_ok=True)
            with self._fs.open(self._path(folder, name), "wb") as file:
                for part in parts:
                    for start in range(0, len(part), AT_ONCE):
                        some = part[start : start + AT_ONCE]
                        file.write(some)
                        digest.update(some)
                    size += len(part)
            self._sync(self._path(folder, name))
        return size, digest.hexdigest()

    def finish(self, folder: str, name: str, content: bytes) -> None:
        """Writes the file that says that a folder is complete: it is there whole, or not at all."""
        if not self._disk:
            self.write(folder, name, [content])
            return
        self.write(folder, f"{name}.partial", [content])
        with answering(f"{self.url}/{folder}/{name} cannot be written"):
            Path(self._path(folder, f"{name}.partial")).replace(self._path(folder, name))
            for path in (self._path(folder), self._base):
                self._sync(path)

    def _sync(self, path: str) -> None:
        if self._disk:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read(self, folder: str, name: str) -> bytes | None:
        """A whole file; none where there is none."""
        with answering(f"{self.url}/{folder}/{name} cannot be read"):
            path = self._path(folder, name)
            return bytes(self._fs.cat_file(path)) if self._fs.exists(path) else None

    @contextmanager
    def open(self, folder: str, name: str) -> Iterator[Any]:
        """A file to read and to seek in."""
        with answering(f"{self.url}/{folder}/{name} cannot be read"), self._fs.open(self._path(folder, name)) as file:
            yield file

    def digest(self, folder: str, name: str) -> tuple[int, str]:
        """A file's bytes and their XXH3-128 (hex), by reading it."""
        size, digest = 0, xxhash.xxh3_128()
        with self.open(folder, name) as file:
            while some := file.read(AT_ONCE):
                size += len(some)
                digest.update(some)
        return size, digest.hexdigest()

    def remove(self, folder: str, first: str) -> None:
        """Removes a folder with all its files, the one that says that it is complete `first`."""
        with answering(f"{self.url}/{folder} cannot be removed"):
            if self._fs.exists(self._path(folder, first)):
                self._fs.rm_file(self._path(folder, first))
            self._fs.rm(self._path(folder), recursive=True)
