"""Two writers of one run: a second start, and a writer that was frozen and wakes up."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.internals import checkpoint

from faults.common import (
    Row,
    difference,
    errors_in,
    folder,
    random_of,
    state_of,
    wait_for,
    words_of,
)
from faults.launches import Undisturbed, command
from faults.runs import EVERY, LIMIT_S, STEPS, Launched, _judge, _saving

SPAN_S = 10.0  # between two starts
LENGTH = f"run.steps={STEPS}"


def _words(place: Path, size: int, *more: str) -> list[str]:
    """Return the command of a run in one process, or with launch=spawn."""
    if size > 1:
        return command("spawn", "slow", place, size, LENGTH, *more)
    return words_of("slow", place, LENGTH, *EVERY, *more)


# Second starts ------------------------------------------------------------------------------------


def starts(amount: int, seed: int) -> Row:
    """Start a run twice, the second time within 10 s of the first: one of them ends like an
    undisturbed run, the other is refused."""
    row, chance, hit = Row("second start within 10 s", amount), random_of(seed), Counter[str]()
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number in range(amount):
            size = 1 + number % 2
            wait_s = 0.0 if number < 2 else SPAN_S * (number + chance.random()) / amount
            resume = chance.choice(("null", "auto"))
            case = f"{size} rank(s), run.resume={resume}, {wait_s:.2f} s later"
            place = base / str(number)
            end, _ = undisturbed("slow", size, LENGTH)
            row.note(case, _start_again(place, size, resume, wait_s, end, hit))
    row.detail = "the first run was " + ", ".join(f"{name} {hit[name]}" for name in sorted(hit))
    return row


def _start_again(
    place: Path, size: int, resume: str, wait_s: float, undisturbed: Any, hit: Counter[str]
) -> str | None:
    """Start a run that builds for 2 s and trains for about 4 s, and start it a second time."""
    build = ("task.options.build_s=2", "task.options.pause_s=0.06", f"run.resume={resume}")
    words, directory = _words(place, size, *build), place / "slow/run"
    first = Launched(words, place, "first")
    time.sleep(wait_s)
    hit[_phase_of(first, directory)] += 1
    second = Launched(words, place, "second")
    runs = (first, second)
    codes = [run.end() for run in runs]
    wanted = [[0, 2], [2, 0], *([[0, 0]] if resume == "auto" else [])]  # one after the other
    if codes not in wanted:
        return f"exit codes {codes}: {first.tail()} || {second.tail()}"
    for run, code in zip(runs, codes, strict=True):
        if code and len(errors_in(run.log.read_text())) != 1:
            return f"not one error line: {run.tail()}"
    if lost := [*(directory / "checkpoints").glob("invalid-*")]:
        return f"a checkpoint was set aside: {lost[0].name}"
    return _judge(directory, undisturbed)


def _phase_of(run: Launched, directory: Path) -> str:
    if run.is_over():
        return "over"
    if _saving(directory):
        return "saving"
    lines = run.marks.read_text().splitlines()
    return lines[-1].split()[0].replace("step", "in a step") if lines else "starting"


# Woken writers ------------------------------------------------------------------------------------

ALONE = (
    "checkpoint.every_steps=3",
    "checkpoint.every_epochs=null",
    "checkpoint.keep_last=100",
    "run.resume=auto",
)


def woken(amount: int, seed: int) -> Row:
    """Check that a writer that was frozen in a save publishes nothing when it wakes after another
    one has taken over."""
    row, chance, hit = Row("woken writer", amount), random_of(seed), Counter[str]()
    with folder() as base:
        words = words_of("slow", base / "whole", LENGTH, *ALONE)
        whole = Launched(words, base / "whole", "whole")
        assert whole.end() == 0, whole.tail()
        undisturbed = state_of(base / "whole/slow/run")
        for number in range(amount):
            problem = _wake(base / str(number), undisturbed, chance, number % 2 == 1, hit)
            row.note(f"case {number}", problem)
    row.detail = ", ".join(f"{name} {count}" for name, count in sorted(hit.items()))
    return row


def _freeze_in_save(run: Launched, directory: Path, chance: random.Random) -> int | None:
    """Stop the process while a staging directory exists, after the first checkpoint; return the
    newest published step."""
    for _ in range(60):
        if not wait_for(lambda: _saving(directory) or run.is_over(), LIMIT_S, 0.0002):
            return None
        time.sleep(chance.random() * 0.004)
        if run.is_over():
            return None
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(0.02)
        published = [path.name for path in (directory / "checkpoints").glob("step-*")]
        if published and _saving(directory):
            return max(int(name[5:]) for name in published)
        run.process.send_signal(signal.SIGCONT)
        wait_for(lambda: not _saving(directory), 5.0, 0.001)
    return None


def _wake(
    place: Path, undisturbed: Any, chance: random.Random, is_over: bool, hit: Counter[str]
) -> str | None:
    """Freeze a writer in a save and wake it after its successor has ended (`is_over`), or while
    the successor runs."""
    words, directory = words_of("slow", place, f"run.steps={STEPS}", *ALONE), place / "slow/run"
    old = Launched(words_of("slow", place, "run.steps=100000", *ALONE), place, "old")
    try:
        step = _freeze_in_save(old, directory, chance)
        if step is None or step >= STEPS - 6:
            return f"could not be frozen in a save in time (step {step}): {old.tail()}"
        (directory / ".writer").unlink()
        new = Launched(words, place, "new")
        if not wait_for(lambda: new.has_marked(f"step {step + 4}"), LIMIT_S):
            return f"the successor did not resume: {new.tail()}"
        time.sleep(chance.random() * 0.2)
        codes = [new.end()] if is_over else []
        old.process.send_signal(signal.SIGCONT)
        codes = [old.end(), *(codes or [new.end()])]
        hit["woken after the end" if is_over else "woken during the run"] += 1
    finally:
        old.process.kill()
        old.process.wait()
    if codes[0] in (0, None) or codes[1] != 0 or len(errors_in(old.log.read_text())) != 1:
        return f"exit codes {codes}: {old.tail()} | {new.tail()}"
    return _judge_successor(directory, step, undisturbed)


def _judge_successor(directory: Path, step: int, undisturbed: Any) -> str | None:
    """Return a problem unless each checkpoint after `step` is of the second session and the run
    equals an undisturbed one."""
    for other, path in checkpoint.steps(directory / "checkpoints").items():
        sessions = len(checkpoint.load(path).manifest["sessions"])
        if sessions != 1 + (other > step):
            return f"step {other} was published by the old process"
    if problem := difference(state_of(directory), undisturbed):
        return problem
    told = json.loads((directory / "exit.json").read_text())
    return f"the old process wrote exit.json over its successor's: {told}" if told["code"] else None
