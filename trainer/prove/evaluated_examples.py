"""Examples that each evaluation of a command has used, over all its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trainer.prove.history import EvalPass, RankHistory
from trainer.prove.merging import CommandHistory


def pair_evaluations(
    ours: Mapping[int, object], theirs: Mapping[int, object]
) -> list[tuple[int, int]]:
    """Return pairs of evaluations: after the same step, or else the first of each, and so on."""
    shared = sorted(ours.keys() & theirs.keys())
    if shared:
        return [(after, after) for after in shared]
    return list(zip(sorted(ours), sorted(theirs), strict=False))


def evaluations(history: CommandHistory) -> dict[int, Counter[str]]:
    """Return the examples of each evaluation over all ranks, by the number of steps before it.

    A pass that is the same on all ranks counts once: each rank has evaluated everything.
    """
    found: dict[int, Counter[str]] = {}
    afters = {each.after for rank in history.ranks for each in rank.evaluations}
    for after in afters:
        total: Counter[str] = Counter()
        by_rank = [_passes_after(rank, after) for rank in history.ranks]
        for number in range(max(map(len, by_rank))):
            rows = [Counter(own[number].rows) for own in by_rank if number < len(own)]
            is_whole = all(each == rows[0] for each in rows)
            total += rows[0] if is_whole else sum(rows, Counter())
        if any(after in rank.gathers for rank in history.ranks):
            total = _without_repeats(total, by_rank)
        found[after] = total
    return found


def _passes_after(rank: RankHistory, after: int) -> list[EvalPass]:
    return [each for each in rank.evaluations if each.after == after]


def _without_repeats(total: Counter[str], by_rank: Sequence[Sequence[EvalPass]]) -> Counter[str]:
    """Return the examples without those with which Accelerate filled the last batches."""
    sizes = [each.size for own in by_rank for each in own[:1]]
    repeats = sum(total.values()) - (sizes[0] or 0) if sizes else 0
    kept = Counter(total)
    for row, count in total.items():
        while repeats > 0 and kept[row] > 1 and count > 1:
            kept[row] -= 1
            repeats -= 1
    return kept
