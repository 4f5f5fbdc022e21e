"""The table of `docs/parallelism.md`: what combines with what, as the plan has it."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from diloco.config import ModelConfig
from island.config_mesh import MemoryConfig, MeshConfig
from island.parallel.plan import refusals

PAGE = Path(__file__).resolve().parents[3] / "docs" / "parallelism.md"
KINDS: dict[str, dict[str, Any]] = {
    "HSDP": {"replicas": 2},
    "tensor": {"tensor": 2, "sequence_parallel": True, "loss_parallel": True},
    "pipeline": {"pipeline": 2, "pipeline_schedule": "interleaved-1f1b"},
    "zero-bubble": {"pipeline": 2, "pipeline_schedule": "zero-bubble"},
    "context": {"context": 2},
    "expert": {"expert": 2, "experts": 4},
    "offload": {"cpu_offload": True},
    "anchors": {"anchors": "device"},
    "bfloat16": {"param_dtype": "bfloat16"},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "compile": {"compile": True},
    "fp8": {"fp8": True},
    "accumulate": {"accumulate": 2},
    "tied": {"tie_embeddings": True},
    "foreign": {"source": "transformers", "name": "somebody/model"},
}
"""Each word of the table, and the settings that it stands for."""


def reasons(*kinds: str) -> list[str] | None:
    """Why kinds do not combine; None where they set one key differently."""
    settings: dict[str, Any] = {}
    for kind in kinds:
        if any(settings.get(key, value) != value for key, value in KINDS[kind].items()):
            return None
        settings |= KINDS[kind]
    parts: list[dict[str, Any]] = [
        {key: value for key, value in settings.items() if key in cls.model_fields}
        for cls in (MeshConfig, MemoryConfig, ModelConfig)
    ]
    used = math.prod(parts[0].get(name, 1) for name in ("replicas", "tensor", "pipeline", "context"))
    mesh = MeshConfig.model_validate({"ranks": used * parts[0].get("expert", 1)} | parts[0])
    model = ModelConfig.model_validate({"kv_heads": 4, "heads": 4} | parts[2])
    return [*refusals(mesh, MemoryConfig.model_validate(parts[1]), model)]


def cell(row: str, column: str) -> str:
    """What the table says of a pair."""
    found = reasons(row, column)
    if row == column or found is None:
        return "·"
    return "no" if found else "yes"


def table() -> list[str]:
    """The table, in Markdown."""
    head = ["", *KINDS]
    rows = [[f"**{row}**", *(cell(row, column) for column in KINDS)] for row in KINDS]
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]


def test_the_table_of_the_page_is_what_the_plan_says() -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if re.match(r"\| (\*\*| \|)|\|  \|", line)] == [table()[0], *table()[2:]]


def test_kinds_fit_a_model_that_suits_them() -> None:
    for kind in KINDS:
        assert reasons(kind) == [], kind


@pytest.mark.parametrize(
    ("pair", "named"), [(pair, pair) for pair in product(KINDS, repeat=2) if pair[0] < pair[1] and reasons(*pair)]
)
def test_what_does_not_combine_is_on_the_page_with_its_reason(pair: tuple[str, str], named: tuple[str, str]) -> None:
    [refused] = re.findall(r"## What is refused\n(.*?)\n## ", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in refused.split("\n- ") if all(re.search(rf"`{kind}`", line) for kind in named)]
    assert lines, f"{pair}: {reasons(*pair)}"
