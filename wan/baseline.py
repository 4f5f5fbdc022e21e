"""What the demo compares with: the same model trained data-parallel by all ranks, and by one island alone."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.config import RunConfig, load_run
from diloco.settings import to_toml
from island.config import IslandConfig, load_island
from wan.processes import Processes
from wan.progress import IslandView, Progress, RunView
from wan.report import Curve

if TYPE_CHECKING:
    import torch

    from wan.demo import Demo

POLL_S = 0.4
EVAL_SEQUENCES = 128
"""Held-out sequences of every evaluation, so that curves and final losses are of the same text."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One comparison: who trains, on how much, for how long. All plans see the same number of tokens."""

    name: str
    ranks: int
    steps: int
    sequences: int
    """Sequences per step of all ranks together."""
    evaluate_steps: int


def plans(demo: Demo) -> tuple[Plan, ...]:
    """Data-parallel: all ranks, the islands' batches at once. Alone: one island's ranks and batch, for longer."""
    islands = len(demo.ranks)
    return (
        Plan(
            name="data-parallel",
            ranks=sum(demo.ranks),
            steps=demo.steps,
            sequences=demo.sequences * islands,
            evaluate_steps=demo.sync_every,
        ),
        Plan(
            name="one island alone",
            ranks=demo.ranks[0],
            steps=demo.steps * islands,
            sequences=demo.sequences,
            evaluate_steps=demo.sync_every * islands,
        ),
    )


def compare(
    demo: Demo, config: RunConfig, processes: Processes, progress: Progress
) -> tuple[tuple[Curve, ...], dict[str, float]]:
    """Trains the comparisons one after the other; returns their held-out curves and final losses."""
    curves, losses = [], {}
    for plan in plans(demo):
        slug = plan.name.replace(" ", "-")
        records = demo.out / "metrics" / f"{slug}.jsonl"
        command = _prepare(demo, config, plan, slug)
        threads = max(1, (os.cpu_count() or 1) // plan.ranks)
        processes.start(slug, command, {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"})
        begun = time.monotonic()
        while not processes.check([slug]):
            progress.update(_view(plan, records, time.monotonic() - begun))
            time.sleep(POLL_S)
        rows = _rows(records)
        evals = [row for row in rows if row["kind"] == "eval"]
        curves.append(
            Curve(
                name=plan.name,
                tokens=tuple(row["tokens"] for row in evals),
                loss=tuple(row["outer_loss"] for row in evals),
            )
        )
        losses[plan.name] = next(row["loss"] for row in rows if row["kind"] == "end")
    return tuple(curves), losses


def _prepare(demo: Demo, config: RunConfig, plan: Plan, slug: str) -> list[str]:
    """Writes a comparison's settings; returns the command that trains it."""
    folder = demo.out / "compare"
    folder.mkdir(exist_ok=True)
    run, island = folder / f"{slug}-run.toml", folder / f"{slug}.toml"
    run.write_text(to_toml(load_run(to_toml(config), "demo", [f"run.steps={plan.steps}"]).value))
    settings = IslandConfig.model_validate(
        {
            "island": {"id": slug},
            "mesh": {"ranks": plan.ranks},
            "data": {
                "text": tuple(str(Path(t).resolve()) for t in demo.text),
                "batch_sequences": plan.sequences,
            },
            "eval": {"every_steps": plan.evaluate_steps, "sequences": EVAL_SEQUENCES},
            "metrics": {"dir": str((demo.out / "metrics").resolve())},
        }
    )
    island.write_text(to_toml(settings))
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    launcher += ["--local-addr=127.0.0.1", f"--nproc-per-node={plan.ranks}", "-m", "wan.baseline"]
    return [sys.executable, *launcher, str(run), str(island)]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _view(plan: Plan, records: Path, elapsed_s: float) -> RunView:
    rows = [row for row in _rows(records) if row["kind"] == "train"]
    last: dict[str, Any] = rows[-1] if rows else {"step": 0, "loss": None, "tokens_per_second": 0.0}
    island = IslandView(
        id=plan.name,
        state="training",
        step=last["step"],
        loss=last["loss"],
        tokens_per_second=last["tokens_per_second"],
        bytes_up=0,
        bytes_down=0,
    )
    return RunView(
        phase=f"comparing: {plan.name}", reason="", steps=plan.steps, rounds=0, islands=(island,), elapsed_s=elapsed_s
    )


def main(run_path: str, island_path: str) -> None:
    """Trains one comparison; a rank of torch's launcher."""
    import torch.distributed as dist

    from island import mesh

    run = load_run(Path(run_path).read_text(), run_path).value
    config = load_island(Path(island_path).read_text(), island_path).value
    _train(run, config, mesh.start(config.mesh))
    gc.collect()
    # DDP's reducer must not be the last to hold the process group: torch frees it with the GIL held, and then waits for
    # a thread of gloo's that may be waiting for the GIL.
    dist.destroy_process_group()


def _train(run: RunConfig, config: IslandConfig, device: torch.device) -> None:
    """Trains to the end of the run; DDP where there are several ranks."""
    from torch.nn.parallel import DistributedDataParallel

    from island import mesh
    from island.data import open_batches, open_data
    from island.group import Group
    from island.metrics import JsonLines, Metrics
    from island.model import Decoder
    from island.trainer import Trainer, held_out_loss

    group = Group()
    model: torch.nn.Module = Decoder(config=run.model).to(device)
    mesh.fill(model, run)
    if group.size > 1:
        model = DistributedDataParallel(model)
    text = open_data(config.data, run.model, run.tokenizer)
    sink = partial(JsonLines, Path(config.metrics.dir) / f"{config.island.id}.jsonl")
    with (
        Metrics([sink] if group.rank == 0 else [], config.metrics.queue_records) as metrics,
        open_batches(text, run, config, rank=group.rank, ranks=group.size) as batches,
    ):
        trainer = Trainer(
            run=run,
            island=config,
            model=model,
            text=text,
            batches=batches,
            device=device,
            metrics=metrics,
            site=None,
            stop=lambda: False,
        )
        trainer.train()
        loss = held_out_loss(model, text, EVAL_SEQUENCES, device, group, nullcontext())
        metrics.record("end", loss=loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
