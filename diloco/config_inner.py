"""`[inner]`: the optimizer inside an island, and the learning rate that it follows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from diloco.settings import Decay, Fraction, NonNegative, Settings

Option = bool | int | float | str | tuple[bool | int | float | str, ...]
"""A value in `[inner.options]`."""
OptimizerName = Annotated[
    str, Field(pattern=r"^(adamw|sgd|muon|lamb|[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*)$")
]


class InnerConfig(Settings):
    optimizer: OptimizerName = "adamw"
    """Inner optimizer: adamw, sgd, muon, lamb, or a class of one's own as "module:Class" (`docs/optimizers.md`). Its
    state is local to an island and is never reset by a sync."""
    options: dict[str, Option] = Field(default={})
    """Arguments of a "module:Class", as `[inner.options]`. It gets `lr` too, and `weight_decay` where it takes one."""
    lr: Annotated[float, Field(gt=0)] = 4e-4
    """Peak learning rate (DiLoCo 2023: 4e-4)."""
    matrix_lr: Annotated[float, Field(ge=0)] = 0.0
    """Peak learning rate of the matrices that Muon moves; 0 takes `lr`, which its update is scaled for."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Shape after the warm-up; "wsd" is constant and falls over the last steps (warmup-stable-decay). It follows the
    run's step, never an island's own restarts."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0; once per run."""
    decay_steps: NonNegative = 0
    """Last steps of the run over which "wsd" falls; 0 takes `decay_ratio`."""
    decay_ratio: Fraction = 0.1
    """The same as a share of the run's steps (arXiv 2404.06395: a tenth)."""
    decay_shape: Literal["linear", "1-sqrt"] = "linear"
    """How "wsd" falls: 1 - x, or 1 - sqrt(x) (arXiv 2405.18392), where x goes from 0 to 1."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the last step, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of the inner optimizer, on tensors of two dimensions and more; decoupled but for "sgd". The outer
    one has none."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Moment decays of AdamW and LAMB, and of AdamW beside Muon."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    momentum: Decay = 0.95
    """Muon's momentum (Nesterov)."""
    newton_schulz_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Steps of the iteration by which Muon makes an update orthogonal."""
    muon_except: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "*lm_head*")
    """Name patterns of matrices that Muon leaves to AdamW, as it does with norms, biases and scalars."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""

    @field_validator("options", mode="before")
    @classmethod
    def _tuples(cls, options: Any) -> Any:
        """A TOML array arrives as a list; settings hold tuples."""
        if not isinstance(options, dict):
            return options
        return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}

    @model_validator(mode="after")
    def _fits(self) -> InnerConfig:
        if self.options and ":" not in self.optimizer:
            raise ValueError(
                f"{', '.join(f'inner.options.{key}' for key in self.options)} is for a class of one's own, not for "
                f"inner.optimizer ({self.optimizer!r}), which has settings: set inner.optimizer=module:Class, or leave "
                "[inner.options] out"
            )
        if self.matrix_lr and self.optimizer != "muon":
            raise ValueError(
                f"inner.matrix_lr ({self.matrix_lr:g}) is for Muon, not for inner.optimizer ({self.optimizer!r}): "
                "set inner.matrix_lr=0 or inner.optimizer=muon"
            )
        return self

    @property
    def peak_matrix_lr(self) -> float:
        """The peak learning rate of Muon's matrices."""
        return self.matrix_lr or self.lr
