"""Differences of two runs, and the result: the same bits, up to rounding, different, or unknown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.base.codec import digest, name_of
from trainer.base.errors import STOPPED, CheckpointError, counted, shortened
from trainer.base.same import RUNS, TINY, relative
from trainer.base.same.distance import squares
from trainer.core.api import COMPRESSING, LAYOUT, is_gone
from trainer.pages.charts import SPEED
from trainer.show.run_reading import PLACE_SETTINGS, Curve, RunFiles

EXAMPLES = "the examples"
MOST_BYTES_AT_ONCE = 2**26  # of a tensor that is read at once


@dataclass(frozen=True)
class Change:
    """A setting or fact with other values. `values` are those of all runs."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """The first place where another run differs from the first one.

    `first_step` is the first step that may be the cause: a log is the mean over several steps.
    `distance` is relative, infinite where one value is not finite, and None of examples.
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
    changes = []
    for name in dict.fromkeys(name for table in tables for name in table):
        values = tuple(str(table[name]) if name in table else "-" for table in tables)
        if name not in PLACE_SETTINGS and len(set(values)) > 1:
            changes.append(Change(name, values))
    return changes


def _logged(run: RunFiles) -> dict[str, str]:
    """Return the names of the curves, as facts."""
    return {f"the curve {name}": "logged" for name in run.curves}


def find_first(one: RunFiles, other: RunFiles) -> list[Difference]:
    """Return the first difference of each kind, the earliest first: curves, examples, weights.

    A log is compared where both runs have one, and only if the logs before it are at the same
    steps: otherwise they are means over other steps.
    """
    limit = rounding_limit(one, other)
    differences = [
        *_of_curves(one, other, limit),
        *_of_examples(one, other),
        *_of_weights(one, other, limit),
    ]
    return sorted(differences, key=lambda each: (each.step, each.first_step))


def rounding_limit(*runs: RunFiles) -> float:
    """Return the relative distance up to which runs may differ by rounding, by their precision."""
    names = {str(run.settings["strategy.precision"]) for run in runs}
    is_compressed = any(run.settings.get("strategy.comm_hook") in COMPRESSING for run in runs)
    return max([*map(RUNS.of, names), RUNS.narrower * is_compressed])


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
    differences = []
    for name in one.curves:
        if name in other.curves and not name.startswith(SPEED):
            begin = max(one.begin, other.begin)
            pairs = _pairs(name, one.curves[name], other.curves[name], begin, limit)
            differences += [each for each in pairs if each.one != each.other]
    differences.sort(key=lambda each: (each.step, not each.name.startswith("train/")))
    large = [each for each in differences if not each.is_rounding]
    yield from dict.fromkeys([*differences[:1], *large[:1]])


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
            distance = relative(a, b, abs(b))  # the same in both directions
            yield Difference(name, first, step, repr(a), repr(b), distance, limit)
        before = step
        is_alike = True


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
                what += ", which is not there, or has another shape or base"
            first = min(before + 1, step)
            yield Difference(what, first, step, distance=distance, limit=limit)
            return
        before = step


def _compare_tensors(
    one: RunFiles, other: RunFiles, step: int
) -> tuple[str, float, int, int] | None:
    """Return the tensor of the model that differs most, and how many do; None if none does."""
    (mine, frozen), (theirs, others) = (run.load_model(step) for run in (one, other))
    shapes = mine.shapes()
    names = {**shapes, **frozen, **theirs.shapes(), **others}
    distances: dict[str, float] = {}
    for name in names:
        if name in shapes and theirs.shapes().get(name) == shapes[name]:
            if (distance := _distance(mine, theirs, name, shapes[name])) is not None:
                distances[name] = distance
        elif _facts_of(mine, frozen, name) != _facts_of(theirs, others, name):
            distances[name] = math.inf
    if not distances:
        return None
    worst = max(distances, key=lambda name: distances[name])
    return worst, distances[worst], len(distances), len(names)


def _facts_of(source: Any, left_out: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return dtype, shape and digest of a tensor, also of one that a checkpoint leaves out."""
    shape = source.shapes().get(name)
    if shape is None:
        return left_out.get(name)
    value = source.read(name, (0,) * len(shape), shape)
    return [name_of(value.dtype), list(shape), digest(value)]


def _distance(mine: Any, theirs: Any, name: str, shape: tuple[int, ...]) -> float | None:
    """Return norm(a - b) / norm(a) of a tensor; None if it has the same bits.

    It is read in slices, as a tensor may be larger than the memory.
    """
    width = mine.dtype(name).itemsize * math.prod(shape[1:])
    rows = max(1, MOST_BYTES_AT_ONCE // max(1, width))
    sums = torch.zeros(2, dtype=torch.float64)
    is_same = True
    for first in range(0, shape[0] if shape else 1, rows):
        offset = (first, *[0] * (len(shape) - 1)) if shape else ()
        size = (min(rows, shape[0] - first), *shape[1:]) if shape else ()
        a, b = mine.read(name, offset, size), theirs.read(name, offset, size)
        is_same = is_same and a.dtype == b.dtype and torch.equal(a, b)
        sums += squares(a, b)
    return None if is_same else math.sqrt(sums[0] / sums[1].clamp_min(TINY))


EQUAL_RUNS = "the same bits: curves, examples and weights are equal"
CANNOT_TELL = "cannot tell"
MOST_NAMED = 4
MOST_OF_A_REASON = 200  # characters
OF_SOURCES = ("the code of ", "the train data's ", "the eval data's ")  # facts


@dataclass(frozen=True)
class Sameness:
    """The verdict on two runs; `is_same` if they are one run, up to rounding."""

    line: str
    is_same: bool


def judge(one: RunFiles, other: RunFiles, differences: list[Difference]) -> Sameness:
    """Return the verdict on two runs, by their first differences."""
    unknown = explain_unknown(one, other)
    if not differences:
        return Sameness(f"{CANNOT_TELL}: {unknown}" if unknown else EQUAL_RUNS, not unknown)
    pair = [one, other]
    settings = [c.name for c in list_changes(pair, "settings") if not c.name.startswith(LAYOUT)]
    small = [each for each in differences if each.is_rounding]
    facts = _list_facts(one, other)
    if settings:
        return Sameness(f"different: {_listed(settings)}", False)
    if len(small) == len(differences):
        return _judge_rounding(one, other, small, unknown)
    if (
        small
        and differences[0] is small[0]
        and not any(each.is_of_examples for each in differences)
    ):
        late = next(each for each in differences if not each.is_rounding)
        growth = f"{_short(small[0])} {small[0].distance:.0e} at step {small[0].step:,}"
        if late.distance is not None and math.isfinite(late.distance):
            growth += f", {_short(late)} {late.distance:.0e} at step {late.step:,}"
        caution = f"changed: {_listed(facts)}; " if facts else ""
        check = "strategy=exact or strategy.precision=fp64 shows whether it is rounding alone"
        line = f"starts as rounding and grows ({growth}); {caution}{check}"
        return Sameness(line, False)
    changed = "Same settings" + (
        ", code and data" if None not in (one.manifest, other.manifest) else ""
    )
    if facts:
        changed = f"Changed: {_listed(facts)}"
    line = f"different: {differences[0].name}, from {_span(differences[0])}. {changed}"
    return Sameness(line, False)


def _judge_rounding(
    one: RunFiles, other: RunFiles, small: list[Difference], unknown: str
) -> Sameness:
    """Return the verdict on two runs whose differences may all be rounding.

    In 16 bits a small change of code or data moves results no further than rounding does.
    """
    limit = rounding_limit(one, other)
    apart = f"at most {max(each.distance or 0.0 for each in small):.0e} apart"
    within = f"{one.settings['strategy.precision']} may differ by {limit:.0e}"
    changed = [name for name in _list_facts(one, other) if name.startswith(OF_SOURCES)]
    if changed and limit > RUNS.fp32:
        unknown = f"{_listed(changed)} changed; strategy.precision=fp64 shows whether it matters"
    if unknown:
        return Sameness(
            f"{CANNOT_TELL}: {apart}, which may be rounding ({within}); {unknown}", False
        )
    return Sameness(f"the same run up to rounding: {apart} ({within})", True)


def _list_facts(one: RunFiles, other: RunFiles) -> list[str]:
    """Return the names of facts that differ; none if a run has no checkpoint, which has them."""
    if one.manifest is None or other.manifest is None:
        return []
    changes = list_changes([one, other], "facts")
    return [each.name for each in changes if not each.name.startswith("the curve ")]


def _span(difference: Difference) -> str:
    if difference.first_step >= difference.step:
        return f"step {difference.step:,}"
    return f"a step between {difference.first_step:,} and {difference.step:,}"


def _short(difference: Difference) -> str:
    return difference.name.partition(",")[0]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def explain_unknown(one: RunFiles, other: RunFiles) -> str:
    """Return why two runs without a difference cannot be called equal; empty if they can be."""
    for run in (other, one):
        if run.step == 0:
            return f"{run.name} {_how_it_ended(run, 'before its first step')}"
    compared = list_compared(one, other)
    last = max((step for steps in compared.values() for step in steps), default=0)
    if last and one.step != other.step:
        shorter = min(one, other, key=lambda run: run.step)
        end = _how_it_ended(shorter, f"after step {shorter.step:,}")
        return f"nothing differs up to step {last:,}; {shorter.name} {end}"
    if apart := [kind for kind, steps in compared.items() if not steps]:
        advice = "train both with the same log.every_steps and checkpoint.every_steps"
        return f"no step has {' or '.join(apart)} in both runs; {advice}"
    for run in (other, one):
        if run.manifest is None:
            return f"{run.name} has no checkpoint, so its code and data are unknown"
    return ""


def _how_it_ended(run: RunFiles, when: str) -> str:
    """Return `failed before its first step: ...`."""
    code = run.exit.get("code")
    if code is None:
        return f"has not ended, or was killed, {when}"
    if code in (0, STOPPED):
        return f"{'stopped' if code else 'ended'} {when}"
    return f"failed {when}: {shortened(str(run.exit.get('reason', '')), MOST_OF_A_REASON)}"


def list_unknown(one: RunFiles, other: RunFiles) -> list[str]:
    """Return a line for each thing that the runs have too little in common to compare."""
    compared = list_compared(one, other)
    lines = [
        f"unknown: {k}, as no step has them in both runs" for k, s in compared.items() if not s
    ]
    if one.manifest is None or other.manifest is None:
        lines.append("unknown: data, code and versions, as a run has no checkpoint")
    if one.step != other.step:
        last = max((step for steps in compared.values() for step in steps), default=0)
        steps = f"{one.name} has {counted(one.step, 'step')}, {other.name} {other.step:,}"
        lines.append(f"unknown: anything after step {last:,}; {steps}")
    return lines
