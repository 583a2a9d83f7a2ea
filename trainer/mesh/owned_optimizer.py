"""An optimizer that needs whole matrices of a model that ranks divide.

Each parameter has an owner among these ranks. Before a step the owner gathers the parameter and its
gradient, and after it every rank gets its part back. The state stays with the owner. torch's Muon
on DTensors gives other numbers (1.6e-3 off, torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.core.distributed.world import RankGroup
from trainer.core.strategy.optimizer_trial import surround_step
from trainer.core.strategy.tensor_shards import Shard, find_owners, slices


@dataclass
class _Parameter:
    """A divided parameter: this rank's part, its whole on the owner, and the boxes of all ranks."""

    part: nn.Parameter
    owner: int
    whole: nn.Parameter | None
    boxes: list[list[Any]]  # by rank, (offset, size) of each box
    most: int  # elements of the largest part

    def pieces(self, rank: int, flat: torch.Tensor) -> Iterator[tuple[tuple[slice, ...], Any]]:
        """Yield the place in the whole of each box of a rank, and its values from `flat`."""
        begin = 0
        for offset, size in self.boxes[rank]:
            count = torch.Size(size).numel()
            yield slices(offset, size), flat[begin : begin + count].view(size)
            begin += count


class OwnedOptimizer:
    """The parameters of one optimizer: `owned` maps each one that this rank owns to its part."""

    def __init__(
        self,
        optimizer: Optimizer,
        local: Sequence[tuple[nn.Parameter, Shard]],
        axis: RankGroup,
    ):
        """`local` are the parts of the optimizer's parameters that are divided, in their order.

        Collective: every rank of `axis` must call it.
        """
        self.owned: dict[nn.Parameter, nn.Parameter] = {}
        self._group = axis.group
        self._rank = axis.rank
        self._parameters: list[_Parameter] = []
        own = [[[o, list(box.shape)] for box, o in shard.boxes()] for _, shard in local]
        every = axis.gather(own)
        owners = find_owners((math.prod(shard.shape) for _, shard in local), axis.size)
        for index, ((part, shard), owner) in enumerate(zip(local, owners, strict=True)):
            whole = None
            if owner == self._rank:
                whole = nn.Parameter(part.new_empty(shard.shape), part.requires_grad)
                self.owned[whole] = part
            boxes = [of_rank[index] for of_rank in every]
            most = max(sum(torch.Size(size).numel() for _, size in each) for each in boxes)
            self._parameters.append(_Parameter(part, owner, whole, boxes, most))
        surround_step(optimizer, self._before, self._after)

    @torch.no_grad()
    def _before(self) -> None:
        for each in self._parameters:
            if each.part.grad is None:
                continue
            weight = self._gather(each, each.part)
            gradient = self._gather(each, each.part.grad)
            if (whole := each.whole) is not None:
                whole.copy_(weight)
                whole.grad = gradient

    @torch.no_grad()
    def _after(self) -> None:
        for each in self._parameters:
            part, whole = each.part, each.whole
            if part.grad is None:
                continue
            mine = part.new_empty(each.most)
            sent = None
            if whole is not None:
                sent = [torch.zeros_like(mine) for _ in each.boxes]
                for rank, flat in enumerate(sent):
                    for index, piece in each.pieces(rank, flat):
                        piece.copy_(whole[index])
                whole.grad = None
            dist.scatter(mine, sent, group=self._group, group_src=each.owner)
            part.copy_(mine[: part.numel()].view_as(part))

    def _gather(self, each: _Parameter, values: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor on its owner, something else on other ranks."""
        mine = values.new_zeros(each.most)
        mine[: values.numel()] = values.flatten()
        if each.whole is None:
            dist.gather(mine, None, group=self._group, group_dst=each.owner)
            return mine
        received = [torch.empty_like(mine) for _ in each.boxes]
        dist.gather(mine, received, group=self._group, group_dst=each.owner)
        whole = torch.empty_like(each.whole)
        for rank, flat in enumerate(received):
            for index, piece in each.pieces(rank, flat):
                whole[index] = piece
        return whole
