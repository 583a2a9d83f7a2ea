"""SIGKILL and errors at the system calls of one save and prune, injected by strace."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.internals import checkpoint
from harness.launch import environment_of_a_command as environment
from harness.training import keep_rules

from faults.common import (
    Row,
    Shape,
    errors_in,
    folder,
    random_of,
    state_of,
    traced,
    without_strace,
    words_of,
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
ERRORS = ("ENOSPC", "EIO", "EROFS", "EINTR")
FALLIBLE = ("openat", "write", "fsync", "close", "mkdir", "rename")
RETRIED = (
    "openat",
    "write",
    "fsync",
)  # Python retries these after EINTR, except the openat of a directory listing


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
    is_listing: bool

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
    for is_counted in (
        False,
        True,
    ):  # first in this process: imports and caches of a first save are not counted
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
    return [
        Point(template, shape, name, at, "O_DIRECTORY" in rest)
        for name, at, rest in calls_in(log.read_text())
    ]


def calls_in(log: str) -> Iterator[tuple[str, int, str]]:
    """Yield (name, how often it was called, arguments) of each system call in a log of strace."""
    counts: Counter[str] = Counter()
    for name, rest in re.findall(r"^\d+ +(\w+)\((.*)", log, re.MULTILINE):
        if name not in _UNSEEN:
            counts[name] += 1
            yield name, counts[name], rest


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
    with _attempt(point, "signal=KILL") as (root, code, said, announced):
        if code != -9:
            return f"exited with code {code}, not by the signal: {said}"
        return _judge(root, point.shape, announced, ends)


@contextmanager
def _attempt(point: Point, what: str) -> Iterator[tuple[Path, int, str, int | None]]:
    """Save the next step with `what` injected at the point; yield (root, exit code, error text,
    announced step)."""
    place, step = point.template.parent, point.shape.num_older + 1
    root, told = (
        place / "root",
        place / "announced",
    )  # as deep as in the counted run, because resolving a path makes calls per folder
    shutil.copytree(point.template, root)
    try:
        code, said = traced(
            lambda: _save_and_prune(root, point.shape, step, told),
            inject(point.call, point.at, what),
            os.devnull,
        )
        yield (
            root,
            code,
            said.strip(),
            step if told.exists() and told.read_bytes() == str(step).encode() else None,
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)
        told.unlink(missing_ok=True)


def _judge(root: Path, shape: Shape, announced: int | None, ends: Counter[str]) -> str | None:
    """Return a problem unless find_newest gives the announced step (else the old or the new one)
    with its own content."""
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
    return None if step in allowed else f"step {step} was found, allowed are {allowed}"


# Errors -------------------------------------------------------------------------------------------


def fail(amount: int, seed: int) -> Row:
    """Inject ENOSPC, EIO, EROFS or EINTR at a system call, so that Python's own retry is tested."""
    row = Row("error from a system call of a save", amount, skipped=without_strace())
    if row.skipped:
        return row
    ends: Counter[str] = Counter()
    with folder() as base:
        points = [point for point in _points(base, 600, seed) if point.call in FALLIBLE]
        for point, error in random_of(seed).sample(
            [(p, e) for p in points for e in ERRORS], amount
        ):
            row.note(f"{error} at {point}", _one_error(point, error, ends))
    row.detail = f"{ends['success']} saves went through, {ends['OSError']} ended in an OSError"
    return row


def _one_error(point: Point, error: str, ends: Counter[str]) -> str | None:
    with _attempt(point, f"error={error}") as (root, code, said, announced):
        ends["success" if code == 0 else "OSError"] += 1
        if code not in (0, 1) or (code == 1 and "Traceback" in said):
            return f"exited with code {code}, without an OSError: {said}"
        if error == "EINTR" and code and point.call in RETRIED and not point.is_listing:
            return f"not retried after EINTR: {said}"
        if left := [path.name for path in root.glob(".staging-*")]:
            return f"left {left[0]}"
        return _judge(root, point.shape, announced, Counter())


# Errors through the whole command -----------------------------------------------------------------

SAVES = (
    "checkpoint.every_steps=3",
    "checkpoint.every_epochs=null",
    "checkpoint.background=false",
    "run.steps=30",
)


def command(amount: int, seed: int) -> Row:
    """Inject an error into a save of `python -m trainer`: one error line, exit code 1, and the
    previous checkpoint intact."""
    row = Row("the same error in a save of the whole command", amount, skipped=without_strace())
    if row.skipped:
        return row
    chance = random_of(seed)
    with folder() as base:
        log = base / "log"
        done = _strace(base / "whole", ["-y", "-e", "trace=fsync,rename,mkdir"], log)
        assert done.returncode == 0, done.stderr
        points = _of_saves(log.read_text())
        for number, (name, at) in enumerate(chance.sample(points, amount)):
            error = chance.choice(ERRORS[:3])
            place = base / str(number)
            done = _strace(
                place,
                ["-e", f"trace={name}", "-e", f"inject={name}:error={error}:when={at}"],
                Path(os.devnull),
            )
            row.note(f"{error} at {name} {at}", _judge_command(done, place / "tiny/run"))
    return row


def _strace(place: Path, options: list[str], log: Path) -> subprocess.CompletedProcess[str]:
    words = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-o",
        str(log),
        *options,
        *words_of("tiny", place, *SAVES),
    ]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)


def _of_saves(log: str) -> list[tuple[str, int]]:
    """Return (call, number of that call in the first thread) for the calls in saves after the
    first; calls of a prune are left out."""
    counts: Counter[str] = Counter()
    main, found, num_saves = log.split(maxsplit=1)[0], [], 0
    for line in log.splitlines():
        if not (match := re.match(rf"{main} +(\w+)\((.*)", line)):
            continue
        counts[match[1]] += 1
        num_saves += match[1] == "mkdir" and ".staging-" in match[2]
        is_save = ".staging-" in match[2] or (match[1] == "fsync" and "/checkpoints>" in match[2])
        if is_save and num_saves > 1:
            found.append((match[1], counts[match[1]]))
    return found


def _judge_command(done: subprocess.CompletedProcess[str], directory: Path) -> str | None:
    lines = done.stderr.splitlines()
    if done.returncode != 1 or len(errors_in(done.stderr)) != 1 or len(lines) != 1:
        return f"exit code {done.returncode} and {len(lines)} lines: {done.stderr.strip()[-300:]}"
    try:
        step = state_of(directory)["step"]
    except Exception as error:
        return str(error)
    told = json.loads((directory / "exit.json").read_text())["code"]
    if told != 1 or not 3 <= step < 30:
        return f"exit.json says {told}, the newest checkpoint is of step {step}"
    return (
        f"left {left[0]}"
        if (left := [p.name for p in (directory / "checkpoints").glob(".staging-*")])
        else None
    )
