"""The checks of this machine, each where all is well and where it is not."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from diloco.codec.policy import up_choice
from diloco.config import RunConfig
from diloco.errors import EnvironmentFault, ExitCode
from diloco.layout import Layout, TensorSpec
from island.config import IslandConfig
from island.preflight import agreement, machine, memory


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
    layer = 6 * 8 + 2 * 8 + 2 * 8 + 4 * 5
    assert alone.activations == tokens * (4 * 3 * layer + 12 * 300)
    assert alone.host == 1300 * 4 + 1300 * 8 + memory.PROCESS_BYTES
    mesh = {"ranks": 4, "replicas": 2, "param_dtype": "bfloat16"}
    shared = memory.need(config, island(data={"batch_sequences": 4}, mesh=mesh), LAYOUT)
    assert shared.model == 1300 * 16 // 2 + 2 * (1000 + 2 * 100) + 2 * (1000 + 100) + 4 * 1000
    assert shared.activations == tokens // 4 * (2 * 3 * layer + 12 * 300)
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


@pytest.mark.parametrize("up", ["fp32", "int4"])
def test_anchors_count_where_they_are(up: str) -> None:
    config = run(wire={"up": up})
    there: dict[str, object] = {"anchors": "device"}
    one, other = (memory.need(config, island(memory=save), LAYOUT) for save in ({}, there))
    assert other.model == one.model + 4 * 1300
    assert other.host == one.host - 4 * 1300 + 2 * 4 * 1300, "less the anchors, and two more of the largest fragment"
    mesh = {"ranks": 4, "replicas": 2}
    one, other = (memory.need(config, island(memory=save, mesh=mesh), LAYOUT) for save in ({}, there))
    assert other.model == one.model + 4 * 1300 // 2, "each rank has those of its shard"
    assert other.host == one.host - 2 * 4 * 1300 + 2 * 4 * 1300


MODEL = {"dim": 8, "heads": 4, "kv_heads": 4, "ffn_dim": 12, "layers": 4, "vocab_size": 300, "sequence_length": 12}


def parts(mesh: dict[str, object], save: dict[str, object] | None = None, **model: object) -> memory.Need:
    """What four ranks with one sequence each need."""
    config = run(model={**MODEL, **model}, sync={"buffers": "average"})
    settings = island(data={"batch_sequences": 8}, mesh={"ranks": 4, **mesh}, memory=save or {})
    return memory.need(config, settings, agreement.model_layout(config))


WHOLE, LOGITS = 6 * 8 + 2 * 8 + 2 * 8 + 4 * 12, 12 * 300
LAYER, ENDS = 4 * 64 + 3 * 8 * 12 + 2 * 8, 300 * 8
VALUES = 4 * LAYER + 2 * ENDS + 8


@pytest.mark.parametrize(
    ("mesh", "save", "expected"),
    [
        ({}, {}, 24 * (4 * 4 * WHOLE + LOGITS)),
        ({}, {"accumulate": 2}, 12 * (4 * 4 * WHOLE + LOGITS)),
        ({}, {"activation_checkpointing": "full"}, 24 * (4 * (4 * 8 + WHOLE) + LOGITS)),
        (
            {},
            {"activation_checkpointing": "selective"},
            24 * (4 * (4 * (8 + 8 + (8 + 16 + 8 + 24 + 8) // 2) + WHOLE) + LOGITS),
        ),
        ({"context": 2}, {}, 24 * (4 * 4 * WHOLE + LOGITS)),
        ({"tensor": 4, "sequence_parallel": True}, {}, 96 * (4 * 4 * WHOLE // 4 + LOGITS)),
        ({"tensor": 4, "loss_parallel": True}, {}, 96 * (4 * 4 * (48 + (WHOLE - 48) // 4) + LOGITS // 4)),
        ({"pipeline": 2}, {}, 24 * (2 * 4 * 2 * WHOLE + LOGITS)),
        ({"pipeline": 2, "microbatches": 4, "pipeline_schedule": "gpipe"}, {}, 12 * (4 * 4 * 2 * WHOLE + 24 * 300)),
    ],
)
def test_activations_are_shared_out_and_saved(mesh: dict[str, object], save: dict[str, object], expected: int) -> None:
    assert parts(mesh, save).activations == expected


def test_the_model_is_divided_over_the_mesh() -> None:
    whole = VALUES * 16
    outside, block = 2 * ENDS + 8, LAYER
    comes = 4 * (outside + 2 * block) + 4 * (outside + block) + 4 * outside
    assert parts({}).model == whole // 4 + comes == parts({"context": 2}).model
    assert parts({"replicas": 2}).model == whole // 2 + comes
    assert parts({"reshard_after_forward": "never"}).model == parts({}).model + 4 * 2 * block
    held = 4 * block // 4 + 2 * ENDS // 4  # norms are whole on each rank
    assert 16 * held < parts({"tensor": 4}).model < 16 * (held + 4 * 16 + 8)
    last = 2 * LAYER + ENDS + 8
    assert parts({"pipeline": 2}).model == 16 * last // 2 + 4 * last + 4 * last + 4 * (ENDS + 8)
    assert parts({"pipeline": 4}).model == 16 * (LAYER + ENDS + 8), "nothing is gathered where one rank shards"
    offloaded = parts({"cpu_offload": True})
    assert (offloaded.model, offloaded.host) == (comes, parts({}).host + whole)


def test_experts_count_with_those_that_a_token_meets() -> None:
    experts: dict[str, object] = {"experts": 4, "expert_dim": 6, "experts_per_token": 2, "shared_experts": 1}
    mixed = WHOLE - 4 * 12 + 2 * (3 * 8 + 4 * 6) + 4 * 6
    whole, shared = parts({}, **experts), parts({"expert": 4}, **experts)
    assert whole.activations == shared.activations == 24 * (4 * 4 * mixed + LOGITS)
    gathered, sent = 3 * 3 * 8 * 6 * 2, 3 * 3 * 8 * 6
    assert whole.model - shared.model == 4 * (gathered + sent), "a rank gathers its own experts alone"


def test_a_model_of_others_is_counted_by_its_matrices() -> None:
    config = run(model={"source": "m:f", "vocab_size": 300, "sequence_length": 10})
    wants = memory.need(config, island(data={"batch_sequences": 4}), LAYOUT)
    assert wants.activations == 40 * (4 * 3 * 20 + 12 * 300)
    assert wants.host == 1300 * 4 + 1300 * 8 + memory.PROCESS_BYTES
    many = island(data={"batch_sequences": 4}, mesh={"ranks": 4})
    assert memory.need(config, many, LAYOUT).host == 4 * 4 * 1300 + 4 * memory.PROCESS_BYTES, "each makes it whole"


def test_the_fewest_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = island(
        data={"batch_sequences": 12}, mesh={"ranks": 4}, nodes={"least": 1, "most": 4, "rendezvous": "h:1"}
    )
    most, least = (memory.need(run(), settings, LAYOUT, nodes) for nodes in (4, 1))
    assert most.host - memory.PROCESS_BYTES == (least.host - memory.PROCESS_BYTES) // 4
    assert most.activations == least.activations // 4
    monkeypatch.setattr(memory, "free_ram", lambda: 10**12)
    assert memory.memory(run(), settings, LAYOUT, []).verdict == "ok"
    finding = memory.memory(run(), settings, LAYOUT, [2 * (most.model + most.activations)])
    assert finding.verdict == "warn" and "with 1 of 4 nodes" in finding.found and "nodes.least" in finding.advice


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
    monkeypatch.setattr(memory, "free_ram", lambda: wants.host + int(memory.HEAP * each) - 1)
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
        (2, {"ranks": 4, "nodes": 2}, "ok", "2 of 2 GPUs (Tensor 9000)"),
        (1, {"ranks": 4, "nodes": 2, "device": "cuda"}, "fail", "mesh.ranks is 4 on 2 nodes, 2 each, but there are 1"),
    ],
)
def test_devices(
    count: int, mesh: dict[str, object], verdict: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, count)
    nodes = mesh.pop("nodes", 1)
    settings = island(mesh=mesh, nodes={"most": nodes, "rendezvous": "host:1"})
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
    assert machine.packages(island(), None, allowed=True).verdict == "ok"
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    finding = machine.packages(wandb, None, allowed=True)
    assert (finding.code, finding.advice) == (ExitCode.ENVIRONMENT, "pip install 'diloco[wandb]'")
    monkeypatch.setattr(machine, "find_spec", lambda name: util.find_spec("json"))
    assert machine.packages(wandb, None, allowed=True).found == "wandb can be imported"


def test_the_optimizer_can_be_imported() -> None:
    named = run(inner={"optimizer": "torch.optim:NAdam"})
    assert "torch.optim:NAdam" in machine.packages(island(), named, allowed=True).found
    unknown = run(inner={"optimizer": "no_such_module:Adam"})
    assert machine.packages(island(), unknown, allowed=False).verdict == "ok"
    with pytest.raises(EnvironmentFault):
        machine.packages(island(), unknown, allowed=True)


@pytest.mark.parametrize(
    ("local", "agreed", "package", "extra"),
    [
        ({"memory": {"fp8": True}}, {}, "torchao", "fp8"),
        ({"data": {"parquet": ["x"]}}, {}, "pyarrow", "data"),
        ({"data": {"dataset": "x"}}, {}, "datasets", "data"),
        ({}, {"model": {"source": "transformers", "name": "x"}}, "transformers", "hf"),
        ({}, {"tokenizer": {"kind": "hf", "name": "x", "digest": "0" * 64}}, "tokenizers", "data"),
    ],
)
def test_every_extra_is_known(
    local: dict[str, object], agreed: dict[str, object], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(machine, "find_spec", asked.append)
    finding = machine.packages(island(**local), run(**agreed), allowed=True)
    assert asked == [package]
    assert finding.verdict == "fail" and finding.advice == f"pip install 'diloco[{extra}]'"
    assert finding.found.startswith(next(iter(machine.wanted(island(**local), run(**agreed)).values()))[0])


def test_float8_needs_its_gpu() -> None:
    with pytest.raises(EnvironmentFault, match=r"memory\.fp8"):
        machine.devices(island(memory={"fp8": True}, mesh={"device": "cpu"}))
    pytest.importorskip("torchao", reason="torchao is not installed (the extra `fp8`)")
    emulated = {"fp8": True, "fp8_emulated": True}
    assert machine.devices(island(memory=emulated, mesh={"device": "cpu"})).verdict == "ok"
