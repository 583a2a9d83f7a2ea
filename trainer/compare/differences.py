"""How two runs differ: settings, data, code, versions, curves, examples and weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.checkpoints.transaction import is_gone
from trainer.engine.precision import COARSE, rounding_of
from trainer.errors import CheckpointError
from trainer.report.reading import PLACE, SPEED, Curve, RunFiles
from trainer.strategy.modules.comm_hooks import COMPRESSING

EXAMPLES = "the examples"
MOST_BYTES = 2**26  # of a tensor that is read at once


@dataclass(frozen=True)
class Change:
    """A setting or fact with other values. `values` are those of all runs."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """The first place where another run differs from the first one.

    `first_step` is the first step that may be the cause: a log is the mean over several steps.
    `distance` is relative to the value of the first run, or None where there is none.
    """

    name: str
    first_step: int
    step: int
    one: str = ""
    other: str = ""
    distance: float | None = None
    limit: float = 0.0  # a larger distance is no rounding

    @property
    def is_rounding(self) -> bool:
        """True if it may be rounding."""
        return self.distance is not None and self.distance <= self.limit

    @property
    def is_of_examples(self) -> bool:
        return self.name == EXAMPLES

    @property
    def steps(self) -> str:
        if self.first_step >= self.step:
            return f"step {self.step:,}"
        return f"steps {self.first_step:,} to {self.step:,}"

    def __str__(self) -> str:
        values = f" {self.one}, and {self.other}" if self.one else ""
        text = f"{self.steps}: {self.name}{values}"
        if self.distance is None or not math.isfinite(self.distance):
            return text
        kind = " (may be rounding)" if self.is_rounding else ""
        return f"{text}: {self.distance:.1e} apart{kind}"


def list_changes(runs: list[RunFiles], kind: str) -> list[Change]:
    """Return the settings or the facts that are not the same in all runs."""
    tables: list[Mapping[str, Any]]
    tables = [r.settings if kind == "settings" else {**r.facts(), **_logged(r)} for r in runs]
    found = []
    for name in dict.fromkeys(name for table in tables for name in table):
        values = tuple(str(table[name]) if name in table else "-" for table in tables)
        if name not in PLACE and len(set(values)) > 1:
            found.append(Change(name, values))
    return found


def _logged(run: RunFiles) -> dict[str, str]:
    """Return the names of the curves, as facts."""
    return {f"the curve {name}": "logged" for name in run.curves}


def find_first(one: RunFiles, other: RunFiles) -> list[Difference]:
    """Return the first difference of each kind, the earliest first: curves, examples, weights.

    A log is compared where both runs have one, and only if the logs before it are at the same
    steps: otherwise they are means over other steps.
    """
    limit = rounding_limit(one, other)
    found = [
        *_of_curves(one, other, limit),
        *_of_examples(one, other),
        *_of_weights(one, other, limit),
    ]
    return sorted(found, key=lambda each: (each.step, each.first_step))


def rounding_limit(*runs: RunFiles) -> float:
    """Return the relative distance up to which runs may differ by rounding, by their precision."""
    names = {str(run.settings["strategy.precision"]) for run in runs}
    is_compressed = any(run.settings.get("strategy.comm_hook") in COMPRESSING for run in runs)
    return max([*map(rounding_of, names), COARSE * is_compressed])


def list_compared(one: RunFiles, other: RunFiles) -> dict[str, list[int]]:
    """Return the steps at which each kind was compared; none where the runs have none in common."""
    begin = max(one.begin, other.begin)
    both = [name for name in one.curves if name in other.curves and not name.startswith(SPEED)]
    pairs = [p for name in both for p in _pairs(name, one.curves[name], other.curves[name], begin)]
    return {
        "curves": sorted({pair.step for pair in pairs}),
        "examples": sorted(step for step in {*one.ledger} & {*other.ledger} if step > begin),
        "weights": sorted(_kept(one) & _kept(other)),
    }


def _kept(run: RunFiles) -> set[int]:
    """Return the steps of checkpoints that a run has not removed meanwhile."""
    return {step for step, path in run.checkpoints.items() if not is_gone(path)}


def _of_curves(one: RunFiles, other: RunFiles, limit: float) -> Iterator[Difference]:
    """Yield the first difference, and the first one that is too large for rounding."""
    found = []
    for name in one.curves:
        if name in other.curves and not name.startswith(SPEED):
            begin = max(one.begin, other.begin)
            pairs = _pairs(name, one.curves[name], other.curves[name], begin, limit)
            found += [each for each in pairs if each.one != each.other]
    found.sort(key=lambda each: (each.step, not each.name.startswith("train/")))
    large = [each for each in found if not each.is_rounding]
    yield from dict.fromkeys([*found[:1], *large[:1]])


def _pairs(
    name: str, mine: Curve, theirs: Curve, begin: int, limit: float = 0.0
) -> Iterator[Difference]:
    """Yield the values of both runs at each step from `begin` on, as if they differed."""
    is_mean = name.startswith("train/")
    before = begin
    is_alike = True  # since `before`, no step is in one run only
    for step in sorted(step for step in {*mine, *theirs} if step >= begin + is_mean):
        if step not in mine or step not in theirs:
            is_alike = False
            continue
        if is_alike or not is_mean:
            a, b = mine[step], theirs[step]
            first = before + 1 if is_mean else step
            yield Difference(name, first, step, repr(a), repr(b), _relative(a, b), limit)
        before = step
        is_alike = True


def _relative(a: float, b: float) -> float | None:
    if not (math.isfinite(a) and math.isfinite(b)):
        return None
    return abs(a - b) / max(abs(a), abs(b), 1e-300)


def _of_examples(one: RunFiles, other: RunFiles) -> Iterator[Difference]:
    before = max(one.begin, other.begin)
    for step in sorted(step for step in {*one.ledger} & {*other.ledger} if step > before):
        mine, theirs = one.ledger[step], other.ledger[step]
        if mine != theirs:
            yield Difference(EXAMPLES, before + 1, step, mine[:8], theirs[:8])
            return
        before = step


def _of_weights(one: RunFiles, other: RunFiles, limit: float) -> Iterator[Difference]:
    before = max(one.begin, other.begin)
    for step in sorted({*one.checkpoints} & {*other.checkpoints}):
        try:
            is_same = one.weights_digest(step) == other.weights_digest(step)
            worst = None if is_same else _compare_tensors(one, other, step)
        except CheckpointError as error:
            if is_gone(one.checkpoints[step]) or is_gone(other.checkpoints[step]):
                continue  # its run is going on
            yield Difference(f"a checkpoint cannot be compared: {error}", step, step)
            return
        if worst is not None:
            name, distance, num_different, num_all = worst
            what = f"the weights, {num_different} of {num_all} tensors, most {name}"
            if not math.isfinite(distance):
                what += ", which is not there or has another shape"
            first = min(before + 1, step)
            yield Difference(what, first, step, distance=distance, limit=limit)
            return
        before = step


def _compare_tensors(
    one: RunFiles, other: RunFiles, step: int
) -> tuple[str, float, int, int] | None:
    """Return the tensor of the model that differs most, and how many do; None if none does."""
    mine, theirs = one.load_tensors(step)["model"], other.load_tensors(step)["model"]
    shapes = mine.shapes()
    distances: dict[str, float] = {}
    for name, shape in shapes.items():
        if theirs.shapes().get(name) != shape:
            distances[name] = math.inf
        elif (distance := _distance(mine, theirs, name, shape)) is not None:
            distances[name] = distance
    distances |= dict.fromkeys((n for n in theirs.shapes() if n not in shapes), math.inf)
    if not distances:
        return None
    worst = max(distances, key=lambda name: distances[name])
    return worst, distances[worst], len(distances), len({**shapes, **theirs.shapes()})


def _distance(mine: Any, theirs: Any, name: str, shape: tuple[int, ...]) -> float | None:
    """Return norm(a - b) / norm(a) of a tensor; None if it has the same bits.

    It is read in slices, as a tensor may be larger than the memory.
    """
    width = mine.dtype(name).itemsize * math.prod(shape[1:])
    rows = max(1, MOST_BYTES // max(1, width))
    squares = [0.0, 0.0]
    is_same = True
    for first in range(0, shape[0] if shape else 1, rows):
        offset = (first, *[0] * (len(shape) - 1)) if shape else ()
        size = (min(rows, shape[0] - first), *shape[1:]) if shape else ()
        a, b = mine.read(name, offset, size), theirs.read(name, offset, size)
        is_same = is_same and a.dtype == b.dtype and torch.equal(a, b)
        a, b = a.double(), b.double()
        squares[0] += float((a - b).square().sum())
        squares[1] += float(a.square().sum())
    return None if is_same else math.sqrt(squares[0] / max(squares[1], 1e-300))
