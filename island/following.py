"""Learning rates that follow the run's inner step, whatever step an island came in at."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import TypeVar

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diloco.errors import InputError

T = TypeVar("T")
Schedulers = LRScheduler | Sequence[LRScheduler] | None


def several(one: T | Sequence[T] | None) -> list[T]:
    """One of a kind, several or none, as a list."""
    return [] if one is None else list(one) if isinstance(one, Sequence) else [one]


class Following:
    """Keeps schedulers at a step of the run: `Following(schedulers)(step)`.

    A schedule of torch goes forwards one step at a time; to go back it begins again from where it stood when this was
    made.

    Raises:
        InputError: a schedule that follows a metric, which differs between islands.
    """

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        for scheduler in schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise InputError(
                    "ReduceLROnPlateau follows this island's own metric, and islands would go apart: use a schedule of "
                    "the step, or step it yourself and do not name it to join"
                )
        self._begun = [
            (scheduler, deepcopy(scheduler.state_dict()), [group["lr"] for group in scheduler.optimizer.param_groups])
            for scheduler in schedulers
        ]

    def __call__(self, step: int) -> None:
        """Sets the learning rates to those of the next inner step, after `step` steps."""
        for scheduler, state, rates in self._begun:
            if scheduler.last_epoch > step:
                scheduler.load_state_dict(deepcopy(state))
                for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                while scheduler.last_epoch < step:
                    scheduler.step()
