"""Findings: the distances between two layouts, checked against limits, with the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from trainer.base.same import CLOSE, RUNS, relative
from trainer.base.same.distance import norms_apart
from trainer.startup_checks.explanations import FIND_IT
from trainer.startup_checks.rank_agreement import explain_results, find_place
from trainer.verify.chance import MOST_FUNCTIONS
from trainer.verify.evidence import Evidence, Probe, describe_difference

UNKNOWN = "unknown"


def explain(reference: Evidence, other: Evidence, group: str, where: str) -> str:
    """Return the likely reason, from the probes of all ranks and from the first difference."""
    if why := _explain_data(reference, other):
        return why
    chance = next((notes.chance for notes in (*reference.ranks, *other.ranks) if notes.chance), [])
    if why := next((notes.finding for notes in other.ranks if notes.finding), ""):
        return _with_chance(why, chance)
    return (
        _explain_first_weights(reference, other)
        or _explain_augmentation(reference, other)
        or _with_chance(
            _explain_results(reference, other)
            or _explain_place(reference, other, group, where)
            or reference.ranks[0].finding
            or _explain_layers(other.probes[0]),
            chance,
        )
    )


# In reasons that may be chance within a step
OF_CHANCE = (FIND_IT, "Python's generator", "or clock", "on chance", UNKNOWN)


def _with_chance(reason: str, chance: Sequence[str]) -> str:
    """Add to a reason the functions of a step that depend on chance, if they may be the cause."""
    if not any(text in reason for text in OF_CHANCE):
        return reason
    return _joined(reason.removesuffix(FIND_IT), " and ".join(chance[:MOST_FUNCTIONS]))


def rounding(reference: Evidence, shown_by: str = "fp64 agrees") -> str:
    """Return why a difference is rounding, and what in the task makes it larger."""
    probe = reference.probes[0]
    amplifiers = ["max-pooling (its argmax flips)"] if probe.has_max_pooling else []
    amplifiers += [f"{name} (near zero gradients)" for name in probe.optimizers if "Adam" in name]
    amplified = f", amplified by {' and '.join(amplifiers)}" if amplifiers else ""
    return f"{shown_by}, so this is rounding{amplified}"


def _explain_data(reference: Evidence, other: Evidence) -> str:
    named = [("one rank", probe) for probe in reference.probes]
    named += [(f"rank {rank}", probe) for rank, probe in enumerate(other.probes)]
    first = reference.probes[0]
    if any(probe.indices != first.indices for _, probe in named):
        return "the data sets differ in length: build_dataset must not depend on the rank"
    for name, probe in named:
        pairs = zip(first.digests, probe.digests, strict=True)
        row = next((n for n, pair in enumerate(pairs) if not _is_close(*pair)), None)
        if row is None:
            continue
        depends = "the data set, or augment, depends on the rank"
        why = f"{depends} or draws unseeded random numbers"
        if probe.changed_by_reading:
            changed = ", ".join(probe.changed_by_reading)
            why = f"it depends on {changed} of the data set, which reading changes"
        values = describe_difference(first.rows[row], probe.rows[row], "one rank")
        return _joined(f"example {first.indices[row]} differs on {name}: {why}", values)
    return ""


def _explain_first_weights(reference: Evidence, other: Evidence) -> str:
    """Return which weights differ before the first step."""
    first = reference.ranks[0].first_weights
    for rank, notes in enumerate(other.ranks):
        for name, tensor in first.items():
            weights = notes.first_weights.get(name)
            if weights is not None and not torch.allclose(weights, tensor, CLOSE, equal_nan=True):
                why = "build_model draws unseeded random numbers, or depends on the rank or layout"
                advice = "draw from torch's own generator, which run.seed seeds"
                return f"{name} differs on rank {rank} before step 1: {why}; {advice}"
    return ""


def _explain_results(reference: Evidence, other: Evidence) -> str:
    """Return what differs for the same rows, by the name of the module, the loss or a gradient."""
    ranks = other.ranks
    steps = list(zip(*(notes.results for notes in ranks), strict=False))
    for index, results in enumerate(steps):
        is_trained = index > 0 and bool(_distances_of_ranks(other))
        for rank, own in enumerate(results if not is_trained else ()):
            if part := find_place(results[0], own):
                return explain_results(rank, part)
    for alone, results in zip(reference.ranks[0].results[:1], steps, strict=False):
        if part := find_place(alone, results[0]):
            why = "the same rows have another loss or gradient there: it depends on the layout"
            advice = "leave self.world, the environment and sizes of micro-batches out of it"
            return f"{part} differs from one rank: {why}; {advice}"
    return ""


def _explain_augmentation(reference: Evidence, other: Evidence) -> str:
    digests = other.digests
    for key, digest in reference.digests.items():
        if key in digests and not _is_close(digest, digests[key]):
            epoch, index = key.split("/")
            why = "augment does not draw all random numbers from its Random argument"
            why += ", or collate pads rows to a length that depends on the others"
            rows = [each.rows.get(key, {}) for each in (reference, other)]
            values = describe_difference(rows[0], rows[1], "one rank")
            return _joined(f"example {index} of epoch {epoch} differs: {why}", values)
    return ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _explain_place(reference: Evidence, other: Evidence, group: str, where: str) -> str:
    if group == "metrics":
        why = "metrics, summarize or the eval data depend on rank or batch size"
        return f"training agrees and evaluation does not: {why}"
    if group not in ("losses", "weights") or where.endswith(" of step 1"):
        return ""
    agree = "the first gradients agree, so the update differs"
    rates = other.rates
    for step, rate in reference.rates.items():
        if step in rates and not _is_close(rate, rates[step]):
            why = f"the lr of step {step} is {rate:.6g} on one rank, {rates[step]:.6g} here"
            return (
                f"{agree}: {why}; build_optimizer, schedule or train_step depend on rank or clock"
            )
    if _distances_of_ranks(other):
        why = "the ranks have different weights"
        return f"{agree}: {why}; optimizer or train_step depend on the rank or on chance"
    return f"{agree}: optimizer or train_step depend on the layout"


def _explain_layers(probe: Probe) -> str:
    if names := probe.batchnorms:
        why = "normalises over the rows of a micro-batch, whose number the layout changes"
        advice = "give run.norm_rows=<rows>, strategy.sync_batchnorm=true or strategy=exact"
        return f"plain BatchNorm ({', '.join(names[:3])}) {why}; {advice}"
    if probe.is_torchs_dropout:
        advice = "leave it out, or keep the size of the micro-batch"
        return f"run.dropout=torch draws per micro-batch, whose size the layout changes; {advice}"
    state = "state that the model keeps outside of its buffers"
    return f"{UNKNOWN}; check custom autograd functions, and {state}"


def _is_close(one: float, other: float) -> bool:
    return relative(one, other, 1 + abs(one)) <= CLOSE


REFERENCE = "reference"
AGREES = "agrees"
SAME_BITS = "same bits"
ROUNDING = "rounding"
DIFFERENT = "DIFFERENT"
PROVES_NOTHING = "PROVES NOTHING"
Distances = dict[str, float]
EXACT = {"examples": 0.0, "gradients": 1e-6, "losses": 1e-8, "weights": 1e-6, "metrics": 1e-8}
# Below fp64 a limit is measured: so many times the distance of two equal layouts with another order
# of summation, and at least a few roundings of a sum.
TIMES = 10
NOISE_OF_A_NORM = 1e-6  # of the norm of all gradients or weights: a smaller one is rounding only
MOST_ROUNDING = 0.3  # a larger difference is none of rounding alone
STILL = 1e-9  # a run whose weights move by less has learned nothing
FLAT_LOSS = 1e-6  # the same if its loss changes by less, relative to the largest loss


@dataclass(frozen=True)
class Finding:
    """One row of the table; `worst` is the largest distance of each group."""

    layout: str
    precision: str
    result: str
    worst: Distances = field(default_factory=dict)
    where: str = ""
    reason: str = ""

    @property
    def is_bad(self) -> bool:
        return self.result in (DIFFERENT, PROVES_NOTHING)


def judge_reference(layout: str, precision: str, evidence: Evidence) -> Finding:
    """Judge the reference run: agreement with a run that learned nothing proves nothing."""
    curves: dict[str, list[float]] = {}
    for (_, name), value in evidence.losses.items():
        if value is not None:
            curves.setdefault(name, []).append(value)
    name, losses = max(curves.items(), key=lambda curve: _spread(curve[1]), default=("", []))
    notes = evidence.ranks[0]
    moved = max(
        norms_apart(notes.first_weights, notes.last_weights, NOISE_OF_A_NORM).values(), default=0.0
    )
    largest = max(map(abs, losses), default=1.0)
    if moved > STILL and _spread(losses) > FLAT_LOSS * largest:
        curve = f"{name.removeprefix('train/')} {losses[0]:.4f} -> {losses[-1]:.4f}"
        return Finding(layout, precision, REFERENCE, reason=curve)
    why = "nothing was learned; raise steps or optim.lr"
    return Finding(layout, precision, PROVES_NOTHING, reason=why)


def _spread(curve: Sequence[float]) -> float:
    return max(curve, default=0.0) - min(curve, default=0.0)


def measure_rounding(precision: str, reference: Evidence, other: Evidence) -> Distances:
    """Return the limits of a precision from two runs that differ in the order of summation."""
    least = EXACT if precision == "fp64" else dict.fromkeys(EXACT, RUNS.of(precision))
    worst = {
        name: max(each.values(), default=0.0) for name, each in _measure(reference, other).items()
    }
    limits = {
        name: min(MOST_ROUNDING, max(least[name], TIMES * size)) for name, size in worst.items()
    }
    return limits | {"examples": 0.0}


def compare(
    layout: str,
    precision: str,
    reference: Evidence,
    other: Evidence,
    limits: Distances = EXACT,
) -> Finding:
    """Return agreement, or the first difference with its likely reason."""
    groups = _measure(reference, other)
    worst = {group: max(distances.values(), default=0.0) for group, distances in groups.items()}
    for group in EXACT:
        distances, limit = groups[group], limits[group]
        name = next((name for name in distances if not distances[name] <= limit), None)
        if name is not None:
            is_tensor = group in ("gradients", "weights")
            where = f"first: {name} ({group})" if is_tensor else f"first: {name}"
            reason = explain(reference, other, group, name)
            return Finding(layout, precision, DIFFERENT, worst, where, reason)
    return Finding(layout, precision, AGREES, worst)


def compare_bits(layout: str, precision: str, reference: Evidence, other: Evidence) -> Finding:
    """Return equal bits, or the first loss or tensor that differs, with the likely reason."""
    finding = compare(layout, precision, reference, other)
    if finding.result == DIFFERENT:
        return finding
    kernel = "a kernel sums in another order; look for one whose shapes depend on the layout"
    return judge_bits(finding, reference, other, kernel)


def judge_bits(finding: Finding, reference: Evidence, other: Evidence, reason: str) -> Finding:
    """Judge two runs that agree by their bits; `reason` explains a difference."""
    name = _find_other_bits(reference, other)
    if name is None:
        return replace(finding, result=SAME_BITS)
    where = f"first: {name}"
    return replace(finding, result=DIFFERENT, where=where, reason=f"the bits differ: {reason}")


def _find_other_bits(reference: Evidence, other: Evidence) -> str | None:
    """Return the name of the first loss, gradient, weight or metric whose bits differ."""
    for (step, name), value in reference.losses.items():
        if other.losses.get((step, name)) != value:
            return f"{name} of step {step}"
    one, two = reference.ranks[0], other.ranks[0]
    for name, tensor in one.gradients.items():
        if two.gradients and not torch.equal(tensor, two.gradients[name]):
            return f"{name} (gradients of the first update)"
    for name, tensor in one.last_weights.items():
        if not torch.equal(tensor, two.last_weights[name]):
            return name
    return next(
        (name for name, v in reference.metrics.items() if other.metrics.get(name) != v), None
    )


def _measure(reference: Evidence, other: Evidence) -> dict[str, Distances]:
    """Return the distances by group and name."""
    first = reference.ranks[0]
    last = other.ranks[0]
    examples = other.examples
    losses = other.losses
    metrics = other.metrics
    return {
        "examples": {
            f"examples of step {step}": float(indices != examples.get(step))
            for step, indices in reference.examples.items()
        },
        "gradients": norms_apart(first.gradients, last.gradients, NOISE_OF_A_NORM),
        "losses": {
            f"{name} of step {step}": relative(value, losses.get((step, name)), 1e-12)
            for (step, name), value in reference.losses.items()
        },
        "weights": {
            **norms_apart(first.last_weights, last.last_weights, NOISE_OF_A_NORM),
            **_distances_of_ranks(other),
        },
        "metrics": {
            name: relative(value, metrics.get(name), 1e-12)
            for name, value in reference.metrics.items()
        },
    }


def _distances_of_ranks(evidence: Evidence) -> Distances:
    """Return infinity for each weight that is not the same on all ranks."""
    first = evidence.ranks[0].last_weights
    return {
        f"{name} on rank {rank} and on rank 0": float("inf")
        for rank, notes in enumerate(evidence.ranks[1:], 1)
        for name, tensor in notes.last_weights.items()
        if not torch.equal(tensor, first[name])
    }
