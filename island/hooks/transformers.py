"""A run for the Trainer of Hugging Face transformers.

    with DiLoCoCallback("host:port", island_id="tokyo") as callback:
        Trainer(model=model, args=arguments, callbacks=[callback], ...).train()

The parameters are the run's from the first step on, also where the Trainer resumes from a checkpoint: of that it keeps
the inner optimizer, the data and its own counts. What it evaluates and saves are the outer parameters. The learning
rate follows the run's step, so `max_steps` is to be the run's.
"""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from island.session import Session, join

log = logging.getLogger("diloco.island")


class DiLoCoCallback(TrainerCallback):
    """Takes a Trainer into a run. List it after callbacks that ask for an evaluation or a checkpoint.

    As a context it also leaves where training raises; without, the run would wait for this process to end.

    Args:
        coordinator, options: as for `island.join`.
    """

    def __init__(self, coordinator: str, **options: Any) -> None:
        self.site: Session | None = None
        """The island's part in the run, once training has begun."""
        self._coordinator, self._options = coordinator, options
        self._outer = contextlib.ExitStack()
        self._tokens = 0

    def __enter__(self) -> DiLoCoCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.site:
            self.site.__exit__(kind, error, trace)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Joins: the model, the optimizer and the schedule are as the Trainer and Accelerate have prepared them."""
        model, optimizer, scheduler = (kwargs[name] for name in ("model", "optimizer", "lr_scheduler"))
        site = join(model, optimizer, self._coordinator, scheduler=scheduler, **self._options)
        self.site, self._tokens = site, state.num_input_tokens_seen
        steps, left = site.config.run.steps, site.config.run.steps - site.at_step
        if state.max_steps != steps:
            short = " and leaves the run before it is done" if state.max_steps - state.global_step < left else ""
            log.warning(
                "the Trainer's schedule is made for %d steps%s, and the run has %d: set max_steps=%d",
                state.max_steps,
                short,
                steps,
                steps,
            )
        control.should_training_stop = site.done

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Goes back from the outer parameters to training."""
        self._outer.close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The edge after an optimizer step, whatever number of batches that took."""
        assert self.site
        tokens = None
        if args.include_num_input_tokens_seen != "no":  # of all ranks together
            tokens = state.num_input_tokens_seen - self._tokens if state.is_world_process_zero else 0
            self._tokens = state.num_input_tokens_seen
        if not self.site.done:
            self.site.step(tokens=tokens)
        if self.site.done:
            control.should_training_stop = True
        self._show_outer(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Goes on where an evaluation or a checkpoint is due at the end of the epoch."""
        self._outer.close()
        self._show_outer(control)

    def _show_outer(self, control: TrainerControl) -> None:
        """Has the model hold the outer parameters while the Trainer evaluates or saves it."""
        if self.site and (control.should_evaluate or control.should_save):
            self._outer.enter_context(self.site.outer_parameters())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tells the coordinator of the loss."""
        if self.site and "loss" in kwargs["logs"]:
            self.site.tell(loss=kwargs["logs"]["loss"])

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tells the coordinator of the loss of the outer parameters."""
        if self.site and "eval_loss" in kwargs["metrics"]:
            self.site.tell(outer_loss=kwargs["metrics"]["eval_loss"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves; the model then has the outer parameters, or the best ones that were evaluated."""
        assert self.site
        self._outer.close()
        if not args.load_best_model_at_end:
            self.site.take_outer()
        self.site.leave("finished" if self.site.done else f"the Trainer has ended after {state.global_step} steps")
