"""The island's settings: what is local to one site. What islands must agree on is in `diloco/config.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from diloco.config import RunConfig
from diloco.errors import ConfigError
from diloco.settings import NonNegative, Positive, Resolved, Seconds, Settings, parse, resolve
from diloco.tls import TLS
from island.config_checkpoint import CheckpointConfig
from island.config_data import DataConfig, EvalConfig
from island.config_mesh import MemoryConfig, MeshConfig
from island.config_nodes import NodesConfig, PreemptionConfig

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
    code: tuple[str, ...] = ()
    """Code that the run's settings may name and this island then imports and calls (`model.source`, `inner.optimizer`):
    MODULE:NAME, or patterns such as "my_models:*". Empty: none, since it would run here with this island's rights."""
    log_dir: str = ""
    """Folder of one log per rank; empty: a temporary one."""
    leave_timeout_s: Positive = 30
    """How long ranks may take to leave after a signal, with the last checkpoint, before they are killed."""
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


class MetricsConfig(Settings):
    dir: str = ""
    """Folder of `<island>.jsonl`, the record of this island; empty writes none."""
    every_steps: Positive = 10
    """Inner steps between two records."""
    peak_tflops: Annotated[float, Field(ge=0)] = 0.0
    """What one device can do at most, in TFLOP/s, to which MFU is the share; 0 takes the bf16 peak of a GPU that is
    known, and shows no MFU else."""
    wandb_project: str = ""
    """Weights & Biases project; empty leaves it off. Without an API key it records offline."""
    queue_records: Positive = 10_000
    """Records that may wait for a slow sink; more are dropped and counted."""


class IslandConfig(Settings):
    """Everything that is local to one site."""

    island: IslandSection
    tls: TLSConfig = TLSConfig()
    mesh: MeshConfig = MeshConfig()
    memory: MemoryConfig = MemoryConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    nodes: NodesConfig = NodesConfig()
    preemption: PreemptionConfig = PreemptionConfig()

    @model_validator(mode="after")
    def _fits(self) -> IslandConfig:
        batch, mesh = self.data.batch_sequences, self.mesh
        least = mesh.data_ranks * mesh.chunks * self.memory.accumulate
        if batch % least:
            parts = [f"mesh.ranks ({mesh.ranks}) without those that read the same rows: {mesh.data_ranks}"]
            parts += [f"{mesh.chunks} microbatches of the pipeline"] * (mesh.chunks > 1)
            parts += [f"memory.accumulate ({self.memory.accumulate})"] * (self.memory.accumulate > 1)
            raise ValueError(
                f"data.batch_sequences ({batch}) must be a multiple of {least}, the product of {', '.join(parts)}: "
                f"set data.batch_sequences={batch + least - batch % least}"
            )
        self._check_documents()
        self._check_nodes()
        return self

    def _check_documents(self) -> None:
        """Raises `ValueError` where documents are to be masked and the mesh or the kernel cannot."""
        if not self.data.mask_documents:
            return
        for name, why in (
            ("tensor", "cuts what a block takes, and a mask of documents is whole"),
            ("pipeline", "hands stages the residual stream, which does not say where documents end"),
            ("context", "cuts sequences, and a part does not say where its first document began"),
        ):
            if (degree := getattr(self.mesh, name)) > 1:
                raise ValueError(
                    f"mesh.{name} ({degree}) {why} (data.mask_documents): "
                    f"set mesh.{name}=1 or data.mask_documents=false"
                )
        if self.memory.attention == "flash":
            raise ValueError(
                "memory.attention 'flash' takes no mask, and data.mask_documents makes one: set memory.attention="
                "efficient or data.mask_documents=false"
            )

    def _check_nodes(self) -> None:
        """Raises `ValueError` where some number of nodes that may train cannot."""
        ranks, nodes = self.mesh.ranks, self.nodes
        if ranks % nodes.most:
            raise ValueError(
                f"mesh.ranks ({ranks}) must be a multiple of nodes.most ({nodes.most}), as every node has as many: "
                f"set mesh.ranks={ranks + nodes.most - ranks % nodes.most}"
            )
        for count in range(nodes.least, nodes.most):
            try:
                self.of(count)
            except ValidationError as error:
                why = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(
                    f"nodes.least ({nodes.least}) lets the island train on {count} of {nodes.most} nodes, and it "
                    f"cannot: with mesh.ranks={ranks // nodes.most * count}, {why}; or raise nodes.least"
                ) from None

    @property
    def ranks_here(self) -> int:
        """Ranks of one node."""
        return self.mesh.ranks // self.nodes.most

    def of(self, nodes: int) -> IslandConfig:
        """The settings of the island while so many of its nodes train. Raises `ValidationError` where they cannot."""
        settings = self.model_dump()
        settings["mesh"]["ranks"] = self.ranks_here * nodes
        return IslandConfig.model_validate({**settings, "nodes": {}})


def check_code(run: RunConfig, allowed: Sequence[str]) -> None:
    """Raises `ConfigError` where a run names code that its island does not allow (`island.code`)."""
    for key, name in (("model.source", run.model.source), ("inner.optimizer", run.inner.optimizer)):
        if ":" in name and not any(fnmatchcase(name, pattern) for pattern in allowed):
            raise ConfigError(
                f"the run has its islands import and call '{name}' ({key}), and this one does not allow that: "
                f"if you trust it, set island.code={json.dumps([*allowed, name])}"
            )


def load_island(text: str, source: str, overrides: Sequence[str] = ()) -> Resolved[IslandConfig]:
    """Reads an island file. Raises `ConfigError` with the key, the source and what to write instead."""
    return resolve(IslandConfig, [(source, parse(text, source))], overrides)
