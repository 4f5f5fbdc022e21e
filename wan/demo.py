"""The demo: a coordinator and islands on this machine train a small language model on real text."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from diloco.config import RunConfig, load_run
from diloco.errors import ConfigError, DeadlineExceeded, EnvironmentFault, InputError
from diloco.fragments import partition
from diloco.layout import Layout, TensorSpec, named_tensors
from diloco.settings import Resolved, to_toml
from diloco.v1 import coordinator_pb2 as pb
from island.config import IslandConfig
from island.data import Bytes, Packed, check_vocabulary, packed_text
from island.group import Group
from island.link import Link
from island.model import Decoder, generate
from island.trainer import held_out_loss
from wan.baseline import EVAL_SEQUENCES, compare
from wan.checkpoint import load
from wan.processes import Processes
from wan.progress import IslandView, Progress, RunView
from wan.report import Curve, IslandRow, Report, table, write

START_TIMEOUT_S = 120.0
POLL_S = 0.4
PROMPT = "def "
SAMPLE_BYTES = 400

MARK = "# Written by `diloco demo`, which removes this folder when it starts again.\n"
"""First line of the run file in the demo's folder: without it, the folder is somebody else's."""

RUN = """
[model]
dim = 64
layers = 4
heads = 4
kv_heads = 2
ffn_dim = 176
sequence_length = 64

[inner]
lr = 4e-3
warmup_steps = 20

[outer]
lr = 0.6

[wire]
up = "bf16"
down = "bf16"

[rounds]
lease_s = 60.0
"""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What the command line asks for."""

    ranks: tuple[int, ...] = (1, 1, 1, 1)
    """Ranks of each island."""
    steps: int = 500
    sync_every: int = 50
    fragments: int = 2
    seed: int = 0
    text: tuple[str, ...] = ()
    out: Path = Path("diloco-demo")
    compare: bool = False
    overrides: tuple[str, ...] = ()
    batch: int = 16
    """Sequences per island and inner step, rounded up to what every number of ranks divides."""

    @property
    def islands(self) -> tuple[str, ...]:
        return tuple(f"island-{i + 1}" for i in range(len(self.ranks)))

    @property
    def sequences(self) -> int:
        total = sum(self.ranks)
        unit = math.lcm(*self.ranks, total // math.gcd(total, len(self.ranks)))
        return unit * math.ceil(self.batch / unit)

    def under(self, config: RunConfig) -> Demo:
        """The same demo with what `overrides` have changed."""
        run, sync = config.run, config.sync
        return replace(self, steps=run.steps, seed=run.seed, sync_every=sync.every_steps, fragments=sync.fragments)


def run(demo: Demo, console: Console) -> Report:
    """Trains, shows progress on `console`, writes the results to `demo.out`, and returns them.

    Raises:
        ConfigError, InputError: what was asked for does not fit together.
        EnvironmentFault: a process failed; its log is quoted.
    """
    config = settings(demo)
    demo = demo.under(config.value)
    check_model(config.value)
    text = packed_text(demo.text, config.value.model, Bytes())
    text.check([0], len(demo.ranks), demo.sequences)
    prepare(demo, config.value)
    begun = time.monotonic()
    title = f"{len(demo.ranks)} islands, {sum(demo.ranks)} ranks, H={demo.sync_every}, {demo.fragments} fragments"
    with Processes(demo.out / "logs") as processes, Progress(console, title, time.monotonic) as progress:
        status = train(demo, processes, progress)
        seconds = time.monotonic() - begun
        curves, losses = compare(demo, config.value, processes, progress) if demo.compare else ((), {})
    report = result(demo, config, text, status, seconds, curves, losses)
    write(report, demo.out)
    console.print(table(report))
    console.print()
    console.print(Text.assemble((report.prompt, "bold"), report.sample))
    console.print()
    return report


def settings(demo: Demo) -> Resolved[RunConfig]:
    """The run's settings: the demo's own, what was asked for, and `--set`."""
    strategy = "whole" if demo.fragments == 1 else "strided"
    asked = (
        f"run.id='demo-{demo.seed}'",
        f"run.seed={demo.seed}",
        f"run.steps={demo.steps}",
        f"sync.every_steps={demo.sync_every}",
        f"sync.fragments={demo.fragments}",
        f"sync.strategy='{strategy}'",
        f"rounds.start_islands={len(demo.ranks)}",
        f"rounds.quorum={len(demo.ranks)}",
    )
    return load_run(RUN, "demo", (*asked, *demo.overrides))


def check_model(config: RunConfig) -> None:
    """Raises `ConfigError` where the run does not fit the demo's bytes and shards, or has too many fragments."""
    if config.tokenizer.kind != "bytes" or config.shards.count:
        raise ConfigError("the demo reads bytes and divides its text itself: set no tokenizer.kind and no shards.count")
    check_vocabulary(config.model.vocab_size)
    with torch.device("meta"):
        tensors = named_tensors(Decoder(config=config.model))
    partition(Layout(TensorSpec(name, tuple(t.shape), kind) for name, t, kind in tensors), config.sync)


def prepare(demo: Demo, config: RunConfig) -> None:
    """Makes the output folder with the settings files, and removes what an earlier demo left there.

    Raises:
        InputError: the folder holds something else, or cannot be made.
    """
    out, settings_file = demo.out, demo.out / "run.toml"
    try:
        if out.exists() and any(out.iterdir()) and not _is_ours(settings_file):
            raise InputError(f"{out} holds files that are not a demo's: name another folder with --out")
        shutil.rmtree(out, ignore_errors=True)
        (out / "islands").mkdir(parents=True)
        settings_file.write_text(MARK + to_toml(config))
    except OSError as error:
        raise InputError(f"cannot use the folder {out} ({error.strerror}): name another with --out") from error
    threads = max(1, (os.cpu_count() or 1) // sum(demo.ranks))
    for i, (name, ranks) in enumerate(zip(demo.islands, demo.ranks, strict=True)):
        island = IslandConfig.model_validate(
            {
                "island": {"id": name, "max_restarts": 0},
                "mesh": {"ranks": ranks, "threads_per_rank": threads},
                "data": {
                    "text": tuple(str(Path(t).resolve()) for t in demo.text),
                    "shard": i,
                    "shards": len(demo.ranks),
                    "batch_sequences": demo.sequences,
                },
                "eval": {"every_steps": demo.sync_every if i == 0 else 0, "sequences": EVAL_SEQUENCES},
                "metrics": {"dir": str((out / "metrics").resolve())},
            }
        )
        (out / "islands" / f"{name}.toml").write_text(to_toml(island))


def _is_ours(settings_file: Path) -> bool:
    return settings_file.is_file() and settings_file.read_bytes().startswith(MARK.encode())


def train(demo: Demo, processes: Processes, progress: Progress) -> pb.StatusReply:
    """Runs the coordinator and the islands to the end of the run; returns its last status."""
    diloco = [sys.executable, "-m", "diloco"]
    state, address = demo.out / "state", demo.out / "state" / "address"
    command = ["coordinator", str(demo.out / "run.toml"), "--state", str(state), "--listen", "127.0.0.1:0"]
    processes.start("coordinator", [*diloco, *command], {"OMP_WAIT_POLICY": "PASSIVE"})
    progress.update(view(None, 0.0))
    deadline = time.monotonic() + START_TIMEOUT_S
    while not address.exists():
        processes.check(["coordinator"])
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the coordinator did not start within {START_TIMEOUT_S:g} s")
        time.sleep(0.05)
    where = address.read_text()
    for name in demo.islands:
        path = demo.out / "islands" / f"{name}.toml"
        processes.start(name, [*diloco, "island", str(path), "--coordinator", where])
    link = Link(where, patience_s=5.0, say=progress.note)
    try:
        first = math.nan
        while not processes.check(demo.islands):
            processes.check(["coordinator"])
            status = link.status()
            if math.isnan(first) and any(i.progress.step for i in status.islands):
                first = time.monotonic()
            progress.update(view(status, time.monotonic() - first))
            time.sleep(POLL_S)
        status = link.status()
        progress.update(view(status, time.monotonic() - first))
    finally:
        link.close()
    processes.stop("coordinator", timeout_s=30.0)
    return status


def view(status: pb.StatusReply | None, elapsed_s: float) -> RunView:
    """What the progress display shows of a status."""
    if status is None:
        return RunView(
            phase="starting", reason="starting the coordinator", steps=0, rounds=0, islands=(), elapsed_s=0.0
        )
    islands = tuple(
        IslandView(
            id=i.id,
            state=i.state,
            step=i.progress.step,
            loss=None if math.isnan(i.progress.loss) else i.progress.loss,
            tokens_per_second=i.progress.tokens_per_second,
            bytes_up=i.progress.bytes_up,
            bytes_down=i.progress.bytes_down,
        )
        for i in status.islands
    )
    return RunView(
        phase=status.state.phase,
        reason=status.state.reason,
        steps=status.steps,
        rounds=status.rounds_committed,
        islands=islands,
        elapsed_s=0.0 if math.isnan(elapsed_s) else elapsed_s,
    )


# -- results ------------------------------------------------------------------------------------------------------


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in an island's metrics file. Raises `EnvironmentFault` where it is missing."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise EnvironmentFault(f"no metrics at {path}: {error.strerror}") from error
    return [row for row in rows if row["kind"] == kind]


def result(
    demo: Demo,
    config: Resolved[RunConfig],
    text: Packed,
    status: pb.StatusReply,
    seconds: float,
    curves: Sequence[Curve],
    losses: dict[str, float],
) -> Report:
    """Gathers what a finished demo has to show."""
    checkpoint = load(demo.out / "state")
    decoder, context = checkpoint.decoder(), config.value.model.sequence_length
    loss = held_out_loss(decoder, text, EVAL_SEQUENCES, torch.device("cpu"), Group(), nullcontext())
    prompt = torch.tensor(list(PROMPT.encode()))
    written = generate(decoder, prompt, SAMPLE_BYTES, 0.8, demo.seed, context)[len(prompt) :]
    metrics = {name: demo.out / "metrics" / f"{name}.jsonl" for name in demo.islands}
    ends = {name: records(path, "end")[-1] for name, path in metrics.items()}
    agreed = " ".join(f"{f.digest:016x}" for f in status.state.fragments)
    islands, parameters = len(demo.ranks), status.parameters
    outer = [(r["tokens"] * islands, r["outer_loss"]) for r in records(metrics[demo.islands[0]], "eval")]
    return Report(
        run_id=status.run_id,
        islands=tuple(_row(i) for i in status.islands),
        parameters=parameters,
        steps=demo.steps,
        sync_every=demo.sync_every,
        fragments=demo.fragments,
        rounds=status.rounds_committed,
        tokens=sum(i.progress.tokens for i in status.islands),
        bytes_up=sum(i.progress.bytes_up for i in status.islands),
        bytes_down=sum(i.progress.bytes_down for i in status.islands),
        bytes_data_parallel=ring_bytes(parameters, islands) * demo.steps,
        loss=loss,
        loss_unigram=text.unigram_loss(),
        loss_data_parallel=losses.get("data-parallel"),
        loss_single=losses.get("one island alone"),
        digests_agree=all(end["digests"] == agreed for end in ends.values()),
        seconds=seconds,
        train=tuple(
            Curve(
                name=name,
                tokens=tuple(r["tokens"] * islands for r in records(path, "train")),
                loss=tuple(r["loss"] for r in records(path, "train")),
            )
            for name, path in metrics.items()
        ),
        held_out=(
            Curve(name="DiLoCo, outer parameters", tokens=tuple(t for t, _ in outer), loss=tuple(v for _, v in outer)),
            *curves,
        ),
        prompt=PROMPT,
        sample=Bytes().decode(written.tolist()),
        settings=tuple((key, json.dumps(value), origin) for key, value, origin in config.rows()),
    )


def ring_bytes(parameters: int, islands: int) -> int:
    """Bytes that all islands together send in one ring all-reduce of fp32 gradients: 2 (M - 1) * 4 N."""
    return 2 * (islands - 1) * 4 * parameters


def _row(island: pb.IslandStatus) -> IslandRow:
    progress = island.progress
    return IslandRow(
        id=island.id,
        ranks=island.ranks,
        tokens=progress.tokens,
        rounds=island.contributions,
        bytes_up=progress.bytes_up,
        bytes_down=progress.bytes_down,
        loss=None if math.isnan(progress.loss) else progress.loss,
        tokens_per_second=progress.tokens_per_second,
    )


def parse_ranks(text: str, islands: int | None) -> tuple[int, ...]:
    """`--ranks-per-island`: one number for all islands, or one per island such as `2,1,1`."""
    try:
        ranks = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--ranks-per-island {text!r} is not a number, nor numbers such as 2,1,1") from None
    if min(ranks) < 1:
        raise ConfigError(f"--ranks-per-island {text!r}: every island needs at least 1 rank")
    if len(ranks) == 1:
        return ranks * (4 if islands is None else islands)
    if islands not in (None, len(ranks)):
        raise ConfigError(f"--ranks-per-island {text!r} names {len(ranks)} islands, but --islands is {islands}")
    return ranks
