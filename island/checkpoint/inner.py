"""The inner half of what an island keeps: model, optimizer, and whatever else has a state of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diloco.layout import canonical_name, named_tensors
from island.checkpoint.pieces import Piece

Scalar = int | float | bool


def of_model(model: nn.Module) -> dict[str, Piece]:
    """All parameters, each once, and all buffers that are saved with the model, under their canonical names."""
    found = {f"model.{name}": Piece.of(tensor, name) for name, tensor, _ in named_tensors(model)}
    saved = {canonical_name(name) for name in model.state_dict(keep_vars=True)}
    for raw, buffer in model.named_buffers():
        name = canonical_name(raw)
        if name in saved and f"model.{name}" not in found:  # of integers: no part of a run, and yet of the model
            found[f"model.{name}"] = Piece.of(buffer, name)
    return found


def of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Piece], dict[str, Scalar]]:
    """The optimizer's state by parameter: tensors as "optimizer.PARAMETER.KEY", and numbers by the same names."""
    pieces: dict[str, Piece] = {}
    numbers: dict[str, Scalar] = {}
    for name, state in _states(model, optimizer):
        for key, value in state.items():
            if isinstance(value, Tensor):
                pieces[f"optimizer.{name}.{key}"] = Piece.of(value, f"{name}.{key}")
            elif isinstance(value, Scalar):
                numbers[f"optimizer.{name}.{key}"] = value
    return pieces, numbers


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, tensor, _ in named_tensors(model):
        if tensor in optimizer.state:
            yield name, optimizer.state[tensor]


def set_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Mapping[str, Scalar]) -> None:
    """Puts numbers back that `of_optimizer` gave."""
    for name, state in _states(model, optimizer):
        for key, value in state.items():
            if isinstance(value, Scalar):
                state[key] = type(value)(numbers[f"optimizer.{name}.{key}"])


def keep_only(model: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Drops the state of parameters other than those named "optimizer.PARAMETER"."""
    for name, tensor, _ in named_tensors(model):
        if f"optimizer.{name}" not in names:
            optimizer.state.pop(tensor, None)


def prepare(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer that has taken no step make its state, of whatever shapes and placements it likes.

    It takes a step with gradients of zero at a rate of zero, as torch's own `set_optimizer_state_dict` does: parameters
    are to be set after it.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
