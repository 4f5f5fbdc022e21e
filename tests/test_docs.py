"""What README and docs say can be typed, read and compiled as it stands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from diloco.cli import cli
from diloco.config import load_run
from diloco.tls import TLS
from island.config import load_island
from tests.support import configure, serving, visit

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Every indented line or fenced shell line that calls `diloco`."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            match = re.match(r"(?: {4}|\t)(?:\.venv/bin/)?(diloco [^#]+)", line)
            if match:
                found.append(match[1].strip())
    return found


def blocks(language: str) -> list[str]:
    """Every fenced block of a language in the README."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("line", commands())
def test_a_command_can_be_typed(line: str) -> None:
    command: click.Command = cli
    arguments = shlex.split(line)[1:]
    context = click.Context(command, info_name="diloco")
    while isinstance(command, click.Group):
        name = arguments.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"there is no `diloco {name}`"
        command = found
    command.make_context(line, arguments, parent=context)


def test_there_are_commands_to_check() -> None:
    names = {line.split()[1] for line in commands()}
    assert {"demo", "coordinator", "island", "status", "config", "export", "eval", "generate"} <= names
    assert {"explain", "health", "pause", "resume", "drain", "kick", "snapshot", "stop"} <= names


def test_settings_files_are_correct() -> None:
    run, island = blocks("toml")
    assert load_run(run, "README").value.sync.fragments == 4
    assert load_island(island, "README").value.mesh.ranks == 2


def test_settings_of_the_data_page_are_correct() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    found = re.findall(r"```toml\n# (run|island)\.toml\n(.*?)```", page, re.DOTALL)
    for file, text in found:
        if file == "island":
            load_island(text, "docs/data.md")
        else:
            load_run(f"[run]\nid = 'a'\n{text}", "docs/data.md")
    assert {file for file, _ in found} == {"run", "island"}


def test_python_compiles() -> None:
    for block in blocks("python"):
        compile(block, "README", "exec")


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")
def test_the_certificates_that_operations_makes_are_good(tmp_path: Path) -> None:
    [script] = re.findall(r"```sh\n(# An authority.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    coordinator, tokyo = (
        TLS(cert=str(tmp_path / f"{n}.pem"), key=str(tmp_path / f"{n}.key"), ca=str(tmp_path / "ca.pem"))
        for n in ("coordinator", "tokyo")
    )
    with (
        serving(configure(), tmp_path / "state", tls=coordinator) as served,
        visit(served.address, "tokyo", tls=tokyo) as visitor,
    ):
        assert visitor.join().run_id == "test"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"\bmake ([a-z-]+)", page.read_text()):
            if target not in ("a", "it"):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} speaks of make {target}"
