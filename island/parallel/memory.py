"""What saves memory or time inside a block: activations computed again, compiled code, float8 products, kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from diloco.errors import EnvironmentFault
from island.config_mesh import Attention, MemoryConfig
from island.model import blocks

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten._grouped_mm.default})
KEPT = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
)
"""What `selective` never computes again: attention, and what other ranks would have to send once more."""
ROUTERS = frozenset({"gate", "router"})
"""What the linear layers that choose experts are called in models of others."""


def save(model: nn.Module, memory: MemoryConfig, device: torch.device) -> None:
    """Applies `[memory]` to the blocks of a model that is not sharded yet. Names of parameters stay.

    Raises:
        EnvironmentFault: float8 is asked for, and the GPU or torchao is not there.
    """
    if memory.fp8:
        convert = float8(device, emulated=memory.fp8_emulated)
        for block in blocks(model):
            convert(block)
    for block in blocks(model):
        forward: Callable[..., Any] = block.forward
        if memory.activation_checkpointing == "selective":
            forward = partial(checkpoint, forward, use_reentrant=False, context_fn=_selective)
        if memory.compile:
            forward = torch.compile(forward)
        if memory.activation_checkpointing == "full":
            forward = partial(checkpoint, forward, use_reentrant=False)
        if forward is not block.forward:
            setattr(block, "forward", forward)  # noqa: B010  a method of this block alone


def kernel(attention: Attention) -> AbstractContextManager[object]:
    """A context in which attention is computed by this kernel; one that cannot do it raises there."""
    return nullcontext() if attention == "auto" else sdpa_kernel(KERNELS[attention])


def _selective() -> Any:
    """Keeps attention and every second matrix product, as torchtitan does: half of the products' activations."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op in KEPT:
            return CheckpointPolicy.MUST_SAVE
        if op not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def float8(device: torch.device, *, emulated: bool) -> Callable[[nn.Module], object]:
    """What turns the linear layers of a block into float8 ones. Parameters stay as they are.

    Each product of forward and backward is of two matrices rounded to e4m3, with a scale, a power of two, for each row
    or column that is added up (torchao's recipe `rowwise`). A layer whose sides are not multiples of 16 stays, and a
    router of somebody's model, whose rounding would send tokens elsewhere.

    Args:
        device: where this rank computes.
        emulated: whether products are taken in the dtype of compute, of the rounded values.

    Raises:
        EnvironmentFault: the GPU is too old, or none, or torchao is not there.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < (8, 9) and not emulated:
        raise EnvironmentFault(
            f"memory.fp8 needs a GPU of compute capability 8.9 or more, and this rank computes on {device} "
            f"({'.'.join(map(str, capability))}): set memory.fp8=false, or "
            "memory.fp8_emulated=true to see what float8 does"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise EnvironmentFault(
            f"memory.fp8 needs torchao ({error}): install torchao, or set memory.fp8=false"
        ) from error
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulated)

    def fits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name.rpartition(".")[2] in ROUTERS:
            return False
        return not (module.in_features % 16 or module.out_features % 16)

    return partial(convert_to_float8_training, config=config, module_filter_fn=fits)
