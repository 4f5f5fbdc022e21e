"""Where text comes from: files of text, JSON lines and Parquet, as documents one after the other."""

from __future__ import annotations

import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from diloco.errors import EnvironmentFault, InputError
from island.config_data import SOURCES, DataConfig
from island.data.packing import Mapped

NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
"""Folders of the standard library that are left out: installed packages, tests and whole applications."""
SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz"), "parquet": (".parquet",), "tokens": (".npy", ".bin"), "text": ("",)}
"""What is read of a folder, by source."""
ROWS = 1024
"""Rows of a Parquet file that are in memory at once."""


def source(data: DataConfig) -> str:
    """Which setting names the data."""
    return next((name for name in SOURCES if getattr(data, name)), "text")


def files(data: DataConfig) -> list[Path]:
    """The files of all sources but a dataset, in the order in which they are read.

    A folder stands for all visible files below it that are of the source, in the order of their names.

    Raises:
        InputError: a path is not there, or a folder has no such file.
    """
    name = source(data)
    if name == "text" and not data.text:
        return list(_library())
    return [file for path in getattr(data, name) for file in _files(Path(path), name)]


def check(data: DataConfig) -> None:
    """Looks at the data as far as that is quick, so that what is missing is told before any rank starts.

    Raises:
        InputError: a file is missing, or not what it should be.
        EnvironmentFault: a library is missing.
    """
    if data.dataset:
        from island.data.streams import library

        library()
    elif data.tokens:
        mapped(data)
    elif data.text or source(data) != "text":
        next(documents(data))


def mapped(data: DataConfig) -> list[Mapped]:
    """The files of tokens, mapped. Raises `InputError` where one is not what it should be."""
    parts = [Mapped(file, "" if file.suffix == ".npy" else data.tokens_dtype) for file in files(data)]
    if not sum(len(part.tokens) for part in parts):
        raise InputError(f"no tokens in {', '.join(data.tokens)}: name files with tokens in data.tokens")
    return parts


def documents(data: DataConfig) -> Iterator[str]:
    """Yields the documents of text, JSON lines or Parquet that are not empty.

    Raises:
        InputError: a file cannot be read or is not what it should be, or there is no text.
        EnvironmentFault: a library is missing.
    """
    name, found = source(data), False
    named = {Path(path) for path in data.text}
    for file in files(data):
        if name == "jsonl":
            texts = _json_lines(file, data.field)
        elif name == "parquet":
            texts = _parquet(file, data.field)
        else:
            texts = _text(file, named=file in named)
        for text in texts:
            if text:
                found = True
                yield text
    if not found:
        raise InputError(
            f"no text in {', '.join(getattr(data, name)) or 'the Python standard library'}: "
            f"name files or folders with text in data.{name}"
        )


def _files(path: Path, name: str) -> Iterator[Path]:
    """Yields a file, or the files of a folder."""
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"cannot read {path} (No such file or directory): correct data.{name}")
        yield path
        return
    found = [
        file
        for file in sorted(path.rglob("*"))
        if file.name.endswith(SUFFIXES[name])
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
    ]
    if not found:
        kind = " or ".join(suffix for suffix in SUFFIXES[name] if suffix)
        raise InputError(f"no text in {path}: it has no {kind or 'visible'} file; correct data.{name}")
    yield from found


def _library() -> Iterator[Path]:
    """Yields the sources of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint(file.relative_to(root).parts):
            yield file


def _text(file: Path, *, named: bool) -> Iterator[str]:
    """Yields the text of a file; one that is not text is passed over, unless it was named."""
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        if named:
            raise InputError(f"{file} is not UTF-8 text: name a text file or a folder in data.text") from error
        return
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror}): correct data.text") from error
    if "\0" not in text:
        yield text
    elif named:
        raise InputError(f"{file} is not UTF-8 text: name a text file or a folder in data.text")


def _json_lines(file: Path, field: str) -> Iterator[str]:
    """Yields the field of every line."""
    number = 0
    try:
        with _opened(file) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield text_of(json.loads(line), field, f"{file}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"cannot read {file} behind line {number} ({error}): correct data.jsonl, or mend it"
        ) from error
    except ValueError as error:
        raise InputError(f"{file}:{number} is not a line of JSON ({error}): mend it or take it out") from error


def _opened(file: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def text_of(value: object, field: str, where: str) -> str:
    """The text of a line or an example."""
    if not isinstance(value, dict):
        raise InputError(f"{where} is no JSON object with a '{field}': mend it or take it out")
    text = value.get(field)
    if not isinstance(text, str):
        raise InputError(f"{where} has no text in '{field}', but {sorted(value)}: set data.field to one of these")
    return text


def _parquet(file: Path, field: str) -> Iterator[str]:
    """Yields the field of every row; rows without are passed over."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentFault("data.parquet needs pyarrow: pip install 'diloco[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(file) as rows:
            columns = rows.schema_arrow
            if field not in columns.names:
                raise InputError(f"{file} has no column '{field}', but {columns.names}: set data.field to one of these")
            if not pyarrow.types.is_string(columns.field(field).type) and not pyarrow.types.is_large_string(
                columns.field(field).type
            ):
                raise InputError(f"{file} has {columns.field(field).type} in '{field}', not text: correct data.field")
            for batch in rows.iter_batches(ROWS, columns=[field]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"cannot read {file} ({error}): correct data.parquet, or copy it again") from error


def describe(paths: Sequence[Path]) -> list[list[object]]:
    """What tells files apart without reading them: path, size in bytes and time of change in ns of each."""
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
