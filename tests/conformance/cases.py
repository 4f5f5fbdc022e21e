"""Known answers of the DiLoCo recurrence: what to run, and the values that an independent implementation gives.

Inner SGD with a constant gradient per island, on scalars that start at 1. The values are facts about the recurrence

    pg_i = theta - local_i (tau steps before the sync);   m <- mu m + mean pg;   theta <- theta - L (mean pg + mu m)
    local_i <- (1 - alpha) theta + alpha local_i (at the sync)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from diloco.config import RunConfig

Rows = dict[tuple[int, int], tuple[float, ...]]
"""(island, fragment) -> local parameter after 0, 1, 2 ... inner steps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run with constant gradients."""

    name: str
    gradients: tuple[float, ...]
    """One per island."""
    inner_lr: float
    every: int
    steps: int
    outer_lr: float
    momentum: float = 0.0
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0
    tokens: tuple[int, ...] = ()
    """Tokens per step of each island; equal where empty."""
    rows: Rows = field(default_factory=dict)
    globals: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Fragment -> outer parameter at versions 0, 1, 2 ..."""

    @property
    def islands(self) -> tuple[str, ...]:
        return tuple(f"island-{i}" for i in range(len(self.gradients)))

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": {"id": self.name, "steps": self.steps},
                "sync": {
                    "every_steps": self.every,
                    "fragments": self.fragments,
                    "strategy": "whole" if self.fragments == 1 else "sequential",
                    "overlap_steps": self.overlap,
                    "alpha": self.alpha,
                },
                "outer": {"lr": self.outer_lr, "momentum": self.momentum},
                "rounds": {"start_islands": len(self.gradients), "quorum": len(self.gradients)},
            }
        )

    def model(self) -> nn.Module:
        """One scalar weight per fragment, at 1."""
        layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(self.fragments))
        for layer in layers:
            nn.init.ones_(layer.weight)
        return nn.ModuleDict({"layers": layers})

    def inner_step(self, model: nn.Module, island: int) -> None:
        """One step of inner SGD with the island's constant gradient."""
        for parameter in model.parameters():
            parameter.data.sub_(self.inner_lr * self.gradients[island])

    def island_tokens(self, island: int) -> int:
        return self.tokens[island] if self.tokens else 1


def weights(model: nn.Module) -> list[float]:
    """The scalars of a case's model, by fragment."""
    return [float(parameter.detach()) for parameter in model.parameters()]


def down(first: float, count: int, by: float) -> tuple[float, ...]:
    """`count` values from `first`, each lower by `by`."""
    return tuple(first - i * by for i in range(count))


def _mocked(number: int, delay: int, alpha: float, row0: tuple[float, ...], row1: tuple[float, ...]) -> Case:
    rows = {(island, f): tuple(row) for island in (0, 1) for f, row in enumerate((row0, row1))}
    return Case(
        name=f"mocked-{number}",
        gradients=(2.0, 2.0),
        inner_lr=1.0,
        every=6,
        steps=15,
        fragments=2,
        outer_lr=2.0,
        overlap=delay,
        alpha=alpha,
        rows=rows,
        globals=MOCKED_GLOBALS[number],
    )


MOCKED_GLOBALS = {
    0: {0: (1, -11, -35), 1: (1, -23, -47)},
    1: {0: (1, -11, -29), 1: (1, -23, -35)},
    2: {0: (1, -11, -23), 1: (1, -23, -23)},
    3: {0: (1, -7, -27), 1: (1, -19, -39)},
    4: {0: (1, -7, -25), 1: (1, -19, -31)},
    5: {0: (1, -7, -23), 1: (1, -19, -23)},
}

MOCKED = (
    _mocked(
        0,
        0,
        0.0,
        (1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59),
        (1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53),
    ),
    _mocked(
        1,
        0,
        0.5,
        (1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25),
        (1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38),
    ),
    _mocked(2, 0, 1.0, down(1, 16, 2), down(1, 16, 2)),
    _mocked(
        3,
        1,
        0.0,
        (1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47),
        (1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45),
    ),
    _mocked(
        4,
        1,
        0.5,
        (1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75),
        (1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35),
    ),
    _mocked(5, 1, 1.0, down(1, 16, 2), down(1, 16, 2)),
)

_A = (1.0, 0.468, -0.2908, -1.25372, -2.400348)
_C0 = (
    (1, 1), (0.9, 0.9), (0.767, 0.8), (0.667, 0.7), (0.567, 0.401), (0.467, 0.301), (0.050245, 0.201),
    (-0.049755, 0.101), (-0.149755, -0.468265), (-0.249755, -0.568265), (-0.902865, -0.668265),
    (-1.002865, -0.768265), (-1.102865, -1.51281),
)  # fmt: skip
_C1 = (
    (1, 1), (0.7, 0.7), (0.567, 0.4), (0.267, 0.1), (-0.033, 0.001), (-0.333, -0.299), (-0.449755, -0.599),
    (-0.749755, -0.899), (-1.049755, -1.068265), (-1.349755, -1.368265), (-1.552865, -1.668265),
    (-1.852865, -1.968265), (-2.152865, -2.21281),
)  # fmt: skip

NESTEROV = (
    Case(
        name="nesterov-A",
        gradients=(1.0, 3.0),
        inner_lr=0.1,
        every=2,
        steps=8,
        outer_lr=0.7,
        momentum=0.9,
        rows={
            (0, 0): (1, 0.9, 0.468, 0.368, -0.2908, -0.3908, -1.25372, -1.35372, -2.400348),
            (1, 0): (1, 0.7, 0.468, 0.168, -0.2908, -0.5908, -1.25372, -1.55372, -2.400348),
        },
        globals={0: _A},
    ),
    Case(
        name="nesterov-B",
        gradients=(1.0, 2.0, 6.0),
        inner_lr=0.1,
        every=4,
        steps=12,
        outer_lr=0.7,
        momentum=0.9,
        globals={0: (1.0, -0.596, -2.8724, -5.761159)},
    ),
    Case(
        name="nesterov-C",
        gradients=(1.0, 3.0),
        inner_lr=0.1,
        every=4,
        steps=12,
        fragments=2,
        overlap=1,
        alpha=0.5,
        outer_lr=0.7,
        momentum=0.9,
        rows={(i, f): tuple(pair[f] for pair in rows) for i, rows in enumerate((_C0, _C1)) for f in (0, 1)},
    ),
    Case(
        name="nesterov-D",
        gradients=(1.0, 3.0),
        inner_lr=0.1,
        every=2,
        steps=6,
        outer_lr=1.0,
        globals={0: (1.0, 0.6, 0.2, -0.2)},
    ),
)

WEIGHTED = Case(
    # After one step the pseudo-gradients are 0.2 and 0.6; weighted 1 : 3 their mean is 0.5.
    name="weighted-by-tokens",
    gradients=(2.0, 6.0),
    inner_lr=0.1,
    every=1,
    steps=1,
    outer_lr=1.0,
    tokens=(1, 3),
    globals={0: (1.0, 0.5)},
)

PLAIN = Case(
    # One island with outer SGD at lr 1 is plain training: 1 - 0.1 t, whatever H is.
    name="one-island-is-plain-training",
    gradients=(1.0,),
    inner_lr=0.1,
    every=3,
    steps=9,
    outer_lr=1.0,
    rows={(0, 0): down(1.0, 10, 0.1)},
    globals={0: (1.0, 0.7, 0.4, 0.1)},
)

DATA_PARALLEL = Case(
    # H = 1, inner SGD and outer SGD at lr 1 are data-parallel training with the mean gradient 2.
    name="every-step-is-data-parallel",
    gradients=(1.0, 3.0),
    inner_lr=0.1,
    every=1,
    steps=6,
    outer_lr=1.0,
    rows={(i, 0): down(1.0, 7, 0.2) for i in (0, 1)},
    globals={0: down(1.0, 7, 0.2)},
)


def closed_form(case: Case) -> tuple[float, ...]:
    """Outer parameter after each round of one fragment without overlap: pg = eta H mean(g), then Nesterov."""
    pg = case.inner_lr * case.every * sum(case.gradients) / len(case.gradients)
    theta, velocity, out = 1.0, 0.0, [1.0]
    for _ in range(case.steps // case.every):
        velocity = case.momentum * velocity + pg
        theta -= case.outer_lr * (pg + case.momentum * velocity)
        out.append(theta)
    return tuple(out)


CASES = (*MOCKED, *NESTEROV, WEIGHTED, PLAIN, DATA_PARALLEL)
