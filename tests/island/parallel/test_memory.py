"""What `[memory]` does to a model in one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from diloco.config import RunConfig
from diloco.errors import EnvironmentFault
from island.config_mesh import MemoryConfig
from island.model import allocate, build_meta, fill, loss
from island.parallel import Engine, Whole, clip
from island.parallel.memory import float8, kernel, save
from tests.island.parallel.rank import run_config

CPU = torch.device("cpu")
ROUNDED = 0.125
"""How far gradients are from those of float32, relative to their norm, where e4m3 rounds values by up to 1/16."""
RUN = run_config({})


def made(memory: MemoryConfig, run: RunConfig = RUN) -> nn.Module:
    model = build_meta(run)
    save(model, memory, CPU)
    allocate(model, CPU)
    fill(model, run)
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
    with pytest.raises(ValidationError, match=r"memory\.fp8 is false: set memory\.fp8=true, or"):
        MemoryConfig(fp8_emulated=True)


EIGHT_BITS = MemoryConfig(fp8=True, fp8_emulated=True)


def test_float8_is_of_the_matrices_of_blocks_alone() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed (the extra `fp8`)")
    run = run_config({"layers": 2, "experts": 16, "expert_dim": 16, "shared_experts": 1, "dense_layers": 1})
    plain, model = made(MemoryConfig(), run), made(EIGHT_BITS, run)
    changed = {name for name, m in model.named_modules() if type(m) is not type(plain.get_submodule(name))}
    attention = {f"layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"}
    dense = {
        f"layers.{mlp}.{name}_proj" for mlp in ("0.mlp", "1.mlp.shared_experts") for name in ("gate", "up", "down")
    }
    assert changed == attention | dense
    for (name, ours), (other, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert ours.dtype == torch.float32 and type(ours) is type(theirs) and torch.equal(ours, theirs)


def test_float8_leaves_sides_that_it_cannot_take_and_routers() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed (the extra `fp8`)")
    block = nn.ModuleDict(
        {
            "gate": nn.Linear(32, 16),
            "router": nn.Linear(32, 16),
            "odd": nn.Linear(32, 24),
            "gate_proj": nn.Linear(32, 48),
        }
    )
    float8(CPU, emulated=True)(block)
    assert [name for name, module in block.items() if type(module) is not nn.Linear] == ["gate_proj"]


def test_float8_rounds_what_it_multiplies() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed (the extra `fp8`)")
    tokens = torch.arange(8 * 16).view(8, 16) % 32
    plain = made(MemoryConfig())
    loss(plain(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    ways: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    first: list[Tensor] = []
    for way in ways:
        model = made(EIGHT_BITS.model_copy(update={"activation_checkpointing": way}))
        loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        found = [p.grad for p in model.parameters() if p.grad is not None]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True)), "what is computed again is the same"
    for (name, parameter), gradient in zip(plain.named_parameters(), first, strict=True):
        assert parameter.grad is not None
        apart = ((gradient - parameter.grad).norm() / parameter.grad.norm()).item()
        assert 0 < apart < ROUNDED, name


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
