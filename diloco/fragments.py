"""Fragments: which tensors are synchronised together, and where each lies in its fragment's flat order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from itertools import accumulate

from diloco.config import RunSection, SyncConfig
from diloco.errors import ConfigError, LayoutError
from diloco.layout import Layout, TensorSpec

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class Fragment:
    """Tensors synchronised together. Its flat order is the tensors' own, one after the other.

    At a coordinator, a fragment that another one keeps is empty: it has a number and no tensors.
    """

    index: int
    tensors: tuple[int, ...]
    """Numbers of the tensors in the layout, ascending."""
    specs: tuple[TensorSpec, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Flat offset of each tensor's first element in the fragment."""
        return (0, *accumulate(spec.numel for spec in self.specs))[:-1]

    @cached_property
    def place(self) -> dict[int, int]:
        """Position in `tensors` of each tensor number."""
        return {tensor: i for i, tensor in enumerate(self.tensors)}

    @property
    def numel(self) -> int:
        """Elements of the fragment."""
        return sum(spec.numel for spec in self.specs)

    @property
    def elsewhere(self) -> bool:
        """Whether another coordinator keeps it."""
        return not self.tensors


def coordinator_of(fragment: int, run: RunSection) -> int:
    """The coordinator that keeps a fragment: f modulo their number.

    Fragments that sync one after the other thus go to different coordinators, and it is known before any layout is.
    """
    return fragment % run.coordinator_count


def kept(fragments: Sequence[Fragment], run: RunSection) -> tuple[Fragment, ...]:
    """The fragments of a run as coordinator `run.coordinator_index` has them: those of the others are empty."""
    return tuple(
        fragment if coordinator_of(fragment.index, run) == run.coordinator_index else Fragment(fragment.index, (), ())
        for fragment in fragments
    )


def partition(layout: Layout, sync: SyncConfig) -> tuple[Fragment, ...]:
    """Splits a layout into `sync.fragments` fragments; static tensors, if any, form one more at the end.

    `sequential` and `strided` keep layers whole. Tensors outside any layer that match `sync.embeddings` go to the
    first fragment, the others (final norm, output projection) to the last. `balanced` packs tensors greedily, the
    largest first, into the lightest fragment (peak at most 4/3 of optimal; Decoupled DiLoCo, arXiv 2604.21428).

    Raises:
        ConfigError: more fragments than the strategy can fill.
        LayoutError: no tensor moves.
    """
    moving = [i for i, spec in enumerate(layout.tensors) if spec.kind != "static"]
    static = [i for i, spec in enumerate(layout.tensors) if spec.kind == "static"]
    if not moving:
        raise LayoutError("every parameter of the model is frozen: a run has nothing to train")
    groups = _assign(layout, moving, sync)
    empty = sum(not group for group in groups)
    if empty:
        what = "tensors" if sync.strategy in ("balanced", "whole") else "layers"
        fits = max(p for p in range(1, max(1, sync.fragments - empty) + 1) if sync.every_steps % p == 0)
        raise ConfigError(
            f"sync.fragments={sync.fragments} with sync.strategy='{sync.strategy}' leaves {empty} fragments empty: "
            f"the model has too few {what}; set sync.fragments={fits}"
        )
    if static:
        groups.append(static)
    return tuple(
        Fragment(i, tuple(sorted(group)), tuple(layout.tensors[t] for t in sorted(group)))
        for i, group in enumerate(groups)
    )


def _assign(layout: Layout, moving: Sequence[int], sync: SyncConfig) -> list[list[int]]:
    count = sync.fragments
    groups: list[list[int]] = [[] for _ in range(count)]
    if sync.strategy == "balanced":
        load = [0] * count
        for tensor in sorted(moving, key=lambda t: (-layout.tensors[t].numel, t)):
            lightest = load.index(min(load))
            groups[lightest].append(tensor)
            load[lightest] += layout.tensors[tensor].numel
        return groups
    layer = {t: _LAYER.search(layout.tensors[t].name) for t in moving}
    order = sorted({int(found[1]) for found in layer.values() if found})
    for tensor, found in layer.items():
        if not found:
            embeds = any(fnmatch(layout.tensors[tensor].name, pattern) for pattern in sync.embeddings)
            groups[0 if embeds else -1].append(tensor)
            continue
        depth = order.index(int(found[1]))
        groups[depth % count if sync.strategy == "strided" else depth * count // len(order)].append(tensor)
    return groups
