"""SIGKILL at the system calls of one save and prune, injected by strace."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.internals import checkpoint
from harness.training import keep_rules

from faults.common import (
    Row,
    Shape,
    folder,
    random_of,
    traced,
    without_strace,
)

# Calls that change no file: dying there equals dying between two others. Their number depends on
# the allocator.
_UNSEEN = {
    "mmap",
    "munmap",
    "mremap",
    "madvise",
    "brk",
    "futex",
    "getrandom",
    "gettid",
    "getpid",
    "sched_yield",
}
_UNSEEN |= {
    "rt_sigaction",
    "rt_sigprocmask",
    "restart_syscall",
    "exit_group",
    "clock_nanosleep",
    "mprotect",
    "select",
    "pselect6",
}


def inject(call: str, at: int, what: str) -> list[str]:
    """Return strace's options for a fault at the `at`-th system call of this name."""
    return ["-e", f"trace={call}", "-e", f"inject={call}:{what}:when={at}"]


@dataclass(frozen=True)
class Point:
    """The `at`-th system call named `call` while a step is saved over the files of `template`."""

    template: Path
    shape: Shape
    call: str
    at: int

    def __str__(self) -> str:
        return f"{self.call} {self.at} of {self.shape}"


def _save_and_prune(root: Path, shape: Shape, step: int, announced: Path) -> None:
    shape.save(root, step)
    descriptor = os.open(announced, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, str(step).encode())
    os.close(descriptor)
    checkpoint.prune(root, keep_rules(1, 0), set())


def _template(base: Path, shape: Shape) -> Path:
    """Write checkpoints up to step `num_older`, to be copied for each case."""
    made = base / f"template-{shape.num_parts}-{shape.size}-{shape.num_older}"
    for step in range(1, shape.num_older + 1):
        shape.save(made, step)
    return made


def _calls(base: Path, template: Path, shape: Shape) -> list[Point]:
    """Return each system call of one save and prune, as strace counts them."""
    log, step = base / "log", shape.num_older + 1
    # first in this process: imports and caches of a first save are not counted
    for is_counted in (False, True):
        root = base / f"counted-{is_counted}"
        shutil.copytree(template, root)

        def body(root: Path = root) -> None:
            _save_and_prune(root, shape, step, base / "announced")

        if is_counted:
            code, said = traced(body, [], str(log))
            assert code == 0, said
        else:
            body()
            shape.step_of(checkpoint.find_newest(root, checkpoint.load)[0])
    (base / "announced").unlink()
    return [Point(template, shape, name, at) for name, at in calls_in(log.read_text())]


def calls_in(log: str) -> Iterator[tuple[str, int]]:
    """Yield (name, how often it was called) of each system call in a log of strace."""
    counts: Counter[str] = Counter()
    for name in re.findall(r"^\d+ +(\w+)\(", log, re.MULTILINE):
        if name not in _UNSEEN:
            counts[name] += 1
            yield name, counts[name]


def _shapes(seed: int) -> Iterator[Shape]:
    chance, seen = random_of(seed), set()
    while True:
        shape = Shape(
            chance.randrange(1, 7),
            chance.choice([1, 100, 1000, 30_000, 300_000]),
            chance.randrange(1, 3),
        )
        if shape not in seen:
            seen.add(shape)
            yield shape


def _points(base: Path, at_least: int, seed: int) -> list[Point]:
    """Return all calls of as many shapes of a save as give `at_least` points."""
    found: list[Point] = []
    for number, shape in enumerate(_shapes(seed)):
        place = base / str(number)
        place.mkdir()
        found += _calls(place, _template(place, shape), shape)
        if len(found) >= at_least:
            return found
    raise AssertionError("unreachable")


def kill(amount: int, seed: int) -> Row:
    """Kill a save before one system call: an announced checkpoint exists, and nothing is mixed."""
    row = Row("SIGKILL at a system call of a save", amount, skipped=without_strace())
    if row.skipped:
        return row
    ends: Counter[str] = Counter()
    with folder() as base:
        for point in random_of(seed).sample(_points(base, amount, seed), amount):
            row.note(str(point), _one(point, ends))
    row.detail = f"the newest checkpoint was the old one {ends['old']} times"
    row.detail += f" and the new one {ends['new']} times"
    return row


def _one(point: Point, ends: Counter[str]) -> str | None:
    """Save the next step, and kill the save at the point."""
    place, step = point.template.parent, point.shape.num_older + 1
    # as deep as in the counted run, because resolving a path makes calls per folder
    root, told = place / "root", place / "announced"
    shutil.copytree(point.template, root)
    try:
        code, said = traced(
            lambda: _save_and_prune(root, point.shape, step, told),
            inject(point.call, point.at, "signal=KILL"),
            os.devnull,
        )
        if code != -9:
            return f"exited with code {code}, not by the signal: {said.strip()}"
        is_announced = told.exists() and told.read_bytes() == str(step).encode()
        return _judge(root, point.shape, step if is_announced else None, ends)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        told.unlink(missing_ok=True)


def _judge(root: Path, shape: Shape, announced: int | None, ends: Counter[str]) -> str | None:
    """Return a problem unless find_newest gives the announced step (else the old or the new one)
    with its own content, and the next save succeeds."""
    old = shape.num_older
    loaded, skipped = checkpoint.find_newest(root, checkpoint.load)
    try:
        step = shape.step_of(loaded)
        for path in checkpoint.steps(root).values():
            shape.step_of(checkpoint.load(path))
    except Exception as error:
        return str(error)
    ends["new" if step == old + 1 else "old"] += 1
    if skipped:
        return f"a checkpoint is invalid: {skipped}"
    allowed = (old, old + 1) if announced is None else (announced,)
    if step not in allowed:
        return f"step {step} was found, allowed are {allowed}"
    checkpoint.sweep(root)
    shape.save(root, old + 1)
    left = sorted(path.name for path in root.iterdir())
    is_clean = all(name.startswith("step-") for name in left)
    newest, _ = checkpoint.find_newest(root, checkpoint.load)
    is_right = is_clean and shape.step_of(newest) == old + 1
    return None if is_right else f"after the next save {left} are there"
