"""The callback for Hugging Face's Trainer, under the real one, beside an island with a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from coordinator.facts import Standing
from diloco.errors import LayoutError
from tests.island.beside import EVERY, STEPS, beside, config, digests, outer
from tests.support import serving

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'diloco[trainer]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'diloco[trainer]'")

from island.hooks.transformers import DiLoCoCallback  # noqa: E402

VOCABULARY, LENGTH, BATCH = 11, 8, 4


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Random tokens, the same ones for a seed."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.rows = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    found: nn.Module = transformers.LlamaForCausalLM(settings).to(dtype)
    return found


def breaking(after: int) -> nn.Module:
    """A model whose forward fails after so many."""
    whole, forwards = model(), iter(range(after))

    def check(*_: object) -> None:
        if next(forwards, None) is None:
            raise RuntimeError("broken")

    whole.register_forward_pre_hook(check)
    return whole


class Watched(transformers.Trainer):  # type: ignore[misc]
    """A Trainer that notes which parameters it evaluates."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("evaluated", []).append(copied(self.model))
        return super().evaluate(*args, **kwargs)


def trainer(folder: Path, callback: DiLoCoCallback, own: nn.Module | None = None, **options: Any) -> Any:
    """A Trainer on 100 rows, evaluated and saved at every sync."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        learning_rate=0.1,
        lr_scheduler_type="linear",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": EVERY, "save_steps": EVERY, **options},
    )
    return Watched(own or model(), arguments, train_dataset=Rows(100), eval_dataset=Rows(8, 1), callbacks=[callback])


def copied(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def callback_at() -> Iterator[Any]:
    made: list[DiLoCoCallback] = []

    def make(address: str, **options: Any) -> DiLoCoCallback:
        made.append(DiLoCoCallback(address, island_id="trainer", **options))
        return made[-1]

    yield make
    for callback in made:
        callback.__exit__(None, None, None)


def test_a_trainer_and_a_plain_loop_end_with_the_same_bits(tmp_path: Path, callback_at: Any) -> None:
    with serving(config(), tmp_path / "state") as host, beside(model(), host) as other:
        callback = callback_at(host.address)
        training = trainer(tmp_path, callback, gradient_accumulation_steps=2, include_num_input_tokens_seen="all")
        training.train()
        site = callback.site
        assert site.digests() == other.result() == digests(host)
        assert (site.at_step, site.rounds, site.tokens) == (STEPS, 2, 2 * STEPS * BATCH * LENGTH)
        last, members = outer(host), host.ask(lambda run: run.state.members)
    assert alike(copied(training.model), last)
    assert alike(training.evaluated[-1], last)
    assert not alike(training.evaluated[0], last)
    saved = load_file(tmp_path / "out" / f"checkpoint-{STEPS}" / "model.safetensors")
    assert all(torch.equal(saved[name], last[name]) for name in last if name in saved)
    assert saved
    assert (members["trainer"].standing, members["trainer"].reason) == (Standing.LEFT, "finished")


def test_a_trainer_trains_on_with_its_own_parameters_after_an_evaluation(tmp_path: Path, callback_at: Any) -> None:
    seen = []

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
            seen.append(copied(model))

    with serving(config(1), tmp_path / "state") as host:
        training = trainer(tmp_path, callback_at(host.address), eval_steps=1, eval_on_start=True, save_strategy="no")
        training.add_callback(Look())
        training.train()
        assert len(training.evaluated) == STEPS + 1
        assert alike(training.evaluated[1], training.evaluated[0]), "the anchor, until the first sync"
        assert not alike(seen[1], training.evaluated[1])
        assert alike(training.evaluated[-1], outer(host))


def test_a_late_trainer_stops_with_the_run_and_its_learning_rate_is_the_runs(
    tmp_path: Path, callback_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(config(1), tmp_path / "state") as host:
        early = callback_at(host.address)
        with pytest.raises(RuntimeError, match="broken"), early:
            trainer(tmp_path, early, own=breaking(EVERY + 1), eval_strategy="no").train()
        assert host.ask(lambda run: run.state.members["trainer"].reason) == "RuntimeError: broken"
        late = callback_at(host.address)
        training = trainer(tmp_path, late, max_steps=STEPS + 4, eval_strategy="no")
        training.train()
        assert late.site.at_step == STEPS
        assert 0 < training.state.global_step < STEPS
        assert "the Trainer's schedule is made for 10 steps, and the run has 6: set max_steps=6" in caplog.text
        rates = [row["learning_rate"] for row in training.state.log_history if "learning_rate" in row]
        step = STEPS - training.state.global_step
        full = [0.1 * (1 - s / (STEPS + 4)) for s in range(step, STEPS)]
        assert rates == pytest.approx(full)


def test_a_resumed_trainer_takes_the_runs_parameters_and_keeps_its_optimizer(tmp_path: Path, callback_at: Any) -> None:
    with serving(config(1), tmp_path / "state") as host:
        first = callback_at(host.address)
        with pytest.raises(RuntimeError), first:
            trainer(tmp_path, first, own=breaking(EVERY + 1), eval_strategy="no").train()
        at_sync, again = outer(host), callback_at(host.address)
        begun: list[Any] = []

        class Look(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
                begun.append((copied(model), len(optimizer.state), again.site.at_step))

        training = trainer(tmp_path, again, eval_strategy="no")
        training.add_callback(Look())
        training.train(resume_from_checkpoint=True)
        parameters, states, step = begun[0]
        assert alike(parameters, at_sync)
        assert (states, step, training.state.global_step) == (len(at_sync), EVERY, STEPS)


def test_a_model_without_float32_parameters_is_refused_with_what_to_do(tmp_path: Path, callback_at: Any) -> None:
    training = trainer(tmp_path, callback_at("127.0.0.1:1"), own=model(torch.bfloat16))
    with pytest.raises(LayoutError, match=r"is torch.bfloat16, .*from_pretrained\(dtype=torch.float32\)"):
        training.train()
