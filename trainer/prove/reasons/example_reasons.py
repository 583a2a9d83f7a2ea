"""Reasons why the examples of two commands differ, or the files that they read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from trainer.base.errors import counted
from trainer.prove.comparison import PairComparison
from trainer.prove.merging import CommandHistory, Step

UNSEEDED = 1 << 32  # torch draws a first seed of 64 bits if the script sets none
FEWEST = 4  # examples that tell an order
FILLS = "the sampler repeats examples, so that each rank has the same number"


def explain_examples(comparison: PairComparison, step_index: int) -> str:
    """Return the likely reason why a step uses other examples."""
    one = comparison.one.steps[step_index]
    other = comparison.other.steps[step_index]
    return (
        explain_repeated_step(comparison, step_index)
        or explain_skipped(comparison, step_index)
        or _explain_copies(comparison.other, other)
        or _explain_copies(comparison.one, one)
        or _explain_content(comparison, one, other)
        or _explain_short_pass(comparison.other, other)
        or _explain_short_pass(comparison.one, one)
        or explain_size(comparison, comparison.one.steps[0], comparison.other.steps[0])
        or _explain_pass(comparison)
        or explain_size(comparison, one, other)
        or _explain_draws(comparison)
        or _explain_order(comparison)
    )


def explain_repeated_step(comparison: PairComparison, step_index: int) -> str:
    """Name a step that follows no backward pass, where the other command has one."""
    counts = [
        history.steps[step_index].num_backwards for history in (comparison.one, comparison.other)
    ]
    if bool(counts[0]) == bool(counts[1]):
        return ""
    name = "A" if counts[1] else "B"
    return f"{name} steps its optimizer again, without a backward pass since the step before"


def explain_skipped(comparison: PairComparison, step_index: int) -> str:
    """Name a rank with more backward passes in a step than in its others, and than other ranks."""
    for history in (comparison.other, comparison.one):
        ranks = history.steps[step_index].ranks
        for rank, step in zip(history.ranks, ranks, strict=True):
            count = len(step.losses)
            usual = sorted(len(each.losses) for each in rank.steps)[len(rank.steps) // 2]
            if count > usual and any(len(each.losses) < count for each in ranks):
                why = "a check for finite values, for example, must decide for all ranks together"
                who = history.name_of(rank)
                return f"{who} skips an optimizer step that other ranks make: {why}"
    return ""


def _explain_copies(history: CommandHistory, step: Step) -> str:
    """Name ranks that use the same examples."""
    for one, other in combinations(step.ranks, 2):
        rows = Counter(one.rows)
        if rows and rows == Counter(other.rows):
            about = history.ranks[0].passes.values()
            why = "no sampler divides the dataset among the ranks"
            if not about:
                why = "the script draws them in the same way on each rank"
            elif any(each["size"] is None for each in about):
                why = "the iterable dataset does not divide its examples among the ranks"
            return f"ranks of {history.name} use the same examples: {why}"
    return ""


def _explain_content(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name random content, or another split: the dataset's indices agree."""
    if have_same_indices(one, other):
        pairs = (_places(comparison.one), _places(comparison.other))
        shared = pairs[0].keys() & pairs[1].keys()
        moved = sum(pairs[0][row] != pairs[1][row] for row in shared)
        if 10 * moved > len(shared):
            why = "the dataset is split or ordered by random numbers that depend on rank or run"
            return f"an index of the dataset is another example: {why} (random_split)"
        why = "the dataset draws random numbers (augmentation) that depend on rank or worker"
        return f"the indices agree, but not what the dataset returns for them: {why}"
    return ""


def have_same_indices(one: Step, other: Step) -> bool:
    """Return True if two steps are known to take the same indices of the dataset."""
    ours = sorted(str(index) for rank in one.ranks for index in rank.index)
    theirs = sorted(str(index) for rank in other.ranks for index in rank.index)
    return bool(ours) and ours == theirs


def _places(history: CommandHistory) -> dict[str, str]:
    """Return the dataset's index of each example."""
    batches = [each for step in history.steps for rank in step.ranks for each in rank.batches]
    pairs = [zip(each.rows, each.index or [], strict=False) for each in batches]
    return {row: str(index) for pair in pairs for row, index in pair}


def _explain_short_pass(history: CommandHistory, step: Step) -> str:
    """Name ranks that are in other passes at the same step."""
    turns = []
    for rank, its_step in zip(history.ranks, step.ranks, strict=True):
        order = {pass_number: turn for turn, pass_number in enumerate(rank.orders)}
        turns.append(max((order.get(each.number, 0) for each in its_step.batches), default=0))
    if len(set(turns)) < 2:
        return ""
    pairs = zip(history.ranks, turns, strict=True)
    ahead = ", ".join(str(rank.rank) for rank, turn in pairs if turn == max(turns))
    return f"rank {ahead} of {history.name} has fewer batches, and is in the next pass already"


def explain_size(comparison: PairComparison, one: Step, other: Step) -> str:
    """Name another global batch."""
    before = sum(one.rows.values())
    after = sum(other.rows.values())
    ratio = comparison.other.size / comparison.one.size
    if not before or before == after:
        return ""
    names = (comparison.one.name, comparison.other.name)
    sizes = (
        f"the global batch is {counted(before, 'example')} in {names[0]} and {after} in {names[1]}"
    )
    if after == before * ratio:
        micro = "or its number of micro-batches " if other.num_backwards > 1 else ""
        return f"{sizes}: the batch size of a rank {micro}was not divided by the number of ranks"
    if other.num_backwards != one.num_backwards and after * one.num_backwards == (
        before * other.num_backwards
    ):
        micro = f"{one.num_backwards} and {other.num_backwards} micro-batches"
        return f"{sizes}: a step has {micro}, and a micro-batch was not made smaller"
    return f"{sizes}: batch size x micro-batches x ranks must be the same"


def passes(history: CommandHistory) -> list[list[list[str]]]:
    """Return the training examples of each pass, of each rank, in order."""
    by_rank = [list(rank.orders.values()) for rank in history.ranks]
    return [list(each) for each in zip(*by_rank, strict=False)]


def repeats_order(history: CommandHistory) -> bool:
    """Return True if a pass begins in the order of the first one, although it is shuffled.

    A pass with one batch is a look at its first batch, unless the steps end there.
    """
    about = list(history.ranks[0].passes.values())
    if not any(each.get("epoch") is not None and each.get("shuffle") for each in about):
        return False
    every = passes(history)
    sizes = [_num_batches(history, pass_number) for pass_number in history.ranks[0].orders][
        : len(every)
    ]
    read = [
        each
        for pass_index, (each, size) in enumerate(zip(every, sizes, strict=True))
        if size > 1 or pass_index == len(every) - 1
    ]
    for other in read[1:]:
        lengths = [min(len(a), len(b)) for a, b in zip(read[0], other, strict=True)]
        pairs = zip(read[0], other, lengths, strict=True)
        if sum(lengths) >= FEWEST and all(a[:n] == b[:n] for a, b, n in pairs):
            return True
    return False


def _num_batches(history: CommandHistory, pass_number: int) -> int:
    """Return how many batches of a pass rank 0 has used."""
    return sum(
        each.number == pass_number for step in history.ranks[0].steps for each in step.batches
    )


def _explain_pass(comparison: PairComparison) -> str:
    """Name a pass with repeated or left out examples, or with the order of the pass before."""
    ours = passes(comparison.one)
    theirs = passes(comparison.other)
    for one, other in zip(ours[:-1], theirs[:-1], strict=False):
        a = Counter(row for rank in one for row in rank)
        b = Counter(row for rank in other for row in rank)
        if a == b:
            continue
        for name, more, less in (("B", b, a), ("A", a, b)):
            if not less - more and set(more) == set(less):
                count = sum((more - less).values())
                return f"{name} repeats {counted(count, 'example')} in a pass: {FILLS}"
            if not less - more:
                count = sum((more - less).values())
                other_name = "A" if name == "B" else "B"
                why = "the last, incomplete batches are dropped"
                return f"{other_name} leaves out {counted(count, 'example')} of a pass: {why}"
    pair = (repeats_order(comparison.one), repeats_order(comparison.other))
    if pair[0] != pair[1] and passes_agree(ours, theirs):
        name = "A" if pair[0] else "B"
        return name_repeated([name])
    return ""


def name_repeated(names: Sequence[str]) -> str:
    """Return the sentence on commands whose passes repeat their order."""
    who = " and ".join(names)
    return f"each pass of {who} has the order of the first: set_epoch is never called"


def are_unseeded(comparison: PairComparison) -> bool:
    """Return True if the commands have other seeds, and one of them is torch's own."""
    one, other = comparison.one.seeds[0], comparison.other.seeds[0]
    return one != other and max(one, other) > UNSEEDED


def passes_agree(ours: list[list[list[str]]], theirs: list[list[list[str]]]) -> bool:
    """Return True if the first passes have the same examples."""
    first = [Counter(row for rank in each[0] for row in rank) for each in (ours, theirs)]
    return first[0] == first[1]


def _explain_draws(comparison: PairComparison) -> str:
    """Name batches that the script draws itself."""
    if comparison.one.ranks[0].passes or comparison.other.ranks[0].passes:
        return ""
    why = "they depend on the rank, by a seed or a part of the data of its own"
    return f"the script draws its batches without a DataLoader, and {why}"


def _explain_order(comparison: PairComparison) -> str:
    """Name samplers and seeds."""
    if are_unseeded(comparison):
        return "the order is drawn from random numbers that the script does not seed"
    kinds = []
    for history in (comparison.one, comparison.other):
        orders = set(history.ranks[0].orders)
        about = history.ranks[0].passes
        kinds.append(
            {about[pass_number]["sampler"] for pass_number in orders if pass_number in about}
        )
    names = [", ".join(sorted(each)) or "none" for each in kinds]
    if kinds[0] != kinds[1]:
        return f"the order comes from {names[0]} in A and from {names[1]} in B"
    for key in ("shuffle", "seed"):
        values = [
            _settings_of_samplers(history, key) for history in (comparison.one, comparison.other)
        ]
        if values[0] != values[1]:
            return f"{key} of the sampler ({names[0]}) is {values[0]} in A and {values[1]} in B"
    order = f"the order ({names[0]}) depends on the layout"
    for history in (comparison.other, comparison.one):
        if len(set(history.seeds)) > 1:
            seeds = ", ".join(map(str, history.seeds))
            return f"{order}: the ranks of {history.name} have other seeds ({seeds})"
    if "RandomSampler" in kinds[0]:
        return f"{order}: its seed is drawn from the global random state; give it a generator"
    return f"{order}: each rank shuffles or reads its own part"


def _settings_of_samplers(history: CommandHistory, key: str) -> str:
    """Return the values of a setting of the samplers of training examples, on all ranks."""
    values = {
        str(rank.passes[pass_number].get(key))
        for rank in history.ranks
        for pass_number in rank.orders
        if pass_number in rank.passes
    }
    return " or ".join(sorted(values))
