"""Gathered: an optimizer that needs whole matrices, such as Muon, over a sharded model.

Each parameter has an owner among the ranks that divide the model. Before a step the owner gathers
the parameter and its gradient, and after it every rank gets its part back. The state stays with
the owner. torch's Muon on DTensors gives other numbers (1.6e-3 off, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.strategy.shards import Shard


class Gathered:
    """The parameters of one optimizer: `owned` maps each one that this rank owns to its part."""

    def __init__(
        self,
        optimizer: Optimizer,
        local: Sequence[tuple[nn.Parameter, Shard]],
        group: dist.ProcessGroup,
    ):
        """`local` are the parts of the optimizer's parameters that are divided, in their order."""
        self.owned: dict[nn.Parameter, nn.Parameter] = {}
        self._group = group
        self._size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._parts: list[tuple[nn.Parameter, Shard, int, nn.Parameter | None]] = []
        loads = [0] * self._size
        for part, shard in local:
            owner = loads.index(min(loads))
            loads[owner] += int(torch.Size(shard.shape).numel())
            whole = None
            if owner == self._rank:
                whole = nn.Parameter(part.new_empty(shard.shape), part.requires_grad)
                self.owned[whole] = part
            self._parts.append((part, shard, owner, whole))
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @torch.no_grad()
    def _before(self, *_: Any) -> None:
        for part, shard, owner, whole in self._parts:
            if part.grad is None:
                continue
            weight = self._gather(part, shard, owner)
            gradient = self._gather(part.grad, shard, owner)
            if whole is not None:
                whole.copy_(weight)
                whole.grad = gradient

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        for part, shard, owner, whole in self._parts:
            if part.grad is None:
                continue
            mine = self._padded(part, shard)
            pieces = None
            if whole is not None:
                rows = len(mine)
                padded = whole.new_zeros(rows * self._size, *whole.shape[1:])
                padded[: len(whole)] = whole
                pieces = list(padded.split(rows))
                whole.grad = None
            dist.scatter(mine, pieces, group=self._group, group_src=owner)
            part.copy_(mine[: len(part)])

    def _gather(self, part: torch.Tensor, shard: Shard, owner: int) -> torch.Tensor:
        """Return the whole tensor on its owner, something else on other ranks."""
        mine = self._padded(part, shard)
        pieces = None
        if owner == self._rank:
            pieces = [torch.empty_like(mine) for _ in range(self._size)]
        dist.gather(mine, pieces, group=self._group, group_dst=owner)
        return torch.cat(pieces)[: shard.shape[0]] if pieces else mine

    def _padded(self, part: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Return a copy with as many rows as every rank sends."""
        rows = -(-shard.shape[0] // self._size)
        padded = part.new_zeros(rows, *part.shape[1:])
        padded[: len(part)] = part
        return padded
