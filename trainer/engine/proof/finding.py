"""Findings of a proof: how two passes over the same rows differ, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.engine.proof.limits import LEAST_OF_ALL
from trainer.engine.proof.passes import Passed
from trainer.engine.proof.trace import (
    Call,
    CallTrace,
    Key,
    describe,
    find_module,
)
from trainer.strategy.mesh_model.mesh_proof import apart

BATCHES = "num_batches_tracked"
ALONE = "compute each row from itself, or take strategy=exact, which fixes the micro-batches"


@dataclass(frozen=True)
class Mismatch:
    """The first thing in which parts differ from the whole: of `kind`, by its `name`."""

    kind: str  # loss, weights, recorded, gradient, buffer or parameter
    name: str = ""


def compare(whole: Passed, parts: Passed, limit: float) -> Mismatch | None:
    """Return the first difference of the sums, gradients, buffers and written parameters."""
    for number, kind in ((0, "loss"), (2, "weights")):
        size = max(float(whole.sums[1 if number == 0 else 2]), 1e-30)
        if not _is_equal(whole.sums[number], parts.sums[number], limit * size):
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


def find_written(whole: Passed, parts: Passed, limit: float) -> str:
    """Return a parameter that forward passes changed to other values, else an empty string."""
    for name in {**whole.written, **parts.written}:
        one, other = whole.written.get(name), parts.written.get(name)
        if one is None or other is None or not apart(one, other) <= limit:
            return name
    return ""


def are_sums_equal(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    """Compare what `sum_up` returns: values relative to their sizes, and weights."""
    values = _is_equal(one[0], other[0], limit * max(float(one[1]), 1e-30))
    return values and _is_equal(one[2], other[2], limit * max(float(one[2].abs()), 1e-30))


def _is_equal(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    if not (one.isfinite() and other.isfinite()):
        return bool(one.isfinite() == other.isfinite())
    return float((one - other).abs()) <= limit


def _find_gradient(whole: Passed, parts: Passed, limit: float) -> str:
    """Return the last parameter whose gradient differs, an empty string if none does."""
    norms = {n: 0.0 if g is None else float(g.double().norm()) for n, g in whole.gradients.items()}
    total = sum(norm * norm for norm in norms.values()) ** 0.5
    found = ""
    for name, one in whole.gradients.items():  # the last one is next to the cause
        other = parts.gradients[name]
        if one is None and other is None:
            continue
        zero = torch.zeros((), dtype=torch.float64)
        one, other = (zero if each is None else each.double() for each in (one, other))
        least = max(limit * limit, LEAST_OF_ALL) * total
        if float((one - other).norm()) > max(limit * norms[name], least, 1e-30):
            found = name
    return found


def explain(difference: Mismatch, whole: Passed, parts: Passed, limit: float) -> str:
    """Return the reason for a difference of parts from the whole, from traced passes."""
    if difference.kind == "buffer":
        return explain_buffers([difference.name], can_rewind=False)
    if name := find_written(whole, parts, limit):
        return explain_written(name)
    if whole.traces and parts.traces:
        found = find_module(whole.traces[0], parts.traces, limit)
        if found is not None:
            return _explain_module(*found, whole.traces[0], parts.traces)
    if difference.kind == "recorded":
        what = f"what self.record({difference.name!r}) gets depends on the micro-batch"
        why = "on its other rows, or on draws without a key by example"
        return f"{what}: {why}; record a value of each row, and draw with torch.rand(rows, ...)"
    if difference.kind == "gradient":
        why = "a hook on it, or a backward pass behind it, depends on the other rows"
        what = f"the gradient of {difference.name} is not the sum over the rows"
        return f"{what}: {why}; {ALONE}"
    what = "its weights" if difference.kind == "weights" else "its value"
    why = f"{what} for an example depends on the other examples"
    advice = "return a value per example from its own row, or use gather_rows"
    return f"the loss mixes the rows of a micro-batch: {why}; {advice}"


def explain_written(name: str, why: str = "once for each micro-batch") -> str:
    what = f"the parameter {name} is written in the forward pass, {why}"
    return f"{what}; write it in train_step, after update"


def list_changed(module: nn.Module, passed: Passed) -> list[str]:
    """Return the buffers that a pass changed."""
    names = []
    for name, buffer in module.named_buffers():
        after = passed.buffers.get(name)
        is_alike = after is not None and after.shape == buffer.shape
        if not is_alike or not torch.equal(buffer.to(after), after):  # type: ignore[arg-type]
            names.append(name)
    return names


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


def _explain_module(key: Key, call: Call, whole: CallTrace, parts: Sequence[CallTrace]) -> str:
    called = describe(key, call)
    kernels = sorted({drawn for drawn, sizes in call.drawn if not sizes})
    if kernels:
        why = "draws inside its kernel, per micro-batch and not per example"
        advice = (
            "put nn.Dropout between its layers"
            if "lstm" in kernels or "gru" in kernels
            else "draw with torch.rand(rows, ...) instead"
        )
        return f"{called}: {' and '.join(kernels)} {why}; {advice}"
    if call.is_raw:
        scripted = [
            n for n, m in call.module.named_modules() if isinstance(m, torch.jit.ScriptModule)
        ]
        how = f"{scripted[0]} is TorchScript" if scripted else "generator=..., or a kernel"
        why = f"draws from torch's generator itself ({how}), so its draws have no key by example"
        return f"{called} {why}; call torch's functions without these"
    others = [part.calls[key] for part in parts]  # each has it, or it was not found
    if any(_draws_of(other) != _draws_of(call) for other in others):
        why = "draws as often as a micro-batch has rows, which shifts all later draws"
        return f"{called} {why}; draw for all rows at once, torch.rand(rows, ...)"
    if odd := _find_odd_draw(call, whole, others, parts):
        why = f"draws {odd}, which has no axis of rows"
        return f"{called} {why}; draw (rows, ...) and join afterwards"
    if call.has_coins:
        why = "draws from numpy's or Python's generator, per micro-batch and not per example"
        return f"{called} {why}; use torch.rand(rows, ...)"
    why = "its output for an example depends on the other examples"
    return f"{called} mixes the rows of a micro-batch: {why}; {ALONE}"


def _draws_of(call: Call) -> int:
    return call.positions[1] - call.positions[0]


def _find_odd_draw(
    call: Call, whole: CallTrace, others: Sequence[Call], parts: Sequence[CallTrace]
) -> str:
    """Return a draw whose sizes neither grow with the rows nor stay, empty if there is none."""
    for number, (name, sizes) in enumerate(call.drawn):
        for other, part in zip(others, parts, strict=True):
            own = other.drawn[number][1] if number < len(other.drawn) else ()
            grows = [s * part.rows == o * whole.rows for s, o in zip(sizes, own, strict=False)]
            if own != sizes and not any(grows):
                return f"{name} of shape {sizes}"
    return ""
