"""Generates diloco/v1 from proto/; with --check, only says whether the committed files are fresh."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "proto").glob("diloco/v1/*.proto"))


def generate(out: Path) -> list[Path]:
    """Writes the message modules and their type stubs under `out`; returns their paths relative to it."""
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'proto'}",
        f"--python_out={out}",
        f"--plugin=protoc-gen-mypy={Path(sys.executable).parent / 'protoc-gen-mypy'}",
        f"--mypy_out=quiet:{out}",
        *map(str, SOURCES),
    ]
    if protoc.main(arguments):
        raise SystemExit("protoc failed")
    return sorted(p.relative_to(out) for p in out.rglob("*_pb2.py*"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a file is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for path in generate(out):
            fresh, committed = (out / path).read_text(), ROOT / path
            if check and (not committed.exists() or committed.read_text() != fresh):
                raise SystemExit(f"{path} is stale: run `make proto`")
            if not check:
                committed.write_text(fresh)


if __name__ == "__main__":
    main()
