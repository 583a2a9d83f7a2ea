"""Sums of gradients over ranks that have the same parameter, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from trainer.distributed.world import RankGroup


class GradientSums:
    """The groups over which gradients are summed after the last backward pass of a step."""

    def __init__(self, bucket_mb: float):
        self._size = int(bucket_mb * 2**20)
        self._members: dict[tuple[int, tuple[int, ...]], list[nn.Parameter]] = {}
        self._groups: dict[tuple[int, ...], RankGroup] = {}

    def add(self, turn: int, group: RankGroup, parameter: nn.Parameter) -> None:
        """Sum a parameter's gradient over the ranks of a group.

        Sums are taken in turns, so that each one begins with whole results of the turn before.
        After the first turn each of the ranks has a part of the gradient, and may have none.
        """
        if group.size > 1:
            self._members.setdefault((turn, group.ranks), []).append(parameter)
            self._groups[group.ranks] = group

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients. A collective."""
        for turn, ranks in sorted(self._members):  # so that no two ranks wait for each other
            parameters = self._members[turn, ranks]
            for parameter in parameters if turn else ():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            reached = [p for p in parameters if p.grad is not None]
            self._reduce(reached, self._groups[ranks])

    def _reduce(self, parameters: list[nn.Parameter], group: RankGroup) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]

        def add_up(flat: torch.Tensor) -> torch.Tensor:
            wide = flat.float() if flat.itemsize < 4 else flat
            group.all_reduce(wide)
            return wide

        exchange(gradients, self._size, add_up)


def exchange(
    tensors: Iterable[torch.Tensor], most: int, send: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replace the values of tensors by what `send` returns for them, a flat bucket at a time."""
    for bucket in buckets(tensors, most):
        parts = send(torch.cat([tensor.flatten() for tensor in bucket]))
        sizes = [tensor.numel() for tensor in bucket]
        for tensor, part in zip(bucket, parts.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))


def buckets(tensors: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one dtype together, until they have `most` bytes."""
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
