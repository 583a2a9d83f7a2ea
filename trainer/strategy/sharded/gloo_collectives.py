"""Exchange between ranks on CPUs: the two collectives of FSDP2, over gloo.

torch's own (2.13) copy what they gather, and sum the whole on every rank, since gloo has no
reduce-scatter. These send each part once, from where it lies to where it is needed, in about half
the time. A sum also takes half the bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed.world import RankGroup

PIECE = 2**23  # bytes that are received before they are summed: as fast as the whole at once


class _Collective:
    """A collective of FSDP2, which allocates its own buffer for all tensors of a unit."""

    def __init__(self, axis: RankGroup) -> None:
        self._axis = axis

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class AllGather(_Collective):
    """Gather the parts of all ranks into the output, where FSDP2 has put this rank's part already.

    FSDP2 keeps a unit's buffer until the next one's is copied, for the streams of a GPU. One object
    for all units frees it before the next is made.
    """

    def __init__(self, axis: RankGroup) -> None:
        super().__init__(axis)
        self._last: weakref.ref[torch.Tensor] | None = None

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self._last and (last := self._last()) is not None:
            last.untyped_storage().resize_(0)
        made = super().allocate(size, dtype=dtype, device=device)
        self._last = weakref.ref(made)
        return made

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        parts = output_tensor.view(group.size(), -1)
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        with self._axis.waiting():
            _exchange([input_tensor] * group.size(), parts, group)


class ReduceScatter(_Collective):
    """Sum each rank's part in the order of the ranks, narrow types in 32 bits.

    The memory of the input is freed at once; FSDP2 would keep it until the next unit's gradients.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        parts = input_tensor.view(group.size(), -1)
        columns = max(1, PIECE // (len(parts) * parts.itemsize))
        buffer = parts.new_empty(len(parts), min(columns, parts.shape[1]))
        for sent, summed in zip(parts.split(columns, 1), output_tensor.split(columns), strict=True):
            received = buffer[:, : len(summed)]
            received[group.rank()] = sent[group.rank()]
            with self._axis.waiting():
                _exchange(sent, received, group)
            torch.sum(received, 0, out=summed)
        input_tensor.untyped_storage().resize_(0)


def exchange_over_gloo(units: Sequence[Any], axis: RankGroup) -> None:
    """Make FSDP2's units use these collectives between the ranks of an axis."""
    gather, reduce = AllGather(axis), ReduceScatter(axis)
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
        unit.set_modules_to_backward_prefetch([unit])  # no other one: nothing overlaps on a CPU


def _exchange(sent: Any, received: Any, group: dist.ProcessGroup) -> None:
    """Send a tensor to each other rank of a group, and receive one from each."""
    rank, size = group.rank(), group.size()
    works: list[Any] = []
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        works.append(dist.irecv(received[source], group=group, group_src=source))
        works.append(dist.isend(sent[target], group=group, group_dst=target))
    for work in works:
        work.wait()
