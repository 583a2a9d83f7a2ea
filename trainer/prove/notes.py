"""Notes: what is worth knowing of the commands, although it does not make them differ."""

from __future__ import annotations

from trainer.prove.comparison import PairComparison
from trainer.prove.example_reasons import name_repeated, repeats_order
from trainer.prove.merging import CommandHistory


def find_notes(found: PairComparison) -> list[str]:
    """Return sentences on mistakes that both commands share, and on the recording."""
    both = (found.one, found.other)
    notes = []
    repeating = [each.name for each in both if repeats_order(each)]
    if repeating:
        notes.append(name_repeated(repeating))
    for each in both:
        notes += _name_shared_files(each)
    ratios = [_slowdown(each) for each in both]
    size = max(rank.num_bytes for each in both for rank in each.ranks)
    seconds = " and ".join(f"{ratio:.2f}" for ratio in ratios)
    notes.append(f"recording made the commands {seconds} times slower, {size / 1e6:.1f} MB a rank")
    errors = [error for each in both for rank in each.ranks for error in rank.errors]
    if errors:
        notes.append(f"the recorder itself failed: {errors[0].strip().splitlines()[-1]}")
    return notes


def _name_shared_files(history: CommandHistory) -> list[str]:
    saves = [set(rank.saves) for rank in history.ranks]
    shared = set.intersection(*saves) if len(saves) > 1 else set()
    return [f"every rank of {history.name} writes {path}" for path in sorted(shared)[:1]]


def _slowdown(history: CommandHistory) -> float:
    rank = max(history.ranks, key=lambda each: each.seconds)
    return rank.seconds / max(rank.seconds - rank.recording, 1e-9)
