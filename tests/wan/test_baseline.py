"""How a comparison ends: the process group goes last."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import island.group
from diloco.config import load_run
from diloco.settings import to_toml
from island.config import IslandConfig
from tests.processes import free_port
from wan.baseline import main

RUN = """
[run]
id = "baseline"
steps = 2
[model]
dim = 16
layers = 1
heads = 2
kv_heads = 2
ffn_dim = 16
sequence_length = 16
[sync]
every_steps = 2
"""


class Two(island.group.Group):
    """A process that takes itself for one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2


def test_nothing_holds_the_process_group_any_more_when_it_is_destroyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("all work and no play " * 200)
    settings = {
        "island": {"id": "alone"},
        "data": {"text": (str(text),), "batch_sequences": 2},
        "metrics": {"dir": str(tmp_path)},
    }
    (tmp_path / "run.toml").write_text(to_toml(load_run(RUN, "the test").value))
    (tmp_path / "island.toml").write_text(to_toml(IslandConfig.model_validate(settings)))
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(island.group, "Group", Two)
    made: list[str] = []
    holders: list[Any] = []
    wrap, destroy = DistributedDataParallel.__init__, dist.destroy_process_group

    def wrapping(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        made.append("wrapped")
        wrap(self, *arguments, **options)

    def destroying() -> None:
        holders.extend(thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel)
        destroy()

    monkeypatch.setattr(DistributedDataParallel, "__init__", wrapping)
    monkeypatch.setattr(dist, "destroy_process_group", destroying)
    main(str(tmp_path / "run.toml"), str(tmp_path / "island.toml"))
    assert made == ["wrapped"]
    assert not holders
    assert not dist.is_initialized()
