"""The island's settings: what is local to one site. What islands must agree on is in `diloco/config.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from diloco.config import NonNegative, Positive, Seconds
from diloco.settings import Resolved, Settings, parse, resolve
from diloco.tls import TLS
from island.config_checkpoint import CheckpointConfig
from island.config_data import DataConfig, EvalConfig

PROGRESS = "progress"
"""File beside the settings of ranks; it says to the daemon that updates were applied."""


class IslandSection(Settings):
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of this island, unique in the run. Contributions are folded in the order of these names."""
    coordinator: str = ""
    """HOST:PORT of the coordinator, or of any where the run has several; `--coordinator` overrides it."""
    run_id: str = ""
    """The run this island means to join; empty takes whatever the coordinator serves."""
    connect_timeout_s: Seconds = 300.0
    """How long to look for a coordinator that does not answer before giving up."""
    reconnect_timeout_s: Seconds = 86_400.0
    """How long a coordinator that has answered before may be silent. Until then the island trains on, or pauses where
    it may not go further, and tries again; then it gives up."""
    spool_dir: str = ""
    """Folder in which anchors are kept while they come, and what the up codec dropped, so that an island that is
    started again goes on with both. Empty: a temporary one, which outlives the ranks and not the daemon."""
    max_bandwidth_mbps: Annotated[float, Field(ge=0)] = 0.0
    """Cap on what this island sends to the coordinator, and on what it receives, in megabits per second; 0 for none.
    Heartbeats are not counted."""
    log_dir: str = ""
    """Folder of one log per rank; empty: a temporary one."""
    max_restarts: NonNegative = 3
    """Times the ranks are started again after one of them failed, without a round completed in between. Each time the
    island rests longer before it."""


class TLSConfig(Settings):
    cert: str = ""
    """PEM file with this island's certificate. With it the connection is encrypted, and both ends show certificates;
    without, nothing is encrypted and nobody is authenticated."""
    key: str = ""
    """PEM file with its private key, without a passphrase."""
    ca: str = ""
    """PEM file with the authority that has signed the coordinator's certificate."""
    server_name: str = ""
    """Name that the coordinator's certificate is for, where that is not the host in `island.coordinator`."""

    @model_validator(mode="after")
    def _fits(self) -> TLSConfig:
        missing = [f"tls.{name}" for name in ("cert", "key", "ca") if not getattr(self, name)]
        if missing and (len(missing) < 3 or self.server_name):
            raise ValueError(f"tls.cert, tls.key and tls.ca go together: name a file for {' and '.join(missing)} too")
        return self

    def files(self) -> TLS | None:
        """The files, where there are any."""
        return TLS(**self.model_dump()) if self.cert else None


class MeshConfig(Settings):
    ranks: Positive = 1
    """Processes of this island. With GPUs, one each."""
    replicas: Positive = 1
    """HSDP: the model is sharded over ranks / replicas and replicated this often. 1 is plain FSDP."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is a GPU per rank (NCCL), else the CPU (gloo)."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward (FSDP's mixed precision). Masters are always float32."""
    threads_per_rank: NonNegative = 0
    """CPU threads of each rank; 0 shares the machine's cores among this island's ranks."""

    @model_validator(mode="after")
    def _fits(self) -> MeshConfig:
        if self.ranks % self.replicas:
            raise ValueError(
                f"mesh.replicas ({self.replicas}) must divide mesh.ranks ({self.ranks}): "
                f"set mesh.replicas={math.gcd(self.replicas, self.ranks)}"
            )
        return self


class MetricsConfig(Settings):
    dir: str = ""
    """Folder of `<island>.jsonl`, the record of this island; empty writes none."""
    every_steps: Positive = 10
    """Inner steps between two records."""
    wandb_project: str = ""
    """Weights & Biases project; empty leaves it off. Without an API key it records offline."""
    queue_records: Positive = 10_000
    """Records that may wait for a slow sink; more are dropped and counted."""


class IslandConfig(Settings):
    """Everything that is local to one site."""

    island: IslandSection
    tls: TLSConfig = TLSConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _fits(self) -> IslandConfig:
        batch, ranks = self.data.batch_sequences, self.mesh.ranks
        if batch % ranks:
            raise ValueError(
                f"data.batch_sequences ({batch}) must be a multiple of mesh.ranks ({ranks}): "
                f"set data.batch_sequences={batch + ranks - batch % ranks}"
            )
        return self


def load_island(text: str, source: str, overrides: Sequence[str] = ()) -> Resolved[IslandConfig]:
    """Reads an island file. Raises `ConfigError` with the key, the source and what to write instead."""
    return resolve(IslandConfig, [(source, parse(text, source))], overrides)
