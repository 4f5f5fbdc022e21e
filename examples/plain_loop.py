"""A plain PyTorch loop that takes part in a run: a few lines around what was there before.

    diloco coordinator examples/run.toml --state state --listen 127.0.0.1:7000
    python examples/plain_loop.py 127.0.0.1:7000 tokyo
    python examples/plain_loop.py 127.0.0.1:7000 oslo          # in another shell

On several GPUs: `torchrun --nproc-per-node 8 examples/plain_loop.py HOST:PORT ISLAND`.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import island

address, name = sys.argv[1:]
distributed = dist.is_torchelastic_launched()
if distributed:
    dist.init_process_group()
rank = dist.get_rank() if distributed else 0

model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
if distributed:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
data = torch.Generator().manual_seed(sum(name.encode()) + rank)  # each island and rank has its own

with island.join(model, optimizer, address, island_id=name, scheduler=scheduler) as site:
    while not site.done:
        batch = torch.randn(32, 16, generator=data)
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        site.step(tokens=len(batch), loss=loss.item())
    with site.outer_parameters(), torch.no_grad():
        held_out = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
        loss = (model(held_out) - held_out.flip(1)).square().mean()
    digests = " ".join(site.digests())
    if rank == 0:
        print(f"{name}: step {site.at_step}, held-out loss {loss:.4f}")
        print(f"{name}: digests {digests}")

if distributed:
    dist.destroy_process_group()
