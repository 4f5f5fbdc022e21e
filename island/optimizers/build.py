"""From the run's `[inner]` to an optimizer."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.config_inner import InnerConfig
from diloco.errors import ConfigError, EnvironmentFault
from diloco.layout import named_tensors
from island.optimizers.lamb import Lamb
from island.optimizers.muon import Muon

FUSED = frozenset({"cpu", "cuda"})
"""Devices that have torch's fused AdamW."""


def build(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    """The run's inner optimizer for the model's trainable parameters, plain or DTensor. Collective over the island.

    Weight decay applies to tensors of two dimensions and more, not to norms and biases. Every group carries its peak
    learning rate as `initial_lr`.

    Raises:
        ConfigError: `inner.optimizer` names no class of optimizers, or one that does not take `inner.options`.
        EnvironmentFault: the module of that class is not installed here.
    """
    named = {name: tensor for name, tensor, kind in named_tensors(model) if kind == "parameter"}
    names = {tensor: name for name, tensor in named.items()}
    moments: dict[str, Any] = {"betas": inner.betas, "eps": inner.eps}
    optimizer: torch.optim.Optimizer
    match inner.optimizer:
        case "adamw":
            fused = _fused(named.values())
            optimizer = torch.optim.AdamW(_groups(named.values(), inner), lr=inner.lr, fused=fused, **moments)
        case "sgd":
            optimizer = torch.optim.SGD(_groups(named.values(), inner), lr=inner.lr)
        case "lamb":
            optimizer = Lamb(_groups(named.values(), inner, lr=inner.lr), names, **moments)
        case "muon":
            matrices = [tensor for name, tensor in named.items() if is_matrix(name, tensor.ndim, inner)]
            rest = [tensor for name, tensor in named.items() if not is_matrix(name, tensor.ndim, inner)]
            groups = [
                *_groups(matrices, inner, lr=inner.peak_matrix_lr, muon=True),
                *_groups(rest, inner, lr=inner.lr, muon=False, fused=_fused(rest)),
            ]
            steps = inner.newton_schulz_steps
            optimizer = Muon(groups, names, momentum=inner.momentum, newton_schulz_steps=steps, **moments)
        case _:
            optimizer = _of_ones_own(named.values(), inner)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def is_matrix(name: str, ndim: int, inner: InnerConfig) -> bool:
    """Whether Muon moves this parameter: a matrix, or a stack of experts' matrices, that no pattern leaves out."""
    stacked = ndim == 3 and "experts" in name
    return (ndim == 2 or stacked) and not any(fnmatchcase(name, pattern) for pattern in inner.muon_except)


def state_bytes(name: str, shape: Sequence[int], inner: InnerConfig) -> int:
    """Bytes of optimizer state of a parameter; a class of one's own is taken to keep two moments."""
    moments = {"sgd": 0, "muon": 1 if is_matrix(name, len(shape), inner) else 2}.get(inner.optimizer, 2)
    return 4 * moments * math.prod(shape)


def _groups(parameters: Iterable[Tensor], inner: InnerConfig, **settings: Any) -> list[dict[str, Any]]:
    """Groups by whether weight decay applies, and by mesh: one call of a fused operator takes one."""
    groups: dict[object, dict[str, Any]] = {}
    for parameter in parameters:
        decay = inner.weight_decay if parameter.ndim > 1 else 0.0
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group = groups.setdefault((parameter.ndim > 1, mesh), {"params": [], "weight_decay": decay, **settings})
        group["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: group["params"][0].ndim <= 1)


def _fused(parameters: Iterable[Tensor]) -> bool:
    return all(p.device.type in FUSED and p.is_floating_point() for p in parameters)


def _of_ones_own(parameters: Iterable[Tensor], inner: InnerConfig) -> torch.optim.Optimizer:
    """The class that `inner.optimizer` names, made with `inner.lr`, `inner.options` and weight decay if it takes it."""
    kind = optimizer_class(inner.optimizer)
    groups = _groups(parameters, inner)
    if "weight_decay" not in inspect.signature(kind).parameters or "weight_decay" in inner.options:
        for group in groups:
            del group["weight_decay"]
    try:
        return kind(groups, lr=inner.lr, **inner.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"inner.optimizer ({inner.optimizer}) does not take lr and inner.options {sorted(inner.options)}: {error}"
        ) from error


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentFault(
            f"inner.optimizer ({name}) cannot be imported: {error}; install its package, or set PYTHONPATH"
        ) from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"inner.optimizer ({name}): {module} has no class {path} of torch.optim.Optimizer: correct the name"
        )
    return found
