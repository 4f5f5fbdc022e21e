"""The run's model, whatever makes it: shapes on the meta device, first values, blocks, and what is refused."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from diloco.config import ModelConfig
from diloco.errors import ConfigError, DilocoError, EnvironmentFault
from diloco.layout import local, named_tensors
from island.config_mesh import MemoryConfig, MeshConfig
from island.model import Decoder, allocate, blocks, build_meta, fill, loss
from island.parallel import assemble
from tests.island.model.shapes import MIXED, SHARED, TIED, run_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
FUNCTION = ModelConfig(source="tests.island.model.functions:bigram", options={"depth": 3, "tied": True})


@pytest.fixture(params=["json", "folder", "function", "ours", "experts"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    """A model of every source."""
    ours = {"function": FUNCTION, "ours": TIED, "experts": SHARED}
    if request.param in ours:
        return ours[request.param]
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    name = tmp_path / "config.json" if request.param == "json" else tmp_path
    return ModelConfig(source="transformers", name=str(name))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(config: ModelConfig, seed: int = 0) -> nn.Module:
    model = allocate(build_meta(run_of(config, seed)), "cpu")
    fill(model, run_of(config, seed))
    return model


def test_a_model_is_made_without_memory_and_then_filled(config: ModelConfig) -> None:
    meta, random = build_meta(run_of(config)), torch.get_rng_state()
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    model, again, other = made(config), made(config), made(config, seed=1)
    assert torch.equal(torch.get_rng_state(), random)
    first, second, third = ({n: t for n, t, _ in named_tensors(m)} for m in (model, again, other))
    assert {n: t.shape for n, t, _ in named_tensors(meta)} == {n: t.shape for n, t in first.items()}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}
    tokens = torch.arange(22).view(2, 11)
    assert model(tokens).shape == (2, 11, config.vocab_size)
    loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]


def test_tied_parameters_stay_one(config: ModelConfig) -> None:
    meta = build_meta(run_of(config))
    count = len(list(meta.parameters()))
    assert len(list(allocate(meta, "cpu").parameters())) == count
    assert (len(list(meta.named_parameters(remove_duplicate=False))) > count) == (config != SHARED)


def test_blocks_are_what_repeats(config: ModelConfig) -> None:
    found = blocks(build_meta(run_of(config)))
    assert len(found) == (TIED.layers if config == TIED else 3)
    assert len({type(block) for block in found}) == 1


def test_a_model_without_repeated_blocks_is_one_unit() -> None:
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert blocks(nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])) == []


@pytest.mark.usefixtures("alone")
def test_a_sharded_model_is_the_same(config: ModelConfig) -> None:
    run = run_of(config)
    sharded, whole = assemble(run, MeshConfig(), MemoryConfig(), torch.device("cpu")).model, made(config)
    values = {name: tensor for name, tensor, _ in named_tensors(whole)}
    assert {name for name, _, _ in named_tensors(sharded)} == set(values)
    assert all(torch.equal(local(tensor), values[name]) for name, tensor, _ in named_tensors(sharded))
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    tokens = torch.arange(10).view(2, 5)
    torch.testing.assert_close(sharded(tokens), whole(tokens))
    loss(sharded(tokens), tokens).backward()  # type: ignore[no-untyped-call]


def test_ours_needs_no_code_of_others() -> None:
    assert isinstance(build_meta(run_of(MIXED)), Decoder)


def test_pretrained_weights_are_where_training_starts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(LLAMA))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    config = ModelConfig(source="transformers", name=str(tmp_path), pretrained=True)
    values = dict(made(config).named_parameters())
    for name, value in theirs.named_parameters():
        assert values[name].dtype == torch.float32
        assert torch.equal(values[name], value.float())
    fresh = dict(made(config.model_copy(update={"pretrained": False})).named_parameters())
    assert not torch.equal(fresh["model.embed_tokens.weight"], values["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"source": "nowhere.at_all:make"}, "No module named 'nowhere': install it at this island"),
        ({"source": "tests.island.model.functions:absent"}, "has no 'absent'"),
        ({"source": "tests.island.model.functions:number", "options": {}}, "returned a int: it must return a torch.nn"),
        ({"options": {"height": 3}}, r"does not take model.options=.*unexpected keyword argument 'height'"),
    ],
)
def test_a_function_that_makes_no_model_is_told(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_meta(run_of(FUNCTION.model_copy(update=change)))


def refused(config: ModelConfig) -> DilocoError:
    with pytest.raises(DilocoError) as caught:
        made(config)
    return caught.value


def test_a_name_that_transformers_does_not_know_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = ModelConfig(source="transformers", name=str(tmp_path))
    assert "name a repository, a folder with a config.json, or a config.json" in str(refused(config))
    absent = config.model_copy(update={"name": str(tmp_path / "absent.json")})
    assert "absent.json' is no causal language model" in str(refused(absent))
    (tmp_path / "odd.json").write_text('{"model_type": "nothing"}')
    assert isinstance(refused(config.model_copy(update={"name": str(tmp_path / "odd.json")})), ConfigError)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "and weights" in str(refused(config.model_copy(update={"pretrained": True})))
    assert "set model.vocab_size=256" in str(refused(config.model_copy(update={"vocab_size": 257})))


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def absent(name: str, *args: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name=name)
        return load(name, *args)

    monkeypatch.setattr(builtins, "__import__", absent)
    error = refused(ModelConfig(source="transformers", name="any/thing"))
    assert isinstance(error, EnvironmentFault)
    assert "pip install 'diloco[hf]'" in str(error)
