"""Reasons for different gradients: reduction, loss weighting, clipping, random draws, BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trainer.base.same import relative
from trainer.prove.comparison import PairComparison
from trainer.prove.merging import CommandHistory, Merged, Step
from trainer.prove.reasons.example_reasons import explain_skipped
from trainer.prove.reasons.loss_reasons import APART, explain_loss, explain_ratio, explain_weighting
from trainer.prove.reasons.pass_reasons import (
    explain_changes,
    explain_members,
    explain_modes,
    explain_passes,
    explain_settings,
    explain_skipped_batches,
    explain_use,
    name_some,
)
from trainer.prove.rounding import compare_tensors, relative_norm

BY_SCALE = "their norm has the scale in it, and the limit has not"


def explain_gradients(comparison: PairComparison, step_index: int) -> str:
    """Return the likely reason why the gradients of a step differ."""
    one = comparison.one.steps[step_index]
    other = comparison.other.steps[step_index]
    if one.gradients.is_zero and other.gradients.is_zero:
        why = "backward is not called, or the optimizer has other parameters than the model"
        return f"nothing is learned, so nothing is proved: {why}"
    if reason := (
        explain_unreduced(comparison.other, step_index, comparison)
        or explain_unreduced(comparison.one, step_index, comparison)
        or explain_changes(comparison, step_index)
        or _explain_missing(comparison.other, other)
        or _explain_missing(comparison.one, one)
        or _explain_early_clipping(comparison, one, other)
        or explain_members(comparison)
        or explain_use(comparison, one, other)
        or explain_skipped_batches(comparison, one, other)
        or _explain_clipping(comparison, one, other)
        or explain_passes(comparison, step_index)
        or explain_ratio(comparison, one, other, step_index)
        or explain_weighting(comparison, one, other, step_index)
    ):
        return reason
    reasons = [
        explain_modes(comparison, one, other),
        explain_settings(comparison, one, other),
        _explain_layers(comparison, one, other),
    ]
    return "; ".join(filter(None, reasons)) or _explain_some(comparison, one, other)


def explain_unreduced(history: CommandHistory, step_index: int, comparison: PairComparison) -> str:
    """Return why the ranks of a command have different gradients; "" if they have the same."""
    if reason := explain_skipped(comparison, step_index):
        return reason
    step = history.steps[step_index]
    if not _names_apart(step.gradients):
        return ""
    merged = step.unclipped if step.unclipped.whole else step.gradients
    if apart := _names_apart(merged):
        return _explain_sums(history, step, merged, apart)
    return _explain_clips(history, step)


def _names_apart(merged: Merged) -> list[str]:
    """Return the tensors that the ranks have differently."""
    return [name for name, value in merged.spread.items() if value > APART]


def _explain_clips(history: CommandHistory, step: Step) -> str:
    """Say why gradients that are equal on the ranks before clipping differ after it."""
    norms = [rank.clips[0]["norm"] for rank in step.ranks if rank.clips]
    if norms and relative(min(norms), max(norms)) > APART:
        shown = ", ".join(f"{norm:.4g}" for norm in norms)
        return f"each rank of {history.name} clips by a norm of its own ({shown})"
    limits = [", ".join(str(clip["max_norm"]) for clip in rank.clips) for rank in step.ranks]
    if len(set(limits)) > 1:
        shown = " and ".join(dict.fromkeys(limits))
        return f"the ranks of {history.name} clip their gradients by other limits: {shown}"
    who = f"the gradients of {history.name} agree on its ranks before clipping"
    return f"{who}, and ranks change those of {name_some(_names_apart(step.gradients))} after it"


def _explain_sums(history: CommandHistory, step: Step, merged: Merged, apart: Sequence[str]) -> str:
    """Say why nothing averages the gradients `apart`, of those that are `merged`."""
    averaged = [name for name, each in merged.whole.items() if name not in apart and np.any(each)]
    start = f"the gradients of {history.name} are not averaged over its ranks"
    wrappers = history.about("wrappers", step.optimizer)
    if averaged:
        return f"{start} for {name_some(apart)}, but for other parameters they are"
    if "FSDP" in wrappers:
        return start
    if not wrappers:
        return f"{start}: DistributedDataParallel does not wrap the model, and nothing else does it"
    forwards = [each for rank in step.ranks for each in rank.forwards]
    if forwards and not any(each["is_wrapper"] for each in forwards):
        return f"{start}: the model is called around its wrapper (as with model.module)"
    last = [rank.backwards[-1]["reduces"] for rank in step.ranks if rank.backwards]
    if last and not any(any(each) for each in last):
        return f"{start}: the last backward pass of the step is within no_sync"
    if _prepares_nothing(step):
        why = "DDP reads require_backward_grad_sync in the forward pass"
        return f"{start}: {why}, and in the last one of the step it is False"
    return f"{start}, or are changed on each rank afterwards"


def _prepares_nothing(step: Step) -> bool:
    """Return True if DDP was within no_sync in the last forward pass of each rank of a step."""
    lasts = [[each for each in rank.forwards if each["is_wrapper"]][-1:] for rank in step.ranks]
    return all(lasts) and not any(last["reduces"] for (last,) in lasts)


def _explain_missing(history: CommandHistory, step: Step) -> str:
    for name, rank_indices in step.gradients.missing.items():
        where = ", ".join(str(history.ranks[rank_index].rank) for rank_index in rank_indices)
        return f"{name} has no gradient on rank {where} of {history.name}, and has one on others"
    return ""


def _explain_early_clipping(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name clipping before all micro-batches, or all ranks, are added."""
    if not one.unclipped.whole or not other.unclipped.whole:
        return ""
    floor = comparison.bounds.gradient_floor
    is_raw_apart = compare_tensors(one.unclipped, other.unclipped, floor)[0] > APART
    for history, step in ((comparison.other, other), (comparison.one, one)):
        firsts = [rank.clips[0]["pass"] for rank in step.ranks if rank.clips]
        if is_raw_apart and firsts and max(firsts) < step.num_backwards:
            return f"{history.name} clips its gradients after each micro-batch, not once in a step"
        if _names_apart(step.unclipped) and not _names_apart(step.gradients):
            return f"the gradients of {history.name} are clipped before they are averaged"
    return ""


def _explain_clipping(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name clipping, if it is what makes the gradients differ."""
    floor = comparison.bounds.gradient_floor
    clips = [[clip for rank in step.ranks for clip in rank.clips] for step in (one, other)]
    if bool(clips[0]) != bool(clips[1]):
        raw = one.unclipped if clips[0] else other.unclipped
        whole = other.gradients if clips[0] else one.gradients
        name = "A" if clips[0] else "B"
        is_same = compare_tensors(raw, whole, floor)[0] <= APART
        return f"only {name} clips its gradients, which agree before" if is_same else ""
    if not clips[0]:
        return ""
    if compare_tensors(one.unclipped, other.unclipped, floor)[0] > APART:
        return ""
    if any(clip["is_scaled"] for clip in clips[0] + clips[1]):
        return f"gradients are clipped before GradScaler.unscale_: {BY_SCALE}"
    return _explain_limits(comparison, one, other, clips)


def _explain_limits(
    comparison: PairComparison, one: Step, other: Step, clips: Sequence[Sequence[Mapping[str, Any]]]
) -> str:
    """Say why clipping changes equal gradients to different ones."""
    ours, theirs = (set(step.unclipped.whole) for step in (one, other))
    for name, absent in (("B", sorted(ours - theirs)), ("A", sorted(theirs - ours))):
        if absent:
            return f"{name} clips without the gradients of {name_some(absent)}"
    for key, what in (("max_norm", "limits"), ("norm_type", "norms of type")):
        values = [", ".join(sorted({str(clip[key]) for clip in each})) for each in clips]
        if values[0] != values[1]:
            return f"the gradients agree before clipping, by {what} {values[0]} and {values[1]}"
    norms = [each[0]["norm"] for each in clips]
    if relative(*norms) > APART:
        by = f"the gradients agree before clipping by norms {norms[0]:.4g} and {norms[1]:.4g}"
        return f"{by}: a rank's norm is that of its own part"
    return _explain_after_clipping(comparison, one, other, clips[0])


def _explain_after_clipping(
    comparison: PairComparison, one: Step, other: Step, clips: Sequence[Mapping[str, Any]]
) -> str:
    """Name the gradients that differ after equal clipping, and the command that changes them."""
    apart = [
        name
        for name, each in one.gradients.whole.items()
        if compare_tensors(Merged({name: each}, {}, {}), other.gradients, 0.0)[0] > APART
    ]
    agree = "the gradients agree before clipping"
    is_by_norm = clips[0]["norm_type"] != "value"
    limit = min(clip["max_norm"] for clip in clips)
    factor = min(1.0, limit / (clips[0]["norm"] + 1e-6))  # as clip_grad_norm_
    for history, step in ((comparison.other, other), (comparison.one, one)) if is_by_norm else ():
        raw = step.unclipped.whole
        expected = Merged({n: factor * raw[n] for n in apart if n in raw}, {}, {})
        if compare_tensors(expected, step.gradients, 0.0)[0] > 1e-4:
            return f"{agree}, and {history.name} changes those of {name_some(apart)} after it"
    return f"{agree}, and those of {name_some(apart)} are changed after it"


def _explain_layers(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name layers whose result depends on the division of the batch, if the losses differ."""
    reasons = []
    steps = (one, other)
    norms = [name for name in comparison.other.about("norms") if name != "SyncBatchNorm"]
    sizes = [sorted({call["size"] for r in s.ranks for call in r.forwards}) for s in steps]
    if norms and sizes[0] != sizes[1]:
        rows = " and ".join(_count(each) for each in sizes)
        reasons.append(f"{norms[0]} normalises over the rows of a micro-batch ({rows})")
    if any(call["drawn"] for step in steps for rank in step.ranks for call in rank.forwards):
        kinds = comparison.other.about("dropout")
        what = ", ".join(kinds) if kinds else "the model's forward pass"
        reasons.append(f"{what} draws other random numbers on another layout")
    elif any(map(draws_random, (comparison.one, comparison.other))):
        what = "the loop draws random numbers beside the examples (noise, mixup)"
        reasons.append(f"{what}, and others on another layout")
    return "; ".join(reasons)


def draws_random(history: CommandHistory) -> bool:
    """Return True if many steps draw random numbers; the order of a pass is drawn once."""
    states = [step.random for step in history.ranks[0].steps]
    return sum(one != other for one, other in pairwise(states)) > len(states) / 3


def _count(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes)) or "?"


def _explain_some(comparison: PairComparison, one: Step, other: Step) -> str:
    """Say which parameters differ, and whether the losses agree."""
    apart = []
    for name, each in one.gradients.whole.items():
        theirs = other.gradients.whole.get(name)
        if theirs is not None and relative_norm(each, theirs) > APART:
            apart.append(name)
    total = len(one.gradients.whole)
    which = "all parameters" if len(apart) == total else f"{', '.join(apart[:3])} only"
    optimizer = other.ranks[0].optimizer
    loss = min(relative(one.losses["mean"], each) for each in other.losses.values())
    if loss < APART:
        why = "the losses agree: gradients are cut off (detach, a gather without gradient), or lost"
        why += " or changed after a backward pass"
        if one.num_backwards != other.num_backwards:
            why += f" ({one.num_backwards} and {other.num_backwards} backward passes)"
        if any(any(rank.optimizers[optimizer]["parts"]) for rank in comparison.other.ranks):
            why = "the losses agree, and a rank holds parts of the gradients: it changes its parts"
            why += " by a factor of its own (clipping by the norm of the parts, for example)"
        return f"{why}; they differ for {which}"
    why = explain_loss(comparison, one, other)
    return f"examples and weights agree, and the losses differ by {loss:.0e}: {why}"
