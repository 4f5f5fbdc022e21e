"""The state of all sources of random numbers of a process, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
import xxhash


def capture() -> dict[str, Any]:
    """The state of Python's, numpy's (the global one) and torch's generators, on the CPU and the current GPU."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [str(kind), [int(key) for key in keys], int(place), int(has_gauss), float(gauss)],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def restore(state: dict[str, Any]) -> None:
    """Puts all generators where they were; a GPU's where there is one."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def derive(*of: object) -> None:
    """Seeds all generators by what they are of, for a rank that has no state: the same each time, another for each."""
    seed = xxhash.xxh3_64_intdigest(repr(of).encode())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
