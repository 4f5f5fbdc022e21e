"""A run for the Trainer of Lightning, under either name of the package.

    Trainer(callbacks=[DiLoCoCallback("host:port", island_id="tokyo")], ...).fit(module)

The parameters are the run's from the first step on, also where `fit` is given a checkpoint: of that it keeps the
optimizer, the loops and the data. Validation sees the outer parameters; checkpoints hold what is being trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor

from island.joining import check
from island.session import Session, join

if TYPE_CHECKING or find_spec("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    from pytorch_lightning import Callback


class DiLoCoCallback(Callback):
    """Takes a Lightning Trainer into a run.

    Args:
        coordinator, options: as for `island.join`.
        module: name of the submodule that the run is about, such as "model", so that its tensors are named as on other
            islands; "" for the whole LightningModule. The rest of it is trained by this island alone.
        tokens: counts the tokens of a batch on this rank; steps are counted without.
    """

    def __init__(
        self, coordinator: str, *, module: str = "", tokens: Callable[[Any], int] | None = None, **options: Any
    ) -> None:
        self.site: Session | None = None
        """The island's part in the run, once training has begun."""
        self._coordinator, self._options = coordinator, options
        self._module, self._count = module, tokens
        self._outer = contextlib.ExitStack()
        self._seen = self._steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins: strategy, optimizers and a checkpoint have been set up by now."""
        if trainer.strategy.model:
            check(trainer.strategy.model, trainer.optimizers)
        by_step = [c.scheduler for c in trainer.lr_scheduler_configs if (c.interval, c.frequency) == ("step", 1)]
        self.site = join(
            pl_module.get_submodule(self._module),
            trainer.optimizers,
            self._coordinator,
            scheduler=by_step,
            **self._options,
        )
        self._steps = trainer.global_step
        trainer.should_stop = trainer.should_stop or self.site.done

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The edge after an optimizer step: one where `global_step` has moved, since gradients may be accumulated."""
        assert self.site
        self._seen += self._count(batch) if self._count else 0
        if trainer.global_step == self._steps or self.site.done:
            return
        self._steps = trainer.global_step
        self.site.step(tokens=self._seen if self._count else None, loss=_loss(trainer, outputs))
        self._seen = 0
        trainer.should_stop = trainer.should_stop or self.site.done

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has the model hold the outer parameters; not for the check before training."""
        if self.site and not trainer.sanity_checking:
            self._outer.enter_context(self.site.outer_parameters())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Goes back to training."""
        self._outer.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves; the model then has the outer parameters."""
        assert self.site
        self.site.take_outer()
        self.site.leave("finished" if self.site.done else f"the Trainer has ended after {trainer.global_step} steps")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves, so that no round waits for this island."""
        if self.site:
            self.site.__exit__(type(exception), exception, None)


def _loss(trainer: Trainer, outputs: Any) -> float | None:
    """The loss of the batch at the steps at which the Trainer logs: elsewhere it would wait for the device."""
    if trainer.global_step % max(1, getattr(trainer, "log_every_n_steps", 1)):
        return None
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else None
