"""Lightning's Trainer in a run: a callback, and nothing else.

pip install 'diloco[lightning]'
diloco coordinator examples/run.toml --state state --listen 127.0.0.1:7000
python examples/lightning_module.py 127.0.0.1:7000 tokyo

On several GPUs Lightning starts a process for each.
"""

import sys

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from island.hooks.lightning import DiLoCoCallback

address, name = sys.argv[1:]


class Flip(lightning.LightningModule):
    """Learns to turn a vector around."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss of a batch [B, 16]."""
        return (self.model(batch) - batch.flip(1)).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        """Of the outer parameters: the callback sees to that."""
        self.log("held_out", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(sum(name.encode()))  # each island has its own data
data = DataLoader(torch.randn(32 * 60, 16), batch_size=32)
held_out = DataLoader(torch.randn(256, 16, generator=torch.Generator().manual_seed(1)), batch_size=256)
callback = DiLoCoCallback(address, module="model", tokens=len, island_id=name)
trainer = lightning.Trainer(
    max_epochs=-1,  # until the run is done
    val_check_interval=15,
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Flip(), data, held_out)
assert callback.site
digests = " ".join(callback.site.digests())  # all ranks together
if trainer.is_global_zero:
    print(f"{name}: step {callback.site.at_step}, held-out loss {trainer.callback_metrics['held_out']:.4f}")
    print(f"{name}: digests {digests}")
