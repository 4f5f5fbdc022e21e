"""Muon for the hidden matrices of a model, AdamW for the rest, in one optimizer.

Muon (Keller Jordan, 2024; arXiv 2502.16982) keeps one momentum, makes each matrix of it nearly orthogonal by a
Newton-Schulz iteration, and scales that so that its root mean square is that of an AdamW update:

    B <- mu B + (1 - mu) G,  U = mu B + (1 - mu) G,  W <- (1 - lr wd) W - 0.2 lr sqrt(max(m, n)) orthogonal(U)

A matrix is a whole 2-D parameter, or one expert of a stack [experts, in, out]. Where it is sharded, one rank gathers
its U, iterates, and hands each rank its part of the result. Matrices are spread over the ranks that hold a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from diloco.layout import Box, local
from island.optimizers.shards import Parcels, Shards, local_gradient

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's quintic: singular values end between about 0.7 and 1.2."""
RMS = 0.2
"""Root mean square of an AdamW update, about (arXiv 2502.16982, section 2.2)."""
TINY = 1e-7
ROUND_VALUES = 2**26
"""Values that a rank gathers at a time, give or take one matrix."""


def orthogonal(matrices: Tensor, steps: int) -> Tensor:
    """The nearest orthogonal matrices, nearly: U V' of the singular value decompositions U S V'.

    Args:
        matrices: [k, m, n], in the dtype to compute in. A matrix of zeros gives zeros.
        steps: of the Newton-Schulz iteration.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=TINY)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a matrix: `index` of the expert in its local stack, if any, and a box of the matrix."""

    rank: int
    index: int | None
    box: Box

    def of(self, tensor: Tensor) -> Tensor:
        """This part of the rank's local tensor: [rows, columns] of the box."""
        return tensor if self.index is None else tensor[self.index]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    """One matrix of the island's model."""

    name: str
    shape: tuple[int, int]
    owner: int
    """The rank that iterates."""
    parts: tuple[Part, ...]
    """Every rank's, replicas too."""
    sources: tuple[Part, ...]
    """Parts that make the whole matrix once; the owner's own where there is a choice."""


def plan(shards: Shards) -> list[list[Matrix]]:
    """All matrices in rounds, each with its owner: the same on every rank.

    A matrix goes to the rank with the least work so far among those that hold all of it, or else a part.
    """
    work = [0] * shards.group.size
    gathered = [0] * shards.group.size
    rounds: list[list[Matrix]] = []
    found = [row for name in shards.names for row in _matrices(shards, name)]
    for name, shape, parts in sorted(found, key=lambda row: -_work(row[1])):
        whole = [part.rank for part in parts if part.box.size == shape]
        owner = min(whole or [part.rank for part in parts], key=lambda rank: (work[rank], rank))
        number = gathered[owner] // ROUND_VALUES
        work[owner] += _work(shape)
        gathered[owner] += math.prod(shape)
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        chosen = {part.box: part for part in sorted(parts, key=lambda part: (part.rank == owner, -part.rank))}
        sources = tuple(sorted(chosen.values(), key=lambda part: part.rank))
        rounds[number].append(Matrix(name=name, shape=shape, owner=owner, parts=parts, sources=sources))
    return rounds


def _matrices(shards: Shards, name: str) -> Iterator[tuple[str, tuple[int, int], tuple[Part, ...]]]:
    *stack, m, n = shards.shapes[name]
    boxes = shards.boxes.get(name, {})
    for expert in range(stack[0]) if stack else [None]:
        parts = []
        for rank, box in boxes.items():
            index = None if expert is None else expert - box.offset[0]
            if index is None or 0 <= index < box.size[0]:
                parts.append(Part(rank=rank, index=index, box=Box(box.offset[-2:], box.size[-2:])))
        if parts:
            yield name, (m, n), tuple(parts)


def _work(shape: tuple[int, int]) -> int:
    return math.prod(shape) * min(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """This rank's part of a parameter: local tensors, and the settings of its group."""

    values: Tensor
    gradient: Tensor
    buffer: Tensor
    group: dict[str, Any]

    def update(self, part: Part) -> Tensor:
        """The part's U: what is to be made orthogonal."""
        return torch.lerp(part.of(self.gradient), part.of(self.buffer), self.group["momentum"])

    def move(self, part: Part, direction: Tensor, shape: tuple[int, int]) -> None:
        """Decays the part of a matrix of `shape`, and steps along `direction`."""
        lr, values = self.group["lr"], part.of(self.values)
        values.mul_(1 - lr * self.group["weight_decay"])
        values.add_(direction, alpha=-lr * RMS * math.sqrt(max(shape)))


class Muon(torch.optim.Optimizer):
    """Muon where a group says `muon`, AdamW where it does not.

    It is a `torch.optim.Optimizer` with its state per parameter: `momentum_buffer` of a matrix, `step`, `exp_avg` and
    `exp_avg_sq` of the rest. Making it and `step` are collective over the island.

    Args:
        groups: each with `muon`, `lr` and `weight_decay`; the parameters of one are on one mesh. Those of a `muon`
            group have two dimensions, or three where the first counts experts.
        names: the parameters' names, the same on all ranks.
        betas, eps: AdamW's.
        momentum: Muon's.
        newton_schulz_steps: of the iteration.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        names: Mapping[Tensor, str],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        newton_schulz_steps: int = 5,
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps, "momentum": momentum, "fused": False})
        self._names = names
        self._steps = newton_schulz_steps
        self._shards = Shards({names[p]: p for group in self._muon_groups() for p in group["params"]})
        self._plan = plan(self._shards)

    def _muon_groups(self) -> Iterator[dict[str, Any]]:
        return (group for group in self.param_groups if group["muon"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["muon"]:
                self._adamw(group)
        held = {
            self._names[p]: self._hold(p, group)
            for group in self._muon_groups()
            for p in group["params"]
            if p.grad is not None
        }
        for matrices in self._plan:
            self._round([matrix for matrix in matrices if matrix.name in held], held)
        return loss

    def _hold(self, parameter: Tensor, group: dict[str, Any]) -> Held:
        """This rank's part of a matrix or a stack, its momentum brought up to date."""
        state, gradient = self.state[parameter], local_gradient(parameter)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return Held(values=local(parameter), gradient=gradient, buffer=buffer, group=group)

    def _adamw(self, group: dict[str, Any]) -> None:
        rows = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                where = parameter.device if group["fused"] else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=where)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            rows.append((parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]))
        if not rows:
            return
        parameters, gradients, firsts, seconds, steps = (list(column) for column in zip(*rows, strict=True))
        adamw(
            parameters,
            gradients,
            firsts,
            seconds,
            [],
            steps,
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _round(self, matrices: Sequence[Matrix], held: Mapping[str, Held]) -> None:
        """Gathers each matrix at its owner, makes it orthogonal there, and moves every part by what comes back.

        Args:
            matrices: those of the round of which this rank holds a part.
        """
        rank = self._shards.group.rank
        device = self.param_groups[0]["params"][0].device
        like = torch.empty(0, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)

        parcels = Parcels(self._shards, like)
        for matrix in matrices:
            for part in matrix.sources:
                if part.rank == rank:
                    parcels.send(matrix.owner, held[matrix.name].update(part))
                if matrix.owner == rank:
                    parcels.expect(part.rank, part.box.numel)
        streams = parcels.exchange()
        own = [matrix for matrix in matrices if matrix.owner == rank]
        whole = {}
        for matrix in own:
            whole[matrix] = like.new_empty(matrix.shape)
            for part in matrix.sources:
                whole[matrix][part.box.slices] = streams[part.rank].take(part.box)
        for shape in {matrix.shape: None for matrix in own}:
            alike = [matrix for matrix in own if matrix.shape == shape]
            stacked = torch.stack([whole[matrix] for matrix in alike])
            whole |= zip(alike, orthogonal(stacked, self._steps), strict=True)

        parcels = Parcels(self._shards, like)
        for matrix in matrices:
            for part in matrix.parts:
                if matrix.owner == rank:
                    parcels.send(part.rank, whole[matrix][part.box.slices])
                if part.rank == rank:
                    parcels.expect(matrix.owner, part.box.numel)
        whole.clear()
        streams = parcels.exchange()
        for matrix in matrices:
            for part in matrix.parts:
                if part.rank == rank:
                    held[matrix.name].move(part, streams[matrix.owner].take(part.box), matrix.shape)
