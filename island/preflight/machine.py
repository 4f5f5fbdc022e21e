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
from island.parallel.memory import float8
from island.preflight.finding import Finding, fail, of_others, ok, warn

SLOW_FSYNC_S = 0.1
SYNCED_BYTES = 2**20
LOG_BYTES = 100 * 2**20
"""Free space below which logs and metrics are in danger."""


def devices(island: IslandConfig) -> Finding:
    """Whether there is a GPU and NCCL for each rank of this node that is to use one, and float8 where asked for."""
    mesh, here, count = island.mesh, island.ranks_here, torch.cuda.device_count()
    nodes = island.nodes.most
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    if mesh.device == "cuda" and count < here:
        ranks = f"mesh.ranks is {mesh.ranks}" + (f" on {nodes} nodes, {here} each" if nodes > 1 else "")
        return fail(
            "devices",
            f"mesh.device is 'cuda' and {ranks}, but there are {count} GPUs",
            "set mesh.device='cpu', or mesh.ranks to the number of GPUs; see that torch is built for CUDA",
            ExitCode.ENVIRONMENT,
        )
    uses = mesh.device != "cpu" and count >= here
    if island.memory.fp8:
        device = torch.device("cuda", 0) if uses else torch.device("cpu")
        float8(device, emulated=island.memory.fp8_emulated)
    if not uses:
        found = f"{here} rank{'s' * (here > 1)} on {os.cpu_count()} CPU cores (gloo)"
        if mesh.device == "auto" and count:
            return warn("devices", f"{found}; {count} GPUs are not used", f"set mesh.ranks={count * nodes} to use them")
        return ok("devices", found)
    if not dist.is_nccl_available():
        return fail("devices", f"{count} GPUs, and torch has no NCCL", "install torch for CUDA", ExitCode.ENVIRONMENT)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return ok("devices", f"{here} of {count} GPUs ({names}), NCCL {version}")


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


def wanted(island: IslandConfig, run: RunConfig | None) -> dict[str, tuple[str, str]]:
    """Packages beside our own that the settings call for: package -> (setting, extra of ours that brings it)."""
    data, found = island.data, dict[str, tuple[str, str]]()
    if island.metrics.wandb_project:
        found["wandb"] = "metrics.wandb_project", "wandb"
    if island.memory.fp8:
        found["torchao"] = "memory.fp8", "fp8"
    if data.parquet:
        found["pyarrow"] = "data.parquet", "data"
    if data.dataset:
        found["datasets"] = "data.dataset", "data"
    if run is not None and run.model.source == "transformers":
        found["transformers"] = "model.source='transformers'", "hf"
    if run is not None and run.tokenizer.kind == "hf" and not data.tokens:
        found["tokenizers"] = "tokenizer.kind='hf'", "data"
    return found


def packages(island: IslandConfig, run: RunConfig | None, *, allowed: bool) -> Finding:
    """Whether the packages are there that the settings call for.

    Args:
        allowed: whether the run's optimizer may be imported (`island.code`).

    Raises:
        ConfigError, EnvironmentFault: the optimizer that the run names cannot be imported.
    """
    calls = wanted(island, run)
    missing = {package: call for package, call in calls.items() if find_spec(package) is None}
    if missing:
        found = "; ".join(f"{setting} needs {package}, which is not here" for package, (setting, _) in missing.items())
        extras = ",".join(sorted({extra for _, extra in missing.values()}))
        return fail("packages", found, f"pip install 'diloco[{extras}]'", ExitCode.ENVIRONMENT)
    names = list(calls)
    if allowed and run is not None and ":" in run.inner.optimizer:
        with of_others(f"inner.optimizer='{run.inner.optimizer}'"):
            optimizer_class(run.inner.optimizer)
        names.append(run.inner.optimizer)
    return ok("packages", f"{', '.join(names)} can be imported" if names else "nothing is called for beside our own")
