"""Proof of a resume: a command is killed, resumed, and compared with a run that was not killed."""

from __future__ import annotations

from dataclasses import replace

from trainer.errors import ConfigError, counted
from trainer.prove.bounds import Bounds, compare_tensors, relative
from trainer.prove.comparison import REST, Deviation, PairComparison, compare, rest_apart
from trainer.prove.merging import CommandHistory
from trainer.prove.proof import Bench, find_bounds
from trainer.prove.rank_reading import open_histories
from trainer.prove.reasons.example_reasons import have_same_indices
from trainer.prove.reasons.gradient_reasons import draws_random, explain_gradients
from trainer.prove.reasons.optimizer_reasons import explain_groups
from trainer.prove.runner import CommandRun


def prove_resume(bench: Bench, command: str, resume: str, kill: int) -> PairComparison:
    """Return how a resumed run differs from one that was not killed.

    The killed run comes first, so that it finds no checkpoint of the reference.
    """
    dtype = "native" if bench.dtype == "native" else "fp64"
    work = bench.folder.absolute() / "files-killed"
    killed = bench.run("A killed", command, dtype, work=work, kill=kill)
    if killed.has_failed and not killed.is_killed and bench.dtype == "auto":
        dtype = "native"
        killed = bench.run("A killed", command, dtype, work=work, kill=kill)
    if not killed.is_killed:
        killed.check()
        bench.tell(killed.last_lines())
        what = f"{killed.stopped or 'ended with code 0'} before {counted(kill, 'step')} were made"
        raise ConfigError(f"{command}: {what}; give kill=STEP, or limit=SECONDS")
    resumed = bench.read("resumed", bench.run("A resumed", resume, dtype, work=work))
    one = bench.read("A", bench.run("A", command, dtype, work=work.with_name("files")))
    bounds = find_bounds(bench, one, dtype)
    return _align(one, resumed, bounds, kill, killed)


def _align(
    one: CommandHistory, resumed: CommandHistory, bounds: Bounds, kill: int, killed: CommandRun
) -> PairComparison:
    """Compare from the step on whose weights the resumed run has at its start."""
    begun = CommandHistory.of("killed", killed.command, open_histories(killed.records))
    first = one.initial[0]
    if compare_tensors(first, begun.initial[0], bounds.weight_floor)[0] > max(bounds.least, 1e-6):
        what = "starts with other weights each time, or found a checkpoint of another run"
        advice = "set its seed, and give it {dir} as the folder of its checkpoints"
        raise ConfigError(f"{one.command}: {what}; {advice}")
    states = [first, *(step.weights for step in one.steps[: kill + 1])]
    apart = [compare_tensors(each, resumed.initial[0], bounds.weight_floor)[0] for each in states]
    place = min(range(len(apart)), key=lambda each: apart[each])
    reference = replace(one, steps=one.steps[place:], initial={**one.initial, 0: states[place]})
    found = compare(reference, resumed, bounds)
    found.worst["evaluation"] = 0.0
    found.deviations = [
        replace(each, reason=explain_resume(found, each, one, place))
        for each in found.deviations
        if each.kind not in ("evaluation", "steps")
    ]
    if apart[place] > max(bounds.least, 1e-6 if bounds.noise else 0.0):
        where = f"the weights at the resume are those of no step (nearest: after step {place})"
        found.deviations = [Deviation("initial weights", 0, where, "they are not all restored")]
    elif place == 0:
        where = "the resumed command starts with the first weights"
        found.deviations = [Deviation("initial weights", 0, where, "no checkpoint was loaded")]
    else:
        repeats = f"; {counted(kill - place, 'step')} repeated" if place < kill else ""
        found.notes.append(f"killed after step {kill}, resumed after step {place}{repeats}")
        if f"rank 0 of {resumed.name}" in rest_apart(found, 0) and not found.deviations:
            found.deviations = [Deviation("rest", 0, f"{REST} differ", "they are not restored")]
    return found


def explain_resume(
    found: PairComparison, deviation: Deviation, one: CommandHistory, place: int
) -> str:
    """Return which part of the state was lost."""
    at = deviation.place
    if deviation.kind == "examples":
        return _explain_position(found, one, place, at)
    if deviation.kind == "lr":
        rates = [next(iter(step.rates.values())) for step in one.steps]
        rate = next(iter(found.other.steps[at].rates.values()))
        if place and relative(rate, rates[0]) < 1e-9:
            what = "the state of the optimizer or of the schedule"
            return f"the rate starts again: {what} is not restored"
        return "the state of the schedule is not restored: it is at another step than the weights"
    if deviation.kind == "precision":
        return "autocast, or the dtype of parameters, is not restored"
    if deviation.kind == "gradients":
        calls = [call for rank in found.other.steps[at].ranks for call in rank.forwards]
        if any(call["drawn"] for call in calls) or draws_random(found.other):
            return "a step draws random numbers, whose state is not restored"
        return explain_gradients(found, at)
    if deviation.kind == "weights":
        ours, theirs = (each.ranks[0].optimizers[0] for each in (found.one, found.other))
        optimizer = theirs["kind"]
        if reason := explain_groups(found.one.steps[at], found.other.steps[at]):
            return f"gradients and rates agree, and settings do not: {reason}"
        if ours["names"] != theirs["names"] and sorted(ours["names"]) == sorted(theirs["names"]):
            why = "load_state_dict goes by order, so they have the state of others"
            return f"the parameters of {optimizer} are in another order: {why}"
        return f"gradients and rates agree: the state of {optimizer} is not restored"
    return "something beside weights and optimizer is not restored on each rank"


def _explain_position(found: PairComparison, one: CommandHistory, place: int, at: int) -> str:
    if have_same_indices(found.one.steps[at], found.other.steps[at]):
        why = "the dataset draws random numbers (augmentation), whose state is not restored"
        return f"the indices agree, but not what the dataset returns for them: {why}"
    rows = found.other.steps[at].rows
    same = [number for number, step in enumerate(one.steps) if step.rows == rows]
    expected = place + at
    if not same:
        return "the order is another one: the sampler's seed, epoch or position is not restored"
    nearest = min(same, key=lambda each: abs(each - expected))
    apart = nearest - expected
    what = "skipped" if apart > 0 else "used again"
    steps = f"the examples of {counted(abs(apart), 'step')} are {what}"
    return f"{steps}: the position in the pass is not restored"
