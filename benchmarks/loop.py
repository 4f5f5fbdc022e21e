"""One rank of `benchmarks.overhead`: a plain loop, with or without the lines that take it into a run."""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import ExitStack

import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import tensors
from benchmarks.processes import serve
from island.session import Session, join

LAYERS, LENGTH, BATCH, VOCABULARY = 4, 64, 8, 256
PEAKS = 12


class Loop:
    """What it can be told to do."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, site: Session | None, device: str) -> None:
        self._model, self._optimizer, self._site, self._device = model, optimizer, site, device
        self._batch = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)

    def train(self, steps: int) -> float:
        """The median duration of so many steps, in seconds."""
        durations = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._step()
            if self._device != "cpu":
                torch.cuda.synchronize()
            durations.append(time.perf_counter() - begin)
        return statistics.median(durations)

    def _step(self) -> None:
        logits = self._model(self._batch)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._batch.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._site:
            self._site.step(tokens=self._batch.numel())

    def edge(self) -> float:
        """The median duration of the edge after a step, with nothing before it, in seconds."""
        durations = []
        for _ in range(200):
            begin = time.perf_counter()
            assert self._site
            self._site.step(tokens=self._batch.numel())
            durations.append(time.perf_counter() - begin)
        return statistics.median(durations)

    def memory(self) -> tuple[int, int, int]:
        """Bytes of the process in host memory, its peak on the device (0 without one), and parameters that it holds."""
        held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in self._model.parameters())
        peak = torch.cuda.max_memory_allocated() if self._device != "cpu" else 0
        return psutil.Process().memory_info().rss, peak, held

    def tensors(self) -> tuple[int, int]:
        """Bytes of all tensors between two steps, and with those that are there at the peak of a step.

        Of several steps that whose peak is lowest: with FSDP the moment at which gathered weights are freed varies.
        """
        held = tensors.held()
        return held, held + min(tensors.peak(self._step) for _ in range(PEAKS))


def main() -> None:
    """Builds the loop, joins where there is an address, and serves."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    device = f"cuda:{options['rank']}" if torch.cuda.device_count() >= options["ranks"] else "cpu"
    if options["ranks"] > 1:
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{options['store']}",
            rank=options["rank"],
            world_size=options["ranks"],
        )
    torch.manual_seed(0)
    model = _model(options["dim"]).to(device)
    if options["ranks"] > 1:
        from torch.distributed.fsdp import fully_shard

        for block in model[1].children():
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with ExitStack() as stack:
        site = None
        if options["address"]:
            site = stack.enter_context(
                join(model, optimizer, options["address"], island_id="bench", anchors=options["anchors"])
            )
        serve(Loop(model, optimizer, site, device))
    if options["ranks"] > 1:
        dist.destroy_process_group()


def _model(dim: int) -> nn.Sequential:
    layers = nn.Sequential(
        *(nn.TransformerEncoderLayer(dim, max(1, dim // 64), 4 * dim, 0.0, batch_first=True) for _ in range(LAYERS))
    )
    return nn.Sequential(nn.Embedding(VOCABULARY, dim), layers, nn.Linear(dim, VOCABULARY))


if __name__ == "__main__":
    main()
