"""Sums of gradients over the ranks that have the same parameter, in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn

from trainer.distributed.world import RankGroup
from trainer.strategy.base import Blueprint
from trainer.strategy.mesh import COPIES, Mesh, open_group
from trainer.strategy.mesh_model.partition import Partition
from trainer.strategy.mesh_model.placements import Placements

Stages = tuple[int, ...]


class GradientSums:
    """Sums gradients over groups of ranks after the last backward pass of a step.

    `copies`: the ranks that compute with the same weights.
    """

    def __init__(
        self, blueprint: Blueprint, mesh: Mesh, partition: Partition, placements: Placements
    ):
        """Open the groups, before the parameters are sharded. A collective."""
        groups = blueprint.world.groups
        self.copies = open_group(mesh, groups, "data", *COPIES)
        self._tensor = groups["tensor"]
        self._tied = _open_tied(groups["pipeline"], partition.stages.values())
        self._placements = placements
        self._partial = partition.partial
        self._size = int(blueprint.config.strategy.bucket_mb * 2**20)
        self._members: dict[tuple[int, tuple[int, ...]], tuple[RankGroup, list[nn.Parameter]]] = {}

    def is_copied(self, name: str) -> bool:
        """Return True if each rank of the tensor axis computes a parameter's whole gradient."""
        return name not in self._placements.cuts and name not in self._partial

    def add(self, name: str, wrapped: torch.Tensor, parameter: nn.Parameter) -> None:
        """Register a parameter, this rank's part of `wrapped`: `reduce` sums its gradient."""
        for turn, group in self._groups_of(name, wrapped):
            if group.size > 1:
                _, members = self._members.setdefault((turn, group.ranks), (group, []))
                members.append(parameter)

    def _groups_of(self, name: str, wrapped: torch.Tensor) -> Iterator[tuple[int, RankGroup]]:
        """Yield (turn, group): copies, then ranks with other positions, then stages that share it.

        A turn begins when the previous one has ended. In the second and third turn each rank of a
        group has a part of the gradient, or none.
        """
        if not self._placements.is_sharded(wrapped):
            yield 0, self.copies
        if name in self._partial:
            yield 1, self._tensor
        stages = self._placements.stages(name)
        if len(stages) > 1:
            yield 2, self._tied[stages]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of all registered parameters. A collective."""
        for turn, ranks in sorted(self._members):  # so that no two ranks wait for each other
            group, parameters = self._members[turn, ranks]
            for parameter in parameters if turn else ():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [p.grad for p in parameters if p.grad is not None]
            exchange(gradients, self._size, partial(_add_up, group))


def _add_up(group: RankGroup, flat: torch.Tensor) -> torch.Tensor:
    wide = flat.float() if flat.itemsize < 4 else flat
    group.all_reduce(wide)
    return wide


def _open_tied(pipeline: RankGroup, every: Iterable[Stages]) -> dict[Stages, RankGroup]:
    """Open a group for each set of stages that share parameters. A collective."""
    found = {tuple(range(pipeline.size)): pipeline}
    for stages in sorted({stages for stages in every if len(stages) > 1} - set(found)):
        members = stages if pipeline.rank in stages else (pipeline.rank,)
        group = pipeline.open(tuple(pipeline.ranks[stage] for stage in members))
        assert group.group  # the others open one too: all ranks open equally many
        found[stages] = group
    return found


def exchange(
    tensors: Iterable[torch.Tensor], most: int, send: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replace the values of tensors by `send(flat)`, a bucket of `most` bytes at a time."""
    for bucket in buckets(tensors, most):
        parts = send(torch.cat([tensor.flatten() for tensor in bucket]))
        sizes = [tensor.numel() for tensor in bucket]
        for tensor, part in zip(bucket, parts.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))


def buckets(tensors: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive tensors of one dtype. A bucket is full at `most` bytes or more."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= most or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
