"""Reasons for other learning rates and other updates: schedules, settings, groups."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from trainer.prove.bounds import relative
from trainer.prove.comparison import PairComparison
from trainer.prove.merging import CommandHistory, Step
from trainer.prove.reasons.example_reasons import explain_repeated_step
from trainer.prove.reasons.pass_reasons import explain_changes, explain_members, name_some


def explain_rates(found: PairComparison, place: int) -> str:
    if reason := explain_repeated_step(found, place):
        return reason
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
    if reason := _explain_advances(found):
        return reason
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
    counts = [_count_advances(history, found.num_steps) for history in (found.one, found.other)]
    if counts[0] == counts[1] > 0:
        return "the schedules advance equally often, so their lengths or other settings differ"
    return "the schedule depends on the layout, for example on the number of batches on a rank"


def _count_advances(history: CommandHistory, num_steps: int) -> int:
    return sum(len(step.ranks[0].advances) for step in history.steps[1:num_steps])


def _agree(one: list[float], other: list[float]) -> bool:
    pairs = list(zip(one, other, strict=False))
    return len(pairs) > 1 and len(set(one)) > 1 and all(relative(a, b) < 1e-9 for a, b in pairs)


def _explain_advances(found: PairComparison) -> str:
    """Name a schedule that advances more often, from the calls of its `step`."""
    ours, theirs = (_count_advances(each, found.num_steps) for each in (found.one, found.other))
    for history, count, usual in ((found.other, theirs, ours), (found.one, ours, theirs)):
        times = round(count / usual) if usual else 1
        if times > 1 and abs(count - times * usual) < times:
            places = [set(step.ranks[0].advances) for step in history.steps[1 : found.num_steps]]
            return _name_fast_schedule(history, times, any(len(each) > 1 for each in places))
    return ""


def _name_fast_schedule(history: CommandHistory, times: int, by_micro: bool) -> str:
    why = f"the schedule of {history.name} advances {times} times at once"
    if by_micro:
        return f"{why}, once for each micro-batch"
    return f"{why}, once for each rank" if times == history.size else why


def _explain_fast_schedule(history: CommandHistory, times: int, is_before: bool) -> str:
    by_micro = times == max(step.num_backwards for step in history.steps)
    is_by_rank = times == history.size and not is_before
    return _name_fast_schedule(history, times, by_micro and not is_by_rank)


def explain_weights(found: PairComparison, place: int) -> str:
    """Return the likely reason why the weights after a step differ."""
    if reason := explain_members(found) or explain_changes(found, place):
        return reason
    agree = "gradients and learning rates agree, so the update differs"
    number = found.other.steps[place].ranks[0].optimizer
    one = found.one.ranks[0].optimizers[number]
    other = found.other.ranks[0].optimizers.get(number, one)
    if one["kind"] != other["kind"]:
        return f"{agree}: the optimizers are {one['kind']} and {other['kind']}"
    if reason := explain_groups(found.one.steps[place], found.other.steps[place]):
        return f"{agree}: {reason}"
    if any(any(rank.optimizers[number]["parts"]) for rank in found.other.ranks):
        why = f"{other['kind']} computes something over a whole tensor, and a rank has a part of it"
        return f"{agree}: {why}"
    return f"{agree}: the optimizer's state differs, or what its step computes"


def explain_groups(one: Step, other: Step) -> str:
    """Name settings of the optimizer that differ, for all parameters or for some."""
    ours, theirs = one.ranks[0].settings, other.ranks[0].settings
    names = [name for name in ours if name in theirs]
    apart: dict[str, list[str]] = {}
    for name in names:
        for key, value in ours[name].items():
            if key != "group" and theirs[name].get(key) != value:
                apart.setdefault(key, []).append(name)
    for key, differing in apart.items():
        before, after = ours[differing[0]][key], theirs[differing[0]].get(key)
        if len(differing) == len(names):
            return f"{key} is {before} and {after}"
        is_moved = _has(ours, key, after) and _has(theirs, key, before)
        why = ", as they are in other groups" if is_moved else ""
        return f"{key} of {name_some(differing)} is {before} and {after}{why}"
    return ""


def _has(settings: Mapping[str, Mapping[str, Any]], key: str, value: Any) -> bool:
    return any(each.get(key) == value for each in settings.values())
