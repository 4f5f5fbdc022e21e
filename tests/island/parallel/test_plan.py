"""The plan of a mesh: its dimensions, who holds what, and what is refused with which words."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import pytest
from pydantic import ValidationError

from diloco.config import ModelConfig
from diloco.errors import ConfigError
from island.config_mesh import MemoryConfig, MeshConfig
from island.parallel.plan import Plan, plan, spread

MODEL = ModelConfig(layers=8, heads=8, kv_heads=4, dim=64)


def planned(memory: MemoryConfig | None = None, model: ModelConfig = MODEL, **mesh: Any) -> Plan:
    return plan(MeshConfig.model_validate(mesh), memory or MemoryConfig(), model)


def test_what_the_degrees_leave_shards_the_model() -> None:
    found = planned(ranks=48, replicas=3, tensor=2, pipeline=2, context=2)
    assert (found.shard, found.data_ranks, found.summed) == (2, 6, 12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "dualpipev"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_stage_is_held_once_and_has_layers(schedule: str, ranks: int) -> None:
    found = planned(ranks=ranks, pipeline=ranks, pipeline_schedule=schedule)
    assert sorted(chain(*found.stages)) == list(range(len(found.layers)))
    assert [*chain(*found.layers)] == list(range(MODEL.layers))
    assert all(found.layers)
    if schedule in ("zero-bubble", "dualpipev"):
        assert found.stages[0] == (0, 2 * ranks - 1), "the first rank holds the embedding and the output"


def test_layers_that_do_not_divide_go_to_the_first_stages() -> None:
    for layers, stages in product(range(1, 20), range(1, 8)):
        if layers >= stages:
            sizes = [len(part) for part in spread(layers, stages)]
            assert sum(sizes) == layers
            assert max(sizes) - min(sizes) <= 1
            assert sizes[-1] == min(sizes), "the last stage also holds the output"


def test_ranks_that_share_rows_are_counted_once() -> None:
    found = planned(ranks=16, replicas=2, tensor=2, pipeline=2, context=2)
    rows = [found.data_rank(rank) for rank in range(16)]
    assert rows == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [rank for rank in range(16) if found.leads(rank)] == [0, 4]


REFUSED = [
    ({"ranks": 3, "tensor": 3}, {}, "mesh.tensor (3) must divide model.heads (8): set it to 1"),
    ({"ranks": 8, "tensor": 8}, {}, "mesh.tensor (8) must divide model.kv_heads (4): set it to 4"),
    ({"ranks": 2, "tensor": 2}, {"fp8": True}, "set mesh.tensor=1 or memory.fp8=false"),
    ({"ranks": 3, "context": 3}, {}, "mesh.context (3) must divide model.sequence_length (64)"),
    ({"ranks": 8, "context": 8}, {}, "model.kv_heads is 4: set mesh.context_method=gather"),
    ({"ranks": 16, "pipeline": 16}, {}, "makes 16 stages, and model.layers is 8: lower mesh.pipeline"),
    ({"ranks": 2, "cpu_offload": True}, {"anchors": "device"}, "set memory.anchors=cpu, or mesh.cpu_offload=false"),
    ({"ranks": 2, "expert": 2}, {}, "the model has none: set mesh.expert=1"),
    (
        {"ranks": 2, "pipeline": 2, "pipeline_schedule": "zero-bubble"},
        {"compile": True},
        "set memory.compile=false or mesh.pipeline_schedule=interleaved-1f1b",
    ),
]


@pytest.mark.parametrize(("mesh", "memory", "words"), REFUSED)
def test_what_does_not_fit_the_model_is_refused(mesh: dict[str, Any], memory: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(MemoryConfig.model_validate(memory), **mesh)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"ranks": 4, "tensor": 3}, "mesh.tensor (3) must divide mesh.ranks (4): set mesh.tensor=1"),
        (
            {"ranks": 6, "tensor": 2, "pipeline": 2},
            "mesh.tensor (2) * mesh.pipeline (2) must divide mesh.ranks (6): set mesh.ranks=8",
        ),
        ({"ranks": 4, "tensor": 2, "expert": 4}, "set mesh.expert=2"),
        ({"ranks": 4, "sequence_parallel": True}, "set mesh.tensor=2 or more, or mesh.sequence_parallel=false"),
        ({"ranks": 2, "pipeline": 2, "microbatches": 3}, "set mesh.microbatches=4 or 0"),
        (
            {"ranks": 2, "pipeline": 2, "microbatches": 2, "pipeline_schedule": "dualpipev"},
            "at least the 4 stages of mesh.pipeline_schedule 'dualpipev': set mesh.microbatches=4 or 0",
        ),
    ],
)
def test_degrees_that_do_not_fit_each_other_are_refused(mesh: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MeshConfig.model_validate(mesh)
    assert words in str(caught.value)
