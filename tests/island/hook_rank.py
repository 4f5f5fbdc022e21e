"""One rank of an island under somebody else's Trainer, as torchrun starts it.

python -m tests.island.hook_rank ADDRESS KIND OUT

KIND is `lightning-ddp`; `trainer-ddp`; or `trainer-fsdp`, which is FSDP2 as accelerate sets it up.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def lightning_ddp(address: str, folder: Path) -> dict[str, Any]:
    """Trains with Lightning's DDP strategy over gloo."""
    from lightning.pytorch.strategies import DDPStrategy

    from tests.island.test_hooks_lightning import Module, fit, joining

    class Shares(Module):
        """Each rank has rows of its own."""

        wrapped = ""

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            self.wrapped = type(self.trainer.strategy.model).__name__
            return super().training_step(batch + dist.get_rank(), number)

    callback = joining(address, tokens=len)
    strategy = DDPStrategy(process_group_backend="gloo")
    module = Shares()
    fit(folder, callback, module, strategy=strategy, devices=2, num_nodes=1, val_check_interval=2)
    return {"wrapped": module.wrapped} | seen(callback.site, module.copied())


def trainer_on(address: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Trains with Hugging Face's Trainer."""
    from island.hooks.transformers import DiLoCoCallback
    from tests.island.test_hooks_transformers import copied, trainer

    with DiLoCoCallback(address, island_id="ranks") as callback:
        options = {"include_num_input_tokens_seen": "all", "save_strategy": "no", **options}
        training = trainer(folder, callback, **options)
        training.train()
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in copied(training.model).items()
        }
        return {
            **seen(callback.site, whole),
            "wrapped": type(training.model_wrapped).__name__,
        }


def let_the_cpu_shard() -> None:
    """Has accelerate shard on the CPU too, where it takes no notice of FSDP by itself; all that follows is its own."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    usual = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        usual(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            assert self.distributed_type is DistributedType.MULTI_CPU, "accelerate shards here by itself: drop this"
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init


def seen(site: Any, parameters: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a rank has come to."""
    return {
        "digests": site.digests(),
        "step": site.at_step,
        "rounds": site.rounds,
        "tokens": site.tokens,
        "parameters": {name: value.tolist() for name, value in parameters.items()},
    }


def main(address: str, kind: str, out: str) -> None:
    """Trains to the end of the run; writes what this rank has seen."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "lightning-ddp":
            found = lightning_ddp(address, folder)
        elif kind == "trainer-ddp":
            found = trainer_on(address, folder)
        else:
            let_the_cpu_shard()
            wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
            found = trainer_on(address, folder, fsdp=True, fsdp_config={"version": 2, **wrap})
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
