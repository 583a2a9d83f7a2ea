"""History of one rank: its steps with examples, losses, gradients and weights, from its records."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Sketch = np.ndarray[Any, np.dtype[np.float64]]
Event = Mapping[str, Any]
MOST_BACKWARDS = 4  # per batch that are tried
MOST_AHEAD = 64  # batches that are looked through
AHEAD = 1  # batches that a loop takes before it needs them, beside those of one step


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

    @property
    def loss(self) -> float:
        """Return the sum of the losses of all backward passes: the one whose gradient is used."""
        return sum(self.losses)

    @property
    def rows(self) -> list[str]:
        return [row for batch in self.batches for row in batch.rows]

    @property
    def index(self) -> list[Any]:
        return [place for batch in self.batches for place in batch.index or []]


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
    time: float = 0.0
    seconds: float = 0.0
    recording: float = 0.0
    num_bytes: int = 0


def decode(names: Sequence[str], texts: Sequence[str | None]) -> dict[str, Sketch | None]:
    """Return the sketches by name; None where a parameter has no gradient."""
    return {
        name: None if text is None else np.frombuffer(base64.b64decode(text))
        for name, text in zip(names, texts, strict=True)
    }


def read_rank(path: Path) -> RankHistory:
    """Return the history in a file of records; a last line that a kill has cut is left out."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        lines.pop()
    events = [json.loads(line) for line in lines]
    start = next(each for each in events if each["event"] == "start")
    history = RankHistory(start["rank"], start["world_size"], time=start["time"])
    history.num_bytes = len(text)
    history.passes = {each["number"]: each for each in events if each["event"] == "pass"}
    history.errors = [each["text"] for each in events if each["event"] == "error"]
    history.saves = [each["path"] for each in events if each["event"] == "save"]
    history.is_averaging = any(each["event"] == "averaged" for each in events)
    label_batches(events)
    owners = assign_batches(events)
    _read_steps(history, events, owners)
    _read_passes(history, events)
    return history


def label_batches(events: Sequence[dict[str, Any]]) -> None:
    """Label each batch with is_training: does a model train before the next batch is taken?

    A loop may take a batch ahead, but then the calls before and after are of one kind. A call that
    does not train may come first, as of a teacher.
    """
    waiting: list[dict[str, Any]] = []
    calls: list[bool] = []  # since the last batch
    for each in [*events, {"event": "batch"}]:
        if each["event"] in ("forward", "backward"):
            calls.append(each["event"] == "backward" or each["training"])
        elif each["event"] == "batch":
            if calls:
                for batch in waiting:
                    batch["is_training"] = any(calls)
                waiting.clear()
                calls.clear()
            waiting.append(each)
    for batch in waiting:
        batch["is_training"] = False
    votes: dict[int, list[bool]] = {}
    for each in events:
        if each["event"] == "batch":
            votes.setdefault(each["number"], []).append(each["is_training"])
    for each in events:
        if each["event"] == "batch":
            vote = votes[each["number"]]
            each["is_training"] = 2 * sum(vote) >= len(vote)


def assign_batches(events: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Return the number of the step (in order, from 0) that uses the batch at each place.

    A batch is known again by the inputs of the model. If it is changed on the way, the order tells:
    with r backward passes per batch, batch j belongs to the step of backward r * j, even if the
    loop takes batches ahead. A loop with fewer backward passes uses its batches in their step.
    """
    batches = [place for place, each in enumerate(events) if each.get("is_training")]
    backwards = [place for place, each in enumerate(events) if each["event"] == "backward"]
    steps = [place for place, each in enumerate(events) if each["event"] == "step"]
    step_of: Sequence[int] = np.searchsorted(steps, np.arange(len(events))).tolist()
    owners = {batch: int(step_of[call]) for batch, call in _match_calls(events).items()}
    if set(owners.values()) >= set(range(len(steps))):
        return owners
    per_step = np.bincount([step_of[each] for each in batches]) if batches else np.zeros(1)
    for ratio in range(1, MOST_BACKWARDS + 1):
        if _fits(events, batches, backwards, ratio, int(per_step.max())):
            used = backwards[::ratio]
            return {b: int(step_of[w]) for b, w in zip(batches, used, strict=False)}
    return _assign_in_order(events, batches, step_of)


def _assign_in_order(
    events: Sequence[Event], batches: list[int], step_of: Sequence[int]
) -> dict[int, int]:
    """Return the next step for each batch, without those that a resumed loop skips at its start."""
    groups: dict[int, list[int]] = {}
    for place in batches:
        groups.setdefault(int(step_of[place]), []).append(place)
    usual = int(np.median([len(group) for group in groups.values()])) if groups else 0
    for group in groups.values():
        while len(group) > usual:
            between = events[group[0] : group[1]]
            if any(each["event"] in ("forward", "backward") for each in between):
                break
            group.pop(0)
    return {place: step for step, group in groups.items() for place in group}


def _match_calls(events: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Return the place of the first forward pass that has the tensors of the batch at a place."""
    found: dict[int, int] = {}
    recent: list[int] = []
    for place, each in enumerate(events):
        if each.get("is_training"):
            recent = [*recent[1 - MOST_AHEAD :], place]
        elif each["event"] == "forward" and each["training"]:
            known = [set(events[batch]["marks"]) for batch in recent]
            inputs = set(each["marks"])
            if len(known) > 1:
                constant = set.intersection(*known)  # as a mask of ones
                inputs = inputs - constant or inputs
            common = [len(inputs & marks) for marks in known]
            best = [batch for batch, n in zip(recent, common, strict=True) if n == max(common) > 0]
            fresh = [batch for batch in best if batch not in found]
            if fresh:
                found[fresh[0]] = place
    return found


def _fits(
    events: Sequence[Event], batches: list[int], backwards: list[int], ratio: int, most: int
) -> bool:
    """Return True if each batch can have `ratio` backward passes, in order and pass by pass."""
    used = backwards[::ratio]
    left = len(batches) - len(used)
    if not 0 <= left <= most + AHEAD or not backwards:
        return False
    if any(batch > first for batch, first in zip(batches, used, strict=False)):
        return False
    numbers = [events[place]["number"] for place in batches]
    for count, (one, other) in enumerate(pairwise(numbers), 1):
        if one != other:
            before = sum(place < batches[count] for place in backwards)
            if before != count * ratio:
                return False
    return True


def _read_steps(history: RankHistory, events: Sequence[Event], owners: Mapping[int, int]) -> None:
    by_step: dict[int, list[MicroBatch]] = {}
    for place, owner in owners.items():
        by_step.setdefault(owner, []).append(_read_batch(events[place]))
    names: dict[int, list[str]] = {}
    since: list[Event] = []  # the last step
    for each in events:
        since.append(each)
        if each["event"] == "optimizer":
            history.optimizers.setdefault(each["number"], each)
            history.num_rest = history.optimizers[0].get("rest")
            names[each["number"]] = each["names"]
        elif each["event"] == "step":
            is_drawn = any(one["event"] == "drawn" for one in since)
            calls: list[Event] = [
                {**one, "drawn": is_drawn}
                for one in since
                if one["event"] == "forward" and one["training"]
            ]
            own = by_step.get(len(history.steps), [])
            if not owners:  # no DataLoader
                own = [_read_batch(one) for one in calls if "rows" in one]
            backwards = [one for one in since if one["event"] == "backward"]
            number = each["optimizer"]
            epsilon = history.optimizers[number]["settings"].get("eps", 0.0)
            step = _read_step(each, names[number], own, backwards, calls, epsilon)
            history.steps.append(step)
            history.seconds = each["seconds"]
            history.recording = each["recording"]
            since = []
    has_open = any(each["event"] == "backward" for each in since)
    history.num_begun = len(history.steps) + has_open


def _read_batch(event: Event) -> MicroBatch:
    weights = event.get("weights") or {}
    return MicroBatch(event["rows"], event.get("index"), weights, event.get("number", 0))


def _read_step(
    event: Event,
    names: Sequence[str],
    batches: list[MicroBatch],
    backwards: list[Event],
    forwards: list[Event],
    epsilon: float,
) -> RankStep:
    rates = event.get("rates", [])
    return RankStep(
        event["optimizer"],
        event["step"],
        batches,
        [each["loss"] for each in backwards],
        backwards,
        forwards,
        decode(names, event.get("gradients", [None] * len(names))),
        decode(names, event["unclipped"]) if "unclipped" in event else {},
        event.get("clips", []),
        decode(names, event["weights"]),
        {name: rate for name, rate in zip(names, rates, strict=False) if rate is not None},
        event["random"],
        np.frombuffer(base64.b64decode(event["rest"])),
        epsilon,
        event["reads"],
    )


def _read_passes(history: RankHistory, events: Sequence[Event]) -> None:
    """Read the passes over loaders: the order of training examples, and the evaluations."""
    after = 0
    found: dict[int, EvalPass] = {}
    ended: set[int] = set()
    counts: Counter[int] = Counter()
    for each in events:
        if each["event"] == "step":
            after += 1
        elif each["event"] == "batch" and each["is_training"]:
            history.orders.setdefault(each["number"], []).extend(each["rows"])
        elif each["event"] == "batch":
            number = each["number"]
            size = history.passes.get(number, {}).get("size")
            found.setdefault(number, EvalPass(number, after, size)).rows.extend(each["rows"])
            counts[number] += 1
            if counts[number] == history.passes.get(number, {}).get("batches"):
                ended.add(number)  # some loops stop by themselves and ask for no further batch
        elif each["event"] == "end":
            ended.add(each["number"])
        elif each["event"] == "gather for metrics":
            history.gathers.add(after)
    history.evaluations = [each for number, each in found.items() if number in ended]


def open_histories(paths: Sequence[Path]) -> list[RankHistory]:
    """Return the history of each rank; of a rank with several processes, the longest."""
    read = [read_rank(path) for path in paths]
    ranks = sorted({each.rank for each in read})
    return [
        max((each for each in read if each.rank == rank), key=lambda each: len(each.steps))
        for rank in ranks
    ]
