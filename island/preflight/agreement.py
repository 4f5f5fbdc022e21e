"""The run: whether this island means the same one as its coordinator, allows its code, and brings the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator

from diloco.config import RunConfig, load_run
from diloco.errors import ConfigError, ExitCode, exit_code
from diloco.fragments import partition
from diloco.framing import PROTOCOL
from diloco.layout import Layout, TensorSpec, named_tensors
from diloco.settings import leaves
from diloco.v1 import coordinator_pb2 as pb
from island.config import IslandConfig, IslandSection, check_code
from island.model import build_meta
from island.parallel.plan import plan
from island.preflight.finding import ADVICE, Finding, fail, of_others, ok, warn

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


def code(config: RunConfig, island: IslandSection) -> Finding:
    """Whether the island allows the code that the run names. Raises `ConfigError` where it does not."""
    check_code(config, island.code)
    names = [name for name in (config.model.source, config.inner.optimizer) if ":" in name]
    return ok("code", f"{', '.join(names)}: allowed by island.code" if names else "the run names none")


def model_layout(config: RunConfig) -> Layout:
    """The layout of the run's model, as it is in the run. No memory is taken for our decoder, nor for transformers'.

    Raises:
        ConfigError: the settings make no model, or the code that they name fails.
        EnvironmentFault: a package is missing.
    """
    with of_others(f"model.source='{config.model.source}'"):
        model = build_meta(config)
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


def mesh(island: IslandConfig, config: RunConfig) -> Finding:
    """Whether the island's mesh fits the run's model, with every number of nodes that may train."""
    nodes = island.nodes
    for count in range(nodes.most, nodes.least - 1, -1):
        part = island.of(count)
        try:
            chosen = plan(part.mesh, part.memory, config.model)
        except ConfigError as error:
            found = error.message if nodes.most == 1 else f"with {count} of {nodes.most} nodes, {error.message}"
            return fail("mesh", found, ADVICE[ExitCode.USAGE], exit_code(error))
        if count == nodes.most:
            names = ("pipeline", "replicas", "shard", "context", "tensor", "expert")
            sizes = [f"{name} {getattr(chosen, name)}" for name in names if getattr(chosen, name) > 1]
            rows = island.data.batch_sequences // chosen.data_ranks
    return ok("mesh", f"{', '.join(sizes) or 'one rank'}; a rank reads {rows} sequences a step")
