"""Mismatch of two passes over the same rows: a difference beyond rounding, and its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from trainer.base.same import BY_HAND, SMALL, relative
from trainer.base.same.distance import apart, norms_apart, sketch
from trainer.core.rng.draw_traces import IN_A_KERNEL
from trainer.core.strategy.modules.dry_run import DispatchMode
from trainer.startup_checks.passes import PassResult
from trainer.startup_checks.trace import Call, CallTrace, Key, describe, find_module

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
ADVICE_ON_MIXED_ROWS = (
    "compute each row from itself, or take strategy=exact, which fixes the micro-batches"
)
MIXES = (
    " mixes the rows of a micro-batch: its output for an example depends on the other examples;"
    f" {ADVICE_ON_MIXED_ROWS}"
)

MIXED_IN_PREPARATION = (
    "a row is prepared otherwise with other rows beside it, by __getitems__, collate, split_batch"
    " or augment; prepare each row from itself, and draw with the `random` that augment gets"
)
PADDED = (
    "the loss of a row depends on its padding, which is as long as the longest row beside it;"
    " divide by its own tokens, as a loss of (values, weights) does, or pad all rows to one length"
)


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


@dataclass(frozen=True)
class Circumstances:
    """Results of experiments: a draw that begins `late`, the place that draws from numpy or Python.

    `is_of_order` if nothing differs once all rows draw the same numbers.
    """

    late: str = ""
    place: str = ""
    is_of_order: bool = False


def explain(
    difference: Mismatch,
    whole: PassResult,
    parts: PassResult,
    limit: float,
    circumstances: Circumstances = Circumstances(),
) -> str:
    """Return the reason for a difference of parts from the whole, from traced passes."""
    if difference.kind == "buffer":
        return explain_buffers([difference.name], can_rewind=False)
    if name := find_written(whole, parts, limit):
        return explain_written(name)
    if whole.traces and parts.traces:
        keyed_call = find_module(whole.traces[0], parts.traces, limit)
        if keyed_call is not None:
            why = _explain_call(*keyed_call, whole.traces[0], parts.traces, circumstances)
            if why or keyed_call[1].module is not None:
                return f"{describe(*keyed_call)}{why or MIXES}"
    if difference.kind == "recorded":
        what = f"what self.record({difference.name!r}) gets depends on the micro-batch"
        why = "on its other rows, or on draws without a key by example"
        why += f", as those in {circumstances.place}" * bool(circumstances.place)
        return f"{what}: {why}; record a value of each row, and draw with torch.rand(rows, ...)"
    if why := _explain_draws(circumstances):
        return f"the loss {why}"
    if difference.kind == "gradient":
        why = "a hook on it, or a backward pass behind it, depends on the other rows"
        what = f"the gradient of {difference.name} is not the sum over the rows"
        return f"{what}: {why}; {ADVICE_ON_MIXED_ROWS}"
    what = "its weights" if difference.kind == "weights" else "its value"
    why = f"{what} for an example depends on the other examples"
    advice = "return a value per example from its own row, or use gather_rows"
    return f"the loss mixes the rows of a micro-batch: {why}; {advice}"


def explain_written(name: str, why: str = "once for each micro-batch") -> str:
    what = f"the parameter {name} is written in the forward pass, {why}"
    return f"{what}; write it in train_step, after update"


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
        own = ("trainer.", "torch.")
        if any(not str(getattr(h, "__module__", "")).startswith(own) for h in hooks.values()):
            return name
    return ""


def explain_buffers(names: Sequence[str], can_rewind: bool) -> str:
    """Return the reason for buffers that advance with each pass, or sum over its rows."""
    named = f"buffer{'s' * (len(names) > 1)} {', '.join(names[:3])}" + " ..." * (len(names) > 3)
    if can_rewind:
        why = "changed in each forward pass, of which a step has one for each micro-batch"
        advice = "set run.buffers=per_step"
    else:
        why = "changed by the rows of a micro-batch, not by those of the global batch"
        advice = "take strategy=exact, which fixes the micro-batches"
    return f"{named}: {why}; {advice}"


def _explain_draws(circumstances: Circumstances) -> str:
    """Return why draws differ, as experiments show it, else an empty string."""
    if circumstances.late:
        why = f"draws {circumstances.late} only later than at the start, which looks for draws"
        return f"{why}, so these have no key by example; draw from step 1 on, with p=1e-9 at first"
    if circumstances.place:
        why = f"draws from numpy's or Python's generator in {circumstances.place}"
        return f"{why}, per micro-batch and not per example; draw in augment, or by torch.rand"
    if circumstances.is_of_order:
        why = "draws for rows that are in another order than in the micro-batch"
        advice = "draw before they are reordered, and reorder what is drawn"
        return f"{why}, so that an example gets the numbers of another one; {advice}"
    return ""


def _explain_call(
    key: Key,
    call: Call,
    whole: CallTrace,
    parts: Sequence[CallTrace],
    circumstances: Circumstances,
) -> str:
    """Return what a call draws otherwise in parts, after its name; an empty string if nothing."""
    kernels = sorted({drawn for drawn, sizes in call.drawn if sizes == IN_A_KERNEL})
    if kernels:
        is_recurrent = "lstm" in kernels or "gru" in kernels
        instead = "draw with torch.rand(rows, ...) instead"
        advice = "put nn.Dropout between its layers" if is_recurrent else instead
        why = "draws inside its kernel, per micro-batch and not per example"
        return f": {' and '.join(kernels)} {why}; {advice}"
    if circumstances.late:
        return f" {_explain_draws(circumstances)}"
    if call.is_raw:
        return f" {_explain_raw(call)}; call torch's functions without these"
    others = [part.calls[key] for part in parts]  # each has it, or it was not found
    for other, part in zip(others, parts, strict=True):
        if _draws_of(other) == _draws_of(call):
            continue
        count = f"{_draws_of(call)} times for {whole.rows} rows, {_draws_of(other)} for {part.rows}"
        why = (
            f"draws as often as a micro-batch has rows or chunks ({count}), which shifts all draws"
        )
        return f" {why}; draw for all rows at once, torch.rand(rows, ...)"
    if odd := _find_odd_draw(call, whole, others, parts):
        why = f"draws {odd}, which has no axis of rows"
        return f" {why}; draw (rows, ...) and join afterwards"
    why = _explain_draws(circumstances)
    return f" {why}" if why else ""


def _explain_raw(call: Call) -> str:
    inside = dict(call.module.named_modules()) if call.module is not None else {}
    scripted = [name for name, m in inside.items() if isinstance(m, torch.jit.ScriptModule)]
    how = f"{scripted[0]} is TorchScript" if scripted else "generator=..., a kernel or a thread"
    return f"draws from torch's generator itself ({how}), so its draws have no key by example"


def _draws_of(call: Call) -> int:
    return call.positions[1] - call.positions[0]


def _find_odd_draw(
    call: Call, whole: CallTrace, others: Sequence[Call], parts: Sequence[CallTrace]
) -> str:
    """Return a draw whose sizes neither grow with the rows nor stay, empty if there is none."""
    for draw_number, (name, sizes) in enumerate(call.drawn):
        for other, part in zip(others, parts, strict=True):
            own = other.drawn[draw_number][1] if draw_number < len(other.drawn) else ()
            grows = [s * part.rows == o * whole.rows for s, o in zip(sizes, own, strict=False)]
            if own != sizes and not any(grows):
                return f"{name} of shape {sizes}"
    return ""
