"""Collectives on tensors: with gradients, for ranks that divide a model, and in buckets.

After Megatron-LM (arXiv:1909.08053, section 3, and 2205.05198). Those with gradients come in pairs
that are each other's backward: `copy` and `add`, `gather` and `split`, `gather_parts` and
`add_split`. On the meta device they only compute shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from trainer.core.distributed.world import RankGroup


def sizes_of(length: int, axis: RankGroup) -> list[int]:
    """Return the lengths of the ranks' parts, which differ by at most one."""
    each, larger = divmod(length, axis.size)
    return [each + (rank < larger) for rank in range(axis.size)]


def own_part(tensor: torch.Tensor, dim: int, axis: RankGroup) -> torch.Tensor:
    """Return this rank's part of a tensor, a view."""
    return tensor.split(sizes_of(tensor.shape[dim], axis), dim)[axis.rank]


def summed(tensor: torch.Tensor, axis: RankGroup) -> torch.Tensor:
    """Return the sum over the ranks, in 32 bits or more; the tensor itself may be overwritten."""
    if tensor.is_meta:
        return tensor
    wide = tensor.float() if tensor.itemsize < 4 else tensor
    wide = wide.contiguous()
    axis.all_reduce(wide)
    return wide.to(tensor.dtype)


def joined(part: torch.Tensor, dim: int, length: int, axis: RankGroup) -> torch.Tensor:
    """Return the whole tensor, whose length along `dim` is `length`, from the ranks' parts."""
    sizes = sizes_of(length, axis)
    if part.is_meta:
        return part.new_empty([*part.shape[:dim], length, *part.shape[dim + 1 :]])
    moved = part.movedim(dim, 0)
    is_even = len(moved) * axis.size == length
    if not is_even:  # equal parts only are gathered
        moved = F.pad(moved, (0, 0) * (moved.dim() - 1) + (0, max(sizes) - len(moved)))
    whole = moved.new_empty(max(sizes) * axis.size, *moved.shape[1:])
    axis.all_gather_into(whole, moved.contiguous())
    if is_even and not dim:
        return whole
    parts = zip(whole.chunk(axis.size), sizes, strict=True)
    # no view, so that a model may change it in place
    return torch.cat([each[:size].movedim(0, dim) for each, size in parts], dim)


def scattered_sum(whole: torch.Tensor, dim: int, axis: RankGroup) -> torch.Tensor:
    """Return this rank's part of the sum over the ranks, in 32 bits or more."""
    length = whole.shape[dim]
    if whole.is_meta or length % axis.size:
        return own_part(summed(whole.clone(), axis), dim, axis).contiguous()
    wide = whole.float() if whole.itemsize < 4 else whole
    moved = wide.movedim(dim, 0).contiguous()
    part = moved.new_empty(length // axis.size, *moved.shape[1:])
    axis.reduce_scatter(part, moved)
    return part.to(whole.dtype).movedim(0, dim).contiguous()


# Each backward pass is the forward pass of another one: gradients of gradients are right too.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: RankGroup) -> torch.Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Add.apply(gradient, ctx.axis), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: RankGroup) -> torch.Tensor:
        ctx.axis = axis
        return summed(tensor.clone(), axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Copy.apply(gradient, ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, length: int, axis: RankGroup) -> Any:
        ctx.dim, ctx.axis = dim, axis
        return joined(part, dim, length, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Split.apply(gradient, ctx.dim, ctx.axis), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, axis: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.axis, ctx.length = dim, axis, whole.shape[dim]
        return own_part(whole, dim, axis).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Gather.apply(gradient, ctx.dim, ctx.length, ctx.axis), None, None


class _GatherParts(_Gather):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _AddSplit.apply(gradient, ctx.dim, ctx.axis), None, None, None


class _AddSplit(_Split):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, axis: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.axis, ctx.length = dim, axis, whole.shape[dim]
        return scattered_sum(whole, dim, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _GatherParts.apply(gradient, ctx.dim, ctx.length, ctx.axis), None, None


def copy(tensor: torch.Tensor, axis: RankGroup) -> Any:
    """Pass on a tensor that all ranks have; its gradient is the sum over the ranks."""
    return _Copy.apply(tensor, axis)


def add(tensor: torch.Tensor, axis: RankGroup) -> Any:
    """Return the sum over the ranks, which all ranks go on with alike."""
    return _Add.apply(tensor, axis)


def gather(part: torch.Tensor, dim: int, length: int, axis: RankGroup) -> Any:
    """Return the whole of divided tensors, which all ranks go on with alike."""
    return _Gather.apply(part, dim, length, axis)


def split(whole: torch.Tensor, dim: int, axis: RankGroup) -> Any:
    """Return this rank's part of a tensor that all ranks have."""
    return _Split.apply(whole, dim, axis)


def gather_parts(part: torch.Tensor, dim: int, length: int, axis: RankGroup) -> Any:
    """Return the whole of divided tensors; each rank goes on with other work on it."""
    return _GatherParts.apply(part, dim, length, axis)


def add_split(whole: torch.Tensor, dim: int, axis: RankGroup) -> Any:
    """Return this rank's part of the sum over the ranks."""
    return _AddSplit.apply(whole, dim, axis)


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
