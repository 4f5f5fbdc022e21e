"""The callback for Lightning, under the real Trainer, beside an island with a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coordinator.facts import Standing
from diloco.errors import InputError
from tests.island.beside import EVERY, STEPS, beside, config, digests, outer
from tests.support import serving

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install 'diloco[lightning]'")

from island.hooks.lightning import DiLoCoCallback  # noqa: E402

WIDTH, BATCH = 5, 4
QUIET = [
    f"ignore:{start}"
    for start in (
        ".*dataloader.* does not have many workers",
        "Be aware that when using `ckpt_path`",
        "You.re resuming",
    )
]
pytestmark = [
    pytest.mark.filterwarnings(line) for line in (*QUIET, "ignore::DeprecationWarning", "ignore::FutureWarning")
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH))


class Module(pl.LightningModule):  # type: ignore[misc]
    """The model under "net", beside a parameter that is no part of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.own = model(), nn.Parameter(torch.zeros(()))
        self.broken_at = -1
        self.validated: list[dict[str, Tensor]] = []
        self.trained: list[dict[str, Tensor]] = []
        self.rates: list[float] = []

    def copied(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.net.named_parameters()}

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        if number == self.broken_at:
            raise RuntimeError("broken")
        self.trained.append(self.copied())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return (self.net(batch) + self.own - batch).square().mean()

    def validation_step(self, batch: Tensor, number: int) -> None:
        self.validated.append(self.copied())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


def batches(count: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(torch.randn(count * BATCH, WIDTH, generator=generator), batch_size=BATCH)


def fit(folder: Path, callback: DiLoCoCallback, module: Module | None = None, **options: Any) -> tuple[Any, Module]:
    module = module or Module()
    checkpoint, more = options.pop("ckpt_path", None), options.pop("more", [])
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=[callback, *more],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": 100, "enable_checkpointing": False, **options},
    )
    trainer.fit(module, batches(40), batches(1), ckpt_path=checkpoint)
    return trainer, module


def joining(address: str, **options: Any) -> DiLoCoCallback:
    return DiLoCoCallback(address, module="net", island_id="lightning", **options)


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_lightning_and_a_plain_loop_end_with_the_same_bits(tmp_path: Path) -> None:
    with serving(config(), tmp_path / "state") as host, beside(model(), host) as other:
        callback = joining(host.address, tokens=len)
        trainer, module = fit(tmp_path, callback, accumulate_grad_batches=2, val_check_interval=2)
        site = callback.site
        assert site
        assert site.digests() == other.result() == digests(host)
        assert (site.at_step, site.rounds, trainer.global_step) == (STEPS, 2, STEPS)
        assert site.tokens == 2 * STEPS * BATCH
        last, members = outer(host), host.ask(lambda run: run.state.members)
    assert alike(module.copied(), last)
    assert alike(module.validated[-1], last)
    assert alike(module.validated[1], module.trained[0]), "the anchor, until the first sync"
    assert not alike(module.validated[1], module.trained[2]), "training went on from its own parameters"
    assert module.own.item() != 0, "what is no part of the run is trained too"
    assert (members["lightning"].standing, members["lightning"].reason) == (Standing.LEFT, "finished")


def test_it_leaves_where_training_raises_and_comes_back_at_the_runs_step(tmp_path: Path) -> None:
    with serving(config(1), tmp_path / "state") as host:
        module, saved = Module(), tmp_path / "saved"
        module.broken_at = EVERY + 1
        keep = pl.callbacks.ModelCheckpoint(dirpath=saved, every_n_train_steps=EVERY)
        with pytest.raises(RuntimeError, match="broken"):
            fit(tmp_path, joining(host.address), module, more=[keep], enable_checkpointing=True)
        assert host.ask(lambda run: run.state.members["lightning"].reason) == "RuntimeError: broken"
        at_sync, again = outer(host), joining(host.address)
        [checkpoint] = saved.iterdir()
        trainer, module = fit(tmp_path, again, ckpt_path=checkpoint)
        assert alike(module.trained[0], at_sync), "the run's parameters, not the checkpoint's"
        assert again.site
        assert (again.site.at_step, trainer.global_step) == (STEPS, STEPS)
        late = joining(host.address)
        module = Module()
        trainer, module = fit(tmp_path, late, module)
        assert late.site
        assert late.site.done
        assert alike(module.copied(), outer(host)), "a run that is over has its last parameters"


def test_a_learning_rate_follows_the_run(tmp_path: Path) -> None:
    with serving(config(1), tmp_path / "state") as host:
        fit(tmp_path, joining(host.address), max_steps=EVERY)
        trainer, module = fit(tmp_path, joining(host.address))
        assert trainer.global_step == STEPS - EVERY
        assert module.rates == pytest.approx([0.1 * (1 - step / STEPS) for step in range(EVERY, STEPS)])


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    class Plateau(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            falling = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": falling, "interval": "step", "monitor": "loss", "strict": False},
            }

    with pytest.raises(InputError, match="ReduceLROnPlateau follows this island's own metric"):
        fit(tmp_path, joining("127.0.0.1:1"), Plateau())
