"""The rules of the house: imports point one way, nothing unsafe is loaded, files and functions stay short."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import diloco.cli

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "diloco" / "v1"
FILES = sorted(
    path
    for folder in ROOT.iterdir()
    if folder.is_dir() and not folder.name.startswith(".") and folder.name not in ("build", "dist")
    for path in folder.rglob("*.py")
    if GENERATED not in path.parents
)
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

FORBIDDEN = {
    "diloco": {"coordinator", "island", "wan", "grpc", "socket", "sqlite3", "time", "random"},
    "coordinator": {"island", "wan"},
    "island": {"coordinator", "wan"},
}
"""Per package, what none of its files imports."""

ONLY_IN_CLI = {"os", "pathlib", "sys"}
"""What only `diloco/cli.py` imports in `diloco`: the algorithm touches no disk and no process."""

LONGEST_FILE = 600
LONGEST_FUNCTION = 100


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Yields (top-level module, line) for every absolute import in a file, inside functions too."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno


def test_the_house_is_found() -> None:
    assert {"diloco/errors.py", "island/config.py", "tests/test_house.py"} <= set(TREES)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{name}:{line} imports {module}"
        for name in TREES
        for module, line in imports(name)
        if module in FORBIDDEN.get(name.partition("/")[0], ())
    ]
    assert not wrong


def test_only_the_command_line_of_diloco_touches_the_machine() -> None:
    wrong = [
        f"{name}:{line} imports {module}"
        for name in TREES
        if name.startswith("diloco/") and name not in ("diloco/cli.py", "diloco/__main__.py")
        for module, line in imports(name)
        if module in ONLY_IN_CLI
    ]
    assert not wrong


def test_nobody_unpickles() -> None:
    wrong = [f"{name}:{line}" for name in TREES for module, line in imports(name) if module == "pickle"]
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if options.get("weights_only") != "True":
                    wrong.append(f"{name}:{node.lineno} calls torch.load without weights_only=True")
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                wrong += [f"{name}:{node.lineno} imports load" for alias in node.names if alias.name == "load"]
    assert not wrong


def test_no_file_is_long() -> None:
    lengths = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in TREES}
    assert not {name: length for name, length in lengths.items() if length > LONGEST_FILE}


def test_no_function_is_long() -> None:
    long = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert not long


def test_the_configuration_page_is_fresh() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "generate.py"))["page"]()
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == written, "run python docs/generate.py"


def test_the_examples_of_the_configuration_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"```toml\n# (\S+)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    [commands] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    for command in commands.splitlines():
        diloco.cli.run(diloco.cli.cli, command.split()[1:])
