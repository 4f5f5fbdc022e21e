"""One rank of an island; the daemon starts it with torch's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from diloco import failpoints
from diloco.config import RunConfig, load_run
from diloco.errors import DilocoError, ExitCode, exit_code
from diloco.settings import to_toml
from island import mesh
from island.config import PROGRESS, IslandConfig, check_code, load_island
from island.data import Cursor, check_shards, document_end, open_batches, open_data
from island.group import Group
from island.holding import Holding
from island.link import Link
from island.metrics import JsonLines, Metrics, Sink, Wandb
from island.pace import Pace
from island.parallel import assemble
from island.session import Session, join
from island.trainer import ASKED, FINISHED, Trainer

log = logging.getLogger("diloco.island")
STEP_EDGE_S = 3
"""How long a rank that was asked to leave goes on to the next step edge."""


def main(path: str) -> int:
    """Runs one rank with the settings in `path`. Returns its exit code."""
    departure = Departure()
    whole = load_island(Path(path).read_text(encoding="utf-8"), path).value
    config = whole.of(int(os.environ.get("GROUP_WORLD_SIZE", whole.nodes.most)))
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if rank == 0 else logging.ERROR,
        format=f"%(asctime)s %(levelname)-7s {config.island.id}/{rank}: %(message)s",
    )
    try:
        setting = os.environ.get(failpoints.VARIABLE, "")
        failpoints.arm(failpoints.trap(setting, lambda which: os.kill(os.getpid(), signal.Signals[which])))
        return work(config, departure, Path(path).with_name(PROGRESS))
    except DilocoError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return exit_code(error)
    except RuntimeError:
        if departure.asked:
            return ExitCode.OK  # another rank, asked as well, has left this one's collective
        raise


class Departure:
    """Whether this rank was asked to leave, by SIGTERM, SIGINT or SIGUSR1.

    Until it trains it leaves at once, from whatever it waits for. Once it trains, all ranks leave together at a step
    edge; where none comes soon, because a round is not ending, it leaves at once too.
    """

    def __init__(self) -> None:
        self.asked = self.training = False
        for which in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(which, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        again, self.asked = self.asked, True
        if not self.training or number == signal.SIGALRM:
            raise SystemExit(ExitCode.OK)
        if not again:
            signal.alarm(STEP_EDGE_S)

    def reached(self) -> None:
        """The step edge has come: what is left to do may take as long as the daemon lets it."""
        signal.alarm(0)


def work(config: IslandConfig, departure: Departure, progress: Path) -> int:
    """Builds the model, joins the run and trains to its end; touches `progress` at updates. Returns the exit code."""
    island = config.island
    device = mesh.start(config.mesh)
    group = Group()
    run = load_run(group.from_first(lambda: _served_run(config)).decode(), "the coordinator").value
    check_code(run, island.code)
    text = open_data(config.data, run.model, run.tokenizer)
    check_shards(text, run, config)
    end = document_end(config.data, run.model, run.tokenizer)
    engine = assemble(run, config.mesh, config.memory, device, document_end=end)
    with (
        Metrics(_sinks(config, run) if group.rank == 0 else [], config.metrics.queue_records) as metrics,
        join(
            engine.model,
            None,  # the trainer has it
            island.coordinator,
            island_id=island.id,
            run_id=island.run_id or run.run.id,
            connect_timeout_s=island.connect_timeout_s,
            reconnect_timeout_s=island.reconnect_timeout_s,
            max_bandwidth_mbps=island.max_bandwidth_mbps,
            spool_dir=island.spool_dir or str(progress.parent / "spool"),
            tls=config.tls.files(),
            checkpoint=config.checkpoint,
            anchors=config.memory.anchors,
        ) as site,
        open_batches(
            text,
            run,
            config,
            step=site.at_step,
            cursor=(holding := Holding(site, run, group)).first(_kept_cursor(site)),
            held=holding.on,
            rank=engine.data_rank,
            ranks=engine.data_ranks,
            pin=device.type == "cuda",
        ) as batches,
    ):
        site.record, site.progressed = metrics.record, progress.touch
        ranks = f"{group.size} rank" + "s" * (group.size > 1)
        log.info("run %s, epoch %d, from step %d, %s", site.run_id, site.epoch, site.at_step, ranks)
        trainer = Trainer(
            run=run,
            island=config,
            engine=engine,
            text=text,
            batches=batches,
            metrics=metrics,
            site=site,
            holding=holding,
            pace=Pace.of(engine.model, run.model, device, group.size, config.metrics.peak_tflops, time.monotonic),
            stop=lambda: departure.asked,
        )
        departure.training = True
        reason = trainer.train()
        departure.reached()
        if reason != FINISHED:
            site.keeping.edge(last=True)
        site.keeping.settle()
        digests = site.digests()
        up, down = site.report()
        metrics.record(
            "end",
            reason=reason,
            step=site.at_step,
            rounds=site.rounds,
            bytes_up=up,
            bytes_down=down,
            digests=" ".join(digests),
            versions=" ".join(str(p.version) for p in site.replica.position),
        )
        site.leave(reason)
        log.info("left: %s", reason)
    dist.destroy_process_group()
    others_left = reason == ASKED and not departure.asked
    return ExitCode.RESIZED if others_left else ExitCode.OK


def _kept_cursor(site: Session) -> Cursor | None:
    """Where the checkpoint that the island goes on with stands in its data."""
    kept = site.kept("data")
    return Cursor.from_json(kept) if kept else None


def _served_run(config: IslandConfig) -> bytes:
    """The settings that the coordinator serves; waits for a coordinator that is not there yet."""
    patience_s = config.island.connect_timeout_s
    link = Link(config.island.coordinator, patience_s=patience_s, say=log.warning, tls=config.tls.files())
    try:
        return link.status().config_toml.encode()
    finally:
        link.close()


def _sinks(config: IslandConfig, run: RunConfig) -> list[Callable[[], Sink]]:
    metrics, island = config.metrics, config.island
    sinks: list[Callable[[], Sink]] = []
    if metrics.dir:
        sinks.append(lambda: JsonLines(Path(metrics.dir) / f"{island.id}.jsonl"))
    if metrics.wandb_project:
        folder = Path(metrics.dir or ".")
        sinks.append(Wandb(metrics.wandb_project, run.run.id, island.id, folder, {"run": to_toml(run)}))
    return sinks
