"""Models of every source in a run: seeded, trained, synchronised, snapshotted, exported and built again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from diloco.config import load_run
from island.model import allocate, build_meta, fill, loss, rebalance
from island.session import join
from tests.support import serving
from wan.checkpoint import export, load

RUN = """
[run]
id = "models"
steps = 4
[sync]
every_steps = 2
buffers = "average"
[inner]
lr = 1e-2
[model]
sequence_length = 16
"""
EXPERTS = 'experts = 4\nscores = "sigmoid"\nshared_experts = 1\ndense_layers = 1\nexpert_dim = 16\nz_loss = 1e-4\n'
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("source", ["experts", "transformers", "function"])
def test_a_model_goes_through_a_run(source: str, tmp_path: Path) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(LLAMA))
    if source == "transformers":
        pytest.importorskip("transformers")
    model_keys = {
        "experts": EXPERTS,
        "transformers": f'source = "transformers"\nname = "{shape}"\n',
        "function": 'source = "tests.island.model.functions:bigram"\noptions = { depth = 3, tied = true }\n',
    }
    config = load_run(RUN + model_keys[source], "the test").value
    model = allocate(build_meta(config), "cpu")
    fill(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.inner.lr)
    tokens = torch.arange(4 * 17).view(4, 17)
    losses = []
    with (
        serving(config, tmp_path / "state") as served,
        join(model, optimizer, served.address, island_id="a") as site,
    ):
        while not site.done:
            value = loss(model(tokens[:, :-1]), tokens[:, 1:], config.model.z_loss)
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            rebalance(model)
            losses.append(value.item())
            site.step(tokens=64)
        with site.outer_parameters():
            expected = model.eval()(tokens).detach()
    assert losses[-1] < losses[0]
    assert torch.equal(load(tmp_path / "state").built()(tokens), expected)
    if source == "experts":
        assert any(name.endswith("e_score_correction_bias") for name in load(tmp_path / "state").tensors)
        return
    export(load(tmp_path / "state"), tmp_path / "out")
    assert torch.equal(load(tmp_path / "out").built()(tokens), expected)
    assert (tmp_path / "out" / "config.json").is_file() == (source == "transformers")
    if source == "transformers":
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        torch.testing.assert_close(theirs(tokens).logits, expected)
