"""The collectives that ranks wait in, and the ranks that have not come, for the report of a hang.

The watcher asks each rank for its last collectives (flight_recorder.py) and compares the answers.
This module loads no more than the standard library.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

MAX_ANSWER = 2**18  # bytes of a mailbox; unused pages of it take no memory
ASK = b"?"
PATIENCE_S = 2.0  # reading 2,000 collectives takes 0.15 s


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

    def describe(self, number: int) -> str:
        """Describe a collective, such as "all_reduce number 17 of the world (3 float32)"."""
        of = {"default_pg": "the world", "undefined": f"the group of {name_ranks(self.members)}"}
        group = of.get(self._description, f"the {self._description} group")
        call = self.calls[number]
        return f"{call.name} number {number} of {group}" + f" ({call.shape})" * bool(call.shape)


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
            return os.write(self._pipe, ASK) > 0
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
    end = time.monotonic() + PATIENCE_S
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
        for number in sorted({*waits.values()}):
            first = [rank for rank in waits if waits[rank] == number]
            others = {*histories[first[0]].members}.intersection(ranks).difference(first)
            places: dict[tuple[str, str, str], list[int]] = {}
            for rank in (*first, *sorted(others)):
                place = _place(number, histories.get(rank), rank in answers)
                places.setdefault(place, []).append(rank)
            yield "; ".join(
                f"{name_ranks(who)} {place[len(who) > 1]} {place[2]}"
                for place, who in places.items()
            )


def _place(number: int, history: History | None, has_answered: bool) -> tuple[str, str, str]:
    """Return where a rank is, as seen from a collective: a verb, its plural, and the rest."""
    if not has_answered:
        return ("does", "do", "not answer and may not have come to it")
    if history is None or max(history.calls) < number:
        return ("has", "have", "not come to it")
    what = history.describe(number) if number in history.calls else "it"
    if history.waits_in == number:
        return ("waits", "wait", f"in {what}")
    return ("has", "have", f"finished {what}")


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
