"""Assignment: which batches are for training, and which optimizer step uses each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trainer.prove.history import Event

MOST_BACKWARDS = 4  # per batch that are tried
MOST_AHEAD = 64  # batches that are looked through
AHEAD = 1  # batches that a loop takes before it needs them, beside those of one step


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
