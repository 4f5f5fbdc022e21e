"""The checks of this machine and of the run's settings, each where all is well and where it is not."""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from diloco.codec.policy import up_choice
from diloco.config import RunConfig
from diloco.errors import ConfigError, EnvironmentFault, ExitCode
from diloco.framing import PROTOCOL
from diloco.layout import Layout, TensorSpec
from diloco.settings import to_toml
from diloco.v1 import coordinator_pb2 as pb
from island.config import DataConfig, IslandConfig
from island.preflight import agreement, machine, memory
from tests.support import configure


def island(**sections: object) -> IslandConfig:
    return IslandConfig.model_validate({"island": {"id": "tokyo"}, **sections})


# -- memory -----------------------------------------------------------------------------------------------------------


def run(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"run": {"id": "r"}, **sections})


LAYOUT = Layout([TensorSpec("embed.weight", (100, 10)), *(TensorSpec(f"layers.{i}.w", (10, 10)) for i in range(3))])
"""1300 values; 1000 outside of blocks, 100 in each."""


def test_what_a_rank_needs_is_counted() -> None:
    config = run(model={"dim": 8, "heads": 2, "kv_heads": 2, "ffn_dim": 5, "layers": 3, "vocab_size": 300})
    alone = memory.need(config, island(data={"batch_sequences": 4}), LAYOUT)
    tokens = 4 * config.model.sequence_length
    assert alone.model == 1300 * (4 + 4 + 8)
    assert alone.activations == tokens * (4 * 3 * (6 * 8 + 2 * 8 + 4 * 5) + 12 * 300)
    assert alone.host == 1300 * 4 + 1300 * 8 + memory.PROCESS_BYTES
    mesh = {"ranks": 4, "replicas": 2, "param_dtype": "bfloat16"}
    shared = memory.need(config, island(data={"batch_sequences": 4}, mesh=mesh), LAYOUT)
    assert shared.model == 1300 * 16 // 2 + 2 * (1000 + 2 * 100)
    assert shared.activations == tokens // 4 * (2 * 3 * (6 * 8 + 2 * 8 + 4 * 5) + 12 * 300)
    assert shared.host == 2 * 1300 * 4 + 1300 * 8 + 4 * memory.PROCESS_BYTES


def test_codecs_optimizers_and_fragments_count() -> None:
    one = memory.need(run(), island(), LAYOUT)
    coded = run(wire={"up": "int4"})
    size = sum(up_choice(coded.wire).of(spec).size(spec.numel) for spec in LAYOUT.tensors)
    assert memory.need(coded, island(), LAYOUT).host == one.host + 1300 * 4 - 1300 * 4 + size
    assert memory.need(run(inner={"optimizer": "sgd"}), island(), LAYOUT).model == one.model - 8 * 1300
    assert memory.need(run(inner={"optimizer": "muon"}), island(), LAYOUT).model == one.model - 4 * 300
    cut = {"strategy": "sequential", "fragments": 2, "every_steps": 10}
    assert memory.need(run(sync=cut), island(), LAYOUT).host < one.host


def test_what_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wants = memory.need(run(), island(), LAYOUT)
    each = wants.model + wants.activations
    monkeypatch.setattr(memory, "free_ram", lambda: 10**12)
    assert memory.memory(run(), island(), LAYOUT, []).verdict == "ok"
    assert memory.memory(run(), island(), LAYOUT, [2 * each]).verdict == "ok"
    assert memory.memory(run(), island(), LAYOUT, [2 * each, each]).verdict == "warn"
    finding = memory.memory(run(), island(), LAYOUT, [each - 1])
    assert (finding.verdict, finding.code) == ("fail", ExitCode.ENVIRONMENT)
    assert "GPU: about" in finding.found and "data.batch_sequences" in finding.advice
    monkeypatch.setattr(memory, "free_ram", lambda: wants.host + each - 1)
    assert memory.memory(run(), island(), LAYOUT, []).verdict == "fail"
    assert memory.memory(run(), island(), LAYOUT, [10**12]).verdict == "warn"


def test_a_control_group_bounds_the_memory(tmp_path: Path) -> None:
    machine_bytes = psutil.virtual_memory().total
    assert 0 < memory.free_ram(tmp_path) <= machine_bytes
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.free_ram(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert 600 < memory.free_ram(tmp_path) <= machine_bytes


# -- devices, folders, packages ---------------------------------------------------------------------------------------


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, *, nccl: bool = True) -> None:
    """A machine with so many GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Tensor 9000")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (1000 + i, 2000))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)


@pytest.mark.parametrize(
    ("count", "mesh", "verdict", "found"),
    [
        (0, {"device": "cuda"}, "fail", "mesh.ranks is 1, but there are 0 GPUs"),
        (1, {"device": "cuda", "ranks": 2}, "fail", "mesh.ranks is 2, but there are 1 GPUs"),
        (0, {"ranks": 2}, "ok", "2 ranks on"),
        (8, {"device": "cpu"}, "ok", "(gloo)"),
        (1, {"ranks": 2}, "warn", "1 GPUs are not used"),
        (4, {"ranks": 2}, "ok", "2 of 4 GPUs (Tensor 9000), NCCL 2.30.1"),
    ],
)
def test_devices(
    count: int, mesh: dict[str, object], verdict: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, count)
    settings = island(mesh=mesh)
    finding = machine.devices(settings)
    assert finding.verdict == verdict and found in finding.found
    assert finding.code == (ExitCode.ENVIRONMENT if verdict == "fail" else ExitCode.OK)
    uses = verdict == "ok" and "NCCL" in finding.found
    assert memory.free_gpus(settings) == ([1000, 1001] if uses else [])


def test_gpus_without_nccl_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2, nccl=False)
    assert machine.devices(island()).code == ExitCode.ENVIRONMENT


def test_a_folder_is_tried_where_it_is_or_will_be(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "not" / "yet"), ""):
        finding = machine.folder("island.spool_dir", path, 1)
        assert finding.verdict == "ok" and "1 MiB durable in" in finding.found
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"
    finding = machine.folder("island.spool_dir", str(tmp_path), 2_000_000_000, lambda path: 1_000_000_000)
    assert (finding.verdict, finding.code) == ("fail", ExitCode.ENVIRONMENT)
    assert "1.0 GB free" in finding.found and "2.0 GB will be kept there" in finding.advice


def test_a_slow_disk_is_told() -> None:
    assert machine.durability("metrics.dir", "so it is", 0.01).verdict == "ok"
    finding = machine.durability("metrics.dir", "so it is", 0.5)
    assert finding.verdict == "warn" and "set metrics.dir to" in finding.advice


def test_packages_that_settings_call_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = island(metrics={"wandb_project": "p"})
    assert machine.packages(island(), None).verdict == "ok"
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    finding = machine.packages(wandb, None)
    assert (finding.code, finding.advice) == (ExitCode.ENVIRONMENT, "pip install 'diloco[wandb]'")
    monkeypatch.setattr(machine, "find_spec", lambda name: util.find_spec("json"))
    assert machine.packages(wandb, None).found == "wandb can be imported"
    assert "torch.optim:NAdam" in machine.packages(island(), run(inner={"optimizer": "torch.optim:NAdam"})).found
    with pytest.raises(EnvironmentFault):
        machine.packages(island(), run(inner={"optimizer": "no_such_module:Adam"}))


# -- the run ----------------------------------------------------------------------------------------------------------


def reply(**fields: object) -> pb.StatusReply:
    state = pb.RunState(phase="running")
    given = {"run_id": "test", "state": state, "config_toml": to_toml(configure()), "protocol": PROTOCOL, **fields}
    return pb.StatusReply(**given)  # type: ignore[arg-type]


def test_the_run_is_the_one_that_is_meant() -> None:
    config, tokyo = configure(), island().island
    finding = agreement.run(reply(), config, tokyo, configure())
    assert finding.verdict == "ok" and finding.found.startswith("run 'test' is running")
    for bad, found in (
        (agreement.run(reply(protocol=PROTOCOL + 1), config, tokyo, None), f"protocol {PROTOCOL + 1}"),
        (
            agreement.run(reply(), config, island(island={"id": "a", "run_id": "b"}).island, None),
            "island.run_id is 'b'",
        ),
        (
            agreement.run(reply(), config, tokyo, configure("outer.lr=0.9")),
            "outer.lr is 0.9 here and 0.7 there",
        ),
    ):
        assert (bad.verdict, bad.code) == ("fail", ExitCode.REFUSED)
        assert found in bad.found
    many = configure(
        "outer.lr=0.9", *(f"inner.{key}=0.5" for key in ("lr", "eps", "momentum", "weight_decay", "clip_norm"))
    )
    assert "and 1 more" in agreement.run(reply(), config, tokyo, many).found


@pytest.mark.parametrize(
    ("state", "verdict"), [("ACTIVE", "warn"), ("SUSPECT", "warn"), ("LOST", "ok"), ("LEFT", "ok")]
)
def test_an_island_of_the_same_name_is_told(state: str, verdict: str) -> None:
    there = reply(islands=[pb.IslandStatus(id="tokyo", state=state)])
    assert agreement.run(there, configure(), island().island, None).verdict == verdict


def test_settings_of_a_later_version_are_not_guessed_at() -> None:
    assert agreement.served(reply()) == configure()
    with pytest.raises(ConfigError, match=r"does not know the run's settings .*outer\.mood.*coordinator's version"):
        agreement.served(reply(config_toml='[run]\nid = "x"\n[outer]\nmood = 1\n'))


def test_the_model_is_the_runs() -> None:
    config = configure()
    mine = agreement.model_layout(config)
    assert agreement.layout(mine, config, reply()).found.endswith("no island has joined before")
    assert agreement.layout(mine, config, reply(layout_digest=mine.digest)).verdict == "ok"
    assert agreement.layout(mine, config, None).verdict == "warn"
    finding = agreement.layout(mine, config, reply(layout_digest="ab" * 32, parameters=7))
    assert (finding.verdict, finding.code) == ("fail", ExitCode.REFUSED)
    assert "the run's has 7 values" in finding.found
    with pytest.raises(ConfigError):
        agreement.layout(mine, configure("sync.fragments=300", "sync.every_steps=300", "run.steps=3000"), reply())


def test_data_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("defg")

    def look(*paths: Path, **rest: object) -> tuple[str, int, str]:
        settings = DataConfig.model_validate({"text": [str(path) for path in paths], **rest})
        finding = agreement.data(settings, configure(), 60.0)
        return finding.verdict, finding.code, finding.found

    assert look()[0] == "ok"
    assert look(tmp_path, shard=1, shards=3) == ("ok", 0, "2 files, 0.0 MB, can be read; shard 1 of 3")
    assert look(tmp_path / "none.txt")[:2] == ("fail", ExitCode.USAGE)
    assert f"cannot read {tmp_path / 'none.txt'} (No such file" in look(tmp_path / "none.txt")[2]
    (tmp_path / "empty").mkdir()
    assert look(tmp_path / "empty") == ("fail", ExitCode.USAGE, "no bytes in 0 files")
    os.mkfifo(tmp_path / "deep" / "pipe")
    assert look(tmp_path)[2].startswith("2 files, "), "what is no file is not waited for"
    with pytest.raises(ConfigError):
        agreement.data(DataConfig(), configure("model.vocab_size=100"), 1.0)
    assert agreement.data(DataConfig(text=(str(tmp_path),)), None, 0.0).found.startswith("1 files and more")
