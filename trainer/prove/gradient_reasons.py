"""Reasons for other gradients: reduction, loss weighting, clipping, random draws, BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np

from trainer.prove.bounds import Bounds, compare_tensors, relative, relative_norm
from trainer.prove.comparison import REST, PairComparison
from trainer.prove.example_reasons import explain_skipped
from trainer.prove.merging import CommandHistory, Merged, Step

APART = 1e-6  # relative: more than rounding of replicas
BY_SCALE = "their norm has the scale in it, and the limit has not"
FEW = 4  # steps that show a trend
WEIGHINGS = {
    "rows": "examples",
    "elements": "lengths",
    "labels": "labels",
    "shifted labels": "labels",
    "non-zero": "tokens",
    "shifted non-zero": "tokens",
}


def explain_gradients(found: PairComparison, place: int) -> str:
    """Return the likely reason why the gradients of a step differ."""
    one = found.one.steps[place]
    other = found.other.steps[place]
    return (
        explain_unreduced(found.other, place, found)
        or explain_unreduced(found.one, place, found)
        or _explain_missing(found.other, other)
        or _explain_missing(found.one, one)
        or _explain_clipping(found, one, other)
        or _explain_use(found, one, other)
        or _explain_ratio(found, one, other, place)
        or _explain_weighting(found, one, other, place)
        or _explain_layers(found, one, other)
        or _explain_some(found, one, other)
    )


def explain_unreduced(history: CommandHistory, place: int, found: PairComparison) -> str:
    """Return why the ranks of a command have different gradients; "" if they have the same."""
    if reason := explain_skipped(found, place):
        return reason
    step = history.steps[place]
    if not any(value > APART for value in step.gradients.spread.values()):
        return ""
    merged = step.unclipped if step.unclipped.whole else step.gradients
    apart = [name for name, value in merged.spread.items() if value > APART]
    if not apart:
        norms = ", ".join(f"{rank.clips[0]['norm']:.4g}" for rank in step.ranks if rank.clips)
        return f"each rank of {history.name} clips by a norm of its own ({norms})"
    averaged = [name for name, each in merged.whole.items() if name not in apart and np.any(each)]
    start = f"the gradients of {history.name} are not averaged over its ranks"
    wrappers = history.about("wrappers", step.optimizer)
    forwards = [each for rank in step.ranks for each in rank.forwards]
    if "FSDP" in wrappers:
        return start
    if averaged:
        some = ", ".join(apart[:3])
        return f"{start} for {some}, but for other parameters they are"
    if not wrappers:
        return f"{start}: DistributedDataParallel does not wrap the model, and nothing else does it"
    if forwards and not any(each["is_wrapper"] for each in forwards):
        return f"{start}: the model is called around its wrapper (as with model.module)"
    last = [rank.backwards[-1]["reduces"] for rank in step.ranks if rank.backwards]
    if last and not any(any(each) for each in last):
        return f"{start}: the last backward pass of the step is within no_sync"
    return f"{start}, or are changed on each rank afterwards"


def _explain_missing(history: CommandHistory, step: Step) -> str:
    for name, ranks in step.gradients.missing.items():
        where = ", ".join(map(str, ranks))
        return f"{name} has no gradient on rank {where} of {history.name}, and has one on others"
    return ""


def _explain_use(found: PairComparison, one: Step, other: Step) -> str:
    """Name parameters that have a gradient in one command only."""
    ours = {name for name, each in one.gradients.whole.items() if np.any(each)}
    theirs = {name for name, each in other.gradients.whole.items() if np.any(each)}
    for name, more, less in ((found.one.name, ours, theirs), (found.other.name, theirs, ours)):
        if more - less:
            names = ", ".join(sorted(more - less)[:3])
            return f"only {name} has gradients of {names}: the layouts use other parts of the model"
    return ""


def _explain_clipping(found: PairComparison, one: Step, other: Step) -> str:
    """Name clipping, if it is what makes the gradients differ."""
    floor = found.bounds.gradient_floor
    clips = [[clip for rank in step.ranks for clip in rank.clips] for step in (one, other)]
    if bool(clips[0]) != bool(clips[1]):
        raw = one.unclipped if clips[0] else other.unclipped
        whole = other.gradients if clips[0] else one.gradients
        name = "A" if clips[0] else "B"
        is_same = compare_tensors(raw, whole, floor)[0] <= APART
        return f"only {name} clips its gradients, which agree before" if is_same else ""
    if not clips[0]:
        return ""
    is_raw_apart = compare_tensors(one.unclipped, other.unclipped, floor)[0] > APART
    for history, step in ((found.other, other), (found.one, one)):
        counts = {len(rank.clips) for rank in step.ranks}
        if is_raw_apart and step.num_backwards > 1 and counts == {step.num_backwards}:
            return f"{history.name} clips its gradients after each micro-batch, not once in a step"
        is_local = any(value > APART for value in step.unclipped.spread.values())
        is_reduced = not any(value > APART for value in step.gradients.spread.values())
        if is_local and is_reduced:
            return f"the gradients of {history.name} are clipped before they are averaged"
    if is_raw_apart:
        return ""
    if any(clip["is_scaled"] for clip in clips[0] + clips[1]):
        return f"gradients are clipped before GradScaler.unscale_: {BY_SCALE}"
    limits = [{clip["max_norm"] for clip in each} for each in clips]
    if limits[0] != limits[1]:
        return f"the gradients agree before clipping, to {limits[0]} and {limits[1]}"
    norms = [clip["norm"] for clip in clips[0][:1] + clips[1][:1]]
    part = "a rank's norm is that of its own part" if max(norms) > min(norms) else "unknown cause"
    return f"the gradients agree before clipping by norms {norms[0]:.4g} and {norms[1]:.4g}: {part}"


def fit_ratio(one: Merged, other: Merged) -> tuple[float, float]:
    """Return (ratio of all gradients, relative part that it does not explain)."""
    names = [name for name in one.whole if name in other.whole]
    a = np.concatenate([one.whole[name] for name in names])
    b = np.concatenate([other.whole[name] for name in names])
    ratio = float(a @ b / (a @ a)) if a @ a else 0.0
    rest = np.linalg.norm(b - ratio * a) / max(float(np.linalg.norm(b)), 1e-300)
    return ratio, float(rest)


def _explain_ratio(found: PairComparison, one: Step, other: Step, place: int) -> str:
    """Name a factor that all gradients have in common."""
    pair = (one.gradients, other.gradients)
    if one.unclipped.whole and other.unclipped.whole:
        pair = (one.unclipped, other.unclipped)
    ratio, rest = fit_ratio(*pair)
    if not rest <= _limit(found.bounds) or not ratio:
        return ""
    names = (found.other.name, found.one.name)
    say = f"all gradients of {names[0]} are {ratio:.4g} times those of {names[1]}"
    windows = [_window(history, place) for history in (found.one, found.other)]
    if _is_near(ratio, windows[1] / windows[0]) and windows[0] != windows[1]:
        return f"{say}: {_name_window(found, place)}"
    ranks = found.other.size / found.one.size
    backwards = other.num_backwards / one.num_backwards
    loss = other.losses["mean"] / one.losses["mean"] if one.losses["mean"] else 0.0
    is_loss = _is_near(loss, ratio)
    if _is_near(ratio, backwards) and backwards != 1 and is_loss:
        why = "the losses of micro-batches are added, and not divided by their number"
    elif _is_near(ratio, 1 / backwards) and backwards != 1 and is_loss:
        why = "the loss is divided by the number of micro-batches twice"
    elif ranks != 1 and _is_near(ratio, ranks):
        what = "the loss is multiplied by the number of ranks" if is_loss else ""
        why = what or "gradients are summed over the ranks instead of averaged"
    elif ranks != 1 and _is_near(ratio, 1 / ranks):
        what = "the loss is divided by the number of ranks, or summed over fewer examples"
        why = f"{what}, and averaging gradients divides again"
        why = why if is_loss else "gradients are divided by the number of ranks twice"
    elif is_loss:
        why = "so is the loss: its normalisation depends on the layout"
    else:
        why = "the loss is not, so they are scaled after the backward pass"
    return f"{say}: {why}"


def _limit(bounds: Bounds) -> float:
    return 1e-3 if bounds.noise else APART


def _is_near(one: float, other: float) -> bool:
    return relative(one, other) < 1e-3


def _window(history: CommandHistory, place: int) -> float:
    """Return the part of a full accumulation window that a step has."""
    return history.steps[place].num_backwards / max(s.num_backwards for s in history.steps)


def _explain_weighting(found: PairComparison, one: Step, other: Step, place: int) -> str:
    """Name unequal micro-batches that count equally: weighted by their size, losses agree."""
    limit = 1e-4 if found.bounds.noise else 1e-7
    plain = relative(one.losses["mean"], other.losses["mean"])
    keys = [key for rank in other.ranks for each in rank.batches for key in each.weights]
    fulls = [max(s.num_backwards for s in h.steps) for h in (found.one, found.other)]
    for key, is_full in product(dict.fromkeys(keys), (False, True)):
        ours = _weigh(one, key, fulls[0] if is_full else one.num_backwards)
        theirs = _weigh(other, key, fulls[1] if is_full else other.num_backwards)
        if ours is None or theirs is None:
            continue
        near = relative(ours, theirs)
        sizes = {h.name: _sizes(s, key) for h, s in ((found.other, other), (found.one, one))}
        uneven = next((name for name, each in sizes.items() if len(set(each)) > 1), "")
        if uneven and near < limit and near < 0.1 * plain:
            what = WEIGHINGS.get(key.rstrip(" 0123456789"), key)
            shown = ", ".join(map(str, sizes[uneven][:6]))
            why = f"micro-batches with different numbers of {what} ({shown}) count equally"
            if is_full and (part := _name_window(found, place)):
                why = f"{part}; {why}"
            return f"{why}; weighted by these numbers the losses agree"
    return ""


def _sizes(step: Step, key: str) -> list[int]:
    return [int(each.weights.get(key, 0)) for rank in step.ranks for each in rank.batches]


def _name_window(found: PairComparison, place: int) -> str:
    """Return a clause about an accumulation window that is not full; "" if it is."""
    for history in (found.other, found.one):
        if _window(history, place) < 1:
            few = history.steps[place].num_backwards
            full = max(step.num_backwards for step in history.steps)
            part = f"this step of {history.name} has {few} of {full} micro-batches"
            return f"{part} (the last of a pass), and the loss is divided by {full}"
    return ""


def _weigh(step: Step, key: str, divisor: int) -> float | None:
    """Return the mean loss of micro-batches, weighted; None if losses and batches do not match.

    Each loss was divided by `divisor` before its backward pass.
    """
    values: list[float] = []
    weights: list[float] = []
    for rank in step.ranks:
        if len(rank.batches) != len(rank.losses):
            return None
        values += [loss * divisor for loss in rank.losses]
        weights += [each.weights.get(key, 0.0) for each in rank.batches]
    return float(np.average(values, weights=weights)) if sum(weights) else None


def _explain_layers(found: PairComparison, one: Step, other: Step) -> str:
    """Name layers whose result depends on the division of the batch, if the losses differ."""
    reasons = []
    steps = (one, other)
    norms = [name for name in found.other.about("norms") if name != "SyncBatchNorm"]
    sizes = [sorted({call["size"] for r in s.ranks for call in r.forwards}) for s in steps]
    if norms and sizes[0] != sizes[1]:
        rows = " and ".join(_count(each) for each in sizes)
        reasons.append(f"{norms[0]} normalises over the rows of a micro-batch ({rows})")
    if any(call["drawn"] for step in steps for rank in step.ranks for call in rank.forwards):
        kinds = found.other.about("dropout")
        what = ", ".join(kinds) if kinds else "the model's forward pass"
        reasons.append(f"{what} draws other random numbers on another layout")
    elif any(map(draws_random, (found.one, found.other))):
        what = "the loop draws random numbers beside the examples (noise, mixup)"
        reasons.append(f"{what}, and others on another layout")
    return "; ".join(reasons)


def draws_random(history: CommandHistory) -> bool:
    """Return True if many steps draw random numbers; the order of a pass is drawn once."""
    states = [step.random for step in history.ranks[0].steps]
    return sum(one != other for one, other in pairwise(states)) > len(states) / 3


def _count(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes)) or "?"


def _explain_some(found: PairComparison, one: Step, other: Step) -> str:
    """Say which parameters differ, and whether the losses agree."""
    apart = []
    for name, each in one.gradients.whole.items():
        theirs = other.gradients.whole.get(name)
        if theirs is not None and relative_norm(each, theirs) > APART:
            apart.append(name)
    total = len(one.gradients.whole)
    which = "all parameters" if len(apart) == total else f"{', '.join(apart[:3])} only"
    number = other.ranks[0].optimizer
    loss = min(relative(one.losses["mean"], each) for each in other.losses.values())
    if loss < APART:
        why = "the losses agree: gradients are cut off (detach, a gather without gradient), or lost"
        why += " or changed after a backward pass"
        if one.num_backwards != other.num_backwards:
            why += f" ({one.num_backwards} and {other.num_backwards} backward passes)"
        if any(any(rank.optimizers[number]["parts"]) for rank in found.other.ranks):
            why = "the losses agree, and a rank holds parts of the gradients: it changes its parts"
            why += " by a factor of its own (clipping by the norm of the parts, for example)"
        return f"{why}; they differ for {which}"
    why = _explain_loss(found, one, other)
    return f"examples and weights agree, and the losses differ by {loss:.0e}: {why}"


def _explain_loss(found: PairComparison, one: Step, other: Step) -> str:
    """Say why a loss is no mean over examples."""
    weighted = found.other.about("weighted")
    ranks = (*one.ranks, *other.ranks)
    if any(relative_norm(ranks[0].rest, rank.rest) > APART for rank in ranks):
        what = f", perhaps the class weights of {weighted[0]}" if weighted else ""
        return f"so do {REST}{what}"
    if weighted:
        return f"{weighted[0]} divides by the sum of the class weights of a micro-batch"
    sizes = [max(len(b.rows) for r in s.ranks for b in r.batches) for s in (one, other) if s.rows]
    pairs = zip(found.one.steps, found.other.steps, strict=False)
    lower = [b.losses["mean"] < a.losses["mean"] for a, b in pairs]
    if len(lower) >= FEW and len(set(sizes)) == 2 and set(lower) == {sizes[1] < sizes[0]}:
        why = "probably it compares the examples of a micro-batch with each other (negatives)"
        return f"{why}, as it is lower for smaller micro-batches at each step"
    return "the loss is not a mean over examples (class weights, or negatives from the micro-batch)"
