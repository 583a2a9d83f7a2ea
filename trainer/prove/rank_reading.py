"""Records of a rank, read as events: finds the batches that train, and the step that uses each."""

from __future__ import annotations

import base64
import json
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import ConfigError
from trainer.prove.merging import EvalPass, Event, MicroBatch, RankHistory, RankStep, Sketch, decode

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
    """Return the number of the step (in order, from 0) that uses the batch at each index.

    A batch is known again by the inputs of the model. If it is changed on the way, the order tells:
    with r backward passes per batch, batch j belongs to the step of backward r * j, even if the
    loop takes batches ahead. A loop with fewer backward passes uses its batches in their step.
    """
    batches = [index for index, each in enumerate(events) if each.get("is_training")]
    backwards = [index for index, each in enumerate(events) if each["event"] == "backward"]
    steps = [index for index, each in enumerate(events) if each["event"] == "step"]
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
    for event_index in batches:
        groups.setdefault(int(step_of[event_index]), []).append(event_index)
    usual = int(np.median([len(group) for group in groups.values()])) if groups else 0
    for group in groups.values():
        while len(group) > usual:
            between = events[group[0] : group[1]]
            if any(each["event"] in ("forward", "backward") for each in between):
                break
            group.pop(0)
    return {event_index: step for step, group in groups.items() for event_index in group}


def _match_calls(events: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Return the index of the first forward pass that has a batch's tensors, by the batch's index.

    Batches with the same first row look alike: the next one is used, not one that a resume skipped.
    """
    calls: dict[int, int] = {}
    last = -1  # batch that was matched
    recent: list[int] = []
    for event_index, each in enumerate(events):
        if each.get("is_training"):
            recent = [*recent[1 - MOST_AHEAD :], event_index]
        elif each["event"] == "forward" and each["training"]:
            recent_marks = [set(events[batch]["marks"]) for batch in recent]
            inputs = set(each["marks"])
            if len(recent_marks) > 1:
                constant = set.intersection(*recent_marks)  # as a mask of ones
                inputs = inputs - constant or inputs
            common = [len(inputs & marks) for marks in recent_marks]
            best = [batch for batch, n in zip(recent, common, strict=True) if n == max(common) > 0]
            fresh = [batch for batch in best if batch not in calls]
            if fresh:
                last = next((batch for batch in fresh if batch > last), fresh[0])
                calls[last] = event_index
    return calls


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
    numbers = [events[event_index]["number"] for event_index in batches]
    for count, (one, other) in enumerate(pairwise(numbers), 1):
        if one != other:
            before = sum(event_index < batches[count] for event_index in backwards)
            if before != count * ratio:
                return False
    return True


RECORDS = re.compile(r"rank\d+-\d+\.jsonl")


def find_records(folder: Path) -> list[Path]:
    """Return the records in a folder, without pipes and other files that are none."""
    return sorted(
        each
        for each in folder.glob("rank*.jsonl")
        if RECORDS.fullmatch(each.name) and stat.S_ISREG(each.lstat().st_mode)
    )


def open_histories(paths: Sequence[Path]) -> list[RankHistory]:
    """Return the history of each rank; of a rank with several processes, the longest."""
    read = [read_rank(path) for path in paths]
    longest = []
    for rank in sorted({each.rank for each in read}):
        own = [each for each in read if each.rank == rank]
        best = max(own, key=lambda each: len(each.steps))
        twins = [each for each in own if each.begun < best.end and best.begun < each.end]
        best.num_twins = sum(each is not best for each in twins)
        longest.append(best)
    return longest


def read_rank(path: Path) -> RankHistory:
    """Return the history in a file of records. Raises ConfigError for a damaged one.

    A last line that a kill has cut is left out.
    """
    try:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if text and not text.endswith("\n"):
            lines.pop()
        history = read_events([json.loads(line) for line in lines])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = "no other program may write there; run the proof again"
        raise ConfigError(f"{path}: the record is damaged ({why}); {advice}") from error
    history.num_bytes = len(text)
    return history


def read_events(events: list[dict[str, Any]]) -> RankHistory:
    """Return the history that events tell."""
    start = next((each for each in events if each["event"] == "start"), None)
    if start is None:
        raise ValueError("no start")
    history = RankHistory(start["rank"], start["world_size"], begun=start["begun"])
    passes = [each for each in events if each["event"] == "pass"]
    history.passes = {each["number"]: each for each in passes if "epoch" in each}  # described ones
    history.errors = [each["text"] for each in events if each["event"] == "error"]
    history.saves = [each["path"] for each in events if each["event"] == "save"]
    history.is_averaging = any(each["event"] == "averaged" for each in events)
    label_batches(events)
    StepReader(history, events).read()
    _read_passes(history, events)
    return history


class StepReader:
    """Reads the optimizer steps of a rank, in order."""

    def __init__(self, history: RankHistory, events: Sequence[dict[str, Any]]) -> None:
        self._history = history
        self._events = events
        self._owners = assign_batches(events)
        self._batches: dict[int, list[MicroBatch]] = {}  # by step
        for event_index, owner in self._owners.items():
            self._batches.setdefault(owner, []).append(_read_batch(events[event_index]))
        self._about: dict[int, Event] = {}  # by optimizer, as are the next two
        self._groups: dict[int, Mapping[str, Any]] = {}
        self._began: dict[int, int] = {}  # number of the backward events before a last step
        self._modes: Mapping[str, Any] = {}
        self._gradients: list[Event] = []  # what backward passes added, and what was dropped

    def read(self) -> None:
        """Add the steps to the history."""
        history = self._history
        since: list[Event] = []  # the last step
        for each in self._events:
            since.append(each)
            if each["event"] in ("contributed", "zeroed", "changed"):
                self._gradients.append(each)
            elif each["event"] == "optimizer":
                history.optimizers.setdefault(each["number"], each)
                history.num_rest = history.optimizers[0].get("rest")
                self._about[each["number"]] = each
            elif each["event"] == "step":
                history.steps.append(self._read_step(each, since))
                history.seconds = each["seconds"]
                history.recording = each["recording"]
                history.end = each.get("time", history.begun)
                since = []
        has_open = any(each["event"] == "backward" for each in since)
        history.num_begun = len(history.steps) + has_open

    def _read_step(self, event: Event, since: Sequence[Event]) -> RankStep:
        optimizer = event["optimizer"]
        names = self._about[optimizer]["names"]
        self._modes = event.get("modes", self._modes)
        groups = self._groups[optimizer] = event.get("groups", self._groups.get(optimizer, {}))
        settings = groups.get("settings", [{}])
        places = groups.get("places", [0] * len(names))
        calls = _read_calls(since)
        batches = self._batches.get(len(self._history.steps), [])
        if not self._owners:  # no DataLoader
            batches = [_read_batch(one) for one in calls if "rows" in one]
        backwards = [one for one in since if one["event"] == "backward"]
        rates = event.get("rates", [])
        return RankStep(
            optimizer,
            event["step"],
            batches,
            [each["loss"] for each in backwards],
            backwards,
            calls,
            decode(names, event.get("gradients", [None] * len(names))),
            decode(names, event["unclipped"]) if "unclipped" in event else {},
            event.get("clips", []),
            decode(names, event["weights"]),
            {name: rate for name, rate in zip(names, rates, strict=False) if rate is not None},
            event["random"],
            np.frombuffer(base64.b64decode(event["rest"])),
            settings[0].get("eps", 0.0),
            event["reads"],
            *self._read_gradients(optimizer),
            {name: {**settings[n], "group": n} for name, n in zip(names, places, strict=False)},
            self._modes,
            _number_by_pass(since, "criterion"),
            [each["pass"] for each in _number_by_pass(since, "advanced")],
            [names[parameter_index] for parameter_index in event.get("frozen", [])],
            self._read_changes(optimizer),
            event.get("exchanged", 0),
        )

    def _read_gradients(self, optimizer: int) -> tuple[list[dict[str, Sketch]], list[int]]:
        """Return what backward passes since the optimizer's last step added, and the drops."""
        about = self._about[optimizer]
        names = dict(zip(about.get("tags", []), about["names"], strict=False))
        passes: list[dict[str, Sketch]] = []
        drops: list[int] = []
        for each in self._gradients[self._began.get(optimizer, 0) :]:
            if each["event"] == "contributed":
                sketches = decode(list(map(str, each["tags"])), each["values"])
                named = {names[int(t)]: s for t, s in sketches.items() if int(t) in names}
                added = {name: sketch for name, sketch in named.items() if sketch is not None}
                passes += [added] if added else []
            elif each["event"] == "zeroed" and not names.keys().isdisjoint(each["tags"]):
                drops.append(len(passes))
        return passes, drops

    def _read_changes(self, optimizer: int) -> list[str]:
        """Return the parameters that were changed before this step, and begin the next."""
        names = self._about[optimizer]["names"]
        since = self._gradients[self._began.get(optimizer, 0) :]
        self._began[optimizer] = len(self._gradients)
        own = [
            each for each in since if each["event"] == "changed" and each["optimizer"] == optimizer
        ]
        return [names[parameter_index] for each in own for parameter_index in each["places"]]


def _number_by_pass(since: Sequence[Event], kind: str) -> list[Event]:
    """Return the events of a kind, with the number of the backward passes of the step before."""
    numbered_events: list[Event] = []
    num_backwards = 0
    for each in since:
        num_backwards += each["event"] == "backward"
        if each["event"] == kind:
            numbered_events.append({**each, "pass": num_backwards})
    return numbered_events


def _read_calls(since: Sequence[Event]) -> list[Event]:
    is_drawn = any(one["event"] == "drawn" for one in since)
    return [
        {**one, "drawn": is_drawn} for one in since if one["event"] == "forward" and one["training"]
    ]


def _read_batch(event: Event) -> MicroBatch:
    weights = event.get("weights") or {}
    return MicroBatch(event["rows"], event.get("index"), weights, event.get("number", 0))


def _read_passes(history: RankHistory, events: Sequence[Event]) -> None:
    """Read the passes over loaders: the order of training examples, and the evaluations."""
    after = 0
    passes: dict[int, EvalPass] = {}
    ended: set[int] = set()
    counts: Counter[int] = Counter()
    for each in events:
        if each["event"] == "step":
            after += 1
        elif each["event"] == "batch" and each["is_training"]:
            history.orders.setdefault(each["number"], []).extend(each["rows"])
        elif each["event"] == "batch":
            pass_number = each["number"]
            size = history.passes.get(pass_number, {}).get("size")
            passes.setdefault(pass_number, EvalPass(pass_number, after, size)).rows.extend(
                each["rows"]
            )
            counts[pass_number] += 1
            if counts[pass_number] == history.passes.get(pass_number, {}).get("batches"):
                ended.add(pass_number)  # some loops stop by themselves and ask for no further batch
        elif each["event"] == "end":
            ended.add(each["number"])
        elif each["event"] == "gather for metrics":
            history.gathers.add(after)
    history.evaluations = [each for pass_number, each in passes.items() if pass_number in ended]
