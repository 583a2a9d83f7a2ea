"""Reasons: the likely cause of each difference, with its evidence."""

from __future__ import annotations

from dataclasses import replace

from trainer.base.errors import counted
from trainer.base.same import FP64, relative
from trainer.prove.comparison import Deviation, PairComparison, rest_apart
from trainer.prove.merging import (
    CommandHistory,
    evaluations,
    first_weights,
    pair_evaluations,
)
from trainer.prove.reasons.example_reasons import (
    FILLS,
    are_unseeded,
    explain_examples,
    explain_size,
    have_same_indices,
)
from trainer.prove.reasons.gradient_reasons import (
    draws_random,
    explain_gradients,
    explain_unreduced,
)
from trainer.prove.reasons.pass_reasons import (
    explain_changes,
    explain_groups,
    explain_rates,
    explain_settings,
    explain_weights,
    name_some,
)
from trainer.prove.rounding import relative_norm


def explain(comparison: PairComparison) -> PairComparison:
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
        "alone": _explain_alone,
    }
    deviations = [
        replace(d, reason=reasons[d.kind](comparison, d.place)) for d in comparison.deviations
    ]
    for each in comparison.harmless:
        reason = reasons[each.kind](comparison, each.place)
        comparison.notes.append(f"gradients and weights agree, although examples do not: {reason}")
    return replace(comparison, deviations=deviations)


def _explain_precision(comparison: PairComparison, step_index: int) -> str:
    why = "low precision in one command only"
    if comparison.bounds.noise:
        return why
    return f"{why}; fp64 switches autocast off, so how much it changes is not judged (dtype=native)"


def _explain_initial(comparison: PairComparison, step_index: int) -> str:
    for history in (comparison.one, comparison.other):
        if any(value > max(comparison.bounds.least, 1e-4) for value in _spreads(history)):
            why = "the model is built from other random numbers on each rank"
            if len(set(history.seeds)) > 1:
                why += f" (seeds {', '.join(map(str, history.seeds))})"
            return f"{why}, and no wrapper sends rank 0's weights to the others"
    if reason := explain_changes(comparison, 0):
        return f"{reason}, after its first backward pass"
    if are_unseeded(comparison):
        return "the script does not seed torch before it builds the model"
    one, other = comparison.one.seeds[0], comparison.other.seeds[0]
    if one != other:
        return f"the seed depends on the layout: {one} and {other}"
    return "the model is built after a number of random draws that depends on the layout"


def _spreads(history: CommandHistory) -> list[float]:
    return [value for merged in history.initial.values() for value in merged.spread.values()]


def _explain_replicas(comparison: PairComparison, step_index: int) -> str:
    for history in (comparison.other, comparison.one):
        step = history.steps[step_index]
        if any(value > FP64 for value in step.weights.spread.values()):
            if reason := explain_unreduced(history, step_index, comparison):
                return reason
            rates = [rank.rates for rank in step.ranks]
            if any(each != rates[0] for each in rates):
                return "the ranks use different learning rates"
    return "their gradients agree, so an optimizer's state or something outside of it differs"


def _explain_rest(comparison: PairComparison, step_index: int) -> str:
    if reason := explain_settings(
        comparison, comparison.one.steps[step_index], comparison.other.steps[step_index]
    ):
        return reason
    apart = rest_apart(comparison, step_index).keys() - rest_apart(comparison, 0).keys()
    if any(history.first_rank in apart for history in (comparison.one, comparison.other)):
        return "an EMA's decay, or how often it is updated, depends on the layout"
    return "not every rank updates them, as an EMA that rank 0 alone updates"


def _explain_evaluation(comparison: PairComparison, after: int) -> str:
    ours = evaluations(comparison.one)
    theirs_all = evaluations(comparison.other)
    later = dict(pair_evaluations(ours, theirs_all))[after]
    one = ours[after]
    other = theirs_all[later]
    if sum(one.values()) == sum(other.values()) and one.keys() - other.keys():
        return "the examples differ in content: evaluation data are drawn at random"
    sentences = []
    for history, counts, theirs in ((comparison.one, one, other), (comparison.other, other, one)):
        repeats = sum((counts - theirs).values())
        left_out = len(theirs.keys() - counts.keys())
        if repeats and len(counts) <= len(theirs):
            total = sum(theirs.values())
            numbers = f"{sum(counts.values())} examples instead of {total} ({repeats} twice)"
            sentences.append(f"{history.name} counts {numbers}: {FILLS}")
        elif left_out and len(counts) < len(theirs):
            sentences.append(f"{history.name} leaves out {counted(left_out, 'example')}")
    return "; ".join(sentences) or "the layouts divide the evaluation data in another way"


def _explain_lengths(comparison: PairComparison, step_index: int) -> str:
    lengths = [
        {rank.num_begun for rank in each.ranks} for each in (comparison.one, comparison.other)
    ]
    if max(map(len, lengths)) > 1:
        for history in (comparison.other, comparison.one):
            if reason := _explain_uneven(history):
                return reason
        return "they have different numbers of batches, or one leaves the loop, fails or hangs"
    short, long = sorted((comparison.one, comparison.other), key=lambda each: len(each.steps))
    for history in (comparison.other, comparison.one):
        if not history.is_whole and len(comparison.one.steps) == len(comparison.other.steps):
            return "it did not come to its next step: read the end of its output above"
    if short.note:
        return f"{short.note}: read the end of its output above"
    return f"{short.name} ends before {long.name}: its ranks have fewer batches in a pass"


def _explain_alone(comparison: PairComparison, step_index: int) -> str:
    history = next(each for each in (comparison.other, comparison.one) if each.are_alone)
    if any(rank.num_twins for rank in history.ranks):
        return "its processes have no RANK of their own and no process group: start a launcher"
    size = f"WORLD_SIZE is {history.size}"
    if len(history.ranks) < history.size:
        others = "the others were not started, or step no optimizer"
        return f"{size}, and {counted(len(history.ranks), 'process', 'es')} trained: {others}"
    if not history.has_group:
        return f"{size}, and the script starts no process group (init_process_group)"
    calls = [each for step in history.steps for rank in step.ranks for each in rank.forwards]
    if any(each["is_wrapper"] for each in calls):
        return "its wrapper never reduces gradients (no_sync)"
    if "DistributedDataParallel" in history.about("wrappers"):
        return "the model is called around its wrapper (as model.module), which reduces nothing"
    return "no DistributedDataParallel wraps the model, and no collective sends its gradients"


def _explain_uneven(history: CommandHistory) -> str:
    """Name the ranks that have fewer batches in their first pass over training examples."""
    counts = [
        next((rank.passes[n]["batches"] for n in rank.orders if n in rank.passes), None)
        for rank in history.ranks
    ]
    known_counts = [each for each in counts if each is not None]
    if len(known_counts) < len(counts) or len(set(known_counts)) < 2:
        return ""
    pairs = zip(history.ranks, counts, strict=True)
    short = ", ".join(str(rank.rank) for rank, count in pairs if count == min(known_counts))
    who = (
        f"rank {short} of {history.name} has {counted(min(known_counts), 'batch', 'es')} in a pass"
    )
    return f"{who}, others {max(known_counts)}: it leaves the loop, and they wait for its gradients"


def explain_resume(
    comparison: PairComparison, deviation: Deviation, one: CommandHistory, resume_step: int
) -> str:
    """Return which part of the state a resume has lost."""
    at = deviation.place
    if deviation.kind == "alone":
        return _explain_alone(comparison, at)
    if deviation.kind == "examples":
        return _explain_position(comparison, one, resume_step, at)
    if deviation.kind == "lr":
        rates = [next(iter(step.rates.values())) for step in one.steps]
        rate = next(iter(comparison.other.steps[at].rates.values()))
        if resume_step and relative(rate, rates[0]) < FP64:
            what = "the state of the optimizer or of the schedule"
            return f"the rate starts again: {what} is not restored"
        return "the state of the schedule is not restored: it is at another step than the weights"
    if deviation.kind == "precision":
        return "autocast, or the dtype of parameters, is not restored"
    if deviation.kind == "gradients":
        calls = [call for rank in comparison.other.steps[at].ranks for call in rank.forwards]
        if any(call["drawn"] for call in calls) or draws_random(comparison.other):
            return "a step draws random numbers, whose state is not restored"
        return explain_gradients(comparison, at)
    if deviation.kind == "weights":
        ours, theirs = (each.ranks[0].optimizers[0] for each in (comparison.one, comparison.other))
        optimizer = theirs["kind"]
        if reason := explain_groups(comparison.one.steps[at], comparison.other.steps[at]):
            return f"gradients and rates agree, and settings do not: {reason}"
        if ours["names"] != theirs["names"] and sorted(ours["names"]) == sorted(theirs["names"]):
            why = "load_state_dict goes by order, so they have the state of others"
            return f"the parameters of {optimizer} are in another order: {why}"
        return f"gradients and rates agree: the state of {optimizer} is not restored"
    return "something beside weights and optimizer is not restored on each rank"


def _explain_position(
    comparison: PairComparison, one: CommandHistory, resume_step: int, at: int
) -> str:
    if have_same_indices(comparison.one.steps[at], comparison.other.steps[at]):
        why = "the dataset draws random numbers (augmentation), whose state is not restored"
        return f"the indices agree, but not what the dataset returns for them: {why}"
    if reason := explain_size(comparison, comparison.one.steps[at], comparison.other.steps[at]):
        return reason
    rows = comparison.other.steps[at].rows
    same = [step_index for step_index, step in enumerate(one.steps) if step.rows == rows]
    expected = resume_step + at
    if not same:
        return "the order is another one: the sampler's seed, epoch or position is not restored"
    nearest = min(same, key=lambda each: abs(each - expected))
    apart = nearest - expected
    if _place_in_pass(one, nearest) == _place_in_pass(one, expected):
        where = f"those of step {nearest + 1}, which is at the same position of another pass"
        return f"the examples are {where}: the epoch, which gives the order, is not restored"
    what = "skipped" if apart > 0 else "used again"
    steps = f"the examples of {counted(abs(apart), 'step')} are {what}"
    return f"{steps}: the position in the pass is not restored"


def _place_in_pass(history: CommandHistory, step_index: int) -> int:
    """Return how many steps of the same pass over the data come before a step."""
    numbers = [[each.number for each in step.ranks[0].batches] for step in history.steps]
    return step_index - next(
        n for n, each in enumerate(numbers) if each[:1] == numbers[step_index][:1]
    )


def find_partly_restored(
    one: CommandHistory, resumed: CommandHistory, kill: int, bound: float
) -> Deviation | None:
    """Return a finding if a part of the weights at a resume is that of a step, and a part is not.

    Ranks are compared one by one: FSDP may restore the part of a rank and not that of another.
    """
    theirs = [first_weights(rank, 0) for rank in resumed.ranks]
    if len(one.ranks) != len(theirs):
        return None
    lost: dict[int, list[tuple[str, int]]] = {}  # by step, the latest first
    for step_number in range(min(kill, len(one.steps)), 0, -1):
        pairs = [
            (name, rank.rank, relative_norm(sketch, resumed_sketch) > bound)
            for rank, step, its in zip(
                resumed.ranks, one.steps[step_number - 1].ranks, theirs, strict=True
            )
            for name, sketch in step.weights.items()
            if sketch is not None and (resumed_sketch := its.get(name)) is not None
        ]
        missing = [(name, rank) for name, rank, is_lost in pairs if is_lost]
        if len(missing) < len(pairs):
            lost[step_number] = missing
    if not lost:
        return None
    best = min(lost, key=lambda each: len(lost[each]))
    names = list(dict.fromkeys(name for name, _ in lost[best]))
    ranks = sorted({rank for _, rank in lost[best]})
    reason = f"{name_some(names)} {'is' if len(names) == 1 else 'are'} not restored"
    if len(ranks) < len(theirs):
        rank_names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        reason += f" on {rank_names}: its part is not in the checkpoint, or is not loaded"
    where = f"only a part of the weights at the resume is that after step {best}"
    return Deviation("initial weights", best, where, reason)
