"""The cross-entropy of scores that are divided over ranks.

After Megatron-LM (arXiv:1909.08053, section 3, and 2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import GetSetDescriptorType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from trainer.core.distributed.world import RankGroup
from trainer.core.strategy.collectives import gather, sizes_of, summed

_TENSOR: Any = torch.Tensor
_SHAPE_QUERIES = {_TENSOR.shape.__get__, _TENSOR.size}
_VALUES = ("T", "mT", "H", "mH", "data", "grad", "real", "imag", "_grad")
_PROPERTIES = {
    getattr(_TENSOR, name).__get__
    for name in dir(torch.Tensor)
    if isinstance(getattr(_TENSOR, name), GetSetDescriptorType) and name not in _VALUES
} | {_TENSOR.dim, _TENSOR.is_floating_point, _TENSOR.register_hook}
ABOUT = _SHAPE_QUERIES | _PROPERTIES  # functions that do not use the values
_CONVERSIONS = {
    *(torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16),
    *(torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.type),
}
_MOVES = {
    *(torch.Tensor.transpose, torch.transpose, torch.Tensor.permute, torch.permute),
    *(torch.Tensor.movedim, torch.movedim, _TENSOR.mT.__get__),
}
_SHAPED = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}
_FLATTENS = {torch.Tensor.flatten, torch.flatten}


class VocabularyPart(torch.Tensor):
    """This rank's part of a tensor of scores, which looks like the whole.

    Cross-entropy is computed from the parts. So are changes of dtype, and of shape where the scores
    stay one axis. Any other function gets the whole tensor, which all ranks then gather.
    """

    _axis: RankGroup
    _length: int
    _dim: int

    @staticmethod
    def of(part: torch.Tensor, length: int, axis: RankGroup, dim: int = -1) -> torch.Tensor:
        """Return a part whose whole has `length` scores along `dim`."""
        scores: VocabularyPart = _StandIn(part) if hasattr(part, "fake_mode") else _Mark.apply(part)
        scores._axis = axis
        scores._length = length
        scores._dim = dim % part.dim()
        return scores

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first = args[0] if args else None
            if isinstance(first, VocabularyPart) and (handler := _short(func)) is not None:
                handled = handler(first, func, args[1:], kwargs)
                if handled is not NotImplemented:
                    return handled
            args, kwargs = gathered((tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def plain(self) -> torch.Tensor:
        """Return the part as a plain tensor."""
        return self.as_subclass(torch.Tensor)

    def _like(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return VocabularyPart.of(part, self._length, self._axis, dim)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor. A collective."""
        return gather(self.plain(), self._dim, self._length, self._axis)

    def sizes(self) -> torch.Size:
        shape = list(self.plain().shape)
        shape[self._dim] = self._length
        return torch.Size(shape)


class _StandIn(VocabularyPart):
    """A part that is one of torch's fake tensors, which cannot change their class."""

    _part: torch.Tensor

    def __new__(cls, part: torch.Tensor) -> Any:
        form: Any = {name: getattr(part, name) for name in ("dtype", "device", "requires_grad")}
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, **form)

    def __init__(self, part: torch.Tensor):
        self._part = part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} got a part without its whole")

    def plain(self) -> torch.Tensor:
        return self._part


class _Mark(torch.autograd.Function):
    """Make a tensor a Parted one, which is no view: FSDP2 warns of modules that return a view."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(VocabularyPart, part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def gathered(tree: Any) -> Any:
    """Return a tree with whole tensors instead of parts. A collective."""
    return tree_map_only(VocabularyPart, VocabularyPart.whole, tree)


def _short(func: Any) -> Any:
    """Return the function that handles a torch function without gathering."""
    if func is F.cross_entropy:
        return _cross_entropy
    if func in _SHAPE_QUERIES:
        return _size
    if func in _PROPERTIES:
        return _about
    if func in _CONVERSIONS:
        return _alike
    if func in _MOVES:
        return _move
    if func in _SHAPED:
        return _shape
    return _flatten if func in _FLATTENS else None


def _about(scores: VocabularyPart, func: Any, args: Any, kwargs: Any) -> Any:
    return func(scores, *args, **kwargs)  # itself: a hook on a view would never be called


def _size(scores: VocabularyPart, func: Any, args: Any, kwargs: Any) -> Any:
    sizes = scores.sizes()
    if not args and not kwargs:
        return sizes
    return sizes[kwargs["dim"] if kwargs else args[0]] if func is torch.Tensor.size else sizes


def _alike(scores: VocabularyPart, func: Any, args: Any, kwargs: Any) -> Any:
    return scores._like(func(scores.plain(), *args, **kwargs), scores._dim)


def _move(scores: VocabularyPart, func: Any, args: Any, kwargs: Any) -> Any:
    """Move axes, and find the axis of the scores by its length on the meta device."""
    plain = scores.plain()
    mark = torch.empty([int(dim == scores._dim) + 1 for dim in range(plain.dim())], device="meta")
    dim = list(func(mark, *args, **kwargs).shape).index(2)
    return scores._like(func(plain, *args, **kwargs), dim)


def _shape(scores: VocabularyPart, func: Any, args: Any, kwargs: Any) -> Any:
    """Reshape the axes before the scores, if these are the last axis and stay it."""
    plain = scores.plain()
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    is_last = scores._dim == plain.dim() - 1
    if kwargs or not sizes or not is_last or sizes[-1] not in (-1, scores._length):
        return NotImplemented
    rows = math.prod(plain.shape[:-1])
    before = [int(size) for size in sizes[:-1]]
    if sizes[-1] == -1 and math.prod(before) != rows:
        return NotImplemented
    return scores._like(plain.reshape(*before, plain.shape[-1]), len(before))


def _flatten(scores: VocabularyPart, func: Any, args: Any, kwargs: Any) -> Any:
    plain = scores.plain()
    flat = func(plain, *args, **kwargs)
    is_kept = scores._dim == plain.dim() - 1 and flat.shape[-1] == plain.shape[-1]
    return scores._like(flat, flat.dim() - 1) if is_kept and flat.dim() > 1 else NotImplemented


def _cross_entropy(scores: VocabularyPart, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute F.cross_entropy over axis 1, or over the only axis."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    arguments = dict(zip((*names, "label_smoothing"), args, strict=False)) | kwargs
    target = arguments["target"]
    is_plain = arguments.get("weight") is None and arguments.get("size_average") is None
    is_plain &= arguments.get("reduce") is None and not target.is_floating_point()
    if not is_plain or scores._dim != (1 if scores.plain().dim() > 1 else 0):
        return NotImplemented
    part = scores.plain()
    if part.itemsize < 4 or torch.is_autocast_enabled(part.device.type):
        part = part.float()
    smoothing = arguments.get("label_smoothing", 0.0)
    ignored = target == arguments.get("ignore_index", -100)
    settings = (scores._length, scores._axis, smoothing)
    with torch.autocast(part.device.type, enabled=False):
        values = _Loss.apply(part.movedim(scores._dim, -1), target.where(~ignored, 0), settings)
        values = values.masked_fill(ignored, 0)
        reduction = arguments.get("reduction", "mean")
        if reduction == "none":
            return values
        return values.sum() if reduction == "sum" else values.sum() / (~ignored).sum()


class _Loss(torch.autograd.Function):
    """Cross-entropy (...) of parts of scores (..., part of the classes) and targets (...)."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, target: torch.Tensor, settings: Any) -> torch.Tensor:
        length, axis, smoothing = settings
        sizes = sizes_of(length, axis)
        own = target - sum(sizes[: axis.rank])
        is_here = (own >= 0) & (own < part.shape[-1])
        own = own.where(is_here, 0).unsqueeze(-1)
        most = part.amax(-1)
        if not part.is_meta:
            axis.all_reduce(most, dist.ReduceOp.MAX)
        shifted = part - most.unsqueeze(-1)
        powers = shifted.exp()
        score = shifted.gather(-1, own).squeeze(-1) * is_here
        sums = torch.stack([powers.sum(-1), score, shifted.sum(-1)])
        total, score, every = summed(sums, axis)
        ctx.save_for_backward(powers / total.unsqueeze(-1), own, is_here)
        ctx.smoothing, ctx.length = smoothing, length
        return total.log() - (1 - smoothing) * score - smoothing * every / length

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shares, own, is_here = ctx.saved_tensors
        shares = shares - ctx.smoothing / ctx.length
        minus = (ctx.smoothing - 1) * is_here.unsqueeze(-1).to(shares.dtype)
        shares.scatter_add_(-1, own, minus)
        return shares * gradient.unsqueeze(-1), None, None
