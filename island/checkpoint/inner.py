"""The inner half of what an island keeps: model, optimizer, and whatever else has a state of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.errors import LayoutError
from diloco.layout import box_of, canonical_name, local, named_tensors
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
    """The optimizer's state by parameter: tensors as "optimizer.PARAMETER.KEY", and numbers by the same names.

    Raises:
        LayoutError: a sharded parameter has a state of which it cannot be said what part this rank holds.
    """
    pieces: dict[str, Piece] = {}
    numbers: dict[str, Scalar] = {}
    for name, tensor, state in _states(model, optimizer):
        for key, value in state.items():
            if isinstance(value, Tensor):
                pieces[f"optimizer.{name}.{key}"] = _state(f"optimizer.{name}.{key}", value, tensor)
            elif isinstance(value, Scalar):
                numbers[f"optimizer.{name}.{key}"] = value
    return pieces, numbers


def _state(name: str, value: Tensor, parameter: Tensor) -> Piece:
    """A tensor of the state: placed as it says itself, or as its parameter where it is of this rank's part of that."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or not value.ndim:
        return Piece.of(value, name)
    if value.shape != local(parameter).shape:
        raise LayoutError(
            f"{name} is a plain tensor {list(value.shape)} of a sharded parameter: have the optimizer make its "
            "state with torch.zeros_like(parameter), so that a checkpoint can hold it"
        )
    box, shape = box_of(parameter, name), tuple(parameter.shape)
    return Piece(source=value, box=box, shape=shape, dtype=value.dtype)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    for name, tensor, _ in named_tensors(model):
        if tensor in optimizer.state:
            yield name, tensor, optimizer.state[tensor]


def set_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Mapping[str, Scalar]) -> None:
    """Puts numbers back that `of_optimizer` gave."""
    for name, _, state in _states(model, optimizer):
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
