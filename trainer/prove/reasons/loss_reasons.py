"""Reasons for different losses: the weights, the division and the sum of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np

from trainer.base.errors import counted
from trainer.base.same import relative
from trainer.prove.comparison import REST, PairComparison
from trainer.prove.merging import CommandHistory, Merged, Sketches, Step
from trainer.prove.rounding import Bounds, relative_norm

APART = 1e-6  # relative: more than rounding of replicas
FEW = 4  # steps that show a trend
SHOWN = 6  # numbers of micro-batches
WEIGHINGS = {
    "rows": "examples",
    "elements": "lengths",
    "padded": "positions with padding",
    "shifted padded": "positions with padding",
    "labels": "labels",
    "shifted labels": "labels",
    "non-zero": "tokens",
    "shifted non-zero": "tokens",
}
CRITERION = "criterion"


def fit_ratio(one: Merged, other: Merged) -> tuple[float, float]:
    """Return (ratio of all gradients, relative part that it does not explain)."""
    names = [name for name in one.whole if name in other.whole]
    if not names:
        return 0.0, 1.0
    a = np.concatenate([one.whole[name] for name in names])
    b = np.concatenate([other.whole[name] for name in names])
    ratio = float(a @ b / (a @ a)) if a @ a else 0.0
    rest = np.linalg.norm(b - ratio * a) / max(float(np.linalg.norm(b)), 1e-300)
    return ratio, float(rest)


def explain_ratio(comparison: PairComparison, one: Step, other: Step, step_index: int) -> str:
    """Name a factor that all gradients have in common."""
    pair = (one.gradients, other.gradients)
    if one.unclipped.whole and other.unclipped.whole:
        pair = (one.unclipped, other.unclipped)
    ratio, rest = fit_ratio(*pair)
    if not rest <= _limit(comparison.bounds) or not ratio:
        return ""
    names = (comparison.other.name, comparison.one.name)
    say = f"all gradients of {names[0]} are {ratio:.4g} times those of {names[1]}"
    windows = [_window(history, step_index) for history in (comparison.one, comparison.other)]
    if _is_near(ratio, windows[1] / windows[0]) and windows[0] != windows[1]:
        return f"{say}: {_name_window(comparison, step_index)}"
    ranks = comparison.other.size / comparison.one.size
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


def _window(history: CommandHistory, step_index: int) -> float:
    """Return the part of a full accumulation window that a step has."""
    return history.steps[step_index].num_backwards / max(s.num_backwards for s in history.steps)


def _name_window(comparison: PairComparison, step_index: int) -> str:
    """Return a clause about an accumulation window that is not full; "" if it is."""
    for history in (comparison.other, comparison.one):
        if _window(history, step_index) < 1:
            few = history.steps[step_index].num_backwards
            full = max(step.num_backwards for step in history.steps)
            part = f"this step of {history.name} has {few} of {full} micro-batches"
            return f"{part} (the last of a pass), and the loss is divided by {full}"
    return ""


def explain_weighting(comparison: PairComparison, one: Step, other: Step, step_index: int) -> str:
    """Name unequal micro-batches that count equally: weighted by their sizes, gradients agree.

    Where gradients of single micro-batches are not known, their losses are weighted.
    """
    for key in _keys(other):
        sizes = [list(_sizes(step, key)) for step in (one, other)]
        if None in sizes[0] + sizes[1] or not (sizes[0] and sizes[1]):
            continue
        uneven = next((n for n in (1, 0) if len(set(sizes[n])) > 1), None)
        if uneven is None:
            continue
        ratio = _fit_weighted(comparison, one, other, key)
        what = "gradients"
        if ratio is None:
            ratio = _fit_losses(comparison, one, other, key, step_index)
            what = "losses"
        if ratio is None:
            continue
        shown = ", ".join(f"{size:.4g}" for size in sizes[uneven][:SHOWN])
        why = _name_weighting(comparison, other, key, shown)
        counts = [step.num_backwards for step in (one, other)]
        for history, num_backwards, factor in (
            (comparison.other, counts[1], counts[0]),
            (comparison.one, counts[0], 1 / counts[1]),
        ):
            if (
                num_backwards > 1
                and _is_near(ratio, factor)
                and not _is_near(factor, counts[0] / counts[1])
            ):
                why = f"{why}, and the losses of micro-batches in {history.name} are added, "
                why += "not divided by their number"
        if part := _name_window(comparison, step_index):
            why = f"{part}; {why}"
        return f"{why}; weighted by these numbers the {what} agree"
    return ""


def _name_weighting(comparison: PairComparison, step: Step, key: str, shown: str) -> str:
    if key != CRITERION:
        what = WEIGHINGS.get(key.rstrip(" 0123456789"), key)
        return f"micro-batches with different numbers of {what} ({shown}) count equally"
    (name, has_weight), *_ = {
        (each["name"], each["settings"].get("weight"))
        for rank in step.ranks
        for each in rank.criteria
    }
    weighted = comparison.other.about("weighted")
    if has_weight:
        who = weighted[0] if weighted else name
        return f"{who} divides by the sum of the class weights of a micro-batch ({shown})"
    return f"micro-batches with different numbers of targets of {name} ({shown}) count equally"


def _keys(step: Step) -> list[str]:
    """Return by what micro-batches could be weighted, the surest first."""
    batches = [each for rank in step.ranks for each in rank.batches]
    return list(dict.fromkeys([CRITERION, *(key for each in batches for key in each.weights)]))


def _sizes(step: Step, key: str) -> Iterator[float | None]:
    """Yield the size of each micro-batch on each rank; None where it is not known."""
    for rank in step.ranks:
        if key == CRITERION:
            for pass_index in range(len(rank.losses)):
                own = [each for each in rank.criteria if each["pass"] == pass_index]
                sizes = {each["divisor"] for each in own}
                yield sizes.pop() if len(sizes) == 1 else None
        elif len(rank.batches) != len(rank.losses):
            yield None
        else:
            yield from (each.weights.get(key) for each in rank.batches)


def _fit_weighted(comparison: PairComparison, one: Step, other: Step, key: str) -> float | None:
    """Return the ratio of the gradients, micro-batches weighted; None if they do not agree."""
    totals = (_weigh_passes(one, key), _weigh_passes(other, key))
    if totals[0] is None or totals[1] is None:
        return None
    ratio, rest = fit_ratio(Merged(totals[0], {}, {}), Merged(totals[1], {}, {}))
    return ratio if rest <= _limit(comparison.bounds) and ratio else None


def _weigh_passes(step: Step, key: str) -> Sketches | None:
    """Return the sum over ranks of the gradients of all passes, weighted by their sizes."""
    sizes = iter(list(_sizes(step, key)))
    total: Sketches = {}
    for rank in step.ranks:
        if len(rank.passes) != len(rank.losses):
            return None
        for each in rank.passes:
            size = next(sizes) or 0.0
            for name, sketch in each.items():
                total[name] = total.get(name, 0.0) + size * sketch
    return total or None


def _fit_losses(
    comparison: PairComparison, one: Step, other: Step, key: str, step_index: int
) -> float | None:
    """Return the ratio of the losses, micro-batches weighted; None if it is no plain factor."""
    if one.total() is not None and other.total() is not None:
        return None  # gradients tell more, and say no
    limit = 1e-4 if comparison.bounds.noise else 1e-7
    plain = relative(one.losses["mean"], other.losses["mean"])
    values = [_weigh_losses(step, key) for step in (one, other)]
    counts = (one.num_backwards, other.num_backwards)
    fulls = [max(s.num_backwards for s in h.steps) for h in (comparison.one, comparison.other)]
    for ours, theirs in product({counts[0], fulls[0], 1}, {counts[1], fulls[1], 1}):
        near = relative(values[0] * ours, values[1] * theirs)
        if near < limit and near < 0.1 * plain:
            return ours / theirs
    return None


def _weigh_losses(step: Step, key: str) -> float:
    losses = [loss for rank in step.ranks for loss in rank.losses]
    weights = [each or 0.0 for each in _sizes(step, key)]
    return float(np.dot(losses, weights))


def explain_loss(comparison: PairComparison, one: Step, other: Step) -> str:
    """Say why a loss is no mean over examples."""
    for name, step, usual in (("B", other, one), ("A", one, other)):
        if math.isfinite(usual.losses["mean"]) and not math.isfinite(step.losses["mean"]):
            return f"the loss of {name} is not finite ({step.losses['mean']})"
    weighted = comparison.other.about("weighted")
    ranks = (*one.ranks, *other.ranks)
    if any(relative_norm(ranks[0].rest, rank.rest) > APART for rank in ranks):
        what = f", perhaps the class weights of {weighted[0]}" if weighted else ""
        return f"so do {REST}{what}"
    if packed := _name_packed(comparison, one, other):
        return packed
    if _has_other_loss(one, other):
        what = "the same examples in one micro-batch have another loss"
        return f"{what}: the loss function, or a setting of the model, differs"
    if shares := _fit_passes(comparison, one, other):
        what = "the gradients of A are those of the micro-batches of B, multiplied by"
        why = "micro-batches count differently (by class weights, a mask or a factor)"
        return f"{why}: {what} {', '.join(f'{each:.4g}' for each in shares[:SHOWN])}"
    sizes = [max(len(b.rows) for r in s.ranks for b in r.batches) for s in (one, other) if s.rows]
    pairs = zip(comparison.one.steps, comparison.other.steps, strict=False)
    lower = [b.losses["mean"] < a.losses["mean"] for a, b in pairs]
    if len(lower) >= FEW and len(set(sizes)) == 2 and set(lower) == {sizes[1] < sizes[0]}:
        why = "probably it compares the examples of a micro-batch with each other (negatives)"
        return f"{why}, as it is lower for smaller micro-batches at each step"
    why = "the loss of an example depends on the others of its micro-batch (negatives, their norm)"
    return f"{why}, or the loss function differs"


def _name_packed(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name a command that joins examples into fewer rows of the model's inputs."""
    num_rows = [
        sum(call["size"] for rank in s.ranks for call in rank.forwards) for s in (one, other)
    ]
    num_examples = sum(one.rows.values())
    for history, joined, usual in (
        (comparison.other, num_rows[1], num_rows[0]),
        (comparison.one, num_rows[0], num_rows[1]),
    ):
        if 0 < joined < usual == num_examples:
            what = f"packs {counted(num_examples, 'example')} into {counted(joined, 'row')}"
            why = "attention, positions or shifted labels may cross their borders"
            return f"{history.name} {what} of the model's inputs: {why}"
    return ""


def _has_other_loss(one: Step, other: Step) -> bool:
    """Return True if a micro-batch of both commands has another loss, however it is divided."""
    losses = [_losses_by_rows(step) for step in (one, other)]
    for rows, ours in losses[0].items():
        theirs = losses[1].get(rows)
        counts = ({1, one.num_backwards}, {1, other.num_backwards})
        if theirs is not None and all(
            relative(ours * a, theirs * b) > APART for a, b in product(*counts)
        ):
            return True
    return False


def _losses_by_rows(step: Step) -> dict[tuple[str, ...], float]:
    return {
        tuple(sorted(batch.rows)): loss
        for rank in step.ranks
        if len(rank.batches) == len(rank.losses)
        for batch, loss in zip(rank.batches, rank.losses, strict=True)
    }


def _fit_passes(comparison: PairComparison, one: Step, other: Step) -> list[float]:
    """Return by what the passes of the other command give the one pass of the first; or []."""
    ours = [each for rank in one.ranks for each in rank.passes]
    theirs = [each for rank in other.ranks for each in rank.passes]
    if len(ours) != 1 or len(theirs) < 2 or any(each.keys() != ours[0].keys() for each in theirs):
        return []
    columns = np.stack([np.concatenate([each[n] for n in ours[0]]) for each in theirs], axis=1)
    wanted = np.concatenate(list(ours[0].values()))
    if len(wanted) < 4 * len(theirs) or not (
        np.isfinite(columns).all() and np.isfinite(wanted).all()
    ):
        return []
    shares, *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    rest = np.linalg.norm(wanted - columns @ shares) / max(float(np.linalg.norm(wanted)), 1e-300)
    return shares.tolist() if rest <= _limit(comparison.bounds) else []
