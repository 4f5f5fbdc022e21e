"""The run's settings: one TOML file, owned by the coordinator and served to every island that joins.

Whatever islands must agree on is here (model, inner schedule, sync, outer optimizer, wire, rounds), so they
cannot disagree. What is local to an island is in `island/config.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from diloco.config_inner import InnerConfig as InnerConfig
from diloco.config_model import MODEL_PRESETS
from diloco.config_model import ModelConfig as ModelConfig
from diloco.config_tokenizer import ShardsConfig, TokenizerConfig
from diloco.errors import ConfigError
from diloco.settings import (
    Decay,
    Fraction,
    NonNegative,
    Positive,
    Resolved,
    Seconds,
    Settings,
    Table,
    parse,
    resolve,
    to_toml,
)

Address = Annotated[str, Field(pattern=r"^[^\s/]+:[0-9]{1,5}$")]
Strategy = Literal["whole", "sequential", "strided", "balanced"]
BufferPolicy = Literal["local", "average", "first"]
Weighting = Literal["tokens", "uniform"]
LatePolicy = Literal["drop", "discount", "hold"]

_CODEC = re.compile(r"fp32|bf16|fp16|int8|int4|e3m0|int2|topk(-([1-9][0-9]{0,3}))?(-int8|-fp32)?(-coded)?")
CODEC_NAMES = (
    "fp32, bf16, fp16, int8, int4, e3m0, int2, topk or topk-K, topk-int8 or topk-K-int8, topk-fp32 or topk-K-fp32, "
    "each topk also with -coded"
)
MOST_KEPT, MOST_CODED = 4096, 128


def _is_codec(name: str) -> bool:
    """Whether a codec has this name (`diloco.codec.by_name`, which needs torch)."""
    match = _CODEC.fullmatch(name)
    return match is not None and int(match[2] or 64) <= (MOST_CODED if match[4] else MOST_KEPT)


class RunSection(Settings):
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the run; every key, file and metric carries it. Letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds the first parameters and the order of the data."""
    steps: Positive = 1000
    """Inner steps that every island takes in the run."""
    coordinators: tuple[Address, ...] = ()
    """Where islands reach coordinator 0, 1 and so on, each as HOST:PORT; empty: there is one, at the address that
    islands are given. Fragment f belongs to coordinator f modulo their number. A run keeps their number; an address
    may change when the coordinators and the islands are started again."""
    coordinator_index: NonNegative = 0
    """Which of `coordinators` this one is. `diloco coordinator --index` sets it, so that all start with one file."""

    @model_validator(mode="after")
    def _fits(self) -> RunSection:
        if self.coordinator_index >= self.coordinator_count:
            last = self.coordinator_count - 1
            raise ValueError(
                f"run.coordinator_index ({self.coordinator_index}) names none of run.coordinators "
                f"({self.coordinator_count} of them): set run.coordinator_index={last} or less (--index), or add its "
                "address to run.coordinators"
            )
        apart = list(dict.fromkeys(self.coordinators))
        if len(apart) < len(self.coordinators):
            raise ValueError(
                f"run.coordinators names an address twice, and each coordinator has its own: "
                f"set run.coordinators={json.dumps(apart)}"
            )
        return self

    @property
    def coordinator_count(self) -> int:
        """Coordinators among which the fragments of the run are spread."""
        return max(1, len(self.coordinators))


class SyncConfig(Settings):
    every_steps: Positive = 500
    """H: inner steps between two syncs of the same fragment."""
    strategy: Strategy = "whole"
    """How tensors form fragments: all in one; runs of layers; layers strided through the depth (Streaming
    DiLoCo); tensors packed to equal bytes (Decoupled DiLoCo)."""
    fragments: Positive = 1
    """P: number of fragments. Divides `every_steps` unless `offsets_steps` is given."""
    offsets_steps: tuple[int, ...] = ()
    """First sync step of each fragment, 1..H, all different. Empty: (p + 1) * H / P."""
    overlap_steps: NonNegative = 0
    """tau: inner steps between sending a contribution and applying the update. Less than H."""
    alpha: Fraction = 0.0
    """Share of the local parameters kept when an update is applied (Streaming DiLoCo, the local merge)."""
    buffers: BufferPolicy = "local"
    """Floating-point buffers that are saved with the model: each island keeps its own; the mean of all islands
    at each sync, weighted as contributions are; or the first island's, for ever."""
    embeddings: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*")
    """Name patterns of tensors outside any layer that belong to the first fragment; the rest go to the
    last."""
    max_steps_without_coordinator: NonNegative = 500
    """Inner steps that an island trains on past a sync while no coordinator answers; then it pauses. It also pauses
    where the same fragment's next contribution falls due, since that needs the anchor which the missing answer
    brings: so never more than `every_steps`. 0 pauses at the sync step."""

    @model_validator(mode="after")
    def _fits(self) -> SyncConfig:
        h, p = self.every_steps, self.fragments
        if self.strategy == "whole" and p != 1:
            raise ValueError(
                f"sync.strategy 'whole' has one fragment, not sync.fragments ({p}): "
                "set sync.fragments=1 or sync.strategy='strided'"
            )
        if self.offsets_steps and p <= h:
            offsets, spread = self.offsets_steps, [1 + i * h // p for i in range(p)]
            if len(offsets) != p or len(set(offsets)) != p or not all(1 <= o <= h for o in offsets):
                raise ValueError(
                    f"sync.offsets_steps ({list(offsets)}) must be sync.fragments ({p}) different steps "
                    f"from 1 to sync.every_steps ({h}): set sync.offsets_steps={spread}"
                )
        elif h % p:
            fits = [f"sync.every_steps={steps}" for steps in (h - h % p, h - h % p + p) if steps]
            raise ValueError(
                f"sync.every_steps ({h}) is not a multiple of sync.fragments ({p}): "
                f"set {' or '.join(fits)}, or give sync.offsets_steps"
            )
        if self.overlap_steps >= h:
            raise ValueError(
                f"sync.overlap_steps ({self.overlap_steps}) must be below sync.every_steps ({h}), because an "
                "update is applied before the fragment's next contribution: "
                f"set sync.overlap_steps={h - 1} or less"
            )
        return self

    @property
    def offsets(self) -> tuple[int, ...]:
        """First sync step of each fragment; a period later where it could not be sent `overlap_steps` before it."""
        h, p = self.every_steps, self.fragments
        steps = self.offsets_steps or tuple((i + 1) * h // p for i in range(p))
        return tuple(step if step > self.overlap_steps else step + h for step in steps)


class OuterConfig(Settings):
    lr: Annotated[float, Field(gt=0)] = 0.7
    """Outer learning rate. 0.7 suits 8 islands at H=500; at H=30 the papers use 0.4 to 0.6 for 1 to 4
    islands."""
    momentum: Decay = 0.9
    """Outer Nesterov momentum; 0 is plain SGD."""


class MergeConfig(Settings):
    weights: Weighting = "tokens"
    """Weight of a contribution in the mean: tokens trained since the fragment was last adopted, or 1."""


class WireConfig(Settings):
    up: str = "fp32"
    """Codec of contributions (`docs/codecs.md`): one for all tensors, or "auto" or "auto:CODEC", by kind: CODEC (int4)
    for matrices, at least 4 bits for embeddings, at least bf16 for norms, biases and buffers. What int4 and those below
    drop, islands keep and send with the next contribution (error feedback)."""
    down: str = "fp32"
    """Codec of updates, likewise. What it drops stays in the coordinator's residual and is sent later."""
    up_overrides: tuple[str, ...] = ()
    """Codecs of contributions by tensors' names, "PATTERN=CODEC" (as "*router*=bf16"); the first that matches wins."""
    down_overrides: tuple[str, ...] = ()
    """Codecs of updates by tensors' names."""
    feedback_decay: Fraction = 1.0
    """Factor on what an island kept of its last contribution when it is added to the next: 1 loses nothing, SparseLoCo
    uses 0.95 with `topk` and no outer momentum, 0 keeps nothing."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=4 * 2**20)] = 2**20
    """Payload of one message of a bulk stream. 256 KiB to 1 MiB is fastest."""

    @model_validator(mode="after")
    def _fits(self) -> WireConfig:
        for way, name, overrides in (
            ("up", self.up, self.up_overrides),
            ("down", self.down, self.down_overrides),
        ):
            if name != "auto" and not _is_codec(name.removeprefix("auto:")):
                raise ValueError(
                    f"wire.{way} ({name!r}) is no codec: set it to auto, auto:CODEC or one of {CODEC_NAMES}"
                )
            for override in overrides:
                pattern, _, codec = override.rpartition("=")
                if not pattern or not _is_codec(codec):
                    raise ValueError(
                        f"wire.{way}_overrides ({override!r}) is not PATTERN=CODEC, for example '*router*=bf16'; "
                        f"codecs: {CODEC_NAMES}"
                    )
        return self


class RoundsConfig(Settings):
    start_islands: Positive = 1
    """Islands that must have loaded the first parameters before the run starts."""
    quorum: Positive = 1
    """Contributions without which a round is never committed."""
    grace_s: Annotated[float, Field(ge=0)] = 30.0
    """Once the quorum has contributed, how long the round waits at least for the other active islands."""
    deviations: Annotated[float, Field(ge=0)] = 4.0
    """The soft deadline follows what was observed: the round also waits until as long after its first contribution as
    the last one came in recent rounds, the median plus this many median absolute deviations. 0 waits for `grace_s`
    alone."""
    progress_s: Seconds = 10.0
    """An island whose upload has brought bytes within this time is still waited for when the soft deadline has passed,
    though not past the hard one."""
    deadline_s: Seconds = 600.0
    """Hard limit of a round, from its first contribution. Below quorum it ends as skipped."""
    late: LatePolicy = "drop"
    """What becomes of a contribution whose round has ended: it is recorded and not used; folded into the open round
    with its weight times `late_discount` for every version that it is behind; or folded into it with its whole
    weight. It never counts towards a quorum."""
    late_discount: Fraction = 0.5
    """Factor on a late contribution's weight per version that its anchor is behind, with late = "discount"."""
    late_rounds: Annotated[int, Field(ge=1, le=8)] = 2
    """Rounds that a late contribution may be behind the open one; an older one is dropped."""
    lease_s: Seconds = 30.0
    """An island that has sent no heartbeat for this long is lost, and suspected after half of it. Islands send one
    every third of it."""

    @model_validator(mode="after")
    def _fits(self) -> RoundsConfig:
        if self.grace_s > self.deadline_s:
            raise ValueError(
                f"rounds.grace_s ({self.grace_s:g}) is longer than rounds.deadline_s ({self.deadline_s:g}): "
                f"set rounds.grace_s={self.deadline_s:g} or rounds.deadline_s={self.grace_s:g}"
            )
        return self

    @property
    def late_window(self) -> int:
        """Rounds that have ended and still take contributions."""
        return 0 if self.late == "drop" else self.late_rounds


class SnapshotConfig(Settings):
    every_rounds: Positive = 1
    """A snapshot of the outer state is written after this many commits, and when the coordinator stops."""
    keep: Positive = 2
    """Snapshots kept; older ones go once a newer one is complete, and the ledger is compacted behind the oldest."""
    url: str = ""
    """Where a copy of every snapshot goes as well, for a machine that is lost: any fsspec URL (s3://bucket/run,
    gs://..., file:///mnt/...). Empty: nowhere. Credentials come from the environment."""
    url_keep: Positive = 3
    """Snapshots kept there."""


class LimitsConfig(Settings):
    """What the coordinator may use. They may be changed when it is started again."""

    islands: Positive = 256
    """Islands that may hold a lease at a time."""
    streams: Positive = 64
    """Bulk streams served at a time, uploads and downloads together."""
    streams_per_island: Positive = 16
    """Bulk streams of one island at a time; at least its ranks, so that each can send."""
    receive_bytes: Positive = 320 * 2**20
    """What all senders together may have under way to the coordinator: it may wait in its memory. Each stream gets an
    equal share, of 256 KiB to 64 MiB, and its sender uses as much of that as its link needs. A stream moves no more
    than its share per round trip: 64 streams of 5 MiB bring 50 MB/s each where that takes 100 ms, one stream 640."""
    disk_bytes: NonNegative = 0
    """Contributions and updates kept in the state folder, and files to be written over; 0 for no limit but the disk."""
    disk_free_bytes: NonNegative = 256 * 2**20
    """Space that is left free on the state folder's disk: below it contributions are refused for a while, and the
    ledger can still be written."""
    retry_s: Seconds = 5.0
    """What an island that is refused for want of room is told to wait."""


class RunConfig(Settings):
    """Everything islands must agree on."""

    run: RunSection
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    shards: ShardsConfig = ShardsConfig()
    inner: InnerConfig = InnerConfig()
    sync: SyncConfig = SyncConfig()
    outer: OuterConfig = OuterConfig()
    merge: MergeConfig = MergeConfig()
    wire: WireConfig = WireConfig()
    rounds: RoundsConfig = RoundsConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        first = min(self.sync.offsets)
        if self.run.steps < first:
            raise ValueError(
                f"run.steps ({self.run.steps}) ends before the first sync, which sync.every_steps "
                f"({self.sync.every_steps}) puts at step {first}: "
                f"set run.steps={first} or lower sync.every_steps"
            )
        if self.inner.schedule == "wsd" and self.inner.warmup_steps + self.inner.decay_steps > self.run.steps:
            room = max(0, self.run.steps - self.inner.warmup_steps)
            raise ValueError(
                f"inner.warmup_steps ({self.inner.warmup_steps}) and inner.decay_steps ({self.inner.decay_steps}) are "
                f"together longer than run.steps ({self.run.steps}): set "
                + (
                    f"inner.decay_steps={room}"
                    if room
                    else f"run.steps={self.inner.warmup_steps + self.inner.decay_steps}"
                )
            )
        if self.rounds.quorum > self.rounds.start_islands:
            raise ValueError(
                f"rounds.quorum ({self.rounds.quorum}) is above rounds.start_islands "
                f"({self.rounds.start_islands}), so a run that starts could never commit: "
                f"set rounds.quorum={self.rounds.start_islands} or rounds.start_islands={self.rounds.quorum}"
            )
        if self.shards.take_over_after_s and self.run.coordinator_count > 1:
            raise ValueError(
                f"shards.take_over_after_s ({self.shards.take_over_after_s:g}) needs one coordinator that knows who is "
                f"absent, and run.coordinators names {self.run.coordinator_count}: name one, or set it to 0"
            )
        if self.run.coordinator_count > self.sync.fragments:
            raise ValueError(
                f"run.coordinators ({self.run.coordinator_count} of them) are more than sync.fragments "
                f"({self.sync.fragments}), so one would have nothing to do; have more fragments, or name fewer: "
                f"set run.coordinators={json.dumps(self.run.coordinators[: self.sync.fragments])}"
            )
        if self.model.experts and self.model.ours and self.model.balance == "bias" and self.sync.buffers != "average":
            raise ValueError(
                f"model.balance ('bias') moves a bias of each expert at every island, and sync.buffers "
                f"('{self.sync.buffers}') leaves them apart: set sync.buffers='average' or model.balance='loss'"
            )
        return self

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical TOML of what islands must agree on.

        That is all but `snapshot`, `limits`, which coordinator this is, and where they are; their number is part of it.
        """
        spread = (
            tuple(f"coordinator:{i}" for i in range(self.run.coordinator_count)) if self.run.coordinators[1:] else ()
        )
        run = self.run.model_copy(update={"coordinators": spread, "coordinator_index": 0})
        agreed = self.model_copy(update={"run": run, "snapshot": SnapshotConfig(), "limits": LimitsConfig()})
        return hashlib.sha256(to_toml(agreed).encode()).hexdigest()


PRESETS: dict[str, Table] = {
    "diloco": {
        "sync": {"strategy": "whole", "fragments": 1, "every_steps": 500, "overlap_steps": 0, "alpha": 0.0},
        "outer": {"lr": 0.7, "momentum": 0.9},
    },
    "streaming": {
        "sync": {"strategy": "strided", "fragments": 2, "every_steps": 100, "overlap_steps": 1, "alpha": 0.5},
        "outer": {"lr": 0.4, "momentum": 0.9},
        "wire": {"up": "auto:e3m0", "down": "auto:e3m0"},
    },
    "sparse": {
        "sync": {"strategy": "whole", "fragments": 1, "every_steps": 30, "overlap_steps": 0, "alpha": 0.0},
        "outer": {"lr": 1.0, "momentum": 0.0},
        "wire": {"up": "auto:topk-coded", "down": "auto:topk-coded", "feedback_decay": 0.95},
    },
}
"""`preset = "..."` atop a run file: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512), SparseLoCo (arXiv
2508.15706)."""


def load_run(text: str, source: str, overrides: Sequence[str] = ()) -> Resolved[RunConfig]:
    """Reads a run file: defaults, then its preset, then the file, then `overrides`.

    Raises:
        ConfigError: with the key, the source and what to write instead.
    """
    table = parse(text, source)
    name = table.pop("preset", None)
    layers: list[tuple[str, Table]] = [(source, table)]
    if name is not None:
        if not isinstance(name, str) or name not in PRESETS:
            raise ConfigError(f"{source}: unknown preset {name!r}; known: {', '.join(PRESETS)}")
        layers.insert(0, (f"preset {name}", PRESETS[name]))
    resolved = resolve(RunConfig, layers, overrides)
    shape = resolved.value.model.preset
    origins = {f"model.{key}": f"preset {shape}" for key in MODEL_PRESETS.get(shape, {})}
    return replace(resolved, origins={**origins, **resolved.origins})
