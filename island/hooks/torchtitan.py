"""A run for the Trainer of torchtitan 0.3, which has no callbacks: two methods of the object are wrapped.

    trainer = config.build()
    with taking_part(trainer, "host:port", island_id="tokyo"):
        trainer.train()

It joins at the first step, when `train` has loaded its checkpoint: the parameters are the run's then. Nothing of
torchtitan is imported; `Titan` says what of it is relied on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from island.session import Session, join


class Optimizers(Protocol):
    """torchtitan/components/optimizer/optimizer.py, `OptimizersContainer`."""

    optimizers: list[Any]


class Schedulers(Protocol):
    """torchtitan/components/optimizer/lr_scheduler.py, `LRSchedulersContainer`."""

    schedulers: list[LRScheduler]


class Dims(Protocol):
    """torchtitan/distributed/parallel_dims.py, `ParallelDims`: degrees of the mesh."""

    dp_replicate: int
    dp_shard: int
    cp: int


class Titan(Protocol):
    """torchtitan/trainer.py, `Trainer`: what this relies on."""

    model_parts: list[nn.Module]
    """One, or this rank's stages of a pipeline."""
    optimizers: Optimizers
    lr_schedulers: Schedulers
    parallel_dims: Dims
    ntokens_seen: int
    """Labels that this rank has trained on; ranks of one tensor- or pipeline-parallel group count the same ones."""
    train_step: Callable[[Iterator[Any]], None]
    """`train` calls it once per optimizer step."""
    should_continue_training: Callable[[], bool]
    """`train` asks it before each."""


class Parts(nn.Module):
    """Parts of one model, whose tensors are named as in the whole."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            yield from part.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for part in self.parts for name, value in part.state_dict(*args, **kwargs).items()}


class Place:
    """A Trainer's place in a run."""

    def __init__(self, trainer: Titan, coordinator: str, options: dict[str, Any]) -> None:
        self.site: Session | None = None
        """The island's part in the run, once the first step has begun."""
        self._trainer, self._coordinator, self._options = trainer, coordinator, options
        self._take_step, self._goes_on = trainer.train_step, trainer.should_continue_training

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """A step of torchtitan's, and the edge after it."""
        site = self.site = self.site or self._join()
        if site.done:
            return
        before = self._trainer.ntokens_seen
        self._take_step(data_iterator)
        dims = self._trainer.parallel_dims
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        alike = ranks // (dims.dp_replicate * dims.dp_shard * dims.cp)  # ranks that count the same labels
        site.step(tokens=(self._trainer.ntokens_seen - before) // alike)

    def should_continue_training(self) -> bool:
        """Whether both torchtitan and the run go on."""
        return self._goes_on() and not (self.site and self.site.done)

    def _join(self) -> Session:
        trainer = self._trainer
        parts, optimizers = trainer.model_parts, list[torch.optim.Optimizer](trainer.optimizers.optimizers)
        model = parts[0] if len(parts) == 1 else Parts(parts)
        return join(model, optimizers, self._coordinator, scheduler=trainer.lr_schedulers.schedulers, **self._options)


@contextmanager
def taking_part(trainer: Titan, coordinator: str, **options: Any) -> Iterator[Place]:
    """Has a torchtitan Trainer take part in a run while it trains within the block; at its end the island leaves.

    Args:
        trainer: as `config.build()` makes it. `training.dtype` must be float32, as it is by default.
        coordinator, options: as for `island.join`.
    """
    place = Place(trainer, coordinator, options)
    trainer.train_step, trainer.should_continue_training = place.train_step, place.should_continue_training
    try:
        yield place
    finally:
        trainer.train_step, trainer.should_continue_training = place._take_step, place._goes_on
        if place.site:
            place.site.__exit__(*sys.exc_info())
