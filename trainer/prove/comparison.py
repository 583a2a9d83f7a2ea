"""Comparison of two commands, step by step: the first difference of each kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.base.same import FP64, relative
from trainer.prove.merging import (
    CommandHistory,
    Step,
    distance,
    evaluations,
    pair_evaluations,
    rename,
)
from trainer.prove.rounding import (
    JUMP,
    PARTLY_FP32,
    Bounds,
    compare_tensors,
    differences,
    find_precision,
    relative_norm,
)

COLUMNS = ("examples", "losses", "gradients", "weights", "lr", "evaluation")
# What explains a difference if it begins in an earlier step, and what also in the same one.
EARLIER = {
    "initial weights": (),
    "precision": (),
    "examples": (),
    "lr": ("examples",),  # a schedule by passes, which have other numbers of steps
    "gradients": ("initial weights", "precision", "examples", "lr", "weights", "replicas", "rest"),
    "weights": ("initial weights", "precision", "examples", "lr", "gradients", "replicas"),
    "rest": ("initial weights", "examples", "lr", "gradients", "weights", "replicas"),
    "replicas": ("initial weights", "gradients"),
    "evaluation": (),
    "steps": ("examples", "ranks"),
    "ranks": (),
    "alone": (),
}
SAME_STEP = {
    **dict.fromkeys(EARLIER, ("initial weights",)),
    "gradients": ("initial weights", "precision", "examples"),
    "weights": EARLIER["weights"],
    "replicas": EARLIER["replicas"],
    "rest": EARLIER["rest"],
}
NUMBERS = (
    "initial weights",
    "precision",
    "gradients",
    "weights",
    "replicas",
    "rest",
    "steps",
    "ranks",
)
OF_NO_STEP = ("evaluation", "ranks", "alone")
SPREAD_BOUND = 1e-4  # of replicas on several ranks, where rounding is not measured
AMPLIFIED = 4.0  # for the error of sketches
REST = "tensors that no optimizer has (an EMA, a frozen model, buffers)"


@dataclass(frozen=True)
class Deviation:
    """A difference: `place` is the index of the step, `where` what differs, `reason` why."""

    kind: str
    place: int
    where: str
    reason: str = ""


@dataclass
class PairComparison:
    """Differences between the reference and another command; `worst` by column."""

    one: CommandHistory
    other: CommandHistory
    bounds: Bounds
    num_steps: int
    worst: dict[str, float] = field(default_factory=dict)
    by_step: list[dict[str, float]] = field(default_factory=list)  # losses, gradients, weights
    deviations: list[Deviation] = field(default_factory=list)
    harmless: list[Deviation] = field(default_factory=list)  # examples, though all numbers agree
    notes: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        return not self.deviations

    @property
    def result(self) -> str:
        """Return the verdict for the table."""
        if self.is_same:
            return "same"
        kinds = [each.kind for each in self.deviations]
        places = [each.place for each in self.deviations if each.kind not in OF_NO_STEP]
        if not places:
            if "alone" in kinds:
                return "ranks train alone"
            return "ranks differ" if "ranks" in kinds else "evaluation differs"
        first = self.deviations[0]
        if first.kind == "initial weights":
            return "differs from the start"
        return f"differs from step {self.number_of(min(places))}"

    @property
    def is_unknown(self) -> bool:
        """Return True if only this is open: whether ranks exchange gradients without our seeing it.

        Without a process group of torch.distributed they may do so by MPI, Horovod, Ray, sockets or
        shared memory, or be models of an ensemble.
        """
        alone = [each for each in (self.one, self.other) if each.are_alone]
        kinds = {each.kind for each in self.deviations}
        return kinds == {"alone"} and not any(each.has_group for each in alone)

    @property
    def is_evaluated(self) -> bool:
        """Return True if both commands evaluated."""
        return all(any(r.evaluations for r in h.ranks) for h in (self.one, self.other))

    def number_of(self, step_index: int) -> int:
        """Return the number of the step at an index; with several optimizers, of its optimizer."""
        return self.one.steps[min(step_index, self.num_steps - 1)].number


def compare(one: CommandHistory, other: CommandHistory, bounds: Bounds) -> PairComparison:
    """Return the differences of two commands, in the order in which one causes the next."""
    rename(one, other)
    num_steps = min(len(one.steps), len(other.steps))
    comparison = PairComparison(one, other, bounds, num_steps)
    comparison.worst = dict.fromkeys(COLUMNS, 0.0)
    firsts = [
        _compare_company(comparison),
        _compare_initial(comparison),
        _compare_precision(comparison),
        _compare_examples(comparison),
        _compare_numbers(comparison),
        _compare_rates(comparison),
        _compare_replicas(comparison),
        _compare_rest(comparison),
        _compare_evaluations(comparison),
        _compare_lengths(comparison),
    ]
    causes = [each for each in firsts if each is not None]
    if all(each.kind not in NUMBERS for each in causes):
        comparison.harmless = [each for each in causes if each.kind == "examples"]
        causes = [each for each in causes if each.kind != "examples"]
    comparison.deviations = [each for each in causes if not _is_consequence(each, causes)]
    return comparison


def _is_consequence(deviation: Deviation, others: Sequence[Deviation]) -> bool:
    """Return True if an earlier difference explains this one."""
    return any(
        each.kind in EARLIER[deviation.kind]
        and each.place + (each.kind not in SAME_STEP[deviation.kind]) <= deviation.place
        for each in others
    )


def _compare_company(comparison: PairComparison) -> Deviation | None:
    """Return a finding if the ranks of a command do the same work, each by itself."""
    for history in (comparison.other, comparison.one):
        if not history.are_alone:
            continue
        if twins := max(rank.num_twins for rank in history.ranks):
            where = f"{history.name} trains {twins + 1} times as rank {history.ranks[0].rank}"
            return Deviation("alone", 0, f"{where} at the same time")
        who = f"{len(history.ranks)} of {history.size} ranks of {history.name}"
        has_rows = any(step.rows for step in history.steps)  # none if no module is called
        same = "use the same examples and " if has_rows else ""
        same = same if len(history.ranks) > 1 else "trained; it "
        return Deviation("alone", 0, f"{who} {same}exchanged no gradients")
    return None


def _compare_initial(comparison: PairComparison) -> Deviation | None:
    bounds = comparison.bounds
    bound = max(bounds.least, SPREAD_BOUND if bounds.noise else 0.0)
    for history in (comparison.one, comparison.other):
        for merged in history.initial.values():
            for name, value in merged.spread.items():
                if value > bound:
                    where = f"{name} starts with other values on the ranks of {history.name}"
                    return Deviation("initial weights", 0, where)
    for optimizer, merged in comparison.one.initial.items():
        if optimizer in comparison.other.initial:
            theirs = comparison.other.initial[optimizer]
            value, name = compare_tensors(merged, theirs, bounds.weight_floor)
            if not value <= bound:
                comparison.worst["weights"] = value
                return Deviation("initial weights", 0, f"{name} starts {value:.0e} apart")
    return None


def _compare_precision(comparison: PairComparison) -> Deviation | None:
    difference = find_precision(comparison.one, comparison.other)
    return Deviation("precision", *difference) if difference else None


def _compare_examples(comparison: PairComparison) -> Deviation | None:
    for step_index, (one, other) in enumerate(_pairs(comparison)):
        if one.rows != other.rows and not is_divided_model(comparison, one, other):
            comparison.worst["examples"] = 1.0
            numbers = (sum(one.rows.values()), sum(other.rows.values()))
            counts = (
                f"{numbers[0]} in {comparison.one.name}, {numbers[1]} in {comparison.other.name}"
            )
            shared = sum((one.rows & other.rows).values())
            return Deviation(
                "examples", step_index, f"the examples differ: {counts}, {shared} in both"
            )
    return None


def is_divided_model(comparison: PairComparison, one: Step, other: Step) -> bool:
    """Return True if ranks use the same examples because each has a part of the model."""
    for whole, copied, history in ((one, other, comparison.other), (other, one, comparison.one)):
        times = sum(copied.rows.values()) / max(sum(whole.rows.values()), 1)
        expected = Counter({row: int(times) * n for row, n in whole.rows.items()})
        is_whole = times in range(2, history.size + 1)
        if history.is_model_parallel and is_whole and copied.rows == expected:
            return True
    return False


def _pairs(comparison: PairComparison) -> list[tuple[Step, Step]]:
    return list(zip(comparison.one.steps, comparison.other.steps, strict=False))


def _compare_numbers(comparison: PairComparison) -> Deviation | None:
    """Return the first gradient or weight that differs by more than rounding."""
    if all(step.gradients.is_zero for pair in _pairs(comparison) for step in pair):
        return Deviation("gradients", 0, "no parameter of A and B has a gradient at any step")
    before = 0.0
    first = _compare_members(comparison)
    for step_index, (one, other) in enumerate(_pairs(comparison)):
        here = differences(one, other, comparison.bounds)
        comparison.by_step.append({kind: value for kind, (value, _) in here.items()})
        for kind, (value, _) in here.items():
            comparison.worst[kind] = max(comparison.worst[kind], value)
        if here["losses"][0] < PARTLY_FP32:
            before = max(before, here["losses"][0])
        for kind in ("gradients", "weights"):
            value, name = here[kind]
            bound = comparison.bounds.of(kind, step_index, before)
            is_over = not value <= bound
            if kind == "gradients" and is_over and _is_reduced_later(one, other, here, bound):
                is_over = False
            if kind == "weights" and is_over and _is_amplified(one, other, name):
                is_over = False
            if first is None and is_over:
                first = Deviation(
                    kind, step_index, _describe(comparison, kind, step_index, name, value, bound)
                )
        before = max([before, *(value for value, _ in here.values())])
    return first


def _compare_members(comparison: PairComparison) -> Deviation | None:
    """Return a finding for parameters that have gradients, and that one optimizer has not."""
    for one, other in ((comparison.one, comparison.other), (comparison.other, comparison.one)):
        if not other.parameters < one.parameters:
            continue
        for name in sorted(one.parameters - other.parameters):
            if any(np.any(step.gradients.whole.get(name, 0.0)) for step in one.steps):
                return Deviation("weights", 0, f"{other.name} does not train {name}")
    return None


def _describe(
    comparison: PairComparison, kind: str, step_index: int, name: str, value: float, bound: float
) -> str:
    """Say how far a tensor is apart, or that it is not finite in one command."""
    if math.isfinite(value):
        return f"the {kind[:-1]} of {name} differs by {value:.0e} (rounding: at most {bound:.0e})"
    tensors = {
        h.name: getattr(h.steps[step_index], kind).whole for h in (comparison.one, comparison.other)
    }
    who = [h for h, whole in tensors.items() if not np.isfinite(whole.get(name, np.zeros(1))).all()]
    return f"the {kind[:-1]} of {name} is not finite (nan or inf) in {' and '.join(who)}"


def _is_amplified(one: Step, other: Step, name: str) -> bool:
    """Return True if rounding of the gradient explains a weight: g / (|g| + eps), as in Adam.

    Its derivative is at most 1 / eps.
    """
    eps = one.ranks[0].epsilon
    if not eps or name not in one.gradients.whole or name not in other.gradients.whole:
        return False
    rate = one.rates.get(name, 0.0)
    gradient = distance(one.gradients.whole[name], other.gradients.whole[name])
    weight = distance(one.weights.whole[name], other.weights.whole[name])
    return weight <= AMPLIFIED * rate / eps * gradient < math.inf


def _is_reduced_later(
    one: Step, other: Step, here: dict[str, tuple[float, str]], bound: float
) -> bool:
    """Return True if the optimizer itself reduces gradients: they differ, and weights do not."""
    are_apart = max([*other.gradients.spread.values(), *one.gradients.spread.values()]) > 1e-6
    return are_apart and here["weights"][0] <= bound


def _compare_rates(comparison: PairComparison) -> Deviation | None:
    first: Deviation | None = None
    for step_index, (one, other) in enumerate(_pairs(comparison)):
        for name in one.rates.keys() & other.rates.keys():
            value = relative(one.rates[name], other.rates[name])
            comparison.worst["lr"] = max(comparison.worst["lr"], value)
            if value > FP64 and first is None:
                rates = f"{one.rates[name]:.6g} and {other.rates[name]:.6g}"
                first = Deviation("lr", step_index, f"the learning rates are {rates}")
    return first


def _compare_replicas(comparison: PairComparison) -> Deviation | None:
    """Return the first step after which ranks of one command have different weights."""
    for history in (comparison.other, comparison.one):
        for step_index, step in enumerate(history.steps):
            spread = step.weights.spread
            name = max(spread, key=lambda each: spread[each], default="")
            bound = SPREAD_BOUND if comparison.bounds.noise else FP64
            if name and not spread[name] <= bound:
                where = f"the ranks of {history.name} have different weights: {name}"
                return Deviation("replicas", step_index, f"{where} {spread[name]:.0e} apart")
    return None


def _compare_rest(comparison: PairComparison) -> Deviation | None:
    """Return the first step before which tensors that no optimizer has differ.

    Those of BatchNorm depend on the micro-batch, and ranks that start with other ones are left out.
    """
    norms = {norm for each in (comparison.one, comparison.other) for norm in each.about("norms")}
    has_norms = bool(norms - {"SyncBatchNorm"})
    if (
        comparison.bounds.noise
        or (has_norms and not _have_same_layout(comparison))
        or comparison.num_steps < 2
    ):
        return None
    before = {} if has_norms else rest_apart(comparison, 0)
    first_ranks = (comparison.one.first_rank, comparison.other.first_rank)
    for step_index in range(1, comparison.num_steps):
        here = rest_apart(comparison, step_index)
        comparable_ranks = [who for who in here if not has_norms or who in first_ranks]
        if who := [name for name in comparable_ranks if name not in before]:
            where = f"{REST} of {who[0]} differ by {here[who[0]]:.0e}"
            return Deviation("rest", step_index, f"{where} from those of {first_ranks[0]}")
    return None


def _have_same_layout(comparison: PairComparison) -> bool:
    """Return True if both commands have as many ranks and micro-batches."""
    one, other = comparison.one.steps[0], comparison.other.steps[0]
    return len(one.ranks) == len(other.ranks) and one.num_backwards == other.num_backwards


def rest_apart(comparison: PairComparison, step_index: int) -> dict[str, float]:
    """Return by rank how far its other tensors are from those of the reference's first rank."""
    base = comparison.one.steps[step_index].ranks[0].rest
    bound = max(comparison.bounds.least, JUMP * comparison.worst["weights"])
    apart = {}
    for history in (comparison.one, comparison.other):
        for rank, step in zip(history.ranks, history.steps[step_index].ranks, strict=True):
            value = relative_norm(base, step.rest)
            if rank.num_rest != comparison.one.ranks[0].num_rest:
                value = math.inf
            if value > bound:
                apart[history.name_of(rank)] = value
    return apart


def _compare_evaluations(comparison: PairComparison) -> Deviation | None:
    ours = evaluations(comparison.one)
    theirs = evaluations(comparison.other)
    for after, later in pair_evaluations(ours, theirs):
        one = ours[after]
        other = theirs[later]
        if one == other:
            continue
        comparison.worst["evaluation"] = 1.0
        counts = f"{sum(one.values())} and {sum(other.values())} examples"
        return Deviation("evaluation", after, f"evaluation after step {after} counts {counts}")
    return None


def _compare_lengths(comparison: PairComparison) -> Deviation | None:
    """Return a finding if a command, or one of its ranks, made fewer steps."""
    one = len(comparison.one.steps)
    other = len(comparison.other.steps)
    for history in (comparison.other, comparison.one):
        lengths = {rank.num_begun for rank in history.ranks}
        if len(lengths) > 1:
            where = f"ranks of {history.name} began {min(lengths)} and {max(lengths)} steps"
            return Deviation("ranks", comparison.num_steps, where)
    if one != other:
        where = f"{comparison.one.name} made {one} steps, {comparison.other.name} {other}"
        return Deviation("steps", comparison.num_steps, where)
    for history in (comparison.other, comparison.one):
        if not history.is_whole:
            return Deviation("steps", comparison.num_steps, f"{history.note} after {one} steps")
    return None
