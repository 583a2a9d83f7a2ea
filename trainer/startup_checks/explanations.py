"""The line about a difference: what differs and where, from passes that were recorded.

No pass is run here. What in the task's code it comes from, `python -m trainer.prove` finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.core.rng.draw_traces import IN_A_KERNEL
from trainer.startup_checks.mismatch import Mismatch, compare, find_written
from trainer.startup_checks.passes import PassResult
from trainer.startup_checks.trace import (
    LOSS_NAME,
    Call,
    CallTrace,
    Key,
    describe,
    differs_alone,
    find_module,
)

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

STATE = "which it changes and no buffer holds; make it a buffer, or a function of self.step"
FIND_IT = ", and use python -m trainer.prove to find it"
CHANCE = (
    "gives different results each time for the same rows: it draws unseeded numbers, or depends on"
    f" the clock, a thread or a file; draw with torch.rand{FIND_IT}"
)


@dataclass(frozen=True)
class RecordedPasses:
    """Passes over the same rows from the same state, and what is known of them.

    `first` and `whole` are the same pass, run twice; `later` and `parts` cut the rows into
    micro-batches, and `later` starts from the state that `first` left. `whole` and `parts` are
    traced. `changed` are names of attributes that a pass changed, and `left` those that nothing put
    back. `is_keyed` if the dry run saw draws, which then have a key by example.
    """

    first: PassResult
    later: PassResult
    whole: PassResult
    parts: PassResult
    changed: Sequence[str]
    left: Sequence[str]
    limit: float
    is_keyed: bool


def explain(passes: RecordedPasses) -> str:
    """Return the line about the difference of parts from the whole."""
    whole, parts, limit = passes.whole, passes.parts, passes.limit
    keyed_call = find_module(whole.traces[0], parts.traces, limit)
    where = LOSS_NAME if keyed_call is None else describe(*keyed_call)
    changed = ", ".join(passes.changed[:3])
    mismatch = compare(whole, parts, limit)
    if compare(passes.first, whole, limit) is not None:
        left = ", ".join(passes.left[:3])
        return f"{where} depends on {left}, {STATE}" if left else f"{where} {CHANCE}"
    if mismatch is None and changed:
        why = f"depend on {changed}, which a pass changes and no buffer holds"
        return f"model or loss {why}; make it a buffer, or a function of self.step"
    if mismatch is None:
        why = "model or loss give different results from time to time"
        return f"{why}; look for rare draws, threads and files"
    if mismatch.kind == "buffer":
        return explain_buffers([mismatch.name], can_rewind=False)
    if name := find_written(whole, parts, limit):
        if name in passes.later.written:
            return explain_written(name)
        why = "is written in the forward pass of the first micro-batch, from its rows"
        return f"the parameter {name} {why}; set it in build_model or prepare"
    if keyed_call is not None and (why := _explain_call(*keyed_call, passes)):
        return f"{where}{why}"
    if changed:
        return _explain_state(where, changed, keyed_call, passes)
    if keyed_call is not None and keyed_call[1].module is not None:
        return f"{where}{MIXES}"
    return explain_loss(mismatch)


def _explain_state(
    where: str, changed: str, keyed_call: tuple[Key, Call] | None, passes: RecordedPasses
) -> str:
    if keyed_call is not None and differs_alone(*keyed_call, passes.parts.traces[0], passes.limit):
        why = f"on the other rows of a micro-batch, or on {changed}, which it changes"
        advice = "compute each row from itself, and make state a buffer"
        return f"{where} depends {why}; {advice}, or a function of self.step"
    return f"{where} depends on {changed}, {STATE}"


def explain_untraced(mismatch: Mismatch, written: str) -> str:
    """Return the line about a difference in a model whose modules could not be traced.

    `written` is a parameter that its forward passes changed, empty if there is none.
    """
    if mismatch.kind == "buffer":
        return explain_buffers([mismatch.name], can_rewind=False)
    return explain_written(written) if written else explain_loss(mismatch)


def explain_loss(mismatch: Mismatch) -> str:
    """Return the line about a difference that is of no module."""
    if mismatch.kind == "recorded":
        what = f"what self.record({mismatch.name!r}) gets depends on the micro-batch"
        why = "on its other rows, or on draws without a key by example"
        return f"{what}: {why}; record a value of each row, and draw with torch.rand(rows, ...)"
    if mismatch.kind == "gradient":
        why = "a hook on it, or a backward pass behind it, depends on the other rows"
        what = f"the gradient of {mismatch.name} is not the sum over the rows"
        return f"{what}: {why}; {ADVICE_ON_MIXED_ROWS}"
    what = "its weights" if mismatch.kind == "weights" else "its value"
    why = f"{what} for an example depends on the other examples"
    advice = "return a value per example from its own row, or use gather_rows"
    return f"the loss mixes the rows of a micro-batch: {why}; {advice}"


def explain_written(name: str, why: str = "once for each micro-batch") -> str:
    what = f"the parameter {name} is written in the forward pass, {why}"
    return f"{what}; write it in train_step, after update"


def explain_buffers(names: Sequence[str], can_rewind: bool) -> str:
    """Return the reason for buffers that advance with each pass, or sum over its rows."""
    named = f"buffer{'s' * (len(names) > 1)} {', '.join(names[:3])}" + (
        " ..." if len(names) > 3 else ""
    )
    if can_rewind:
        why = "changed in each forward pass, of which a step has one for each micro-batch"
        advice = "set run.buffers=per_step"
    else:
        why = "changed by the rows of a micro-batch, not by those of the global batch"
        advice = "take strategy=exact, which fixes the micro-batches"
    return f"{named}: {why}; {advice}"


GLOBAL_DRAWS = (
    "draws from numpy's or Python's generator, per micro-batch and not per example; draw in"
    " augment, or by torch.rand"
)
REORDERED = (
    "either draws for rows in another order than in the micro-batch, so that an example gets the"
    " numbers of another one, or mixes rows; draw before they are reordered, and reorder what is"
    " drawn"
)


def _explain_call(key: Key, call: Call, passes: RecordedPasses) -> str:
    """Return what a call draws otherwise in parts, after its name; an empty string if nothing."""
    whole, parts = passes.whole.traces[0], passes.parts.traces
    kernels = sorted({drawn for drawn, sizes in call.drawn if sizes == IN_A_KERNEL})
    if kernels:
        is_recurrent = "lstm" in kernels or "gru" in kernels
        instead = "draw with torch.rand(rows, ...) instead"
        advice = "put nn.Dropout between its layers" if is_recurrent else instead
        why = "draws inside its kernel, per micro-batch and not per example"
        return f": {' and '.join(kernels)} {why}; {advice}"
    if call.is_raw:
        return f" {_explain_raw(call, passes.is_keyed)}"
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
    if call.has_global_draws:
        return f" {GLOBAL_DRAWS}"
    return f" {REORDERED}" if call.drawn and not passes.changed else ""


def _explain_raw(call: Call, is_keyed: bool) -> str:
    inside = dict(call.module.named_modules()) if call.module is not None else {}
    scripted = [name for name, m in inside.items() if isinstance(m, torch.jit.ScriptModule)]
    how = f"{scripted[0]} is TorchScript" if scripted else "generator=..., a kernel or a thread"
    why = f"draws from torch's generator itself ({how})"
    advice = "call torch's functions without these"
    if not is_keyed and not scripted:
        why += ", or first draws after the start has looked for draws"
        advice += ", and draw from step 1 on, with p=1e-9 at first"
    return f"{why}: its draws have no key by example; {advice}"


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
