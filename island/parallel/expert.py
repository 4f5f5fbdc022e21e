"""Expert parallel: each rank holds some experts of every layer, and tokens travel to them and back.

The weights of a layer's experts are one DTensor, cut over the experts; FSDP cuts further over the ranks that hold the
same ones. Two all-to-alls in each direction move the rows; none is dropped. With tensor parallel each expert's matrices
are cut too, columns, then rows, and what comes back is one part of a sum over the ranks.

Shapes: M rows of D numbers, sorted by their experts; X experts, of which each of R ranks holds X / R.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from island.model import Decoder
from island.model.moe import Experts, MoE, here


class Exchange:
    """Takes the place of `island.model.moe.here` where the experts are on several ranks. Collective among them."""

    def __init__(self, over: DeviceMesh) -> None:
        self._group, self._ranks = over.get_group(), over.size()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes differ from step to step
    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, D] in the order of their experts, of which each has `counts` [X], to results [M, D]."""
        came = all_to_all_single(counts, None, None, self._group).view(self._ranks, -1)  # by rank and expert of mine
        away, here = (counts.view(self._ranks, -1).sum(1).tolist(), came.sum(1).tolist())
        arrived = all_to_all_single(rows, here, away, self._group)
        mine = torch.arange(came.shape[1], device=rows.device).repeat(self._ranks)
        order = mine.repeat_interleave(came.flatten(), output_size=sum(here)).argsort(stable=True)
        done = experts(arrived[order], came.sum(0))
        back: Tensor = all_to_all_single(done[order.argsort()], away, here, self._group)
        return back


def share_out(model: Decoder, over: DeviceMesh) -> None:
    """Gives each rank its experts of every layer of a decoder, or of a stage, and its part of their matrices.

    Args:
        over: the ranks that share experts ("expert"), matrices ("tensor"), or both.
    """
    names = over.mesh_dim_names or ()
    exchange = Exchange(over["expert"]) if "expert" in names else here
    for module in model.modules():
        if isinstance(module, MoE):
            module.exchange = exchange
            for name, weight in [*module.experts.named_parameters()]:
                cuts = {"expert": Shard(0), "tensor": Shard(1 if name == "down_proj" else 2)}
                cut = distribute_tensor(weight, over, [cuts[over] for over in names], src_data_rank=None)
                setattr(module.experts, name, nn.Parameter(cut))
