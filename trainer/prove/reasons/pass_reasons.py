"""Reasons for gradients that change after the backward passes, and for modules in other modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.prove.bounds import compare_tensors
from trainer.prove.comparison import PairComparison
from trainer.prove.merging import CommandHistory, Merged, Sketches, Step, size_of
from trainer.prove.reasons.loss_reasons import APART, fit_ratio

MOST_NAMES = 3


def name_some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def explain_members(found: PairComparison) -> str:
    """Name parameters that the optimizer of one command does not have."""
    for one, other in ((found.one, found.other), (found.other, found.one)):
        only = sorted(one.parameters - other.parameters)
        if only and other.parameters < one.parameters:
            return f"only the optimizer of {one.name} has {name_some(only)}"
    return ""


def explain_changes(found: PairComparison, place: int) -> str:
    """Name weights that one command changes between two steps of its optimizer."""
    steps = (found.one.steps[place], found.other.steps[place])
    ours, theirs = ({name for rank in step.ranks for name in rank.changed} for step in steps)
    for name, only in (("B", sorted(theirs - ours)), ("A", sorted(ours - theirs))):
        if only:
            return f"{name} changes {name_some(only)} outside of the optimizer's step"
    return ""


def explain_use(found: PairComparison, one: Step, other: Step) -> str:
    """Name parameters that have a gradient in one command only."""
    floor = found.bounds.silence * max(one.gradients.norm, other.gradients.norm)
    ours, theirs = _used_names(one), _used_names(other)
    for history, more, history_of_less, less, step in (
        (found.one, ours, found.other, theirs, other),
        (found.other, theirs, found.one, ours, one),
    ):
        whole = (one if history is found.one else other).gradients.whole
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


def explain_uncalled(found: PairComparison, one: Step, other: Step) -> str:
    """Name batches that are taken, and for which the model is not called."""
    for name, step, usual in (("B", other, one), ("A", one, other)):
        for rank in step.ranks:
            calls, batches = len(rank.forwards), len(rank.batches)
            if 0 < calls < batches and all(len(r.forwards) >= len(r.batches) for r in usual.ranks):
                return f"{name} takes {batches} micro-batches in a step and trains on {calls} only"
    return ""


def explain_passes(found: PairComparison, place: int) -> str:
    """Name gradients that are changed afterwards, where the backward passes agree."""
    one, other = found.one.steps[place], found.other.steps[place]
    totals = (one.total(), other.total())
    if not totals[0] or not totals[1]:
        return ""
    ratio, rest = fit_ratio(_merged(totals[0]), _merged(totals[1]))
    if not rest <= APART or not ratio:
        return ""
    pairs = ((found.other, other, totals[1]), (found.one, one, totals[0]))
    changing = [each for each in pairs if not _is_used(*each[1:])]
    if len(changing) == 2:  # as a GAN, which drops gradients of its other loss
        return ""
    for history, step, total in changing:
        used = step.unclipped if step.unclipped.whole else step.gradients
        if reason := _explain_dropped(history, step, used) or _explain_kept(history, place, total):
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
            kept = f"the first {end} of {count} micro-batches"
            return f"{history.name} uses the gradients of {kept} only"
        how = "zero_grad is called after each micro-batch" if drops else "the others are dropped"
        kept = f"the last {count - first} of {count} micro-batches"
        return f"{history.name} uses the gradients of {kept} only: {how}"
    return ""


def _explain_kept(history: CommandHistory, place: int, total: Sketches) -> str:
    """Name gradients that are added to those of the step before."""
    step = history.steps[place]
    own = [each for each in history.steps[:place] if each.optimizer == step.optimizer]
    if not own:
        return ""
    before = own[-1].gradients.whole
    used = step.unclipped if step.unclipped.whole else step.gradients
    added = {n: each - before[n] for n, each in used.whole.items() if n in before}
    scale, left = fit_ratio(_merged(total), _merged(added))
    if not (left <= APART and scale):
        return ""
    return f"{history.name} does not drop the gradients of the step before (zero_grad): they add up"


def explain_modes(found: PairComparison, one: Step, other: Step) -> str:
    """Name modules that are called in eval mode or without gradients on one side only."""
    for mode, words in (
        ("eval", ("in eval mode", "in training mode")),
        ("no grad", ("without gradients (no_grad)", "with gradients")),
    ):
        for history, step in ((found.other, other), (found.one, one)):
            named = [_named(rank.modes, mode) for rank in step.ranks]
            for rank, mine in zip(history.ranks, named, strict=True):
                only = sorted(each for each in mine if any(each not in its for its in named))
                if only:
                    who = f"rank {rank.rank} of {history.name}"
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


def explain_settings(found: PairComparison, one: Step, other: Step) -> str:
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
    modules = [_modules(history) for history in (found.one, found.other)]
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
