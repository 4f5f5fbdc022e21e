"""Islands of different rank counts and layouts train in one run, and everybody holds the same bits at every version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diloco.config import RunConfig
from diloco.digest import show
from tests.integration.rank import STEPS
from tests.processes import all_end_well
from tests.support import Serving, serving

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 180
ON_DEVICE = ("fsdp", "hsdp")
"""Layouts whose anchors are beside the parameters."""
PROMPT_FREE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Freed tensors leave resident memory at once, so that its peak is what was held."""


def config(run_id: str, islands: int, chunk_bytes: int = 4096, **sync: object) -> RunConfig:
    """Two strided fragments every two steps, overlapped by one step and mixed by half, few bits both ways."""
    up, down = WIRES.get(run_id, ("bf16", "bf16"))
    return RunConfig.model_validate(
        {
            "run": {"id": run_id, "steps": STEPS},
            "sync": {
                "every_steps": 4,
                "strategy": "strided",
                "fragments": 2,
                "overlap_steps": 1,
                "alpha": 0.5,
                "buffers": "average",
            }
            | sync,
            "wire": {"up": up, "down": down, "chunk_bytes": chunk_bytes},
            "rounds": {"start_islands": islands, "quorum": islands, "deadline_s": 120.0},
        }
    )


def launch(
    serving: Serving, layouts: Sequence[str], folder: Path, *, alike: bool = False
) -> list[list[dict[str, Any]]]:
    """Runs one island per layout (all but `single` and `wide` with two ranks); returns what each rank saw.

    Their models begin with different parameters unless they are `alike`.
    """
    folder.mkdir()
    processes, outs = [], []
    for i, layout in enumerate(layouts):
        ranks = 1 if layout in ("single", "wide") else 2
        out = folder / f"island-{i}"
        spec = {
            "address": serving.address,
            "island": f"island-{i}",
            "layout": layout,
            "seed": i,
            "begin": 0 if alike else i,
            "anchors": "device" if layout in ON_DEVICE else "cpu",
            "store": str(folder / f"store-{i}"),
            "out": str(out),
        }
        path = folder / f"spec-{i}.json"
        path.write_text(json.dumps(spec))
        for rank in range(ranks):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", **PROMPT_FREE}
            command = [sys.executable, "-m", "tests.integration.rank", str(path)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env))
        outs.append([out.with_suffix(f".{rank}.json") for rank in range(ranks)])
    all_end_well(processes, BOUND_S)
    return [[json.loads(path.read_text()) for path in paths] for paths in outs]


WIRES = {"every-layout": ("int4", "e3m0"), "two-ranks-and-one": ("auto:int2", "auto:topk-coded")}
"""Codecs of a run, up and down, that are not bf16."""
RUNS = {
    "every-layout": ("fsdp", "hsdp", "tensor-parallel", "single"),
    "two-ranks-and-one": ("fsdp", "single"),
    "one-and-one": ("single", "single"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name == "every-layout" else ()) for name in RUNS],
)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run: (coordinator, what each rank of each island saw)."""
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        host = stack.enter_context(serving(config(request.param, len(RUNS[request.param])), folder / "state"))
        seen = launch(host, RUNS[request.param], folder / "islands")
        yield host, seen, RUNS[request.param]


def test_same_digests_on_every_rank_at_every_version(finished: Any) -> None:
    host, seen, _ = finished
    outcomes = host.ask(lambda run: dict(run.outcomes))
    known = {(f, o.version): show(o.digest) for (f, _), o in outcomes.items()}
    static = show(host.ask(lambda run: run.outers[2].digest))
    first: dict[int, set[str]] = {0: set(), 1: set()}
    for island in seen:
        for rank in island:
            assert len(rank["seen"]) == STEPS
            for versions, digests in rank["seen"]:
                assert digests[2] == static
                for fragment in (0, 1):
                    if versions[fragment]:
                        assert digests[fragment] == known[fragment, versions[fragment]]
                    else:
                        first[fragment].add(digests[fragment])
            assert rank["seen"][-1][0] == [2, 2, 0]
    assert [len(first[fragment]) for fragment in (0, 1)] == [1, 1], "islands began with different parameters"


def test_each_rank_sends_its_own_pieces_and_nothing_twice(finished: Any) -> None:
    host, seen, layouts = finished
    fragments, up = host.ask(lambda run: (run.fragments, run.up))
    for layout, island in zip(layouts, seen, strict=True):
        for fragment in (0, 1):
            sizes, specs = [rank["sizes"][fragment] for rank in island], fragments[fragment].specs
            least = sum(up.of(spec).size(spec.numel) for spec in specs)
            most = least + (5 * len(island) * len(specs) if host.run.config.run.id in WIRES else 0)
            assert least <= sum(sizes) <= most, "bytes of the whole fragment, once per island"
            if layout != "single":
                assert max(sizes) <= 0.75 * sum(sizes), "no rank sends the model"


def test_contributions_of_all_islands_were_folded(finished: Any) -> None:
    host, seen, _ = finished
    members = host.ask(lambda run: run.state.members)
    assert {m.contributions for m in members.values()} == {4}
    assert {m.dropped for m in members.values()} == {0}
    assert len(members) == len(seen)


@pytest.mark.slow
def test_a_sync_holds_no_more_than_the_fragment_in_flight(tmp_path: Path) -> None:
    """256 MiB in 8 fragments: a sync's peak is well below half of the model, as it never gathers it."""
    sync = {"fragments": 8, "every_steps": 8, "overlap_steps": 0, "alpha": 0.0}
    settings = config("wide", 1, chunk_bytes=2**20, **sync)
    with serving(settings, tmp_path / "state") as host:
        [[rank]] = launch(host, ["wide"], tmp_path / "islands")
    before, after = rank["seen"]
    fragment_kib = 32 * 1024
    assert after - before < 3 * fragment_kib, f"grew by {(after - before) / 1024:.0f} MiB"
