"""What `[memory]` does to a model in one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from diloco.errors import EnvironmentFault
from island.config_mesh import MemoryConfig
from island.model import allocate, build_meta, fill, loss
from island.parallel import Engine, Whole, clip
from island.parallel.memory import kernel, save
from tests.island.parallel.rank import run_config

CPU = torch.device("cpu")
RUN = run_config({})


def made(memory: MemoryConfig) -> nn.Module:
    model = build_meta(RUN)
    save(model, memory, CPU)
    allocate(model, CPU)
    fill(model, RUN)
    return model


def kept_bytes(model: nn.Module) -> int:
    """Bytes that forward keeps for backward, each tensor once, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.arange(8 * 16).view(8, 16) % 32
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss(model(tokens), tokens)
    value.backward()  # type: ignore[no-untyped-call]
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_checkpointing_keeps_less_and_changes_nothing() -> None:
    ways: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    models = [made(MemoryConfig(activation_checkpointing=way)) for way in ways]
    none, selective, full = (kept_bytes(model) for model in models)
    assert full < none / 4
    assert selective < none
    for a, b in pairwise(models):
        for (name, one), (other, two) in zip(a.named_parameters(), b.named_parameters(), strict=True):
            assert name == other
            assert one.grad is not None
            assert torch.equal(one.grad, two.grad if two.grad is not None else torch.zeros(())), name


def test_float8_is_refused_without_a_gpu_that_has_it() -> None:
    with pytest.raises(EnvironmentFault, match=r"8\.9 .* computes on cpu .* set memory\.fp8=false"):
        made(MemoryConfig(fp8=True))


def test_a_kernel_that_cannot_do_it_is_not_replaced_in_silence() -> None:
    model = made(MemoryConfig())
    with kernel("cudnn"), pytest.raises(RuntimeError, match="No viable backend"):
        model(torch.zeros(1, 16, dtype=torch.int64))


def test_clipping_is_that_of_torch() -> None:
    ours, theirs = made(MemoryConfig()), made(MemoryConfig())
    tokens = torch.arange(8 * 16).view(8, 16) % 32
    for model in (ours, theirs):
        loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    assert norm > 0.1
    assert torch.allclose(clip(ours, 0.1), norm, rtol=1e-6)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.allclose(one.grad, two.grad, rtol=1e-5, atol=0)


def test_accumulated_parts_make_the_gradient_of_the_whole() -> None:
    whole, parts = made(MemoryConfig()), made(MemoryConfig())
    tokens = torch.arange(8 * 16).view(8, 16) % 32
    one = Engine.around(whole)
    four = Engine(parts, Whole(parts, loss, 0.25), CPU, accumulate=4)
    assert torch.allclose(one.step(tokens, tokens), four.step(tokens, tokens), rtol=1e-6)
    assert torch.allclose(one.evaluate(tokens, tokens), four.evaluate(tokens, tokens), rtol=1e-6)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=1e-6)
