"""One rank of an island that something happens to in a test.

python -m tests.integration.faults SPEC.json     with RANK and WORLD_SIZE in the environment
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordinator.files import REAL
from island.session import Session, join
from tests.integration.rank import WIDTH, build
from tests.processes import wait_until

AT = 5
"""Inner step before which it happens."""


def happens(site: Session, fault: str, folder: Path, rank: int) -> None:
    """A parameter of rank 1 is NaN; or the ranks wait for the test, and then for rank 0 to find its heart "silent"."""
    if fault == "nan":
        if rank == 1:
            with torch.no_grad():
                held = next(h for h in site.replica.owned(0) if h.spec.kind == "parameter")
                held.local.view(-1)[0] = math.nan
        return
    (folder / f"at-{rank}").touch()
    wait_until((folder / "go").exists, "the test lets the island go on")
    if fault == "silent":
        wait_until(lambda: site.heart is None or site.heart.silent, "the heart knows")


def main(path: str) -> None:
    """Trains to the end of the run; writes what was seen after every step."""
    spec = json.loads(Path(path).read_text())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=size)
    model = build(spec["layout"], spec["seed"])
    generator = torch.Generator().manual_seed(spec["seed"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    seen: list[Any] = []
    taken, folder = 0, Path(spec["out"]).parent
    with join(model, optimizer, spec["address"], island_id=spec["island"], connect_timeout_s=60) as site:
        while not site.done:
            batch = torch.randn(4, WIDTH, generator=generator)
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            taken += 1
            if taken == AT:
                happens(site, spec["fault"], folder, rank)
            site.step(tokens=4)
            (folder / f"step-{site.at_step}-{rank}").touch()
            seen.append([site.at_step, site.epoch, [p.version for p in site.replica.position], site.digests()])
        finite = all(bool(torch.isfinite(h.local).all()) for f in range(3) for h in site.replica.held(f))
        counts = {"rejoins": site.rejoins, "rollbacks": site.rollbacks, "finite": finite}
    REAL.write(Path(spec["out"]).with_suffix(f".{rank}.json"), json.dumps({"seen": seen, **counts}).encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
