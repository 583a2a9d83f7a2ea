"""Comparison: measure the distances between two layouts, and judge them as findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from trainer.engine.precision import rounding_of
from trainer.verify.evidence import Evidence, Tensors
from trainer.verify.reasons import explain

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
MOST = 0.3  # a larger difference is none of rounding alone
STILL = 1e-9  # a run whose weights move by less has learned nothing
FLAT = 1e-6  # the same if its loss changes by less, relative to the largest loss


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
    moved = max(_distances(notes.first_weights, notes.last_weights).values(), default=0.0)
    largest = max(map(abs, losses), default=1.0)
    if moved > STILL and _spread(losses) > FLAT * largest:
        curve = f"{name.removeprefix('train/')} {losses[0]:.4f} -> {losses[-1]:.4f}"
        return Finding(layout, precision, REFERENCE, reason=curve)
    why = "nothing was learned; raise steps or optim.lr"
    return Finding(layout, precision, PROVES_NOTHING, reason=why)


def _spread(curve: Sequence[float]) -> float:
    return max(curve, default=0.0) - min(curve, default=0.0)


def measure_rounding(precision: str, reference: Evidence, other: Evidence) -> Distances:
    """Return the limits of a precision from two runs that differ in the order of summation."""
    least = rounding_of(precision)
    worst = {
        name: max(each.values(), default=0.0) for name, each in _measure(reference, other).items()
    }
    limits = {name: min(MOST, max(least, TIMES * size)) for name, size in worst.items()}
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
            return f"{name} (gradients of step 1)"
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
        "gradients": _distances(first.gradients, last.gradients),
        "losses": {
            f"{name} of step {step}": _distance(value, losses.get((step, name)))
            for (step, name), value in reference.losses.items()
        },
        "weights": {
            **_distances(first.last_weights, last.last_weights),
            **_distances_of_ranks(other),
        },
        "metrics": {
            name: _distance(value, metrics.get(name)) for name, value in reference.metrics.items()
        },
    }


def _distance(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / max(abs(one), 1e-12)


def _distances(reference: Mapping[str, torch.Tensor], other: Tensors) -> Distances:
    """Return norm(a - b) / norm(a) for each tensor, in fp64.

    norm(a) counts as at least a millionth of the norm of all tensors: the gradient of a bias
    before BatchNorm is rounding noise only.
    """
    total = sum(float(tensor.double().square().sum()) for tensor in reference.values()) ** 0.5
    distances = {}
    for name, tensor in reference.items():
        missing = torch.full((), float("inf"))
        difference = tensor.double() - other.get(name, missing).double()
        norm = float(tensor.double().norm())
        distances[name] = float(difference.norm()) / max(norm, 1e-6 * total, 1e-300)
    return distances


def _distances_of_ranks(evidence: Evidence) -> Distances:
    """Return infinity for each weight that is not the same on all ranks."""
    first = evidence.ranks[0].last_weights
    return {
        f"{name} on rank {rank} and on rank 0": float("inf")
        for rank, notes in enumerate(evidence.ranks[1:], 1)
        for name, tensor in notes.last_weights.items()
        if not torch.equal(tensor, first[name])
    }
