"""Whole runs: ranks that are killed and runs that are started again."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.launch import environment_of_a_command as environment
from harness.launch import ranks_of
from harness.verbs import audit

from faults.common import (
    Row,
    difference,
    folder,
    random_of,
    state_of,
    wait_for,
    words_of,
)
from faults.task import MARKS
from trainer.base.process.table import send

PHASES = ("start-up", "first step", "mid step", "evaluation", "during save", "at the end")
LAYOUTS = {
    "ddp": ["strategy=ddp"],
    "parameter_server": ["strategy=ddp", "strategy.comm_hook=parameter_server"],
    "sync_batchnorm": ["strategy=ddp", "strategy.sync_batchnorm=true", "task.options.norm=true"],
}
STEPS = 30
EVERY = (
    "checkpoint.every_steps=4",
    "checkpoint.every_epochs=null",
    "eval.every_steps=6",
    "eval.every_epochs=null",
)
LIMIT_S = 120.0


# Killed ranks -------------------------------------------------------------------------------------


class Launched:
    """A run in a process or under a launcher; its output goes to a file."""

    def __init__(self, words: list[str], place: Path, name: str, **more: str):
        """Start it; `more` are environment variables."""
        place.mkdir(parents=True, exist_ok=True)
        self.marks, self.log = place / f"{name}.marks", place / f"{name}.log"
        self.marks.touch()
        told = environment(**{MARKS: str(self.marks), **more})
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                words, cwd=place, env=told, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> int | None:
        """Return its exit code; None if it had to be killed after LIMIT_S."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self, *others: int) -> None:
        for pid in (*self.ranks().values(), self.process.pid, *others):
            send(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Return rank to process id of the launcher's living children."""
        return ranks_of(self.process)

    def has_marked(self, text: str) -> bool:
        return any(line.startswith(text) for line in self.marks.read_text().splitlines())

    def tail(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-4:])[-500:]


def _saving(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(
            entry.name.startswith(".staging-") for entry in os.scandir(directory / "checkpoints")
        )
    return False


def _wait_for_phase(run: Launched, base: Path, phase: str, chance: random.Random) -> None:
    """Wait until the run below `base` is in `phase` or has ended, and a random time longer."""
    at = chance.randrange(2, STEPS)
    wanted = {
        "start-up": lambda: run.ranks(),
        "first step": lambda: run.has_marked("step 1"),
        "mid step": lambda: run.has_marked(f"step {at}"),
        "evaluation": lambda: run.has_marked(f"evaluation {at // 6 * 6 or 6}"),
        "during save": lambda: run.has_marked(f"step {at}") and any(map(_saving, base.glob("*/"))),
        "at the end": lambda: run.has_marked(f"step {STEPS}"),
    }[phase]
    wait_for(lambda: wanted() or run.is_over(), LIMIT_S, 0.0005)
    longest = {"start-up": 4.0, "at the end": 0.3, "during save": 0.004}.get(phase, 0.03)
    time.sleep(chance.random() * longest)


def _layout_words(place: Path, layout: str, ranks: int, *more: str) -> list[str]:
    return words_of(
        "slow", place, f"run.steps={STEPS}", *EVERY, *LAYOUTS[layout], *more, ranks=ranks
    )


def ranks(amount: int, seed: int) -> Row:
    """Kill one rank at a random time and start the run again: it ends like an undisturbed run."""
    row, chance, hit = (
        Row("rank killed, run started again", amount),
        random_of(seed),
        Counter[str](),
    )
    cases = [(phase, layout, size) for layout in LAYOUTS for size in (2, 3) for phase in PHASES]
    cases = (chance.sample(cases, len(cases)) * (1 + amount // len(cases)))[:amount]
    if amount < 6:  # one layout, so one undisturbed run
        cases = [(phase, *cases[0][1:]) for phase, *_ in cases]
    undisturbed: dict[tuple[str, int], Any] = {}
    with folder() as base:
        for number, (phase, layout, size) in enumerate(cases):
            if (layout, size) not in undisturbed:
                place = base / f"{layout}-{size}"
                run = Launched(_layout_words(place, layout, size), place, "whole")
                assert run.end() == 0, run.tail()
                undisturbed[layout, size] = state_of(place / "slow/run")
            case = f"rank of {size} with {layout}, {phase}"
            row.note(
                case,
                _kill_one(
                    base / str(number),
                    (phase, layout, size),
                    undisturbed[layout, size],
                    chance,
                    hit,
                ),
            )
    row.detail = f"{hit['killed']} ranks were killed, {hit['over']} runs had ended; " + ", ".join(
        f"{phase} {hit[phase]}" for phase in PHASES if hit[phase]
    )
    return row


def _kill_one(
    place: Path,
    case: tuple[str, str, int],
    undisturbed: Any,
    chance: random.Random,
    hit: Counter[str],
) -> str | None:
    phase, layout, size = case
    words, directory = _layout_words(place, layout, size, "run.resume=auto"), place / "slow/run"
    run = Launched(words, place, "killed")
    _wait_for_phase(run, directory.parent, phase, chance)
    alive = run.ranks()
    hit["killed" if alive else "over"] += 1
    hit[phase] += bool(alive)
    if alive:
        send(alive[chance.choice(sorted(alive))], signal.SIGKILL)
    if run.end() is None:
        return f"torchrun did not end within {LIMIT_S:.0f} s: {run.tail()}"
    again = Launched(words, place, "again")
    if code := again.end():
        return f"the second start ended with code {code}: {again.tail()}"
    return _judge(directory, undisturbed)


def _judge(directory: Path, undisturbed: Any) -> str | None:
    """Return a problem unless the run equals an undisturbed run, passes the audit, and has each
    step once per curve."""
    try:
        problem = difference(state_of(directory), undisturbed)
    except Exception as error:
        return str(error)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = audit([str(directory)])
    return problem or (f"audit: {said.getvalue().strip()}" if code else _twice(directory))


def _twice(directory: Path) -> str | None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory / "tensorboard"), {"scalars": 0})
    board.Reload()
    for tag in board.Tags()["scalars"]:
        steps = [event.step for event in board.Scalars(tag)]
        if len(steps) != len(set(steps)):
            return f"TensorBoard has a step of {tag} twice: {steps}"
    return None
