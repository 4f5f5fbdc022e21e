"""Tensor parallel: matrix products cut over ranks, with the residual stream whole or cut along the sequence.

Columns of the first matrix of a pair and rows of the second are cut (Megatron-LM, arXiv 1909.08053), so that one
reduction serves both; with `sequence_parallel` it is a reduce-scatter, and norms work on a part of the sequence
(arXiv 2205.05198). The vocabulary is cut in the embedding and in the output.

Of a block of experts, each expert's matrices are cut so. All ranks route alike, on the whole sequence, and between the
experts' input and their sum every gradient is one part of a sum over the ranks, also that of the router.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from island.config_mesh import MeshConfig
from island.model import Decoder
from island.model.moe import MoE


class Whole(ParallelStyle):
    """A module that every rank computes alike: its weights become DTensors that are replicated."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def into(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False), *inputs[1:])

        def out(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Tensor:
            whole: Tensor = outputs.to_local()
            return whole

        return distribute_module(module, device_mesh, None, into, out)  # type: ignore[arg-type]  # hooks may return


class Mixture(ParallelStyle):
    """A block of experts whose weights `island.parallel.expert` cuts: its router, the shared ones, and the sum.

    Args:
        stream: how the residual stream is placed before and after it.
    """

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MoE)

        def into(_: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
            [x] = inputs
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, (self._stream,), run_check=False)
            return arrived(x.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),)))

        def out(_: nn.Module, __: tuple[Any, ...], part: Tensor) -> Tensor:
            parts = DTensor.from_local(part, device_mesh, (Partial(),), run_check=False)
            return arrived(parts.redistribute(placements=(self._stream,)).to_local())

        place(module.gate, device_mesh, Replicate())
        if module.shared_experts is not None:
            for name, cut in (("gate_proj", Shard(0)), ("up_proj", Shard(0)), ("down_proj", Shard(1))):
                linear = module.shared_experts.get_submodule(name)
                place(linear, device_mesh, cut)
                setattr(linear, "forward", partial(product, linear))  # noqa: B010  of this layer alone
        module.register_forward_pre_hook(into)
        module.register_forward_hook(out)
        return module


def place(module: nn.Module, over: DeviceMesh, placement: Placement) -> None:
    """Makes a module's weight, on the meta device, a DTensor."""
    weight = distribute_tensor(module.get_parameter("weight"), over, (placement,), src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(weight))


def product(linear: nn.Module, x: Tensor) -> Tensor:
    """Applies this rank's part of a linear layer."""
    weight = linear.weight
    assert isinstance(weight, DTensor)
    return F.linear(x, weight.to_local())


class Arrived(torch.autograd.Function):
    """Waits for a tensor that other ranks are sending.

    Compiled code drops the gradient of an input that is still on its way (torch 2.13), so none may reach a block.
    """

    @staticmethod
    def forward(_: Any, coming: AsyncCollectiveTensor) -> Tensor:
        return coming.wait().detach()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def arrived(x: Tensor) -> Tensor:
    """A tensor once it is here, where other ranks are still sending it."""
    if not isinstance(x, AsyncCollectiveTensor):
        return x
    out: Tensor = Arrived.apply(x)  # type: ignore[no-untyped-call]
    return out


def cut(model: Decoder, mesh: MeshConfig, over: DeviceMesh) -> None:
    """Cuts a decoder, or the stage of a pipeline, over the ranks of `over`.

    With `loss_parallel` its logits are this rank's part of the vocabulary, which `part_of_vocabulary` makes whole
    again for the loss.
    """
    parted = mesh.sequence_parallel
    stream = Shard(1) if parted else Replicate()
    norm: ParallelStyle = SequenceParallel() if parted else Whole()
    outer: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "norm": norm,
        "lm_head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1) if mesh.loss_parallel else Replicate()
        ),
    }
    parallelize_module(model, over, {name: style for name, style in outer.items() if getattr(model, name) is not None})
    if model.embed_tokens is not None:
        model.embed_tokens.register_forward_hook(lambda _, __, stream: arrived(stream))
    if model.config.tie_embeddings and model.lm_head is not None and model.embed_tokens is not None:
        model.lm_head.weight = model.embed_tokens.weight  # both are cut over the vocabulary
    head_norm = SequenceParallel(
        sequence_dim=2, use_local_output=True
    )  # of [B, T, H, E], which is cut over the heads H
    for block in model.layers.values():
        styles: dict[str, ParallelStyle] = {"input_layernorm": norm, "post_attention_layernorm": norm}
        dense = not isinstance(block.mlp, MoE)
        columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        rows = ["self_attn.o_proj"]
        if dense:
            columns += ["mlp.gate_proj", "mlp.up_proj"]
            rows += ["mlp.down_proj"]
        else:
            styles["mlp"] = Mixture(stream)
            if parted:  # compiled code ends here, and what it hands on had better be plain
                styles["post_attention_layernorm"] = SequenceParallel(use_local_output=True)
        styles |= {name: ColwiseParallel() for name in columns}
        styles |= {name: RowwiseParallel(output_layouts=stream) for name in rows}
        if parted:
            styles["self_attn"] = PrepareModuleInput(
                input_layouts=(Shard(1), None, None, None),
                desired_input_layouts=(Replicate(), None, None, None),
            )
            if dense:
                styles["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for name in ("q_norm", "k_norm"):
            if isinstance(getattr(block.self_attn, name, None), nn.Module):
                styles[f"self_attn.{name}"] = head_norm
        parallelize_module(block, over, styles)


def part_of_vocabulary(logits: Tensor, over: DeviceMesh) -> Tensor:
    """Logits [B, T, V / ranks] of this rank as a part of [B, T, V]."""
    return DTensor.from_local(logits, over, (Shard(2),), run_check=False)
