"""This machine: its GPUs, its folders, its packages."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from diloco.config import RunConfig
from diloco.errors import ExitCode
from island.config import IslandConfig
from island.optimizers.build import optimizer_class
from island.preflight.finding import Finding, fail, ok, warn

SLOW_FSYNC_S = 0.1
SYNCED_BYTES = 2**20
LOG_BYTES = 100 * 2**20
"""Free space below which logs and metrics are in danger."""


def devices(island: IslandConfig) -> Finding:
    """Whether there is a GPU and NCCL for each rank, where it is to use one."""
    mesh, count = island.mesh, torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    if mesh.device == "cuda" and count < mesh.ranks:
        return fail(
            "devices",
            f"mesh.device is 'cuda' and mesh.ranks is {mesh.ranks}, but there are {count} GPUs",
            "set mesh.device='cpu', or mesh.ranks to the number of GPUs; see that torch is built for CUDA",
            ExitCode.ENVIRONMENT,
        )
    if mesh.device == "cpu" or count < mesh.ranks:
        found = f"{mesh.ranks} ranks on {os.cpu_count()} CPU cores (gloo)"
        if mesh.device == "auto" and count:
            return warn("devices", f"{found}; {count} GPUs are not used", f"set mesh.ranks={count} to use them")
        return ok("devices", found)
    if not dist.is_nccl_available():
        return fail("devices", f"{count} GPUs, and torch has no NCCL", "install torch for CUDA", ExitCode.ENVIRONMENT)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return ok("devices", f"{mesh.ranks} of {count} GPUs ({names}), NCCL {version}")


def folder(setting: str, path: str, need_bytes: int, free: Callable[[Path], int] | None = None) -> Finding:
    """Whether a folder of the settings can be written, has room, and how long it takes to make a megabyte durable.

    Args:
        setting: its key.
        path: the folder, which need not exist; "" is a temporary one.
        need_bytes: what will be kept there.
        free: free bytes of the disk of a path.
    """
    there = Path(path or tempfile.gettempdir()).absolute()
    while not there.exists():
        there = there.parent
    free_bytes = (free or _free)(there)
    times = []
    with tempfile.TemporaryFile(dir=there) as file:
        for _ in range(3):
            begin = time.monotonic()
            file.write(bytes(SYNCED_BYTES))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.monotonic() - begin)
    found = f"{path or 'a temporary folder'}: {free_bytes / 1e9:.1f} GB free"
    found += f", 1 MiB durable in {1e3 * statistics.median(times):.1f} ms"
    if free_bytes < need_bytes:
        advice = f"make room: {need_bytes / 1e9:.1f} GB will be kept there; or set {setting} to another disk's folder"
        return fail(setting, found, advice, ExitCode.ENVIRONMENT)
    return durability(setting, found, statistics.median(times))


def durability(setting: str, found: str, seconds: float) -> Finding:
    """Whether a megabyte is durable soon enough."""
    if seconds > SLOW_FSYNC_S:
        return warn(setting, found, f"set {setting} to a folder of a local disk: this one is slow, as networks are")
    return ok(setting, found)


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def packages(island: IslandConfig, run: RunConfig | None) -> Finding:
    """Whether the packages are there that the settings call for."""
    wanted = {"wandb": ("metrics.wandb_project", "pip install 'diloco[wandb]'")} if island.metrics.wandb_project else {}
    for package, (setting, command) in wanted.items():
        if find_spec(package) is None:
            return fail("packages", f"{setting} needs {package}, which is not here", command, ExitCode.ENVIRONMENT)
    names = list(wanted)
    if run is not None and ":" in run.inner.optimizer:
        optimizer_class(run.inner.optimizer)
        names.append(run.inner.optimizer)
    return ok("packages", f"{', '.join(names)} can be imported" if names else "nothing is called for beside our own")
