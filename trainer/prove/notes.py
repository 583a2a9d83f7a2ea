"""Notes on two commands: mistakes that both share, steps that prove little, and the recording."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer.base.same import relative
from trainer.prove.comparison import REST, PairComparison, rest_apart
from trainer.prove.merging import CommandHistory, Step
from trainer.prove.private_view import WrittenFile
from trainer.prove.reasons.example_reasons import name_repeated, repeats_order
from trainer.prove.reasons.gradient_reasons import BY_SCALE
from trainer.prove.rounding import name_unjudged


def find_notes(comparison: PairComparison, is_protected: bool) -> list[str]:
    """Return sentences on mistakes that both commands share, and on the recording.

    The user's disk `is_protected` if the commands could change nothing on it.
    """
    both = (comparison.one, comparison.other)
    notes = []
    repeating = [each.name for each in both if repeats_order(each)]
    if repeating:
        notes.append(name_repeated(repeating))
    notes += _name_written(both, is_protected)
    for each in both:
        if any(c["is_scaled"] for step in each.steps for rank in step.ranks for c in rank.clips):
            notes.append(f"{each.name} clips gradients before GradScaler.unscale_: {BY_SCALE}")
        notes += [each.note] if each.note else []
        notes += _name_shared_files(each) + _name_own_loss(each) + _name_copies(each)
    starts = [who for who, apart in rest_apart(comparison, 0).items() if apart < math.inf]
    if starts and comparison.is_same:
        notes.append(
            f"{REST} of {starts[0]} start with other values than those of {both[0].first_rank}"
        )
    notes += name_unjudged(both, not comparison.bounds.noise) + _name_steps(comparison)
    ratios = [_slowdown(each) for each in both]
    size = max(rank.num_bytes for each in both for rank in each.ranks)
    seconds = " and ".join(f"{ratio:.2f}" for ratio in ratios)
    notes.append(f"recording made the commands {seconds} times slower, {size / 1e6:.1f} MB a rank")
    errors = [error for each in both for rank in each.ranks for error in rank.errors]
    if errors:
        notes.append(f"the recorder itself failed: {errors[0].strip().splitlines()[-1]}")
    return notes


MOST_FILES_SHOWN = 4


def _name_written(both: Sequence[CommandHistory], is_protected: bool) -> list[str]:
    """Name what commands wrote in their private views, or in private copies."""
    notes = []
    lists = {each.name: each.written for each in both if each.written}
    is_same = len(lists) == 2 and len({tuple(each) for each in lists.values()}) == 1
    named = {" and ".join(lists): both[0].written} if is_same else lists
    for who, files in named.items():
        order = sorted(files, key=lambda each: (each.what == "new", each.path))
        shown = [_name_file(each) for each in order[:MOST_FILES_SHOWN]]
        more = f" and {len(files) - MOST_FILES_SHOWN} more" if len(files) > MOST_FILES_SHOWN else ""
        gone = "in private copies that are gone"
        if is_protected:
            gone = "in a private view of the disk that is gone; your files are unchanged"
        notes.append(f"{who} wrote {', '.join(shown)}{more}, {gone}")
    return notes


def _name_file(file: WrittenFile) -> str:
    path = Path(file.path)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}" if file.what == "new" else f"{shown} ({file.what})"


def _name_steps(comparison: PairComparison) -> list[str]:
    """Name steps that prove little: without gradients, or with numbers that are not finite."""
    pairs = list(zip(comparison.one.steps, comparison.other.steps, strict=False))
    empty = [n for n, pair in enumerate(pairs, 1) if all(s.gradients.is_zero for s in pair)]
    notes = []
    if empty and len(empty) < len(pairs):
        notes.append(f"no parameter has a gradient in {_name_places(empty)}, which prove nothing")
    for kind in ("losses", "weights"):
        for who, are_finite in (
            ("A and B", (False, False)),
            ("A", (False, True)),
            ("B", (True, False)),
        ):
            places = [
                n
                for n, pair in enumerate(pairs, 1)
                if tuple(_is_finite(step, kind) for step in pair) == are_finite
            ]
            if places and (comparison.is_same or who == "A and B"):
                where = _name_places(places)
                notes.append(f"{kind} of {who} are not finite (nan or inf) in {where}")
    return notes


def _name_places(places: list[int]) -> str:
    if len(places) > 1 and places[-1] - places[0] == len(places) - 1:
        return f"steps {places[0]} to {places[-1]}"
    return f"{'steps' if len(places) > 1 else 'step'} {', '.join(map(str, places[:6]))}"


def _is_finite(step: Step, kind: str) -> bool:
    if kind == "losses":
        return math.isfinite(step.losses["mean"])
    return all(np.isfinite(each).all() for each in step.weights.whole.values())


def _name_shared_files(history: CommandHistory) -> list[str]:
    saves = [set(rank.saves) for rank in history.ranks]
    shared = set.intersection(*saves) if len(saves) > 1 else set()
    return [f"every rank of {history.name} writes {path}" for path in sorted(shared)[:1]]


def _name_own_loss(history: CommandHistory) -> list[str]:
    """Name a loss that the first rank reads, as for a log, although it is of its own examples."""
    own = history.ranks[0].steps
    if any(rank.is_averaging for rank in history.ranks):
        return []
    for step_index, step in enumerate(history.steps):
        reads = {each for later in own[step_index : step_index + 2] for each in later.reads}
        for losses in zip(*(rank.losses for rank in step.ranks), strict=False):
            mean = float(np.mean(losses))
            if losses[0] in reads and relative(losses[0], mean) > 1e-4:
                what = f"{losses[0]:.4g}; the mean over the ranks is {mean:.4g}"
                who = f"{history.first_rank} reads the loss of its own examples ({what})"
                return [f"{who}: average it before you log it"]
    return []


def _name_copies(history: CommandHistory) -> list[str]:
    """Name examples that data workers repeat within a pass."""
    times = 0
    for rank in history.ranks:
        for pass_number, rows in rank.orders.items():
            if rank.passes.get(pass_number, {}).get("size") is None:  # of an iterable dataset
                times = max(times, int(np.median(list(Counter(rows).values()))))
    if times < 2:
        return []
    why = "the iterable dataset does not divide them among its workers (get_worker_info)"
    return [f"each example comes {times} times in a pass of {history.name}: {why}"]


def _slowdown(history: CommandHistory) -> float:
    rank = max(history.ranks, key=lambda each: each.seconds)
    return rank.seconds / max(rank.seconds - rank.recording, 1e-9)
