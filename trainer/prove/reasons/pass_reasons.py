"""Reasons in a pass and in the optimizers: modes, draws, precision, rates and decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from trainer.base.same import FP64, relative
from trainer.prove.comparison import PairComparison
from trainer.prove.merging import CommandHistory, Merged, Sketches, Step, size_of
from trainer.prove.reasons.example_reasons import explain_repeated_step
from trainer.prove.reasons.loss_reasons import APART, fit_ratio
from trainer.prove.rounding import compare_tensors

MOST_NAMES = 3


def name_some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def explain_members(comparison: PairComparison) -> str:
    """Name parameters that the optimizer of one command does not have."""
    for one, other in ((comparison.one, comparison.other), (comparison.other, comparison.one)):
        only = sorted(one.parameters - other.parameters)
        if only and other.parameters < one.parameters:
            return f"only the optimizer of {one.name} has {name_some(only)}"
    return ""


def explain_changes(comparison: PairComparison, step_index: int) -> str:
    """Name weights that one command changes between two steps of its optimizer."""
    steps = (comparison.one.steps[step_index], comparison.other.steps[step_index])
    ours, theirs = ({name for rank in step.ranks for name in rank.changed} for step in steps)
    for name, only in (("B", sorted(theirs - ours)), ("A", sorted(ours - theirs))):
        if only:
            return f"{name} changes {name_some(only)} outside of the optimizer's step"
    return ""


def explain_use(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name parameters that have a gradient in one command only."""
    floor = comparison.bounds.silence * max(one.gradients.norm, other.gradients.norm)
    ours, theirs = _used_names(one), _used_names(other)
    for history, more, history_of_less, less, step in (
        (comparison.one, ours, comparison.other, theirs, other),
        (comparison.other, theirs, comparison.one, ours, one),
    ):
        whole = (one if history is comparison.one else other).gradients.whole
        only = sorted(name for name in more - less if not size_of(whole[name]) < floor)
        if not only:
            continue
        who = history_of_less.name
        names = name_some(only)
        frozen = {name for rank in step.ranks for name in rank.frozen}
        clipped = {name for name, each in step.unclipped.whole.items() if np.any(each)}
        added = step.total() or {}
        say = f"only {history.name} has gradients of {names}"
        if frozen.issuperset(only):
            return f"{say}: {who} freezes them (requires_grad is False)"
        quiet = {name for rank in step.ranks for name, _ in rank.modes.get("no grad", [])}
        if quiet.issuperset(name.rpartition(".")[0] for name in only):
            return f"{say}: {who} calls their modules without gradients (no_grad)"
        if clipped.issuperset(only):
            return f"{say}: {who} drops them after clipping"
        if all(name in added and np.any(added[name]) for name in only):
            return f"{say}: {who} drops them after its backward passes"
        return f"{say}: the layouts use other parts of the model"
    return ""


def _used_names(step: Step) -> set[str]:
    """Return the parameters that have a gradient on a rank; a mean over ranks may be zero."""
    pairs = [pair for rank in step.ranks for pair in rank.gradients.items()]
    return {name for name, each in pairs if each is not None and np.any(each)}


def explain_skipped_batches(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name batches that are taken, and for which the model is not called."""
    for name, step, usual in (("B", other, one), ("A", one, other)):
        for rank in step.ranks:
            calls, batches = len(rank.forwards), len(rank.batches)
            if 0 < calls < batches and all(len(r.forwards) >= len(r.batches) for r in usual.ranks):
                return f"{name} takes {batches} micro-batches in a step and trains on {calls} only"
    return ""


def explain_passes(comparison: PairComparison, step_index: int) -> str:
    """Name gradients that are changed afterwards, where the backward passes agree."""
    one, other = comparison.one.steps[step_index], comparison.other.steps[step_index]
    totals = (one.total(), other.total())
    if not totals[0] or not totals[1]:
        return ""
    ratio, rest = fit_ratio(_merged(totals[0]), _merged(totals[1]))
    if not rest <= APART or not ratio:
        return ""
    pairs = ((comparison.other, other, totals[1]), (comparison.one, one, totals[0]))
    changing = [each for each in pairs if not _is_used(*each[1:])]
    if len(changing) == 2:  # as a GAN, which drops gradients of its other loss
        return ""
    for history, step, total in changing:
        used = step.unclipped if step.unclipped.whole else step.gradients
        if reason := _explain_dropped(history, step, used) or _explain_kept(
            history, step_index, total
        ):
            return reason
        apart = _names_apart(total, used)
        if len(apart) < len(total):
            who = f"after the backward passes, which agree, {history.name} changes the gradients"
            return f"{who} of {name_some(apart)}"
    return ""


def _is_used(step: Step, total: Sketches) -> bool:
    """Return True if a step uses the gradients as the backward passes have added them."""
    used = step.unclipped if step.unclipped.whole else step.gradients
    scale, left = fit_ratio(_merged(total), used)
    return left <= APART and scale != 0


def _merged(whole: Sketches) -> Merged:
    return Merged(whole, {}, {})


def _names_apart(total: Sketches, used: Merged) -> list[str]:
    return [
        name
        for name, each in total.items()
        if compare_tensors(_merged({name: each}), used, 0.0)[0] > APART
    ]


def _explain_dropped(history: CommandHistory, step: Step, used: Merged) -> str:
    """Name micro-batches of a step whose gradients are not used."""
    count = max(len(rank.passes) for rank in step.ranks)
    for first, end in [(n, None) for n in range(1, count)] + [(0, n) for n in range(1, count)]:
        total = step.total(first, end)
        scale, left = fit_ratio(_merged(total), used) if total else (0.0, 1.0)
        if not (left <= APART and scale):
            continue
        drops = any(first in rank.drops for rank in step.ranks)
        if end is not None:
            used_part = f"the first {end} of {count} micro-batches"
            return f"{history.name} uses the gradients of {used_part} only"
        how = "zero_grad is called after each micro-batch" if drops else "the others are dropped"
        used_part = f"the last {count - first} of {count} micro-batches"
        return f"{history.name} uses the gradients of {used_part} only: {how}"
    return ""


def _explain_kept(history: CommandHistory, step_index: int, total: Sketches) -> str:
    """Name gradients that are added to those of the step before."""
    step = history.steps[step_index]
    own = [each for each in history.steps[:step_index] if each.optimizer == step.optimizer]
    if not own:
        return ""
    before = own[-1].gradients.whole
    used = step.unclipped if step.unclipped.whole else step.gradients
    added = {n: each - before[n] for n, each in used.whole.items() if n in before}
    scale, left = fit_ratio(_merged(total), _merged(added))
    if not (left <= APART and scale):
        return ""
    return f"{history.name} does not drop the gradients of the step before (zero_grad): they add up"


def explain_modes(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name modules that are called in eval mode or without gradients on one side only."""
    for mode, words in (
        ("eval", ("in eval mode", "in training mode")),
        ("no grad", ("without gradients (no_grad)", "with gradients")),
    ):
        for history, step in ((comparison.other, other), (comparison.one, one)):
            named = [_named(rank.modes, mode) for rank in step.ranks]
            for rank, mine in zip(history.ranks, named, strict=True):
                only = sorted(each for each in mine if any(each not in its for its in named))
                if only:
                    who = history.name_of(rank)
                    return f"{who} calls {name_some(only)} {words[0]}, other ranks {words[1]}"
        sides = [_named(step.ranks[0].modes, mode) for step in (one, other)]
        for name, only in (("B", sorted(sides[1] - sides[0])), ("A", sorted(sides[0] - sides[1]))):
            if only:
                rest = "A" if name == "B" else "B"
                return f"{name} calls {name_some(only)} {words[0]}, {rest} {words[1]}"
    return ""


def _named(modes: Mapping[str, Any], mode: str) -> set[str]:
    """Return the modules in a mode, torch's own before classes of the script."""
    return {f"{name or 'the model'} ({kind})" for name, kind in modes.get(mode, [])}


def explain_settings(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name settings of loss functions and modules that differ."""
    calls = [
        {each["name"]: each["settings"] for r in s.ranks for each in r.criteria}
        for s in (one, other)
    ]
    for name in calls[0].keys() & calls[1].keys():
        for key, value in calls[0][name].items():
            if calls[1][name].get(key) != value:
                return f"{key} of {name} is {value} in A and {calls[1][name].get(key)} in B"
    if calls[0].keys() != calls[1].keys():
        shown = [", ".join(sorted(each)) or "no function of torch" for each in calls]
        return f"the loss is {shown[0]} in A and {shown[1]} in B"
    modules = [_modules(history) for history in (comparison.one, comparison.other)]
    apart = sorted(
        name
        for name in modules[0].keys() & modules[1].keys()
        if modules[0][name] != modules[1][name]
    )
    if apart:
        name = apart[0]
        return f"{name} is {modules[0][name]} in A and {modules[1][name]} in B"
    return ""


def _modules(history: CommandHistory) -> dict[str, Any]:
    every = [each for rank in history.ranks for each in rank.optimizers.values()]
    return {name: value for each in every for name, value in each["modules"].items()}


def explain_rates(comparison: PairComparison, step_index: int) -> str:
    if reason := explain_repeated_step(comparison, step_index):
        return reason
    ratio = comparison.other.size / comparison.one.size
    name = next(
        name
        for name, rate in comparison.one.steps[step_index].rates.items()
        if relative(rate, comparison.other.steps[step_index].rates.get(name, rate)) > FP64
    )
    one = [step.rates[name] for step in comparison.one.steps if name in step.rates]
    other = [step.rates[name] for step in comparison.other.steps if name in step.rates]
    pairs = list(zip(one, other, strict=False))
    if len({rank.rates.get(name) for rank in comparison.other.steps[step_index].ranks}) > 1:
        return "the ranks of B use different learning rates"
    if ratio != 1 and all(relative(a * ratio, b) < FP64 for a, b in pairs):
        return f"the learning rate is multiplied by {ratio:.6g}, the ratio of the numbers of ranks"
    if reason := _explain_advances(comparison):
        return reason
    if reason := _explain_faster(comparison, one, other):
        return reason
    if _agree(one[1:], other) or _agree(one, other[1:]):
        return "the schedule is one step ahead on one of the layouts"
    first, its = next((pair for pair in pairs if pair[0]), (1.0, 0.0))  # a warm-up begins with 0
    if its and all(relative(a * its, b * first) < FP64 for a, b in pairs):
        return f"the learning rate is multiplied by {its / first:.6g}"
    counts = [
        _count_advances(history, comparison.num_steps)
        for history in (comparison.one, comparison.other)
    ]
    if counts[0] == counts[1] > 0:
        return "the schedules advance equally often, so their lengths or other settings differ"
    return "the schedule depends on the layout, for example on the number of batches on a rank"


def _count_advances(history: CommandHistory, num_steps: int) -> int:
    return sum(len(step.ranks[0].advances) for step in history.steps[1:num_steps])


def _agree(one: list[float], other: list[float]) -> bool:
    pairs = list(zip(one, other, strict=False))
    return len(pairs) > 1 and len(set(one)) > 1 and all(relative(a, b) < FP64 for a, b in pairs)


def _explain_faster(comparison: PairComparison, one: list[float], other: list[float]) -> str:
    """Name a schedule whose rates are every second, third or so of the other's.

    The rates are compared by step, and, for a schedule that changes once an epoch, by epoch.
    """
    epochs = [[rate for rate, _ in groupby(rates)] for rates in (one, other)]
    guesses = [
        (times, start, ours, theirs)
        for times in sorted({comparison.other.size, comparison.one.size, 2, 3, 4} - {1})
        for start in (0, times - 1)  # after a step, or after each micro-batch of it
        for ours, theirs in ((one, other), epochs)
    ]
    for times, start, ours, theirs in guesses:
        if _agree(ours[start::times], theirs):
            return _explain_fast_schedule(comparison.other, times, start > 0)
        if _agree(ours, theirs[start::times]):
            return _explain_fast_schedule(comparison.one, times, start > 0)
    return ""


def _explain_advances(comparison: PairComparison) -> str:
    """Name a schedule that advances more often, from the calls of its `step`."""
    ours, theirs = (
        _count_advances(each, comparison.num_steps) for each in (comparison.one, comparison.other)
    )
    for history, count, usual in ((comparison.other, theirs, ours), (comparison.one, ours, theirs)):
        times = round(count / usual) if usual else 1
        if times > 1 and abs(count - times * usual) < times:
            places = [
                set(step.ranks[0].advances) for step in history.steps[1 : comparison.num_steps]
            ]
            return _name_fast_schedule(history, times, any(len(each) > 1 for each in places))
    return ""


def _name_fast_schedule(history: CommandHistory, times: int, by_micro: bool) -> str:
    why = f"the schedule of {history.name} advances {times} times at once"
    if by_micro:
        return f"{why}, once for each micro-batch"
    return f"{why}, once for each rank" if times == history.size else why


def _explain_fast_schedule(history: CommandHistory, times: int, is_before: bool) -> str:
    by_micro = times == max(step.num_backwards for step in history.steps)
    is_by_rank = times == history.size and not is_before
    return _name_fast_schedule(history, times, by_micro and not is_by_rank)


def explain_weights(comparison: PairComparison, step_index: int) -> str:
    """Return the likely reason why the weights after a step differ."""
    if reason := explain_members(comparison) or explain_changes(comparison, step_index):
        return reason
    agree = "gradients and learning rates agree, so the update differs"
    optimizer = comparison.other.steps[step_index].ranks[0].optimizer
    one = comparison.one.ranks[0].optimizers[optimizer]
    other = comparison.other.ranks[0].optimizers.get(optimizer, one)
    if one["kind"] != other["kind"]:
        return f"{agree}: the optimizers are {one['kind']} and {other['kind']}"
    if reason := explain_groups(
        comparison.one.steps[step_index], comparison.other.steps[step_index]
    ):
        return f"{agree}: {reason}"
    if any(any(rank.optimizers[optimizer]["parts"]) for rank in comparison.other.ranks):
        why = f"{other['kind']} computes something over a whole tensor, and a rank has a part of it"
        return f"{agree}: {why}"
    return f"{agree}: the optimizer's state differs, or what its step computes"


def explain_groups(one: Step, other: Step) -> str:
    """Name settings of the optimizer that differ, for all parameters or for some."""
    ours, theirs = one.ranks[0].settings, other.ranks[0].settings
    names = [name for name in ours if name in theirs]
    apart: dict[str, list[str]] = {}
    for name in names:
        for key, value in ours[name].items():
            if key != "group" and theirs[name].get(key) != value:
                apart.setdefault(key, []).append(name)
    for key, differing in apart.items():
        before, after = ours[differing[0]][key], theirs[differing[0]].get(key)
        if len(differing) == len(names):
            return f"{key} is {before} and {after}"
        is_moved = _has(ours, key, after) and _has(theirs, key, before)
        why = ", as they are in other groups" if is_moved else ""
        return f"{key} of {name_some(differing)} is {before} and {after}{why}"
    return ""


def _has(settings: Mapping[str, Mapping[str, Any]], key: str, value: Any) -> bool:
    return any(each.get(key) == value for each in settings.values())
