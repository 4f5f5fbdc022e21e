"""However a model is sharded, its optimizer does what it does in a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from island.optimizers import build
from tests.integration.optimizer_rank import LAYOUTS, OPTIMIZERS, RANKS, STEPS
from tests.island.test_optimizers import Mixed, inner, take_steps, values
from tests.processes import all_end_well

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks wrote."""
    path = tmp_path_factory.mktemp("optimizers")
    env = {**os.environ, "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.optimizer_rank", str(path)]
    processes = [subprocess.Popen(command, cwd=ROOT, env={**env, "RANK": str(rank)}) for rank in range(RANKS)]
    all_end_well(processes, BOUND_S)
    return path


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_move_as_the_whole_does(layout: str, name: str, folder: Path) -> None:
    alone = Mixed()
    take_steps(alone, build(alone, inner(name)), last=STEPS)
    expected, seen = values(alone), set()
    ranks = [load_file(folder / f"{layout}-{name}-{rank}.safetensors") for rank in range(RANKS)]
    for tensors in ranks:
        for key, value in tensors.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
            seen.add(key)
            assert all(torch.equal(value, other[key]) for other in ranks if key in other), "replicas differ"
    assert seen == set(expected)
