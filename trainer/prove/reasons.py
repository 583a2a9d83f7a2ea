"""Reasons: the likely cause of each difference, with its evidence."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from trainer.errors import counted
from trainer.prove.bounds import relative
from trainer.prove.comparison import PairComparison, evaluations, pair_evaluations, rest_apart
from trainer.prove.example_reasons import FILLS, are_unseeded, explain_examples
from trainer.prove.gradient_reasons import explain_gradients, explain_unreduced
from trainer.prove.merging import CommandHistory


def explain(found: PairComparison) -> PairComparison:
    """Return the comparison with a reason for each finding."""
    reasons = {
        "initial weights": _explain_initial,
        "examples": explain_examples,
        "gradients": explain_gradients,
        "lr": _explain_rates,
        "weights": _explain_weights,
        "replicas": _explain_replicas,
        "rest": _explain_rest,
        "evaluation": _explain_evaluation,
        "steps": _explain_lengths,
        "ranks": _explain_lengths,
    }
    deviations = [replace(d, reason=reasons[d.kind](found, d.place)) for d in found.deviations]
    for each in found.harmless:
        reason = reasons[each.kind](found, each.place)
        found.notes.append(f"gradients and weights agree, although examples do not: {reason}")
    return replace(found, deviations=deviations)


def _explain_initial(found: PairComparison, place: int) -> str:
    for history in (found.one, found.other):
        if any(value > max(found.bounds.least, 1e-4) for value in _spreads(history)):
            why = "the model is built from other random numbers on each rank"
            if len(set(history.seeds)) > 1:
                why += f" (seeds {', '.join(map(str, history.seeds))})"
            return f"{why}, and no wrapper sends rank 0's weights to the others"
    if are_unseeded(found):
        return "the script does not seed torch before it builds the model"
    one, other = found.one.seeds[0], found.other.seeds[0]
    if one != other:
        return f"the seed depends on the layout: {one} and {other}"
    return "the model is built after a number of random draws that depends on the layout"


def _spreads(history: CommandHistory) -> list[float]:
    return [value for merged in history.initial.values() for value in merged.spread.values()]


def _explain_rates(found: PairComparison, place: int) -> str:
    ratio = found.other.size / found.one.size
    name = next(
        name
        for name, rate in found.one.steps[place].rates.items()
        if relative(rate, found.other.steps[place].rates.get(name, rate)) > 1e-9
    )
    one = [step.rates[name] for step in found.one.steps if name in step.rates]
    other = [step.rates[name] for step in found.other.steps if name in step.rates]
    pairs = list(zip(one, other, strict=False))
    if len({rank.rates.get(name) for rank in found.other.steps[place].ranks}) > 1:
        return "the ranks of B use different learning rates"
    if ratio != 1 and all(relative(a * ratio, b) < 1e-9 for a, b in pairs):
        return f"the learning rate is multiplied by {ratio:.6g}, the ratio of the numbers of ranks"
    phases = [[rate for rate, _ in groupby(rates)] for rates in (one, other)]  # of an epoch each
    for times in sorted({found.other.size, found.one.size, 2, 3, 4} - {1}):
        for start in (0, times - 1):  # after a step, or after each micro-batch of it
            for ours, theirs in ((one, other), phases):
                if _agree(ours[start::times], theirs):
                    return _explain_fast_schedule(found.other, times, start > 0)
                if _agree(ours, theirs[start::times]):
                    return _explain_fast_schedule(found.one, times, start > 0)
    if _agree(one[1:], other) or _agree(one, other[1:]):
        return "the schedule is one step ahead on one of the layouts"
    first, its = next((pair for pair in pairs if pair[0]), (1.0, 0.0))  # a warm-up begins with 0
    if its and all(relative(a * its, b * first) < 1e-9 for a, b in pairs):
        return f"the learning rate is multiplied by {its / first:.6g}"
    return "the schedule depends on the layout, for example on the number of batches on a rank"


def _agree(one: list[float], other: list[float]) -> bool:
    pairs = list(zip(one, other, strict=False))
    return len(pairs) > 1 and len(set(one)) > 1 and all(relative(a, b) < 1e-9 for a, b in pairs)


def _explain_fast_schedule(history: CommandHistory, times: int, is_before: bool) -> str:
    why = f"the schedule of {history.name} advances {times} times at once"
    if times == history.size and not is_before:
        why += ", once for each rank"
    elif times == max(step.num_backwards for step in history.steps):
        why += ", once for each micro-batch"
    return why


def _explain_weights(found: PairComparison, place: int) -> str:
    agree = "gradients and learning rates agree, so the update differs"
    number = found.other.steps[place].ranks[0].optimizer
    one = found.one.ranks[0].optimizers[number]
    other = found.other.ranks[0].optimizers.get(number, one)
    if one["kind"] != other["kind"]:
        return f"{agree}: the optimizers are {one['kind']} and {other['kind']}"
    for key, value in one["settings"].items():
        if key not in ("lr", "initial_lr") and other["settings"].get(key) != value:
            return f"{agree}: {key} is {value} and {other['settings'].get(key)}"
    if any(any(rank.optimizers[number]["parts"]) for rank in found.other.ranks):
        why = f"{other['kind']} computes something over a whole tensor, and a rank has a part of it"
        return f"{agree}: {why}"
    return f"{agree}: the optimizer's state differs, or weights are changed outside of its step"


def _explain_replicas(found: PairComparison, place: int) -> str:
    for history in (found.other, found.one):
        step = history.steps[place]
        if any(value > 1e-9 for value in step.weights.spread.values()):
            if reason := explain_unreduced(history, place, found):
                return reason
            rates = [rank.rates for rank in step.ranks]
            if any(each != rates[0] for each in rates):
                return "the ranks use different learning rates"
    return "their gradients agree, so an optimizer's state or something outside of it differs"


def _explain_rest(found: PairComparison, place: int) -> str:
    apart = rest_apart(found, place).keys() - rest_apart(found, 0).keys()
    if any(f"rank 0 of {history.name}" in apart for history in (found.one, found.other)):
        return "an EMA's decay, or how often it is updated, depends on the layout"
    return "not every rank updates them, as an EMA that rank 0 alone updates"


def _explain_evaluation(found: PairComparison, after: int) -> str:
    ours = evaluations(found.one)
    theirs_all = evaluations(found.other)
    later = dict(pair_evaluations(ours, theirs_all))[after]
    one = ours[after]
    other = theirs_all[later]
    if sum(one.values()) == sum(other.values()) and one.keys() - other.keys():
        return "the examples differ in content: evaluation data are drawn at random"
    sentences = []
    for history, counts, theirs in ((found.one, one, other), (found.other, other, one)):
        repeats = sum((counts - theirs).values())
        left_out = len(theirs.keys() - counts.keys())
        if repeats and len(counts) <= len(theirs):
            total = sum(theirs.values())
            numbers = f"{sum(counts.values())} examples instead of {total} ({repeats} twice)"
            sentences.append(f"{history.name} counts {numbers}: {FILLS}")
        elif left_out and len(counts) < len(theirs):
            sentences.append(f"{history.name} leaves out {counted(left_out, 'example')}")
    return "; ".join(sentences) or "the layouts divide the evaluation data in another way"


def _explain_lengths(found: PairComparison, place: int) -> str:
    lengths = [{rank.num_begun for rank in each.ranks} for each in (found.one, found.other)]
    if max(map(len, lengths)) > 1:
        return "they have different numbers of batches, or one leaves the loop, fails or hangs"
    short, long = sorted((found.one, found.other), key=lambda each: len(each.steps))
    if short.note:
        return f"{short.note}: read the end of its output above"
    return f"{short.name} ends before {long.name}: its ranks have fewer batches in a pass"
