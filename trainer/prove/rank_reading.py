"""Reading of the records of a rank: one line of JSON for each event."""

from __future__ import annotations

import base64
import json
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import ConfigError
from trainer.prove.assignment import assign_batches, label_batches
from trainer.prove.history import (
    EvalPass,
    Event,
    MicroBatch,
    RankHistory,
    RankStep,
    Sketch,
    decode,
)

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
    ranks = sorted({each.rank for each in read})
    return [
        max((each for each in read if each.rank == rank), key=lambda each: len(each.steps))
        for rank in ranks
    ]


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
    history = RankHistory(start["rank"], start["world_size"], time=start["time"])
    history.passes = {each["number"]: each for each in events if each["event"] == "pass"}
    history.errors = [each["text"] for each in events if each["event"] == "error"]
    history.saves = [each["path"] for each in events if each["event"] == "save"]
    history.is_averaging = any(each["event"] == "averaged" for each in events)
    for each in events:
        if each["event"] == "file":
            history.files.setdefault(each["path"], each["is_written"])
            history.written |= {each["path"]} if each["is_written"] else set()
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
        for place, owner in self._owners.items():
            self._batches.setdefault(owner, []).append(_read_batch(events[place]))
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
                since = []
        has_open = any(each["event"] == "backward" for each in since)
        history.num_begun = len(history.steps) + has_open

    def _read_step(self, event: Event, since: Sequence[Event]) -> RankStep:
        number = event["optimizer"]
        names = self._about[number]["names"]
        self._modes = event.get("modes", self._modes)
        groups = self._groups[number] = event.get("groups", self._groups.get(number, {}))
        settings = groups.get("settings", [{}])
        places = groups.get("places", [0] * len(names))
        calls = _read_calls(since)
        batches = self._batches.get(len(self._history.steps), [])
        if not self._owners:  # no DataLoader
            batches = [_read_batch(one) for one in calls if "rows" in one]
        backwards = [one for one in since if one["event"] == "backward"]
        rates = event.get("rates", [])
        return RankStep(
            number,
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
            *self._read_gradients(number),
            {name: {**settings[n], "group": n} for name, n in zip(names, places, strict=False)},
            self._modes,
            _number_by_pass(since, "criterion"),
            [each["pass"] for each in _number_by_pass(since, "advanced")],
            [names[place] for place in event.get("frozen", [])],
            self._read_changes(number),
        )

    def _read_gradients(self, number: int) -> tuple[list[dict[str, Sketch]], list[int]]:
        """Return what backward passes since the optimizer's last step added, and the drops."""
        about = self._about[number]
        names = dict(zip(about.get("tags", []), about["names"], strict=False))
        passes: list[dict[str, Sketch]] = []
        drops: list[int] = []
        for each in self._gradients[self._began.get(number, 0) :]:
            if each["event"] == "contributed":
                found = decode(list(map(str, each["tags"])), each["values"])
                named = {names[int(t)]: s for t, s in found.items() if int(t) in names}
                kept = {name: sketch for name, sketch in named.items() if sketch is not None}
                passes += [kept] if kept else []
            elif each["event"] == "zeroed" and not names.keys().isdisjoint(each["tags"]):
                drops.append(len(passes))
        return passes, drops

    def _read_changes(self, number: int) -> list[str]:
        """Return the parameters that were changed before this step, and begin the next."""
        names = self._about[number]["names"]
        since = self._gradients[self._began.get(number, 0) :]
        self._began[number] = len(self._gradients)
        own = [each for each in since if each["event"] == "changed" and each["optimizer"] == number]
        return [names[place] for each in own for place in each["places"]]


def _number_by_pass(since: Sequence[Event], kind: str) -> list[Event]:
    """Return the events of a kind, with the number of the backward passes of the step before."""
    found: list[Event] = []
    number = 0
    for each in since:
        number += each["event"] == "backward"
        if each["event"] == kind:
            found.append({**each, "pass": number})
    return found


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
