"""Steps of a command: the records of its ranks, merged by the arithmetic of sketches."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from trainer.prove.private_view import WrittenFile

Sketch = np.ndarray[Any, np.dtype[np.float64]]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """Examples of one batch of a DataLoader, or of one forward pass if there is none."""

    rows: list[str]
    index: list[Any] | None
    weights: dict[str, float]
    number: int  # of its pass; 0 without a DataLoader


@dataclass
class RankStep:
    """One optimizer step on one rank. Sketches are in the order of the optimizer's parameters."""

    optimizer: int
    number: int
    batches: list[MicroBatch]
    losses: list[float]
    backwards: list[Event]
    forwards: list[Event]
    gradients: dict[str, Sketch | None]
    unclipped: dict[str, Sketch | None]
    clips: list[dict[str, Any]]
    weights: dict[str, Sketch | None]
    rates: dict[str, float]
    random: str
    rest: Sketch  # sum of the tensors that no optimizer has
    epsilon: float  # of an optimizer that divides by the size of gradients; 0 without
    reads: list[float]  # numbers that the script took from tensors since the step before
    passes: list[dict[str, Sketch]]  # what each backward pass added to the gradients of this step
    drops: list[int]  # for each zero_grad among them: the number of passes before it
    settings: dict[str, dict[str, Any]]  # of the optimizer, by parameter
    modes: Mapping[str, Any]
    criteria: list[Event]  # calls of loss functions, with the number of their backward pass
    advances: list[int]  # steps of schedules: for each, the number of backward passes before it
    frozen: list[str]  # parameters that need no gradient
    changed: list[str]  # parameters that were changed since the optimizer's step before
    exchanged: int  # elements of tensors that the rank sent or received since the step before

    @property
    def loss(self) -> float:
        """Return the sum of the losses of all backward passes: the one whose gradient is used."""
        return sum(self.losses)

    @property
    def rows(self) -> list[str]:
        return [row for batch in self.batches for row in batch.rows]

    @property
    def index(self) -> list[Any]:
        return [index for batch in self.batches for index in batch.index or []]

    def rename(self, names: Mapping[str, str]) -> None:
        """Give parameters other names."""
        mappings: list[dict[str, Any]] = [self.gradients, self.unclipped, self.weights]
        for each in (*mappings, self.rates, self.settings, *self.passes):
            rename_keys(each, names)
        for named in (self.frozen, self.changed):
            named[:] = [names.get(name, name) for name in named]


def rename_keys(mapping: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give the keys of a mapping other names."""
    renamed = {names.get(key, key): value for key, value in mapping.items()}
    mapping.clear()
    mapping.update(renamed)


@dataclass(frozen=True)
class EvalPass:
    """A whole pass over a loader without a backward pass; `after` is the number of steps before."""

    number: int
    after: int
    size: int | None  # of the dataset
    rows: list[str] = field(default_factory=list)


@dataclass
class RankHistory:
    """Everything that one process recorded."""

    rank: int
    world_size: int
    steps: list[RankStep] = field(default_factory=list)
    optimizers: dict[int, Event] = field(default_factory=dict)
    passes: dict[int, Event] = field(default_factory=dict)
    orders: dict[int, list[str]] = field(default_factory=dict)  # training examples by pass
    evaluations: list[EvalPass] = field(default_factory=list)
    gathers: set[int] = field(default_factory=set)  # evaluations without repeated examples
    errors: list[str] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    num_rest: int | None = None  # elements of the tensors that no optimizer has, at first
    num_begun: int = 0  # steps, with one that has a backward pass and no end
    is_averaging: bool = False  # the script has a collective of small tensors or objects
    begun: float = 0.0  # time of the start of the process
    seconds: float = 0.0
    recording: float = 0.0
    num_bytes: int = 0
    end: float = 0.0  # time of the last step
    num_twins: int = 0  # other processes of this rank that were alive while it trained


def decode(names: Sequence[str], texts: Sequence[str | None]) -> dict[str, Sketch | None]:
    """Return the sketches by name; None where a parameter has no gradient."""
    return {
        name: None if text is None else np.frombuffer(base64.b64decode(text))
        for name, text in zip(names, texts, strict=True)
    }


Sketches = dict[str, Sketch]
LEAST_EXCHANGED = 0.1  # of the trained elements: less than that are metrics
NUM = 16  # sums of a sketch, as in recorder/digests.py


def size_of(sketch: Sketch) -> float:
    """Return the norm of the finite sums of a sketch."""
    return float(np.linalg.norm(sketch[np.isfinite(sketch)]))


def distance(one: Sketch, other: Sketch) -> float:
    """Return the norm of the difference; sums that are not finite in both are equal."""
    is_finite = np.isfinite(one)
    if not np.array_equal(is_finite, np.isfinite(other)):
        return math.inf
    return float(np.linalg.norm(one[is_finite] - other[is_finite]))


@dataclass(frozen=True)
class Merged:
    """A set of tensors over all ranks: the whole tensors, and how far replicas are apart.

    `spread[name]`: largest relative difference of a replica from the mean of the replicas.
    `missing[name]`: indices, in the list of ranks, of those without the tensor that others have.
    """

    whole: Sketches
    spread: dict[str, float]
    missing: dict[str, list[int]]

    @cached_property
    def norm(self) -> float:
        """Return the norm of all tensors together."""
        return math.sqrt(sum(size_of(each) ** 2 for each in self.whole.values()))

    @property
    def is_zero(self) -> bool:
        """Return True if there is no tensor, or none but zeros."""
        return not any(np.any(each) for each in self.whole.values())


@dataclass(frozen=True)
class Step:
    """One optimizer step of a command, with what each rank did."""

    ranks: list[RankStep]
    gradients: Merged
    unclipped: Merged
    weights: Merged

    def rename(self, names: Mapping[str, str]) -> None:
        """Give parameters other names."""
        for merged in (self.gradients, self.unclipped, self.weights):
            for mapping in (merged.whole, merged.spread, merged.missing):
                rename_keys(mapping, names)
        for rank in self.ranks:
            rank.rename(names)

    @property
    def number(self) -> int:
        return self.ranks[0].number

    @property
    def optimizer(self) -> int:
        return self.ranks[0].optimizer

    @cached_property
    def rows(self) -> Counter[str]:
        """Return the examples of all ranks, each with how often it was used."""
        return Counter(row for rank in self.ranks for row in rank.rows)

    @property
    def num_backwards(self) -> int:
        return max(len(rank.losses) for rank in self.ranks)

    @cached_property
    def rates(self) -> dict[str, float]:
        return {name: rate for rank in self.ranks for name, rate in rank.rates.items()}

    def total(self, first: int = 0, end: int | None = None) -> Sketches | None:
        """Return the mean over ranks of what backward passes added; None if it is not known."""
        total: Sketches = {}
        for rank in self.ranks:
            if not rank.passes:
                return None
            for each in rank.passes[first:end]:
                for name, sketch in each.items():
                    total[name] = total.get(name, 0.0) + sketch / len(self.ranks)
        return total

    @property
    def losses(self) -> dict[str, float]:
        """Return the loss of the step under each convention of how ranks are combined."""
        values = [rank.loss for rank in self.ranks]
        losses = {"mean": float(np.mean(values)), "sum": float(np.sum(values))}
        counts = [len(rank.rows) for rank in self.ranks]
        if sum(counts):
            losses["rows"] = float(np.average(values, weights=counts))
        return losses


@dataclass
class CommandHistory:
    """Everything that a command recorded."""

    name: str  # A, B, ...
    command: str
    ranks: list[RankHistory]
    steps: list[Step]
    initial: dict[int, Merged]  # first weights, by optimizer
    size: int = 0  # ranks that the launcher started
    note: str = ""  # how it was ended or failed, although it made steps
    is_whole: bool = True  # each rank made all steps that were asked for, or ended by itself
    written: list[WrittenFile] = field(default_factory=list)  # in its private view

    @classmethod
    def of(cls, name: str, command: str, ranks: list[RankHistory]) -> CommandHistory:
        num_steps = min(len(rank.steps) for rank in ranks)
        parts = _find_parts(ranks)
        steps = [_merge_step([rank.steps[i] for rank in ranks], parts) for i in range(num_steps)]
        initial = {}
        for optimizer in ranks[0].optimizers:
            tensors = [first_weights(rank, optimizer) for rank in ranks]
            initial[optimizer] = _merge(tensors, parts.get(optimizer, {}))
        return cls(name, command, ranks, steps, initial, ranks[0].world_size)

    def name_of(self, rank: RankHistory) -> str:
        return f"rank {rank.rank} of {self.name}"

    @property
    def first_rank(self) -> str:
        """The name of the first rank with records: one that steps no optimizer has none."""
        return self.name_of(self.ranks[0])

    @property
    def is_model_parallel(self) -> bool:
        """Return True if ranks hold parts of the model other than those of sharded data."""
        describes = [each for rank in self.ranks for each in rank.optimizers.values()]
        has_parts = any(any(each["parts"]) for each in describes)
        is_sharded_data = any("FSDP" in each["wrappers"] for each in describes)
        names = {tuple(each["names"]) for each in describes if each["number"] == 0}
        return (has_parts and not is_sharded_data) or len(names) > 1

    @property
    def are_alone(self) -> bool:
        """Return True if ranks use the same examples and exchange nothing that we see.

        Their gradients agree then, whether they are reduced or not.
        """
        if any(rank.num_twins for rank in self.ranks):
            return True
        if self.size < 2 or self.is_model_parallel or self._exchanges():
            return False
        return all(rank.rows == step.ranks[0].rows for step in self.steps for rank in step.ranks)

    @property
    def has_group(self) -> bool:
        """Return True if a rank has a process group of torch.distributed."""
        return any(each["has_group"] for rank in self.ranks for each in rank.optimizers.values())

    def _exchanges(self) -> bool:
        """Return True if gradients or weights of a step may be those of several ranks."""
        if "FSDP" in self.about("wrappers"):
            return True
        about = self.ranks[0].optimizers.values()
        num_trained = sum(math.prod(shape) for each in about for shape in each["shapes"])
        for step in (step for rank in self.ranks for step in rank.steps):
            is_reduced = any(call["is_wrapper"] and call.get("reduces") for call in step.forwards)
            if is_reduced or step.exchanged > LEAST_EXCHANGED * num_trained:
                return True
        return False

    @property
    def parameters(self) -> set[str]:
        """Return the names of all parameters that an optimizer has."""
        return {name for merged in self.initial.values() for name in merged.whole}

    @property
    def seeds(self) -> list[int]:
        """Return the seed of torch's generator on each rank, at the first step."""
        return [next(iter(rank.optimizers.values()))["seed"] for rank in self.ranks]

    def about(self, key: str, optimizer: int | None = None) -> list[str]:
        """Return what the ranks noted of the models (of an optimizer): norms, dropout, wrappers."""
        every = [each for rank in self.ranks for each in rank.optimizers.values()]
        notes = [each[key] for each in every if optimizer in (None, each["number"])]
        return sorted({value for values in notes for value in values})


def first_weights(rank: RankHistory, optimizer: int) -> dict[str, Sketch | None]:
    """Return the weights of an optimizer before its first step."""
    about = rank.optimizers.get(optimizer)
    return decode(about["names"], about["weights"]) if about else {}


Parts = dict[int, dict[str, list[Any]]]  # by optimizer and name: of each rank


def _find_parts(ranks: Sequence[RankHistory]) -> Parts:
    """Return where each rank's part of a tensor is, by optimizer and name."""
    parts: Parts = {}
    for rank_index, rank in enumerate(ranks):
        for optimizer, about in rank.optimizers.items():
            for name, part in zip(about["names"], about["parts"], strict=True):
                places = parts.setdefault(optimizer, {}).setdefault(name, [None] * len(ranks))
                key = part and (tuple(part[0]), tuple(part[1]))
                places[rank_index] = (rank.rank,) if part and part[2] else key
    return parts


def _merge_step(ranks: list[RankStep], parts: Parts) -> Step:
    where = parts.get(ranks[0].optimizer, {})

    def merged(get: Callable[[RankStep], dict[str, Sketch | None]]) -> Merged:
        return _merge([get(rank) for rank in ranks], where)

    return Step(
        ranks,
        merged(lambda rank: rank.gradients),
        merged(lambda rank: rank.unclipped),
        merged(lambda rank: rank.weights),
    )


def _merge(tensors: Sequence[Mapping[str, Sketch | None]], where: Mapping[str, Any]) -> Merged:
    """Return mean over replicas, sum over distinct parts."""
    names = dict.fromkeys(name for each in tensors for name in each)
    whole: Sketches = {}
    spread: dict[str, float] = {}
    missing: dict[str, list[int]] = {}
    for name in names:
        owners = [rank_index for rank_index, each in enumerate(tensors) if name in each]
        absent = [rank_index for rank_index in owners if tensors[rank_index][name] is None]
        if len(absent) == len(owners):
            continue
        if absent:
            missing[name] = absent
        places = where.get(name, [None] * len(tensors))
        groups: dict[Any, list[Sketch]] = {}
        for rank_index in owners:
            sketch = tensors[rank_index][name]
            group = groups.setdefault(places[rank_index], [])
            group.append(np.zeros(NUM) if sketch is None else sketch)
        means = [np.mean(group, axis=0) for group in groups.values()]
        total = np.sum(means, axis=0)
        whole[name] = total
        size = size_of(total)
        apart = [
            distance(each, mean)
            for group, mean in zip(groups.values(), means, strict=True)
            for each in group
        ]
        worst = max(apart)
        spread[name] = worst / size if size else worst
    return Merged(whole, spread, missing)


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
    examples: dict[int, Counter[str]] = {}
    afters = {each.after for rank in history.ranks for each in rank.evaluations}
    for after in afters:
        total: Counter[str] = Counter()
        by_rank = [_passes_after(rank, after) for rank in history.ranks]
        for pass_index in range(max(map(len, by_rank))):
            rows = [Counter(own[pass_index].rows) for own in by_rank if pass_index < len(own)]
            is_whole = all(each == rows[0] for each in rows)
            total += rows[0] if is_whole else sum(rows, Counter())
        if any(after in rank.gathers for rank in history.ranks):
            total = _without_repeats(total, by_rank)
        examples[after] = total
    return examples


def _passes_after(rank: RankHistory, after: int) -> list[EvalPass]:
    return [each for each in rank.evaluations if each.after == after]


def _without_repeats(total: Counter[str], by_rank: Sequence[Sequence[EvalPass]]) -> Counter[str]:
    """Return the examples without those with which Accelerate filled the last batches."""
    sizes = [each.size for own in by_rank for each in own[:1]]
    repeats = sum(total.values()) - (sizes[0] or 0) if sizes else 0
    remaining = Counter(total)
    for row, count in total.items():
        while repeats > 0 and remaining[row] > 1 and count > 1:
            remaining[row] -= 1
            repeats -= 1
    return remaining


def rename(one: CommandHistory, other: CommandHistory) -> None:
    """Give the parameters of the other command the names of the first, where the order tells.

    A script may hold its model in another module on one layout.
    """
    for optimizer, about in one.ranks[0].optimizers.items():
        theirs = other.ranks[0].optimizers.get(optimizer)
        if theirs is None or set(about["names"]) == set(theirs["names"]):
            continue
        if about["shapes"] != theirs["shapes"]:
            continue
        names = dict(zip(theirs["names"], about["names"], strict=True))
        for step in other.steps:
            if step.ranks[0].optimizer == optimizer:
                step.rename(names)
        rename_keys(other.initial[optimizer].whole, names)
