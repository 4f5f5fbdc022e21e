"""The island's ranks as torch's device mesh, and the parts of it that each kind of parallelism works over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from island.parallel.plan import Plan


@dataclass(frozen=True)
class Ranks:
    """The mesh of a plan. Collective to make, and so is the first use of what is made when asked for."""

    plan: Plan
    device: torch.device

    @cached_property
    def all(self) -> DeviceMesh:
        """Every rank: pipeline, replicas, parts (shard and context together), tensor."""
        plan = self.plan
        shape = (plan.pipeline, plan.replicas, plan.shard * plan.context, plan.tensor)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("pipeline", "replicas", "parts", "tensor"))

    @cached_property
    def data(self) -> DeviceMesh:
        """What FSDP shards over: parts, and with HSDP replicas before them."""
        return self.all["replicas", "parts"] if self.plan.replicas > 1 else self.all["parts"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share this rank's matrix products."""
        return self.all["tensor"]

    @property
    def pipeline(self) -> DeviceMesh:
        """The ranks of this rank's pipeline."""
        return self.all["pipeline"]

    @cached_property
    def context(self) -> DeviceMesh:
        """The ranks that share this rank's sequences."""
        sizes = (self.plan.shard, self.plan.context)
        return self.all._unflatten("parts", sizes, ("shard", "context"))["context"]

    def total(self, counts: Tensor) -> Tensor:
        """The sum of counts, int64, over the ranks that hold the same layers and read other tokens. Collective."""
        counts = counts.clone()
        for name in ("replicas", "parts"):
            dist.all_reduce(counts, group=self.all.get_group(name))
        return counts

    @cached_property
    def _experts(self) -> DeviceMesh:
        sizes = (self.plan.shard * self.plan.context // self.plan.expert, self.plan.expert)
        return self.all._unflatten("parts", sizes, ("rest", "expert"))

    @property
    def expert(self) -> DeviceMesh:
        """The ranks that share this rank's experts ("expert"), those that share their matrices ("tensor"), or both."""
        if self.plan.expert == 1:
            return self.tensor
        return self._experts["expert", "tensor"] if self.plan.tensor > 1 else self._experts["expert"]

    @property
    def beside_expert(self) -> DeviceMesh:
        """What FSDP shards experts over: the parts that hold the same experts, and with HSDP replicas before them."""
        return self._experts["replicas", "rest"] if self.plan.replicas > 1 else self._experts["rest"]
