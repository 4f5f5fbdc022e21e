"""Context parallel: each rank has a part of every sequence; attention alone needs the rest of it.

`ulysses` (arXiv 2309.14509) swaps the split from time to heads before attention and back after it. `gather` collects
the keys and values of the sequence up to this rank's part. Both are exact.

Shapes: B batch, H query heads, K key and value heads, T the whole sequence, t this rank's part of it, E head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_single, all_to_all_single

from island.config_mesh import ContextMethod
from island.model import Decoder
from island.model.decoder import causal


class Ulysses:
    """Causal attention over the whole sequence, for a part of the heads."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [B, H, t, E], keys and values [B, K, t, E] to the mixed values [B, H, t, E]."""
        return self._to_time(causal(self._to_heads(q), self._to_heads(k), self._to_heads(v)))

    def _swap(self, parts: Tensor) -> Tensor:
        """Sends part i of the first dimension to rank i; returns those that came, by rank."""
        swapped: Tensor = all_to_all_single(parts, None, None, self._group)
        return swapped

    def _to_heads(self, x: Tensor) -> Tensor:
        return self._swap(torch.stack(x.chunk(self._ranks, dim=1))).movedim(0, 2).flatten(2, 3)

    def _to_time(self, x: Tensor) -> Tensor:
        return self._swap(torch.stack(x.chunk(self._ranks, dim=2))).movedim(0, 1).flatten(1, 2)


class Gathered:
    """Attention of this rank's queries to the keys and values of all ranks before it and its own."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank = group, group.rank()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [B, H, t, E], keys and values [B, K, t, E] to the mixed values [B, H, t, E]."""
        part = q.shape[2]
        end = (self._rank + 1) * part
        keys, values = (all_gather_single(x, 2, self._group)[:, :, :end] for x in (k, v))
        seen = torch.ones(part, end, dtype=torch.bool, device=q.device).tril(end - part)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])


def attend_over(model: Decoder, method: ContextMethod, group: ProcessGroup) -> None:
    """Has every layer's attention see the sequences that the ranks of `group` share."""
    attend = Ulysses(group) if method == "ulysses" else Gathered(group)
    for block in model.layers.values():
        setattr(block.self_attn, "attend", attend)  # noqa: B010  the type of a block is any module's


def place(model: Decoder, *, part: int = 0, split: int = 1) -> None:
    """Tells a decoder, or the stage of a pipeline, at which positions its tokens are.

    Args:
        part: which part of the sequence this rank has.
        split: ranks over which tensor parallelism splits that part further where the residual stream comes in.
    """

    def positions(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        stream = inputs[0]
        length = stream.shape[1] * (split if model.embed_tokens is None else 1)
        at = torch.arange(part * length, (part + 1) * length, device=stream.device)
        return inputs, {**options, "positions": at}

    model.register_forward_pre_hook(positions, with_kwargs=True)
