"""ZeRO-1: DDP whose optimizer state is divided over the ranks.

Stage 1 of Rajbhandari et al., arXiv:1910.02054. Each rank has all weights and gradients. Each
parameter has one owner, which keeps its state, steps it, and sends the result. torch's
ZeroRedundancyOptimizer wraps an optimizer's class; here the task's own optimizer is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.core.distributed.group import Group
from trainer.core.distributed.world import World
from trainer.core.strategy.collectives import exchange
from trainer.core.strategy.cost import AllReduceCost, Message, Parts, PlannedRank, size_of
from trainer.core.strategy.ddp import DistributedDataParallel
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.strategy.optimizer_trial import (
    check_hooks,
    check_independence,
    is_elementwise,
    surround_step,
)
from trainer.core.strategy.tensor_shards import Shard, find_owners
from trainer.core.strategy.tensors import Tensors, join_states

MOST_BYTES_OF_A_MESSAGE = 25 * 2**20  # as of DDP's buckets


class OwnedCost(AllReduceCost):
    """The cost of DDP, and of the weights that owners send."""

    divides_state = True

    @classmethod
    def messages(cls, rank: PlannedRank) -> list[Message]:
        size = rank.mesh.replicate
        sent = size_of(rank.trained) * (size - 1) / size
        return [
            *super().messages(rank),
            Message("replicate", "broadcast of parameters", size, sent),
        ]

    @classmethod
    def stepped(
        cls, optimizer: Optimizer, parts: Parts, whole: Parts, mesh: Mesh
    ) -> tuple[Parts, int]:
        every, _ = super().stepped(optimizer, parts, whole, mesh)
        owners = find_owners((p.numel() for p in every.values()), mesh.replicate)
        return {p: part for (p, part), n in zip(every.items(), owners, strict=True) if n == 0}, 0


class OwnedTensors(Tensors):
    """Whole tensors on each rank. Its optimizers step only the parameters that the rank owns."""

    def __init__(self, module: nn.Module, world: World):
        super().__init__(module, world)
        self._owners: dict[torch.Tensor, int] = {}

    def adopt(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Make an optimizer step this rank's own parameters, and send them after each step.

        Raises ConfigError for an optimizer that needs more than one parameter at a time.
        """
        check_hooks(optimizer)
        if not is_elementwise(optimizer):
            check_independence(optimizer)
        every = super().adopt(optimizer)
        owners = find_owners((p.numel() for p in every), self._world.world_size)
        owner_of: dict[torch.Tensor, int] = dict(zip(every, owners, strict=True))
        self._owners |= owner_of
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if owner_of[p] == self._world.rank]
        owned = [[p for p in every if owner_of[p] == n] for n in range(self._world.world_size)]
        surround_step(optimizer, None, partial(_send, owned))
        return every

    def collect_plain(self, states: list[dict[str, Any]], group: Group) -> list[dict[str, Any]]:
        return join_states(states, group)

    def shard_of(self, tensor: torch.Tensor, is_state: bool = False) -> Shard:
        owner = self._owners.get(tensor)
        if not is_state or owner is None:
            return super().shard_of(tensor)
        return Shard.whole(tensor.detach(), owner == self._world.rank, ("replicate",))

    def writers(self) -> list[int]:
        return list(range(self._world.world_size))


@torch.no_grad()
def _send(owned: Sequence[Sequence[nn.Parameter]]) -> None:
    """Send each rank's parameters to the others. A collective."""
    for owner, parameters in enumerate(owned):

        def send(flat: torch.Tensor, owner: int = owner) -> torch.Tensor:
            dist.broadcast(flat, owner)
            return flat

        exchange((p for p in parameters if p.requires_grad), MOST_BYTES_OF_A_MESSAGE, send)


class ZeroRedundancy(DistributedDataParallel):
    """DDP with the optimizers' state divided over the ranks."""

    cost = OwnedCost

    def _open_tensors(self) -> Tensors:
        return OwnedTensors(self.module, self.world)

    def list_remarks(self, is_resumed: bool) -> list[str]:
        lines = super().list_remarks(is_resumed)
        return [*lines, "zero1: each rank steps its own parameters, and sends them to the others"]


STRATEGY = ZeroRedundancy
