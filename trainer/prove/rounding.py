"""Limits of rounding, and the cases that a comparison in fp64 cannot decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainer.base.errors import counted
from trainer.base.same import FP64, TINY, relative
from trainer.prove.merging import CommandHistory, Merged, Sketch, Step, distance, size_of

JUMP = 200.0  # an error begins with a jump, rounding grows from step to step
TIMES_MEASURED = 30.0  # times the effect of a change in the last bit
PARTLY_FP32 = 1e-6  # losses that differ by less: the script computes some of it in fp32
COMPARED_KINDS = ("losses", "gradients", "weights")


@dataclass(frozen=True)
class Bounds:
    """Bounds for relative differences. `noise[kind][i]`: measured up to step i; empty in fp64.

    A tensor is compared relative to its own norm, but at least to `gradient_floor` or
    `weight_floor` of the largest: some gradients are zero but for rounding.
    """

    name: str = "fp64"
    least: float = FP64
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
        return max(self.least, TIMES_MEASURED * here)


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
    above_noise = {}
    for name, each in weights.whole.items():
        gradient = gradients.whole.get(name)
        size = 0.0 if gradient is None else size_of(gradient)
        if size == 0 or not size < least:
            above_noise[name] = each
    return Merged(above_noise, weights.spread, weights.missing)


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
    noise: dict[str, list[float]] = {kind: [] for kind in COMPARED_KINDS}
    for a, b in zip(one.steps, other.steps, strict=False):
        differences_by_kind = differences(a, b, native)
        for kind in COMPARED_KINDS:
            noise[kind].append(max([differences_by_kind[kind][0], *noise[kind][-1:]]))
    return replace(native, noise=noise)


def relative_norm(one: Sketch, other: Sketch) -> float:
    """Return the relative difference of two sketches."""
    return distance(one, other) / max(size_of(one), TINY)


MOST_NAMES = 3


def find_precision(one: CommandHistory, other: CommandHistory) -> tuple[int, str] | None:
    """Return the first step with another autocast, or None, and what differs."""
    shared = owners(one) & owners(other)
    for step_index, (ours, theirs) in enumerate(zip(one.steps, other.steps, strict=False)):
        pair = [autocast(step, shared) for step in (ours, theirs)]
        if pair[0] != pair[1] and (set(pair[0]) != set(pair[1]) or shared):
            shown = [f"{h.name} {_show(each)}" for h, each in zip((one, other), pair, strict=True)]
            return step_index, " and ".join(shown)
    kinds = [
        sorted({kind for each in described(h) for kind in each["dtypes"]}) for h in (one, other)
    ]
    if kinds[0] != kinds[1]:
        shown = [", ".join(each).replace("torch.", "") for each in kinds]
        return 0, f"the parameters of A are {shown[0]} and those of B {shown[1]}"
    return None


def described(history: CommandHistory) -> list[Mapping[str, Any]]:
    """Return what is noted of each optimizer on each rank."""
    return [each for rank in history.ranks for each in rank.optimizers.values()]


def owners(history: CommandHistory) -> set[str]:
    """Return the names of the modules that have trained parameters of their own."""
    return {name.rpartition(".")[0] for each in described(history) for name in each["names"]}


def autocast(step: Step, modules: set[str]) -> dict[str, set[str]]:
    """Return the modules that are called under autocast in a step, by dtype."""
    names_by_dtype: dict[str, set[str]] = {}
    for rank in step.ranks:
        for dtype, named in rank.modes.get("autocast", {}).items():
            names_by_dtype.setdefault(dtype, set()).update(
                name for name, _ in named if name in modules
            )
    return names_by_dtype


def _show(modules: Mapping[str, set[str]]) -> str:
    if not modules:
        return "computes without autocast"
    parts = []
    for dtype, names in modules.items():
        few = ", ".join(sorted(names)[:MOST_NAMES])
        parts.append(f"{dtype} ({counted(len(names), 'module')}: {few})" if few else dtype)
    return f"computes under autocast in {' and '.join(parts)}"


def name_unjudged(histories: Sequence[CommandHistory], is_fp64: bool) -> list[str]:
    """Return notes on low precision that a comparison in fp64 switches off."""
    if not is_fp64:
        return []
    steps = [(each, rank) for each in histories for step in each.steps for rank in step.ranks]
    dtypes = sorted({dtype for _, rank in steps for dtype in rank.modes.get("autocast", {})})
    notes = []
    if dtypes:
        what = f"autocast ({', '.join(dtypes)})"
        notes.append(f"fp64 switches {what} off and does not judge its rounding: dtype=native does")
    scaled = {each.name for each, rank in steps if any(b["scale"] != 1 for b in rank.backwards)}
    if scaled:
        who = " and ".join(sorted(scaled))
        notes.append(
            f"in fp64 no gradient overflows: steps that GradScaler skips in {who} are not judged"
        )
    flags = [described(each)[0]["flags"] for each in histories]
    for key in flags[0]:
        if flags[0][key] != flags[1].get(key):
            pair = f"{flags[0][key]} in A and {flags[1].get(key)} in B"
            notes.append(f"{key} is {pair}, which fp64 does not judge: dtype=native does")
    return notes
