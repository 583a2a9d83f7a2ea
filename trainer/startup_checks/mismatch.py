"""Mismatch of two passes over the same rows: a difference beyond rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from trainer.base.python_code import owner_of
from trainer.base.same import BY_HAND, SMALL, relative
from trainer.base.same.distance import apart, norms_apart, sketch
from trainer.core.strategy.modules.dry_run import DispatchMode
from trainer.startup_checks.passes import PassResult

LEAST_OF_ALL = 1e-12  # of all gradients: those that are zero but for rounding are that small
DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_SUM_OPERATIONS = (torch.ops.aten.sum, torch.ops.aten.mean)


class NarrowestDtype(DispatchMode):
    """Finds the narrowest dtype of products of matrices, and of sums in 16 bits: `found`.

    Its rounding is that of the whole step: other operations give each row nearly the same bits in
    any layout, and a sum in fp32 in an fp64 model is mostly one to be logged. `limit` allows for
    any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = torch.float64
        self.limit = 0.0

    @property
    def name(self) -> str:
        return DTYPE_NAMES[self.found]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.limit = max(self.limit, BY_HAND.of(leaf.dtype))
        packet = func._overloadpacket
        if packet in flop_registry or packet in _SUM_OPERATIONS:
            for leaf in tree_leaves((args, out)):
                if isinstance(leaf, torch.Tensor) and leaf.dtype in DTYPE_NAMES:
                    is_narrower = leaf.dtype.itemsize < self.found.itemsize
                    if is_narrower and (packet in flop_registry or leaf.dtype.itemsize == 2):
                        self.found = leaf.dtype
        return out


BATCHES = "num_batches_tracked"


@dataclass(frozen=True)
class Mismatch:
    """The first thing in which parts differ from the whole: of `kind`, by its `name`."""

    kind: str  # loss, weights, recorded, gradient, buffer or parameter
    name: str = ""


def compare(whole: PassResult, parts: PassResult, limit: float) -> Mismatch | None:
    """Return the first difference of the sums, gradients, buffers and written parameters."""
    for index, size, kind in ((0, 1, "loss"), (2, 2, "weights")):
        if not _is_near(whole.sums, parts.sums, index, size, limit):
            return Mismatch(kind)
    if name := _find_gradient(whole, parts, limit):
        return Mismatch("gradient", name)
    for name in {**whole.recorded, **parts.recorded}:
        sums, others = (each.recorded.get(name) for each in (whole, parts))
        if sums is None or others is None or not are_sums_equal(sums, others, limit):
            return Mismatch("recorded", name)
    for name, value in whole.buffers.items():
        other = parts.buffers.get(name)
        if other is None or name.endswith(BATCHES):
            continue
        if not apart(value, other) <= limit:
            return Mismatch("buffer", name)
    name = find_written(whole, parts, limit)
    return Mismatch("parameter", name) if name else None


def flatten(passed: PassResult) -> tuple[torch.Tensor, Callable[[torch.Tensor], PassResult]]:
    """Return sums and sketches of gradients as (n,), and what makes a result of such numbers."""
    gradients = {n: sketch(g) for n, g in passed.gradients.items() if g is not None}
    leaves, form = tree_flatten((passed.sums, gradients, passed.recorded))
    sizes = [leaf.numel() for leaf in leaves]

    def of(numbers: torch.Tensor) -> PassResult:
        sums, gradients, recorded = tree_unflatten(numbers.split(sizes), form)
        return PassResult(sums, gradients, {}, {}, passed.dtype, recorded)

    return torch.cat([leaf.double().cpu() for leaf in leaves]), of


def find_written(whole: PassResult, parts: PassResult, limit: float) -> str:
    """Return a parameter that forward passes changed to other values, else an empty string."""
    for name in {**whole.written, **parts.written}:
        one, other = whole.written.get(name), parts.written.get(name)
        if one is None or other is None or not apart(one, other) <= limit:
            return name
    return ""


def are_sums_equal(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    """Compare what `sum_up` returns: values relative to their sizes, and weights."""
    return _is_near(one, other, 0, 1, limit) and _is_near(one, other, 2, 2, limit)


def _is_near(one: torch.Tensor, other: torch.Tensor, index: int, size: int, limit: float) -> bool:
    """Compare a sum with that of another pass, relative to the sum of the sizes of its values."""
    least = max(float(one[size].abs()), SMALL)
    return relative(float(one[index]), float(other[index]), least) <= limit


def _find_gradient(whole: PassResult, parts: PassResult, limit: float) -> str:
    """Return the last parameter whose gradient differs, an empty string if none does.

    Unlike in `apart`, NaN in one of two gradients is no difference.
    """
    zero = torch.zeros((), device=whole.sums.device)
    ones, others = (
        {name: zero if g is None else g for name, g in each.gradients.items()}
        for each in (whole, parts)
    )
    distances = norms_apart(ones, others, max(limit, LEAST_OF_ALL / limit))
    return next((n for n in reversed(distances) if distances[n] > limit), "")  # next to the cause


def list_changed(module: nn.Module, passed: PassResult) -> list[str]:
    """Return the buffers that a pass changed."""
    names = []
    for name, buffer in module.named_buffers():
        after = passed.buffers.get(name)
        if after is None or not torch.equal(buffer.to(after), after):
            names.append(name)
    return names


def find_late_hook(module: nn.Module) -> str:
    """Return a parameter with a hook of the user's that no pass here can call, or ""."""
    for name, parameter in module.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(owner_of(hook) not in ("torch", "lockstep") for hook in hooks.values()):
            return name
    return ""
