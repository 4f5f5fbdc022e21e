"""The examples, each as its first lines say that it is run, beside the plain loop where the model is the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from diloco.config import load_run
from tests.island.beside import digests
from tests.support import serving

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NEEDS = {"hf_trainer": "accelerate", "lightning_module": "lightning"}
BOUND_S = 120


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ends(process: subprocess.Popen[str]) -> str:
    """What an example printed."""
    try:
        output, _ = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"plain_loop", *NEEDS}


RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["plain_loop"], [*RANKS, "plain_loop"]),
        pytest.param(["hf_trainer"], [*RANKS, "hf_trainer"], marks=pytest.mark.slow),
        (["lightning_module"], ["plain_loop"]),
    ],
    ids=["plain_loop-ddp", "hf_trainer-ddp", "lightning_module"],
)
def test_two_islands_end_with_the_same_bits(tmp_path: Path, first: list[str], second: list[str]) -> None:
    for needed in {NEEDS[name] for name in (first[-1], second[-1]) if name in NEEDS}:
        if not find_spec(needed):
            pytest.skip(f"needs {needed}: pip install 'diloco[hooks]'")
    text = (EXAMPLES / "run.toml").read_text()
    config = load_run(text, "run.toml", ["rounds.start_islands=2", "rounds.quorum=2"]).value
    with serving(config, tmp_path) as host:
        islands = [
            start([*how[:-1], str(EXAMPLES / f"{how[-1]}.py"), host.address, name])
            for how, name in ((first, "tokyo"), (second, "oslo"))
        ]
        outputs = [ends(island) for island in islands]
        found = [re.findall(r"^\w+: digests (.*)$", output, re.MULTILINE) for output in outputs]
        assert found == [[" ".join(digests(host))]] * 2, outputs
        losses = [float(re.findall(r"step 60, held-out loss ([\d.]+)", output)[0]) for output in outputs]
    assert max(losses) < (5.4 if "hf_trainer" in first else 0.9), outputs
