"""Bounds: which differences are rounding, from their size and from how they grow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from trainer.prove.history import Sketch
from trainer.prove.merging import CommandHistory, Merged, Step, distance, size_of

JUMP = 200.0  # an error begins with a jump, rounding grows from step to step
FP64_BOUND = 1e-9
MEASURED = 30.0  # times the effect of a change in the last bit
PARTLY_FP32 = 1e-6  # losses that differ by less: the script computes some of it in fp32
KINDS = ("losses", "gradients", "weights")


@dataclass(frozen=True)
class Bounds:
    """Bounds for relative differences. `noise[kind][i]`: measured up to step i; empty in fp64.

    A tensor is compared relative to its own norm, but at least to `gradient_floor` or
    `weight_floor` of the largest: some gradients are zero but for rounding.
    """

    name: str = "fp64"
    least: float = FP64_BOUND
    gradient_floor: float = 1e-5
    weight_floor: float = 1e-3
    silence: float = 1e-10  # gradients below it, relative to all, are rounding
    noise: dict[str, list[float]] = field(default_factory=dict)

    def of(self, kind: str, step: int, before: float) -> float:
        """Return the bound at a step; `before` is the largest difference of the steps before."""
        if not self.noise:
            return max(self.least, JUMP * before)
        measured = self.noise[kind]
        here = measured[min(step, len(measured) - 1)] if measured else 0.0
        return max(self.least, MEASURED * here)


def compare_tensors(one: Merged, other: Merged, floor: float) -> tuple[float, str]:
    """Return the largest relative difference and the name of its tensor."""
    sizes = {name: size_of(each) for name, each in one.whole.items()}
    least = floor * max(sizes.values(), default=0.0)
    worst = 0.0
    where = ""
    for name, size in sizes.items():
        if name not in other.whole:
            continue
        apart = distance(one.whole[name], other.whole[name])
        base = max(size, least)
        value = apart / base if base else apart
        if value > worst:
            worst = value
            where = name
    return worst, where


def fill(one: Merged, other: Merged, weights: Merged) -> Merged:
    """Return gradients with zeros for those that only the other command has."""
    absent = [name for name in other.whole if name not in one.whole and name in weights.whole]
    zeros = {name: np.zeros_like(other.whole[name]) for name in absent}
    return Merged(one.whole | zeros, one.spread, one.missing)


def without_noise(weights: Merged, gradients: Merged, silence: float) -> Merged:
    """Return the weights whose gradient is more than rounding, which Adam would amplify."""
    least = silence * gradients.norm
    kept = {}
    for name, each in weights.whole.items():
        gradient = gradients.whole.get(name)
        size = 0.0 if gradient is None else size_of(gradient)
        if size == 0 or not size < least:
            kept[name] = each
    return Merged(kept, weights.spread, weights.missing)


def differences(one: Step, other: Step, bounds: Bounds) -> dict[str, tuple[float, str]]:
    """Return the largest relative difference of a step by kind, and the tensor that has it."""
    losses = one.losses["mean"]
    conventions = other.losses.values()
    loss = min(relative(losses, each) for each in conventions)
    loss = min(loss, *(relative(each, other.losses["mean"]) for each in one.losses.values()))
    ours = fill(one.gradients, other.gradients, one.weights)
    theirs = fill(other.gradients, one.gradients, other.weights)
    quiet = [without_noise(each.weights, each.gradients, bounds.silence) for each in (one, other)]
    return {
        "losses": (loss, ""),
        "gradients": compare_tensors(ours, theirs, bounds.gradient_floor),
        "weights": compare_tensors(quiet[0], quiet[1], bounds.weight_floor),
    }


def measure(one: CommandHistory, other: CommandHistory) -> Bounds:
    """Return bounds from a run and its repeat with other last bits and other sums."""
    native = Bounds("native", 1e-6, 1e-2, 1e-2, 1e-6)
    noise: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for a, b in zip(one.steps, other.steps, strict=False):
        found = differences(a, b, native)
        for kind in KINDS:
            noise[kind].append(max([found[kind][0], *noise[kind][-1:]]))
    return replace(native, noise=noise)


def relative(one: float, other: float) -> float:
    """Return the relative difference of two numbers; two that are not finite are equal."""
    if one == other or not (math.isfinite(one) or math.isfinite(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), 1e-300)


def relative_norm(one: Sketch, other: Sketch) -> float:
    """Return the relative difference of two sketches."""
    return distance(one, other) / max(size_of(one), 1e-300)
