"""Islands of different meshes train the project's decoder in one run, and hold the same bits at every version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diloco.config import RunConfig
from diloco.digest import show
from tests.integration.mesh_rank import ROWS
from tests.processes import Hand, all_end_well
from tests.support import Serving, serving

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 240
STEPS = 8
DENSE = {"vocab_size": 32, "dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 32, "sequence_length": 16}
TIED = DENSE | {"tie_embeddings": True}
EXPERTS = TIED | {"experts": 4, "expert_dim": 16, "dense_layers": 1}
Islands = list[tuple[int, dict[str, Any]]]
FOUR: Islands = [(2, {}), (2, {"tensor": 2, "sequence_parallel": True}), (2, {"pipeline": 2}), (1, {})]
OTHERS: Islands = [
    (2, {"replicas": 2}),
    (2, {"context": 2}),
    (2, {"pipeline": 2, "pipeline_schedule": "zero-bubble"}),
    (2, {"param_dtype": "bfloat16", "cpu_offload": True}),
]
OF_TIED: Islands = [
    (2, {"pipeline": 2}),
    (2, {"pipeline": 2, "pipeline_schedule": "zero-bubble"}),
    (2, {"tensor": 2, "compile": True}),
    (1, {}),
]
OF_EXPERTS: Islands = [
    (2, {"expert": 2}),
    (2, {"context": 2, "expert": 2}),
    (2, {"tensor": 2, "sequence_parallel": True}),
    (1, {}),
]
EIGHT_BITS = {"fp8": True, "fp8_emulated": True}
OF_FLOAT8: Islands = [
    (2, EIGHT_BITS | {"param_dtype": "bfloat16"}),
    (2, EIGHT_BITS | {"pipeline": 2, "activation_checkpointing": "full"}),
    (1, EIGHT_BITS),
    (1, {}),
]


def config(run_id: str, islands: int, model: dict[str, Any]) -> RunConfig:
    """Two strided fragments every four steps, overlapped by one, four bits up."""
    sync = {"every_steps": 4, "strategy": "strided", "fragments": 2, "overlap_steps": 1, "buffers": "average"}
    return RunConfig.model_validate(
        {
            "run": {"id": run_id, "steps": STEPS},
            "model": model,
            "sync": sync,
            "wire": {"up": "int4", "down": "bf16", "chunk_bytes": 4096},
            "rounds": {"start_islands": islands, "quorum": islands, "deadline_s": 120.0},
        }
    )


def launch(host: Serving, run: RunConfig, islands: Islands, folder: Path) -> list[list[dict[str, Any]]]:
    """Runs the islands to the end of the run; returns what each rank saw."""
    folder.mkdir()
    processes, outs = [], []
    for number, (ranks, mesh) in enumerate(islands):
        name = f"island-{number}"
        spec = {
            "address": host.address,
            "island": name,
            "mesh": mesh,
            "run": run.model_dump(mode="json"),
            "seed": number,
            "store": str(folder / f"store-{number}"),
            "out": str(folder / name),
        }
        path = folder / f"{name}.spec"
        path.write_text(json.dumps(spec))
        for rank in range(ranks):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.integration.mesh_rank", str(path)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env))
        outs.append([(folder / name).with_suffix(f".{rank}.json") for rank in range(ranks)])
    all_end_well(processes, BOUND_S)
    return [[json.loads(path.read_text()) for path in paths] for paths in outs]


@pytest.mark.parametrize(
    ("name", "islands", "model"),
    [
        ("four", FOUR, DENSE),
        pytest.param("others", OTHERS, DENSE, marks=pytest.mark.slow),
        pytest.param("tied", OF_TIED, TIED, marks=pytest.mark.slow),
        pytest.param("experts", OF_EXPERTS, EXPERTS, marks=pytest.mark.slow),
        pytest.param("float8", OF_FLOAT8, DENSE, marks=pytest.mark.slow),
    ],
)
def test_same_digests_on_every_rank_at_every_version(
    name: str, islands: Islands, model: dict[str, Any], tmp_path: Path
) -> None:
    if islands is OF_FLOAT8:
        pytest.importorskip("torchao", reason="torchao is not installed (the extra `fp8`)")
    run = config(name, len(islands), model)
    with serving(run, tmp_path / "state") as host:
        seen = launch(host, run, islands, tmp_path / "islands")
        outcomes = host.ask(lambda run: dict(run.outcomes))
        members = host.ask(lambda run: run.state.members)
    known = {(f, o.version): show(o.digest) for (f, _), o in outcomes.items()}
    assert {m.contributions for m in members.values()} == {4}
    assert {m.dropped for m in members.values()} == {0}
    for (ranks, mesh), island in zip(islands, seen, strict=True):
        for rank in island:
            assert len(rank["seen"]) == STEPS
            for versions, digests in rank["seen"]:
                for fragment in (0, 1):
                    if versions[fragment]:
                        assert digests[fragment] == known[fragment, versions[fragment]]
            assert rank["seen"][-1][0][:2] == [2, 2]
        tokens = STEPS * ROWS * run.model.sequence_length
        assert sum(rank["tokens"] for rank in island) == tokens, "rows that several ranks read count once"
        if "pipeline" in mesh:
            both = set(island[0]["held"]) & set(island[1]["held"])
            ends = {"embed_tokens.weight"} if model == TIED and "pipeline_schedule" not in mesh else set()
            assert both == ends, "a stage holds its own tensors alone, but for an embedding that is the output too"
            assert ranks == len(island)


@pytest.mark.slow
def test_four_islands_with_daemons_end_with_the_same_digests(tmp_path: Path) -> None:
    meshes = {
        "fsdp": ["mesh.ranks=2"],
        "tensor": ["mesh.ranks=2", "mesh.tensor=2"],
        "pipeline": ["mesh.ranks=2", "mesh.pipeline=2"],
        "single": [],
    }
    rounds = "[sync]\nevery_steps = 4\nfragments = 2\nstrategy = 'strided'\n[rounds]\nstart_islands = 4\nquorum = 4\n"
    with ExitStack() as stack:
        hand = Hand(tmp_path, stack, steps=24, run=rounds)
        hand.coordinator()
        islands = [hand.island(name, *mesh) for name, mesh in meshes.items()]
        codes = [island.wait() for island in islands]
        assert codes == [0] * 4, "\n".join(island.output for island in islands)
    ends = [hand.records(name, "end") for name in meshes]
    assert [len(end) for end in ends] == [1] * 4
    assert len({end[0]["digests"] for end in ends}) == 1
    assert {end[0]["versions"] for end in ends} == {"6 6"}
    assert not any("fetching it whole" in island.output for island in islands), "a digest differed on the way"
