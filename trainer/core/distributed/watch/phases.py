"""The watcher's view of a rank: its phase, the collective that it waits in, and its speed.

The watcher asks each rank for its last collectives (watching.py) and compares the answers.
This module loads no more than the standard library.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

MAX_ANSWER = 2**18  # bytes of a mailbox; unused pages of it take no memory
ASK_BYTE = b"?"
ANSWER_PATIENCE_S = 2.0  # reading 2,000 collectives takes 0.15 s

Value = TypeVar("Value")


class CollectiveCall(NamedTuple):
    """A collective as a rank called it; `shape`: number and dtype of its elements."""

    number: int
    name: str
    shape: str
    is_done: bool


class History:
    """One rank's last collectives in one group; `members` are the ranks of the group."""

    def __init__(self, members: list[int], description: str, calls: list[list[Any]]):
        self.members = members
        self._description = description
        self.calls = {call.number: call for call in (CollectiveCall(*each) for each in calls)}
        self.waits_in = min((n for n, call in self.calls.items() if not call.is_done), default=None)

    def describe(self, ordinal: int) -> str:
        """Describe a collective, such as "all_reduce number 17 of the world (3 float32)"."""
        of = {"default_pg": "the world", "undefined": f"the group of {name_ranks(self.members)}"}
        group = of.get(self._description, f"the {self._description} group")
        call = self.calls[ordinal]
        return f"{call.name} number {ordinal} of {group}" + (
            f" ({call.shape})" if call.shape else ""
        )


Answer = Mapping[str, History]  # by group


class Mailbox:
    """Memory that a rank shares with the watcher: the number of its answers, then the last one."""

    def __init__(self, memory: memoryview, pipe: str = ""):
        """`pipe`: the path of the rank's pipe, which the watcher opens once and for all.

        Later another file of the rank may have the same path.
        """
        self._count = memory[:8].cast("Q")
        self._text = memory[8:]
        self._before = 0
        self._pipe = -1
        with suppress(OSError):  # there is none, or the rank has exited
            self._pipe = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)

    def write(self, text: str) -> None:
        """Write an answer; an empty one if the rank cannot read its recorder."""
        data = text.encode()[: len(self._text) - 1] + b"\0"
        self._text[: len(data)] = data
        self._count[0] += 1

    def ask(self) -> bool:
        """Ask the rank. Return False if nobody will answer."""
        self._before = self._count[0]
        with suppress(OSError):
            return os.write(self._pipe, ASK_BYTE) > 0
        return False

    def has_answer(self) -> bool:
        return self._count[0] > self._before

    def read(self) -> Answer:
        """Return the answer. Raises ValueError if it is empty, or too long for the memory."""
        groups = json.loads(bytes(self._text).split(b"\0")[0])
        return {key: History(*answer) for key, answer in groups.items()}


def ask(mailboxes: Mapping[int, Mailbox]) -> dict[int, Answer]:
    """Ask ranks for their last collectives; return those of the ranks that answer in time."""
    asked = {rank: mailbox for rank, mailbox in mailboxes.items() if mailbox.ask()}
    end = time.monotonic() + ANSWER_PATIENCE_S
    while not all(each.has_answer() for each in asked.values()) and time.monotonic() < end:
        time.sleep(0.01)
    answers = {}
    for rank, mailbox in asked.items():
        with suppress(ValueError):
            if mailbox.has_answer():
                answers[rank] = mailbox.read()
    return answers


def describe(answers: Mapping[int, Answer], ranks: Collection[int]) -> Iterator[str]:
    """Yield a line for each collective that ranks wait in, about this node's `ranks`."""
    for key in sorted({key for answer in answers.values() for key in answer}):
        histories = {rank: answer[key] for rank, answer in answers.items() if key in answer}
        waits = {rank: each.waits_in for rank, each in histories.items() if each.waits_in}
        for ordinal in sorted({*waits.values()}):
            first = [rank for rank in waits if waits[rank] == ordinal]
            others = {*histories[first[0]].members}.intersection(ranks).difference(first)
            clauses = {
                rank: _place(ordinal, histories.get(rank), rank in answers)
                for rank in (*first, *sorted(others))
            }
            yield "; ".join(
                f"{name_ranks(who)} {clause[len(who) > 1]} {clause[2]}"
                for clause, who in ranks_by_value(clauses).items()
            )


def _place(ordinal: int, history: History | None, has_answered: bool) -> tuple[str, str, str]:
    """Return where a rank is, as seen from a collective: a verb, its plural, and the rest."""
    if not has_answered:
        return ("does", "do", "not answer and may not have come to it")
    if history is None or max(history.calls) < ordinal:
        return ("has", "have", "not come to it")
    what = history.describe(ordinal) if ordinal in history.calls else "it"
    if history.waits_in == ordinal:
        return ("waits", "wait", f"in {what}")
    return ("has", "have", f"finished {what}")


def ranks_by_value(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """Return the ranks that have each value, in the order of the first rank that has it."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def name_ranks(ranks: Iterable[int]) -> str:
    """Format rank numbers: `rank 3`, `ranks 0, 1`, `ranks 0-6, 9`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    parts = [f"{r[0]}-{r[-1]}" if r[-1] - r[0] > 1 else ", ".join(map(str, r)) for r in ranges]
    is_one = len(ranges) == 1 and len(ranges[0]) == 1
    return f"rank{'s' * (not is_one)} {', '.join(parts)}"


HOST = os.uname().nodename
PATIENCE = 5  # times the limit, before the first step and while saving
STRAGGLER = 3.0  # times the median
STRAGGLER_STEPS = 50
# The groups of a mesh; 0: none of these.
MESH_GROUPS = ("", "pipeline", "replicate", "shard", "context", "tensor", "data")
PHASES = (
    "start-up",
    "building data and model",
    "the data loader",
    "forward and backward",
    "gradient all-reduce",
    "the update",
    "reading the losses",
    "evaluation",
    "saving a checkpoint",
    "the end of the run",
    "waiting for the device",
    "copying to checkpoint.mirror",
)


class Phase(IntEnum):
    """The phase that a rank is in; PHASES has their names. LEFT: it is no longer watched."""

    START, BUILD, DATA, COMPUTE, REDUCE, UPDATE = range(6)
    LOG, EVALUATE, SAVE, END, DEVICE, MIRROR, LEFT = range(6, 13)


@dataclass(frozen=True)
class State:
    """One rank at one moment: `seconds` in its phase; `total` seconds of work in `steps` steps."""

    rank: int
    place: str
    pid: int
    step: int
    phase: int
    seconds: float
    total: float
    steps: int
    group: str
    is_stopped: bool
    stopped_children: list[int]

    @property
    def patience(self) -> int:
        return PATIENCE if not self.steps or self.phase == Phase.SAVE else 1

    def is_waiting(self, stack: Sequence[str]) -> bool:
        """Return True if it is in a collective, which ends when other ranks call it too."""
        if self.is_stopped or self.group:
            return not self.is_stopped
        is_building_ddp = any("torch/nn/parallel/distributed.py" in frame for frame in stack[:1])
        is_in_collective = any("torch/distributed/" in frame for frame in stack[:3])
        is_in_collective |= any("trainer/core/distributed/group.py" in frame for frame in stack[:1])
        # a collective of a GPU returns at once: the host waits later, for the step's outcome
        is_by_phase = self.phase in (Phase.REDUCE, Phase.DEVICE)
        return is_by_phase or is_building_ddp or is_in_collective

    def describe(self) -> str:
        children = ", ".join(map(str, self.stopped_children))
        return (
            f"rank {self.rank} ({self.place}process {self.pid} on {HOST}) has been in"
            f" {PHASES[self.phase]} for {self.seconds:.0f} s, at step {self.step}"
            + (", stopped by a signal" if self.is_stopped else "")
            + (f"; its child process {children} is stopped" if children else "")
        )


class Stragglers:
    """Find ranks whose own work in a step takes 3 times the median, over 50 steps; once each."""

    def __init__(self) -> None:
        self._before: Sequence[State] = ()
        self._named: set[int] = set()

    def report(self, states: Sequence[State]) -> None:
        """Print a line for each new straggler among the ranks of this node."""
        before = self._before or states
        pairs = list(zip(states, before, strict=True))
        steps = min(s.steps - past.steps for s, past in pairs)
        self._before = before if steps < STRAGGLER_STEPS else states
        if steps < STRAGGLER_STEPS or len(states) == 1:
            return
        means = {s.rank: (s.total - past.total) / (s.steps - past.steps) for s, past in pairs}
        median = statistics.median_low(means.values())
        for rank, mean in means.items():
            if mean > STRAGGLER * median and rank not in self._named:
                self._named.add(rank)
                times = f"{mean * 1e3:.1f} ms a step over the last {steps} steps"
                who = f"rank {rank} on {HOST} is a straggler"
                say(f"warning: {who}: {times}, the median is {median * 1e3:.1f}")


def say(line: str) -> None:
    with suppress(OSError):  # the terminal was closed
        print(line, file=sys.stderr, flush=True)
