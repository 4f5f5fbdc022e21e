"""The callbacks under the real Trainers with two ranks, beside an island of one with a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.island.beside import STEPS, beside, config, digests, outer
from tests.processes import all_end_well, free_port
from tests.support import serving

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "lightning-ddp": ("lightning", "test_hooks_lightning", "DistributedDataParallel"),
    "trainer-ddp": ("accelerate", "test_hooks_transformers", "DistributedDataParallel"),
    "trainer-fsdp": ("accelerate", "test_hooks_transformers", "FSDPLlamaForCausalLM"),
}
TOKENS = {"lightning-ddp": [STEPS * 4] * 2, "trainer": [STEPS * 2 * 4 * 8, 0]}
"""Of each rank: Lightning's count their own, of the Trainer the first one counts all."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_and_a_plain_loop_end_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    library, module, wrapped = KINDS[kind]
    pytest.importorskip(library, reason=f"needs {library}: pip install 'diloco[hooks]'")
    model: Any = import_module(f"tests.island.{module}").model
    out, place = tmp_path / "seen", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with serving(config(), tmp_path / "state") as host, beside(model(), host) as other:
        command = [sys.executable, "-m", "tests.island.hook_rank", host.address, kind, str(out)]
        ranks = []
        for rank in ("0", "1"):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
            env = {**os.environ, **place, **own, "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "hooks"}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=env))
        all_end_well(ranks)
        seen = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
        assert [rank["digests"] for rank in seen] == [other.result(), digests(host)]
        last = outer(host)
    assert [rank["wrapped"] for rank in seen] == [wrapped] * 2
    assert [(rank["step"], rank["rounds"]) for rank in seen] == [(STEPS, 2)] * 2
    assert [rank["tokens"] for rank in seen] == TOKENS.get(kind, TOKENS["trainer"])
    for rank in seen:
        assert rank["parameters"].keys() == last.keys()
        assert all(torch.equal(torch.tensor(value), last[name]) for name, value in rank["parameters"].items())
