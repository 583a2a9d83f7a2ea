"""Whole runs: ranks that are killed and runs that are started again, and two writers of one run."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import random
import signal
import subprocess
import termios
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.internals import checkpoint
from harness.launch import environment_of_a_command as environment
from harness.verbs import audit

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
from faults.task import MARKS

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

    def __init__(
        self, words: list[str], place: Path, name: str, terminal: int | None = None, **more: str
    ):
        """Start it on `terminal`, if one is given; `more` are environment variables."""
        place.mkdir(parents=True, exist_ok=True)
        self.marks, self.log = place / f"{name}.marks", place / f"{name}.log"
        self.marks.touch()
        told = environment(**{MARKS: str(self.marks), **more})
        with open(self.log, "wb") as log:
            shown = log if terminal is None else terminal
            self.process = subprocess.Popen(
                words,
                cwd=place,
                env=told,
                stdin=subprocess.DEVNULL,
                stdout=shown,
                stderr=shown,
                start_new_session=terminal is not None,
                preexec_fn=None if terminal is None else lambda: _take(terminal),
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Return rank to process id of the launcher's living children; those of launch=spawn are
        numbered in their order."""
        found: dict[int, int] = {}
        pid = self.process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in children:
                told = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                found |= {int(word[5:]): int(child) for word in told if word.startswith(b"RANK=")}
                if b"multiprocessing.spawn" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found[len(found)] = int(child)
        return found

    def has_marked(self, text: str) -> bool:
        return any(line.startswith(text) for line in self.marks.read_text().splitlines())

    def tail(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-4:])[-500:]


def _take(terminal: int) -> None:
    """Make it the controlling terminal of this session: when it closes, the kernel sends SIGHUP."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the parent may ignore it


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
        with contextlib.suppress(ProcessLookupError):
            os.kill(alive[chance.choice(sorted(alive))], signal.SIGKILL)
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


# Two writers --------------------------------------------------------------------------------------

ALONE = (
    "checkpoint.every_steps=3",
    "checkpoint.every_epochs=null",
    "checkpoint.keep_last=100",
    "run.resume=auto",
)


def doubles(amount: int, seed: int) -> Row:
    """Check that a second start is refused, and that a writer frozen in a save that wakes after
    another took over publishes nothing."""
    row, chance, hit = Row("second start or woken writer", amount), random_of(seed), Counter[str]()
    with folder() as base:
        whole = Launched(
            words_of("slow", base / "whole", f"run.steps={STEPS}", *ALONE), base / "whole", "whole"
        )
        assert whole.end() == 0, whole.tail()
        undisturbed = state_of(base / "whole/slow/run")
        for number in range(amount):
            place = base / str(number)
            if number % 4 == 0:
                row.note(f"second start {number}", _start_twice(place, chance, hit))
            else:
                row.note(
                    f"woken writer {number}",
                    _wake(place, undisturbed, chance, number % 2 == 0, hit),
                )
    row.detail = ", ".join(f"{name} {count}" for name, count in sorted(hit.items()))
    return row


def _start_twice(place: Path, chance: random.Random, hit: Counter[str]) -> str | None:
    words = words_of("slow", place, "run.steps=100000", *ALONE)
    first = Launched(words, place, "first")
    try:
        if not wait_for(lambda: first.has_marked("step 2"), LIMIT_S):
            return f"the first did not start: {first.tail()}"
        time.sleep(chance.random() * 0.3)
        second = subprocess.run(
            words, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
        )
        hit["second start refused"] += second.returncode == 2
        wanted = f": process {first.process.pid} on {os.uname().nodename} writes there"
        if (
            second.returncode != 2
            or len(second.stderr.splitlines()) != 1
            or wanted not in second.stderr
        ):
            return f"exit code {second.returncode}: {second.stderr.strip()[-300:]}"
        return None if first.process.poll() is None else f"the first ended: {first.tail()}"
    finally:
        first.process.kill()
        first.process.wait()


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
