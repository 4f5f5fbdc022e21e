"""The demo from its command line to its report, and what can be done with the model it leaves."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.config import ModelConfig
from diloco.errors import ExitCode
from island.model import Decoder, first_value
from tests.processes import Process, background, diloco_here
from wan.checkpoint import Checkpoint, export, load

STEPS, SYNC_EVERY, FRAGMENTS, RANKS = 16, 8, 2, (2, 1)
SEQUENCES, LENGTH = 18, 64
"""Sequences per island and step: the demo's 16, rounded up to what 2 ranks, 1 rank and all 3 together divide."""
EVALUATED = 128
TIMES = ("time_s", "tokens_per_second", "bytes_up", "bytes_down")
"""What differs between two runs that train the same."""


@dataclass(frozen=True)
class Demo:
    """A demo that has ended."""

    out: Path
    text: Path
    output: str
    left: list[str]
    """Processes that it left behind."""

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return summary

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, island by island, without times and rates."""
        rows = [json.loads(line) for i in (1, 2) for line in self.metrics(i).read_text().splitlines()]
        return [{k: v for k, v in row.items() if k not in TIMES} for row in rows if row["kind"] == kind]

    def metrics(self, island: int) -> Path:
        return self.out / "metrics" / f"island-{island}.jsonl"


def play(folder: Path) -> Demo:
    """Runs a small demo in `folder`."""
    text, out = folder / "text.txt", folder / "out"
    text.write_text(inspect.getsource(argparse) + inspect.getsource(ast))
    command = f"demo --steps {STEPS} --sync-every {SYNC_EVERY} --fragments {FRAGMENTS} --text {text} --out {out}"
    ranks = ",".join(map(str, RANKS))
    with background(*command.split(), "--ranks-per-island", ranks, log=folder / "output") as process:
        code = process.wait()
        left = [str(p) for p in process.family()]
        assert code == ExitCode.OK, output(process, out)
        return Demo(out, text, process.output, left)


def output(process: Process, out: Path) -> str:
    """What a failed demo printed, and its logs."""
    return "\n".join([process.output, *(f"{p}:\n{p.read_text()}" for p in sorted(out.glob("logs/*.log")))])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """One demo for all tests that only look at what it left."""
    return play(tmp_path_factory.mktemp("demo"))


def test_the_summary_adds_up(demo: Demo) -> None:
    summary, n = demo.summary, demo.summary["parameters"]
    rounds, payload = STEPS // SYNC_EVERY, 2 * len(RANKS) * n * (STEPS // SYNC_EVERY)  # bf16 is two bytes
    assert summary["run_id"] == "demo-0"
    assert (summary["steps"], summary["sync_every"], summary["fragments"]) == (STEPS, SYNC_EVERY, FRAGMENTS)
    assert summary["rounds"] == rounds * FRAGMENTS
    assert [(i["id"], i["ranks"], i["rounds"]) for i in summary["islands"]] == [
        ("island-1", 2, rounds * FRAGMENTS),
        ("island-2", 1, rounds * FRAGMENTS),
    ]
    assert {i["tokens"] for i in summary["islands"]} == {STEPS * SEQUENCES * LENGTH}
    assert summary["tokens"] == len(RANKS) * STEPS * SEQUENCES * LENGTH
    first = 4 * n  # one island sent the first parameters, float32; all made the same, so nobody fetched them
    assert payload + first < summary["bytes_up"] < 1.1 * (payload + first)
    assert payload < summary["bytes_down"] < 1.1 * payload
    assert summary["bytes_data_parallel"] == 2 * (len(RANKS) - 1) * 4 * n * STEPS
    assert summary["digests_agree"] is True
    assert summary["seconds"] > 0


def test_the_model_has_learnt(demo: Demo) -> None:
    losses = [row["loss"] for row in demo.records("train")]
    assert max(losses) < math.log(256)
    assert demo.summary["loss"] < 0.8 * math.log(256)
    assert 2 < demo.summary["loss_unigram"] < math.log(256)


def test_the_islands_end_alike(demo: Demo) -> None:
    one, two = demo.records("end")
    assert one["digests"] == two["digests"]
    assert one["versions"] == two["versions"] == "2 2"
    assert (one["step"], one["reason"]) == (STEPS, "finished")


def test_the_results_are_there(demo: Demo) -> None:
    assert "<html" in (demo.out / "report.html").read_text()
    assert (demo.out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (demo.out / "logs").iterdir()} == {"coordinator.log", "island-1.log", "island-2.log"}
    assert "stopping: SIGTERM" in (demo.out / "logs" / "coordinator.log").read_text()
    assert "left: finished" in (demo.out / "logs" / "island-1.log").read_text()
    assert f"report: {demo.out}/report.html" in demo.output.replace("\n", "")
    assert "Traceback" not in demo.output


def test_no_process_is_left_behind(demo: Demo) -> None:
    assert not demo.left


@pytest.mark.slow
def test_a_demo_again_is_the_same_to_the_bit(demo: Demo, tmp_path: Path) -> None:
    again = play(tmp_path)
    for kind in ("train", "eval", "end"):
        assert demo.records(kind)
        assert demo.records(kind) == again.records(kind)
    assert demo.summary["loss"] == again.summary["loss"]


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(demo: Demo) -> Path:
    """The demo's model as `diloco export` writes it."""
    to = demo.out.parent / "exported"
    ended = diloco_here("export", "--state", str(demo.out / "state"), "--to", str(to))
    assert ended.code == ExitCode.OK, ended
    assert ended.out == f"{to}: {demo.summary['parameters']:,} parameters at versions 2, 2\n"
    return to


def logits_of_both(folder: Path, vocabulary: int) -> Iterator[torch.Tensor]:
    """The logits of the same tokens from `transformers` and from our own decoder."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(vocabulary, (3, 32), generator=torch.Generator().manual_seed(1))
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), load(folder).built()
    with torch.no_grad():
        yield theirs(tokens).logits
        yield ours(tokens)


def test_transformers_computes_the_same(exported: Path) -> None:
    theirs, ours = logits_of_both(exported, 256)
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


def test_transformers_computes_the_same_with_tied_embeddings_and_grouped_queries(tmp_path: Path) -> None:
    model = ModelConfig(vocab_size=300, dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=80, tie_embeddings=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(config=model).named_parameters()}
    assert "lm_head.weight" not in shapes
    tensors = {name: first_value(name, shape, model, seed=5) * 4 for name, shape in shapes.items()}
    export(Checkpoint(model=model, tensors=tensors, versions=(3, 4)), tmp_path / "tied")
    assert load(tmp_path / "tied").versions == (3, 4)
    theirs, ours = logits_of_both(tmp_path / "tied", 300)
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


def test_a_state_and_its_export_evaluate_alike(demo: Demo, exported: Path) -> None:
    options = ("--text", str(demo.text), "--sequences", str(EVALUATED))
    state, folder = (diloco_here("eval", str(path), *options) for path in (demo.out / "state", exported))
    assert state == folder
    assert state.code == ExitCode.OK
    found = re.fullmatch(r"loss (\S+) nats per byte on held-out text \(unigram (\S+)\)\n", state.out)
    assert found
    assert found.groups() == (f"{demo.summary['loss']:.4f}", f"{demo.summary['loss_unigram']:.4f}")


def test_a_state_and_its_export_write_alike(demo: Demo, exported: Path) -> None:
    def write(path: Path, *options: str) -> str:
        ended = diloco_here("generate", str(path), "--prompt", "class ", "--length", "80", *options)
        assert ended.code == ExitCode.OK, ended
        return ended.out

    state = demo.out / "state"
    assert write(state) == write(exported) == write(state)
    assert write(state, "--temperature", "0") == write(exported, "--temperature", "0")
    assert write(state, "--seed", "1") != write(state, "--seed", "2")
    assert write(state).startswith("class ")
    assert len(write(state).encode()) >= len("class ") + 80


@pytest.mark.slow
def test_a_comparison_trains_data_parallel_and_one_island_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--compare", "--ranks-per-island", "2,1", "--steps", "20", "--sync-every", "10", "--out", str(out)]
    command = [sys.executable, "-m", "diloco", "demo", *options]
    subprocess.run(command, check=True, timeout=280, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    for name, loss in (("data-parallel", "loss_data_parallel"), ("one-island-alone", "loss_single")):
        rows = [json.loads(line) for line in (out / "metrics" / f"{name}.jsonl").read_text().splitlines()]
        trained = [row for row in rows if row["kind"] == "train"]
        assert trained[-1]["tokens"] == summary["tokens"]
        assert [row["loss"] for row in rows if row["kind"] == "end"] == [summary[loss]]
        assert 0 < summary[loss] < 6
