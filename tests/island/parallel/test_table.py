"""Each mesh, precision and way to save memory beside the same model in one process: losses and parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from island.config_mesh import MemoryConfig, MeshConfig
from island.parallel.plan import refusals
from tests.island.parallel.rank import STEPS, run_config
from tests.processes import all_end_well

ROOT = Path(__file__).resolve().parents[3]
BOUND_S = 280
Case = dict[str, dict[str, Any]]
EXACT, HALF, EIGHTH, APART = 2e-6, 1e-3, 2e-3, 1e-6
"""How far a loss may be from that of one process, with float32, bfloat16 and float8, and a parameter with float32."""

EXPERTS = {"experts": 4, "expert_dim": 16, "shared_experts": 1, "dense_layers": 1}
MESHES: dict[str, Case] = {
    "fsdp": {},
    "hsdp": {"mesh": {"replicas": 2}},
    "tensor": {"mesh": {"tensor": 2}, "model": {"qk_norm": True}},
    "sequence": {"mesh": {"tensor": 2, "sequence_parallel": True}, "model": {"qk_norm": True}},
    "loss": {"mesh": {"tensor": 2, "loss_parallel": True}, "model": {"z_loss": 1e-2}},
    "tied": {"mesh": {"tensor": 2, "sequence_parallel": True}, "model": {"tie_embeddings": True}},
    "gpipe": {"mesh": {"pipeline": 2, "pipeline_schedule": "gpipe"}, "model": {"tie_embeddings": True}},
    "1f1b": {"mesh": {"pipeline": 2, "microbatches": 4}, "model": {"z_loss": 1e-2}},
    "interleaved": {"mesh": {"pipeline": 2, "pipeline_schedule": "interleaved-1f1b"}},
    "zero-bubble": {"mesh": {"pipeline": 2, "pipeline_schedule": "zero-bubble"}},
    "dualpipev": {"mesh": {"pipeline": 2, "pipeline_schedule": "dualpipev"}, "model": {"tie_embeddings": True}},
    "ulysses": {"mesh": {"context": 2}},
    "gather": {"mesh": {"context": 2, "context_method": "gather"}, "model": {"kv_heads": 1}},
    "expert": {"mesh": {"expert": 2}, "model": EXPERTS},
    "expert-context": {"mesh": {"expert": 2, "context": 2}, "model": EXPERTS},
    "tensor-experts": {
        "mesh": {"tensor": 2, "sequence_parallel": True},
        "model": EXPERTS | {"balance": "loss", "balance_factor": 1.0},
    },
}
PRECISIONS: dict[str, Case] = {
    "float32": {},
    "bfloat16": {"mesh": {"param_dtype": "bfloat16"}},
    "bfloat16-reduced": {"mesh": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
}
CHECKPOINTING: dict[str, Case] = {
    name: {"memory": {"activation_checkpointing": name}} for name in ("none", "selective", "full")
}
FLOAT8: Case = {"mesh": {"param_dtype": "bfloat16"}, "memory": {"fp8": True, "fp8_emulated": True}}
COMPILED: Case = {"memory": {"compile": True}}
OPTIONS: dict[str, Case] = {
    "accumulated": {"memory": {"accumulate": 2}},
    "accumulated-replicas": {"memory": {"accumulate": 2}, "mesh": {"replicas": 2}},
    "accumulated-pipeline": {
        "memory": {"accumulate": 2},
        "mesh": {"pipeline": 2},
        "model": {"tie_embeddings": True},
    },
    "offloaded": {"mesh": {"cpu_offload": True}},
    "never-resharded": {"mesh": {"reshard_after_forward": "never"}},
    "pipeline-resharded": {"mesh": {"reshard_after_forward": "always", "pipeline": 2}},
    "math": {"memory": {"attention": "math"}},
    "flash": {"memory": {"attention": "flash"}},
    "foreign": {"model": {"source": "tests.island.parallel.rank:Foreign"}},
    "foreign-tensor": {"model": {"source": "tests.island.parallel.rank:Foreign"}, "mesh": {"tensor": 2}},
    "compiled-tensor": {"mesh": {"tensor": 2, "sequence_parallel": True}, "model": {"layers": 2}} | COMPILED,
    "experts-unbalanced": {"mesh": {"pipeline": 2}, "model": EXPERTS | {"balance": "none"}},
}
OF_FOUR: dict[str, Case] = {
    "tensor-fsdp": {"mesh": {"tensor": 2, "sequence_parallel": True, "loss_parallel": True}},
    "tensor-hsdp": {"mesh": {"tensor": 2, "replicas": 2}},
    "tensor-pipeline": {"mesh": {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "loss_parallel": True}},
    "tensor-context": {"mesh": {"tensor": 2, "context": 2, "context_method": "gather", "sequence_parallel": True}},
    "tensor-pipeline-compiled": {"mesh": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}} | COMPILED,
    "tensor-expert": {"mesh": {"tensor": 2, "expert": 2, "sequence_parallel": True}, "model": EXPERTS},
    "tensor-expert-compiled": {"mesh": {"tensor": 2, "expert": 2}, "model": EXPERTS} | COMPILED,
    "tensor-experts-fsdp": {"mesh": {"tensor": 2}, "model": EXPERTS},
    "tensor-experts-hsdp": {"mesh": {"tensor": 2, "replicas": 2}, "model": EXPERTS},
    "tensor-experts-pipeline": {"mesh": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, "model": EXPERTS},
    "tensor-experts-context": {
        "mesh": {"tensor": 2, "context": 2, "context_method": "gather", "expert": 2},
        "model": EXPERTS,
    },
    "pipeline-fsdp": {"mesh": {"pipeline": 2, "pipeline_schedule": "zero-bubble"}},
    "pipeline-tied": {"mesh": {"pipeline": 4}, "model": {"tie_embeddings": True}},
    "pipeline-tied-fsdp": {"mesh": {"pipeline": 2, "replicas": 2}, "model": {"tie_embeddings": True, "vocab_size": 33}},
    "pipeline-tied-tensor": {
        "mesh": {"pipeline": 2, "tensor": 2, "pipeline_schedule": "zero-bubble", "loss_parallel": True},
        "model": {"tie_embeddings": True},
        "memory": {"accumulate": 2},
    },
    "zero-bubble-tied-fsdp": {
        "mesh": {"pipeline": 2, "pipeline_schedule": "zero-bubble"},
        "model": {"tie_embeddings": True, "vocab_size": 33},
    },
    "pipeline-context": {"mesh": {"pipeline": 2, "context": 2}},
    "pipeline-expert": {"mesh": {"pipeline": 2, "expert": 2}, "model": EXPERTS},
    "context-fsdp": {"mesh": {"context": 2}},
    "hsdp": {"mesh": {"replicas": 2}, "memory": {"accumulate": 2}},
    "expert": {"mesh": {"expert": 4}, "model": EXPERTS},
    "expert-fsdp": {"mesh": {"expert": 2}, "model": EXPERTS},
    "expert-hsdp": {"mesh": {"expert": 2, "replicas": 2}, "model": EXPERTS},
    "expert-within": {"mesh": {"expert": 2}, "model": EXPERTS | {"experts": 2}},
    "expert-context": {"mesh": {"expert": 4, "context": 2}, "model": EXPERTS},
}


def together(*parts: Case) -> Case:
    """Settings laid over each other."""
    return {key: {k: v for part in parts for k, v in part.get(key, {}).items()} for key in ("mesh", "memory", "model")}


TABLE = {
    f"{mesh} {precision} {checkpointing}": together(MESHES[mesh], PRECISIONS[precision], CHECKPOINTING[checkpointing])
    for mesh, precision, checkpointing in product(MESHES, PRECISIONS, CHECKPOINTING)
}
FAST = [
    *(f"{mesh} float32 none" for mesh in MESHES),
    *(f"{mesh} float32 full" for mesh in ("fsdp", "sequence", "zero-bubble", "expert")),
    *(f"{mesh} float32 selective" for mesh in ("fsdp", "1f1b", "ulysses", "expert")),
    *(f"{mesh} bfloat16 none" for mesh in ("fsdp", "tensor", "1f1b")),
    "dualpipev float32 selective",
]


def launch(cases: dict[str, Case], ranks: int, folder: Path, backend: str = "aot_eager") -> list[dict[str, Any]]:
    """Runs cases one after the other on a group of ranks; what each rank found, by case.

    `backend` is that of compiled blocks: `aot_eager` traces forward and backward as `inductor` does, in a tenth of the
    time.
    """
    spec, places = folder / "spec.json", {"store": str(folder / "store"), "out": str(folder / "out")}
    spec.write_text(json.dumps(places | {"cases": cases, "backend": backend}))
    env = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.island.parallel.rank", str(spec)]
    processes = [subprocess.Popen(command, cwd=ROOT, env={**env, "RANK": str(rank)}) for rank in range(ranks)]
    all_end_well(processes, BOUND_S)
    return [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(ranks)]


def check(cases: dict[str, Case], ranks: int, folder: Path, backend: str = "aot_eager") -> None:
    """Asserts that every case does what one process does, or is refused as the plan says."""
    found = launch(cases, ranks, folder, backend)
    wrong = []
    for name, case in cases.items():
        settings = {"ranks": ranks} | case.get("mesh", {})
        mesh, memory = MeshConfig.model_validate(settings), MemoryConfig.model_validate(case.get("memory", {}))
        refused = [*refusals(mesh, memory, run_config(case.get("model", {})).model)]
        for rank in found:
            row = rank[name]
            if refused or "error" in row:
                if not refused or refused[0] not in row.get("error", ""):
                    wrong.append(f"{name}: {row}")
                continue
            exact = mesh.param_dtype == "float32"
            bound = EXACT if exact else EIGHTH if memory.fp8 else HALF
            losses = [abs(a - b) for a, b in zip(row["losses"], row["alone"], strict=True)]
            assert len(losses) == STEPS + 1
            if max(losses) > bound or (exact and row["apart"] > APART):
                wrong.append(f"{name}: losses {max(losses):.1e}, parameters {row['apart']:.1e}")
        held = [rank[name].get("held", 0) for rank in found]
        if not refused and mesh.pipeline > 1 and max(held) >= found[0][name]["of"]:
            wrong.append(f"{name}: a stage holds every tensor")
    assert not wrong, "\n".join(wrong)


def test_meshes_equal_one_process(tmp_path: Path) -> None:
    check({name: TABLE[name] for name in FAST} | OPTIONS, 2, tmp_path)


@pytest.mark.slow
def test_the_whole_table(tmp_path: Path) -> None:
    check({name: case for name, case in TABLE.items() if name not in FAST}, 2, tmp_path)


@pytest.mark.slow
def test_meshes_of_several_dimensions(tmp_path: Path) -> None:
    check(OF_FOUR, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_float8_on_meshes(checkpointing: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed (the extra `fp8`)")
    cases = {mesh: together(case, FLOAT8, CHECKPOINTING[checkpointing]) for mesh, case in MESHES.items()}
    check(cases | {"compiled": together(FLOAT8, COMPILED, CHECKPOINTING[checkpointing])}, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_compiled_meshes(checkpointing: str, tmp_path: Path) -> None:
    cases = {mesh: together(case, COMPILED, CHECKPOINTING[checkpointing]) for mesh, case in MESHES.items()}
    check(cases, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "sequence", "1f1b", "expert-context"])
def test_blocks_compiled_into_machine_code(mesh: str, tmp_path: Path) -> None:
    check({mesh: together(MESHES[mesh], COMPILED, {"model": {"layers": 2}})}, 2, tmp_path, "inductor")
