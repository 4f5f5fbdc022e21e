"""The run: whether this island means the same one as its coordinator, and brings the same model and readable data."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from diloco.config import RunConfig, load_run
from diloco.errors import ConfigError, ExitCode
from diloco.fragments import partition
from diloco.framing import PROTOCOL
from diloco.layout import Layout, TensorSpec, named_tensors
from diloco.settings import leaves
from diloco.v1 import coordinator_pb2 as pb
from island.config import IslandSection
from island.config_data import DataConfig
from island.data import check_vocabulary
from island.model import Decoder
from island.preflight.finding import Finding, fail, ok, warn

MOST_FILES = 20_000
"""Files of data that are looked at."""
DIFFERENCES = 5


def served(reply: pb.StatusReply) -> RunConfig:
    """The settings that a coordinator serves.

    Raises:
        ConfigError: this version does not know one of them.
    """
    try:
        return load_run(reply.config_toml, "the coordinator").value
    except ConfigError as error:
        raise ConfigError(
            f"this version does not know the run's settings ({error.message.splitlines()[0]}): install the "
            "coordinator's version"
        ) from error


def run(reply: pb.StatusReply, config: RunConfig, island: IslandSection, own: RunConfig | None) -> Finding:
    """Whether the coordinator speaks our protocol and serves the run that is meant.

    Args:
        config: what it serves.
        own: a run file at hand, to compare.
    """
    if reply.protocol and reply.protocol != PROTOCOL:
        return fail(
            "run",
            f"the coordinator speaks protocol {reply.protocol}, this installation {PROTOCOL}",
            "install the same version on both sides",
            ExitCode.REFUSED,
        )
    if island.run_id and island.run_id != config.run.id:
        return fail(
            "run",
            f"the coordinator serves run '{config.run.id}', and island.run_id is '{island.run_id}'",
            "check the address, or correct island.run_id",
            ExitCode.REFUSED,
        )
    if own is not None and own.digest != config.digest:
        return fail(
            "run",
            f"the run file differs from what the coordinator serves: {', '.join(_differences(own, config))}",
            "take the coordinator's run file, or start it with this one",
            ExitCode.REFUSED,
        )
    standing = {row.id: row.state for row in reply.islands}.get(island.id, "")
    found = f"run '{config.run.id}' is {reply.state.phase}, settings {config.digest[:16]}"
    if standing in ("JOINING", "ACTIVE", "SUSPECT", "DRAINING"):
        return warn(
            "run",
            f"{found}; an island '{island.id}' is {standing} in it",
            "end the other process that has this island.id before you start this one",
        )
    return ok("run", found)


def _differences(own: RunConfig, other: RunConfig) -> Iterator[str]:
    mine, theirs = (dict(leaves(config.model_dump(mode="json"))) for config in (own, other))
    apart = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
    for key in apart[:DIFFERENCES]:
        yield f"{key} is {json.dumps(mine.get(key))} here and {json.dumps(theirs.get(key))} there"
    if len(apart) > DIFFERENCES:
        yield f"and {len(apart) - DIFFERENCES} more"


def model_layout(config: RunConfig) -> Layout:
    """The layout of the run's model, as it is in the run. No memory is taken for the model."""
    with torch.device("meta"):
        model = Decoder(config=config.model)
    specs = (TensorSpec(name, tuple(tensor.shape), kind) for name, tensor, kind in named_tensors(model))
    return Layout(specs).under(config.sync.buffers)


def layout(mine: Layout, config: RunConfig, reply: pb.StatusReply | None) -> Finding:
    """Whether the model that is built here is the run's."""
    fragments = partition(mine, config.sync)
    found = f"{mine.numel:,} values in {len(mine.tensors)} tensors, {len(fragments)} fragments, {mine.digest[:16]}"
    if reply is None:
        return warn("model", f"{found}; not compared, as no coordinator answers", "try again when one does")
    if reply.layout_digest and reply.layout_digest != mine.digest:
        return fail(
            "model",
            f"{found}; the run's has {reply.parameters:,} values, {reply.layout_digest[:16]}",
            "install the version that the other islands have, or join the run that this model is for",
            ExitCode.REFUSED,
        )
    return ok("model", found if reply.layout_digest else f"{found}; no island has joined before")


def data(settings: DataConfig, config: RunConfig | None, bound_s: float) -> Finding:
    """Whether the files that `data.text` names can be read. It looks at their first bytes, not at all of them."""
    if config is not None:
        check_vocabulary(config.model.vocab_size)
    if not settings.text:
        return ok("data", "none named: the sources of this Python")
    until, count, size, cut = time.monotonic() + bound_s, 0, 0, False
    for path in _files(settings.text):
        try:
            with path.open("rb") as file:
                file.read(4096)
                size += os.fstat(file.fileno()).st_size
        except OSError as error:
            found = f"cannot read {path} ({error.strerror})"
            return fail("data", found, "correct data.text, or let this user read it", ExitCode.USAGE)
        count += 1
        if cut := count >= MOST_FILES or time.monotonic() > until:
            break
    if not size:
        return fail("data", f"no bytes in {count} files", "name files or folders of text in data.text", ExitCode.USAGE)
    found = f"{count}{' files and more' if cut else ' files'}, {size / 1e6:.1f} MB, can be read"
    return ok("data", f"{found}; shard {settings.shard} of {settings.shards}")


def _files(paths: tuple[str, ...]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from (file for file in path.rglob("[!.]*") if file.is_file())
        else:
            yield path
