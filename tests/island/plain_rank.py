"""One rank of an island with a plain loop: `python -m tests.island.plain_rank ADDRESS KIND OUT`, as torchrun starts it.

KIND is `ddp`; `compiled-ddp`; `device-ddp`, whose anchors are on the device; `fsdp`; or `no-cpu`, where the default
group carries no CPU tensors, as NCCL's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import island
from island.config_mesh import AnchorPolicy
from tests.island.test_library import BATCH, WIDTH, model


def main(address: str, kind: str, out: str) -> None:
    """Trains to the end of the run; writes what this rank has seen."""
    torch.set_num_threads(1)
    dist.init_process_group("cuda:gloo" if kind == "no-cpu" else "gloo")
    net: nn.Module = model()
    if kind == "fsdp":
        fully_shard(net)
    if "ddp" in kind:
        net = DistributedDataParallel(net)
    if "compiled" in kind:
        net = cast(nn.Module, torch.compile(net, backend="eager"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0 if kind == "no-cpu" else dist.get_rank())
    anchors: AnchorPolicy = "device" if "device" in kind else "cpu"
    with island.join(net, optimizer, address, island_id="ranks", anchors=anchors) as site:
        while not site.done:
            batch = torch.randn(BATCH, WIDTH, generator=generator)
            (net(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            site.step()
        seen = {"digests": site.digests(), "step": site.at_step, "tokens": site.tokens}
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
