"""The run's model, whatever makes it: our decoder, transformers, or a function of the user's.

Of our decoder every tensor's first value is made alone, by its name. Of any other model the first values are what its
own code gives under the run's seed: each rank makes the whole model in the CPU's memory for a moment, and keeps its
part. Ranks of an island run the same versions of the same packages, so they agree; islands need not, as the first
island to join seeds the run.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.config import ModelConfig, RunConfig
from diloco.errors import ConfigError, EnvironmentFault
from diloco.layout import box_of, canonical_name, local
from island.model.decoder import Decoder
from island.model.init import first_part


def build_meta(run: RunConfig) -> nn.Module:
    """The run's model on the meta device: whole, float32, without values; token ids [B, T] to logits [B, T, V].

    Raises:
        ConfigError: `model.source`, `model.name` or `model.options` make no such model.
        EnvironmentFault: `model.source` is 'transformers', which is not installed.
    """
    if not run.model.ours and run.model.source != "transformers":
        return _on(_whole(run), "meta")
    with torch.device("meta"):
        return Decoder(config=run.model) if run.model.ours else _of_transformers(run.model, pretrained=False)


def allocate(model: nn.Module, device: torch.device | str) -> nn.Module:
    """`model.to_empty` that keeps tied parameters one, where torch gives every name a tensor of its own."""
    return _on(model, device, empty=True)


@torch.no_grad()
def fill(model: nn.Module, run: RunConfig) -> None:
    """Gives every tensor this rank holds its first value. The model may be sharded, wrapped, or a pipeline's stage.

    Raises:
        ConfigError, EnvironmentFault: as `build_meta`.
    """
    if run.model.ours:
        for raw, parameter in model.named_parameters():
            name, shape = canonical_name(raw), tuple(parameter.shape)
            slices = box_of(parameter, name).slices
            local(parameter).copy_(first_part(name, shape, slices, run.model, run.run.seed))
        for buffer in model.buffers():  # of routers
            buffer.zero_()
        return
    values = {canonical_name(name): value for name, value in _tensors(_whole(run)).items()}
    for raw, tensor in _tensors(model).items():
        name = canonical_name(raw)
        local(tensor).copy_(values[name][box_of(tensor, name).slices])


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks in order: the units to shard, to checkpoint and to compile.

    They are the modules of the largest `ModuleList` or `ModuleDict` that holds modules of one class alone; empty where
    there is none.
    """
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m))
    candidates = [list(m.values() if isinstance(m, nn.ModuleDict) else m) for m in lists]
    alike = [found for found in candidates if len({type(block) for block in found}) == 1]
    return max(alike, key=lambda found: sum(p.numel() for block in found for p in block.parameters()), default=[])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _on(model: nn.Module, device: torch.device | str, *, empty: bool = False) -> nn.Module:
    """Moves a model, with its values or without, and ties again what was tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model = model.to_empty(device=device) if empty else model.to(device)
    for first, *others in names.values():
        for other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
    return model


def _whole(run: RunConfig) -> nn.Module:
    """A foreign model with its first values, float32, on the CPU; the random state is left as it was."""
    config = run.model
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.run.seed)
        if config.source == "transformers":
            return _of_transformers(config, pretrained=config.pretrained)
        return _of_function(config).float()


def _of_function(config: ModelConfig) -> nn.Module:
    """What `MODULE:FUNCTION` returns for `model.options`."""
    module, _, function = config.source.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.source='{config.source}': {error}: install it at this island, or put its folder on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"model.source='{config.source}': module '{module}' has no '{function}'") from error
    try:
        model = make(**config.options)
    except TypeError as error:
        raise ConfigError(
            f"model.source='{config.source}' does not take model.options={config.options}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.source='{config.source}' returned a {type(model).__name__}: it must return a torch.nn.Module "
            "from token ids [B, T] to logits [B, T, V]"
        )
    return model


def _of_transformers(config: ModelConfig, *, pretrained: bool) -> nn.Module:
    """The causal language model that `model.name` names, whose output is its logits."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise EnvironmentFault("model.source='transformers' needs a package: pip install 'diloco[hf]'") from error
    auto: Any = transformers.AutoModelForCausalLM
    try:
        shape = shape_of(config.name)
        if pretrained:
            model = auto.from_pretrained(config.name, config=shape, dtype=torch.float32)
        else:
            model = auto.from_config(shape, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.name='{config.name}' is no causal language model that transformers can make: name a repository, a "
            f"folder with a config.json{' and weights' if pretrained else ', or a config.json'} ({error})"
        ) from error
    if shape.vocab_size < config.vocab_size:
        raise ConfigError(
            f"model.vocab_size ({config.vocab_size}) is above that of model.name='{config.name}': "
            f"set model.vocab_size={shape.vocab_size}"
        )
    model.register_forward_hook(_logits)
    module: nn.Module = model.train()
    return module


def shape_of(name: str) -> Any:
    """The transformers config of a repository, a folder or a `config.json`."""
    import transformers

    path = Path(name)
    if path.suffix == ".json":
        table = json.loads(path.read_text(encoding="utf-8"))
        shape: Any = transformers.AutoConfig.for_model(table.pop("model_type"), **table)
    else:
        shape = transformers.AutoConfig.from_pretrained(name)
    shape.use_cache = False
    return shape


def _logits(model: nn.Module, inputs: object, output: Any) -> Tensor:
    """Forward hook: of what a transformers model returns, its logits [B, T, V]."""
    logits: Tensor = output.logits
    return logits
