"""Reasons: the likely cause of each difference, with its evidence."""

from __future__ import annotations

from dataclasses import replace

from trainer.errors import counted
from trainer.prove.comparison import PairComparison, rest_apart
from trainer.prove.evaluated_examples import evaluations, pair_evaluations
from trainer.prove.merging import CommandHistory
from trainer.prove.reasons.example_reasons import FILLS, are_unseeded, explain_examples
from trainer.prove.reasons.file_reasons import name_files
from trainer.prove.reasons.gradient_reasons import explain_gradients, explain_unreduced
from trainer.prove.reasons.optimizer_reasons import explain_rates, explain_weights
from trainer.prove.reasons.pass_reasons import explain_changes, explain_settings

RESTORED = ("examples", "lr", "weights")  # that a snapshot changes from the first step on


def explain(found: PairComparison) -> PairComparison:
    """Return the comparison with a reason for each finding."""
    reasons = {
        "initial weights": _explain_initial,
        "precision": _explain_precision,
        "examples": explain_examples,
        "gradients": explain_gradients,
        "lr": explain_rates,
        "weights": explain_weights,
        "replicas": _explain_replicas,
        "rest": _explain_rest,
        "evaluation": _explain_evaluation,
        "steps": _explain_lengths,
        "ranks": _explain_lengths,
    }
    deviations = [replace(d, reason=reasons[d.kind](found, d.place)) for d in found.deviations]
    if deviations and (files := name_files(found)) and files not in deviations[0].reason:
        if deviations[0].place == 0 and deviations[0].kind in RESTORED:
            first = deviations[0]
            deviations[0] = replace(first, reason=f"{files}; or {first.reason}")
        else:
            found.notes.append(files)
    for each in found.harmless:
        reason = reasons[each.kind](found, each.place)
        found.notes.append(f"gradients and weights agree, although examples do not: {reason}")
    return replace(found, deviations=deviations)


def _explain_precision(found: PairComparison, place: int) -> str:
    why = "low precision in one command only"
    if found.bounds.noise:
        return why
    return f"{why}; fp64 switches autocast off, so how much it changes is not judged (dtype=native)"


def _explain_initial(found: PairComparison, place: int) -> str:
    for history in (found.one, found.other):
        if any(value > max(found.bounds.least, 1e-4) for value in _spreads(history)):
            why = "the model is built from other random numbers on each rank"
            if len(set(history.seeds)) > 1:
                why += f" (seeds {', '.join(map(str, history.seeds))})"
            return f"{why}, and no wrapper sends rank 0's weights to the others"
    if reason := explain_changes(found, 0):
        return f"{reason}, after its first backward pass"
    if files := name_files(found):
        return files
    if are_unseeded(found):
        return "the script does not seed torch before it builds the model"
    one, other = found.one.seeds[0], found.other.seeds[0]
    if one != other:
        return f"the seed depends on the layout: {one} and {other}"
    return "the model is built after a number of random draws that depends on the layout"


def _spreads(history: CommandHistory) -> list[float]:
    return [value for merged in history.initial.values() for value in merged.spread.values()]


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
    if reason := explain_settings(found, found.one.steps[place], found.other.steps[place]):
        return reason
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
    for history in (found.other, found.one):
        if history.note and len(found.one.steps) == len(found.other.steps):
            return "it failed before its last step was complete: read the end of its output above"
    if files := name_files(found):
        return files
    if short.note:
        return f"{short.note}: read the end of its output above"
    return f"{short.name} ends before {long.name}: its ranks have fewer batches in a pass"
