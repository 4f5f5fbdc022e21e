"""Bytes that the tensors of a process hold: of all that live, and of those that come and go while it works."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def held() -> int:
    """Bytes of all storages of tensors that live, in RAM and on devices, each once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = [
        tensor.untyped_storage()
        for tensor in tensors
        if not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)  # a DTensor's own tensor is another
    ]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def peak(work: Callable[[], object]) -> int:
    """The most bytes that work holds at one time of those that it takes from torch's allocators, on this thread.

    What other threads take meanwhile is not seen.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, profile_memory=True, acc_events=True) as found:
        work()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    moves: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(moves, initial=0))
