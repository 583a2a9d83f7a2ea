"""A rank that hangs: it is named with its phase, and the group ends or restarts."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from faults.common import Row, folder, random_of
from faults.launches import LAUNCHERS, Undisturbed, command, seconds_until_gone
from faults.runs import LIMIT_S, Launched, _judge

HOW = {
    "stop": "SIGSTOP",
    "loop": "endless loop",
    "gil": "C call that holds the GIL",
    "sleep": "sleep in the task's code",
}
MOMENTS = ("first step", "mid run", "evaluation")
STEPS, HANG_S, SECONDS = 14, 2, 10
PATIENCE = 5  # factor on the limit until the first step is finished
COMMON = (
    *(f"run.steps={STEPS}", f"dist.hang_timeout_s={HANG_S}", "checkpoint.every_steps=3"),
    "run.prove=false",  # no hang in the trial passes of a later step
)


def hangs(amount: int, seed: int) -> Row:
    """Make a rank hang: exactly that rank is named, the group ends in time, a restart resumes."""
    row, chance, hit = Row("rank that hangs", amount), random_of(seed), Counter[str]()
    cases = [(how, moment) for how in HOW for moment in MOMENTS]
    cases += [("worker", moment) for moment in MOMENTS[:2]]
    cases = (chance.sample(cases, len(cases)) * (1 + amount // len(cases)))[:amount]
    longest = 0.0
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number, (how, moment) in enumerate(cases):
            case = _Hang(
                base / str(number),
                how,
                moment,
                chance.choice((2, 3)),
                chance,
                is_restarted=number % 2 == 1,
            )
            row.note(str(case), case.problem(undisturbed))
            hit["restarted" if case.is_restarted else "ended"] += 1
            longest = max(longest, case.seconds - case.limit_s)
    row.detail = f"{hit['ended']} ended, {hit['restarted']} restarted; reported at most "
    row.detail += f"{longest:.1f} s after the limit"
    return row


class _Hang:
    """One case: a rank that hangs in one way at one moment."""

    task = "stuck"
    layout: tuple[str, ...] = ()
    coordinates = ""  # of the rank in a mesh, as the report has them

    def __init__(
        self,
        place: Path,
        how: str,
        moment: str,
        size: int,
        chance: random.Random,
        is_restarted: bool,
    ):
        self.place, self.how, self.moment, self.size, self.is_restarted = (
            place,
            how,
            moment,
            size,
            is_restarted,
        )
        self.rank, self.kind = (
            chance.randrange(size),
            "elastic" if is_restarted else chance.choice(LAUNCHERS),
        )
        self.at = {
            "first step": 0,
            "mid run": chance.randrange(4, STEPS - 2),
            "evaluation": chance.choice((6, 12)),
        }[moment]
        self.where = (
            "worker" if how == "worker" else "metrics" if moment == "evaluation" else "step"
        )
        self.limit_s = HANG_S * (PATIENCE if moment == "first step" else 1)
        self.seconds = 0.0

    def __str__(self) -> str:
        what = HOW.get(self.how, "stopped data worker")
        return f"{what}, {self.moment}, rank {self.rank} of {self.size} with {self.kind}" + (
            ", restarted" if self.is_restarted else ""
        )

    def problem(self, undisturbed: Undisturbed) -> str | None:
        data = [f"task.options.where={self.where}", f"data.workers={int(self.how == 'worker')}"]
        data += self.layout
        end = undisturbed(self.task, self.size, *COMMON, *data)[0] if self.is_restarted else None
        stuck = [
            f"task.options.how={self.how}",
            f"task.options.rank={self.rank}",
            f"task.options.at={self.at}",
        ]
        more = {"restarts": 1} if self.is_restarted else {}
        words = command(self.kind, self.task, self.place, self.size, *COMMON, *data, *stuck, **more)
        run = Launched(words, self.place, "stuck")
        ranks: dict[int, int] = {}
        mark = self._wait(run, ranks)
        if mark is None:
            run.kill(*ranks.values())
            return f"the rank did not hang as planned: {run.tail()}"
        pid, since = mark
        seconds = seconds_until_gone(run, ranks.values(), since)
        if isinstance(seconds, str):
            return seconds
        self.seconds = seconds
        code = run.end()
        told = run.log.read_text(errors="replace")
        if code != (0 if self.is_restarted else 1):
            return f"exit code {code}: {run.tail()}"
        if problem := self._judge_report(told, pid):
            return problem
        if seconds > self.limit_s + SECONDS:
            return f"the ranks ended after {seconds:.1f} s: {run.tail()}"
        directory = self.place / self.task / "run"
        return _judge(directory, end) if self.is_restarted else self._judge_exit(directory, told)

    def _wait(self, run: Launched, ranks: dict[int, int]) -> tuple[int, float] | None:
        """Return (process id of the hung rank, time since which it hangs); fill `ranks`."""
        end = time.monotonic() + LIMIT_S
        while run.process.poll() is None and time.monotonic() < end:
            ranks |= run.ranks()
            found = re.search(r"^stuck (\d+) (\S+)$", run.marks.read_text(), re.M)
            if found:
                return int(found[1]), float(found[2])
            time.sleep(0.02)
        return None

    def _judge_report(self, told: str, pid: int) -> str | None:
        line = _report(told)
        named = re.findall(
            rf"rank (\d+) \({self.coordinates}process (\d+) on \S+\) has been in ([^;]*?) "
            r"for \d+ s, at step (\d+)",
            line,
        )
        phase = {
            "worker": "the data loader",
            "metrics": "evaluation",
            "step": "forward and backward",
        }[self.where]
        at = {str(self.at)} if self.how != "worker" else {str(n) for n in range(STEPS)}
        if (
            len(named) != 1
            or named[0][:3] != (str(self.rank), str(pid), phase)
            or named[0][3] not in at
        ):
            return f"rank {self.rank} (process {pid}) in {phase} must be named: {line}"
        is_frozen = {
            "stop": ", stopped by a signal" in line,
            "worker": "; its child process" in line,
        }
        if not is_frozen.get(self.how, True):
            return f"the line does not report that it is stopped: {line}"
        stack = told.partition("innermost call first:")[2]
        if self.how != "worker" and "faults/task.py" not in stack:
            return f"its stack is not shown: {told[-500:]}"
        missing = rf"; rank {self.rank} (has not|does not answer and may not have) come to it"
        if not re.search(rf"waits? in \w+ number \d+ of the [^\n]*{missing}", told):
            return f"the collective without it is not named: {told[-500:]}"
        return self._judge_waits(line, named[0][3])

    def _judge_waits(self, line: str, at: str) -> str | None:
        waits = re.findall(r"ranks? ([\d, ]+) waits? in ([^;]*?) of step (\d+)", line)
        others = sorted(int(rank) for ranks, *_ in waits for rank in ranks.split(","))
        places = (
            {"a collective in evaluation"} if self.where == "metrics" else {"gradient all-reduce"}
        )
        if self.moment == "first step":  # DDP rebuilds its buckets there, with its own collective
            places.add("a collective in forward and backward")
        is_right = all(place in places and step == at for _, place, step in waits)
        if not is_right or others != [r for r in range(self.size) if r != self.rank]:
            return f"all others must wait in {' or '.join(sorted(places))} of step {at}: {line}"
        return None

    def _judge_exit(self, directory: Path, told: str) -> str | None:
        found: dict[str, Any] = json.loads((directory / "exit.json").read_text())
        report = _report(told).removeprefix("error: ")
        is_said = found["code"] == 1 and found["reason"].startswith(report)
        return None if is_said else f"exit.json does not report it: {found}"


def _report(told: str) -> str:
    return next(
        (line for line in told.splitlines() if line.startswith("error: hang detected: ")),
        "no report",
    )
