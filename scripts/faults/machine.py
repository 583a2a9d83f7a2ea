"""A hostile machine: second starts, terminals that close, and conditions that must not affect a
run."""

from __future__ import annotations

import json
import os
import pty
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from faults.launches import STOPPED, Undisturbed, command
from faults.runs import EVERY, LIMIT_S, STEPS, Launched, _judge, _saving

SPAN_S = 10.0  # between two starts
APART = ("unshare", "-rn")  # in a namespace without a network
LENGTH = f"run.steps={STEPS}"


def _words(place: Path, size: int, *more: str) -> list[str]:
    """Return the command of a run in one process, or with launch=spawn."""
    if size > 1:
        return command("spawn", "slow", place, size, LENGTH, *more)
    return words_of("slow", place, LENGTH, *EVERY, *more)


def _end(undisturbed: Undisturbed, size: int) -> Any:
    state, _ = undisturbed("slow", size, LENGTH)
    return state


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
            row.note(case, _start_again(place, size, resume, wait_s, _end(undisturbed, size), hit))
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


# Terminals ----------------------------------------------------------------------------------------


def terminals(amount: int, seed: int) -> Row:
    """Close, fill or hang up a terminal, or end the reader of its output: the run continues, or
    saves and exits with 75; it ends like an undisturbed run."""
    row, chance, hit = Row("terminal that closes or fails", amount), random_of(seed), Counter[str]()
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number in range(amount):
            kind, size = list(TERMINALS)[number % len(TERMINALS)], chance.choice((1, 2))
            at = chance.randrange(1, STEPS // 2)
            place = base / str(number)
            problem = TERMINALS[kind](place, size, at) or _finish(
                place, size, _end(undisturbed, size)
            )
            row.note(f"{kind} at step {at} of {size} rank(s)", problem)
            hit[kind] += problem is None
    row.detail = ", ".join(f"{kind} {hit[kind]}" for kind in TERMINALS if hit[kind])
    return row


def _finish(place: Path, size: int, undisturbed: Any) -> str | None:
    """Resume the run if it was stopped, and compare its end."""
    directory = place / "slow/run"
    told = json.loads((directory / "exit.json").read_text())
    if told["code"] == STOPPED:
        again = Launched(_words(place, size, "run.resume=auto"), place, "again")
        if code := again.end():
            return f"the resume ended with code {code}: {again.tail()}"
    return _judge(directory, undisturbed)


def _hang_up(place: Path, size: int, at: int) -> str | None:
    ours, theirs = pty.openpty()
    run = Launched(_words(place, size), place, "run", terminal=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    wait_for(lambda: _drained(ours) and (run.has_marked(f"step {at}") or run.is_over()), LIMIT_S)
    os.close(ours)
    code = run.end()
    return None if code == STOPPED else f"exit code {code}"


def _drained(terminal: int) -> bool:
    """Read the available output, because a full terminal would block the run."""
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass
    return True


def _ignored_hang_up(place: Path, size: int, at: int) -> str | None:
    run = Launched(["nohup", *_words(place, size)], place, "run")
    wait_for(lambda: run.has_marked(f"step {at}") or run.is_over(), LIMIT_S)
    for pid in (run.process.pid, *run.ranks().values()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)
    code = run.end()
    return None if code == 0 else f"exit code {code}: {run.tail()}"


def _with_output(output: str) -> Callable[[Path, int, int], str | None]:
    def problem(place: Path, size: int, at: int) -> str | None:
        shell = f"{shlex.join(_words(place, size))} {output.format(lines=at)}"
        run = Launched(["bash", "-c", shell], place, "run")
        code = run.end()
        return None if code == 0 else f"exit code {code}: {run.tail()}"

    return problem


TERMINALS: dict[str, Callable[[Path, int, int], str | None]] = {
    "hang-up": _hang_up,
    "hang-up under nohup": _ignored_hang_up,
    "reader gone": _with_output("2>&1 | head -n {lines} > /dev/null; exit ${{PIPESTATUS[0]}}"),
    "full": _with_output("> /dev/full 2>&1"),
    "closed": _with_output("<&- >&- 2>&-"),
}


# Conditions that must not affect a run ------------------------------------------------------------


def places(amount: int, seed: int) -> Row:
    """Run without network, with a clock set back, os.chdir, growing data or a long build: the run
    ends like an undisturbed one, or with one line."""
    row, chance, hit = (
        Row("network, clock, folder, data or build that changes", amount),
        random_of(seed),
        Counter[str](),
    )
    kinds = list(PLACES)
    if shutil.which("unshare") is None or subprocess.run([*APART, "true"], check=False).returncode:
        kinds.remove("no network")
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number in range(amount):
            kind = kinds[number % len(kinds)]
            try:
                problem = PLACES[kind](base / str(number), undisturbed, chance)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            row.note(kind, problem)
            hit[kind] += problem is None
    row.detail = ", ".join(f"{kind} {hit[kind]}" for kind in PLACES if hit[kind])
    return row


def _without_network(place: Path, undisturbed: Undisturbed, chance: random.Random) -> str | None:
    run = Launched([*APART, *_words(place, 1)], place, "run")
    return f"{run.tail()}" if run.end() else _judge(place / "slow/run", _end(undisturbed, 1))


def _clock_set_back(place: Path, undisturbed: Undisturbed, chance: random.Random) -> str | None:
    """Date the newer of two runs before the older: run.resume=auto resumes the newer."""
    size = chance.choice((1, 2))
    unnamed = ["run.name=null", "run.steps=8"]
    for name in ("older", "newer"):
        run = Launched(_words(place, size, *unnamed), place, name)
        if run.end():
            return run.tail()
        newer = max((place / "slow").iterdir())
        time.sleep(1.1)  # names have seconds
    for path in (*newer.rglob("*"), newer):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    again = Launched(
        _words(place, size, "run.name=null", "run.resume=auto", f"run.steps={STEPS}"),
        place,
        "again",
    )
    if again.end():
        return again.tail()
    return _compare_weights(newer, _end(undisturbed, size))


def _compare_weights(directory: Path, undisturbed: Any) -> str | None:
    """Compare step and weights only: the record of this run also has its first end."""
    ours, theirs = (
        {name: state[name] for name in ("step", "model")}
        for state in (state_of(directory), undisturbed)
    )
    return difference(ours, theirs)


def _old_file(place: Path, undisturbed: Undisturbed, chance: random.Random) -> str | None:
    """Reuse the file of dist.init=file of a killed job, dated hours off."""
    place.mkdir()
    path = place / "store"
    words = _words(place, 2, "dist.init=file", f"dist.path={path}")
    killed = Launched(words, place, "killed")
    wait_for(lambda: killed.has_marked("step 2") or killed.is_over(), LIMIT_S)
    killed.kill()
    hours = chance.choice((-2, 2, 48))
    if path.exists():
        os.utime(path, (time.time() + 3600 * hours,) * 2)
    again = Launched([*words, "run.resume=auto"], place, "again")
    return again.tail() if again.end() else _judge(place / "slow/run", _end(undisturbed, 2))


def _elsewhere(place: Path, undisturbed: Undisturbed, chance: random.Random) -> str | None:
    """Resume a run whose task calls os.chdir, with a relative run.dir."""
    size = chance.choice((1, 2))
    words = [
        word
        for word in _words(place, size, "task.options.build=elsewhere", "run.resume=auto")
        if not word.startswith("run.dir=")
    ]
    for steps in (chance.randrange(5, STEPS), STEPS):
        run = Launched([*words, "run.dir=runs", f"run.steps={steps}"], place, f"to-{steps}")
        if run.end():
            return run.tail()
    return _compare_weights(place / "runs/slow/run", _end(undisturbed, size))


def _growing(place: Path, undisturbed: Undisturbed, chance: random.Random) -> str | None:
    """Change the length of the data: one error line, and a resume with the old length continues."""
    size, workers = chance.choice((1, 2)), chance.choice((0, 1))
    task = ["task.trainer=faults.task.Growing", f"data.workers={workers}", "run.resume=auto"]
    run = Launched(_words(place, size, *task), place, "run")
    wait_for(lambda: run.has_marked("step 6") or run.is_over(), LIMIT_S)
    (place / "grown").touch()
    code = run.end()
    lines = errors_in(run.log.read_text())
    if (
        code != 1
        or len(lines) != 1
        or "the train data has 225 examples and had 203" not in lines[0]
    ):
        return f"exit code {code}: {run.tail()}"
    (place / "grown").unlink()
    again = Launched(_words(place, size, *task), place, "again")
    if again.end():
        return again.tail()
    alone = Launched(_words(place / "alone", size, *task), place / "alone", "alone")
    if alone.end():
        return alone.tail()
    return _judge(place / "slow/run", state_of(place / "alone/slow/run"))


def _long_build(place: Path, undisturbed: Undisturbed, chance: random.Random) -> str | None:
    """Build for longer than five times dist.hang_timeout_s: only a rank that sleeps is ended."""
    size = chance.choice((1, 2))
    how = chance.choice(("busy", "asleep"))
    build = (f"task.options.build={how}", "task.options.build_s=8", "dist.hang_timeout_s=1")
    run = Launched(_words(place, size, *build), place, "run")
    code = run.end()
    is_told = "has been in building data and model" in run.log.read_text()
    if how == "asleep":
        return None if code and is_told else f"exit code {code}: {run.tail()}"
    return run.tail() if code or is_told else _judge(place / "slow/run", _end(undisturbed, size))


PLACES: dict[str, Callable[[Path, Undisturbed, random.Random], str | None]] = {
    "no network": _without_network,
    "run of a clock set back": _clock_set_back,
    "store of a dead job": _old_file,
    "os.chdir": _elsewhere,
    "data that grows": _growing,
    "long build": _long_build,
}
