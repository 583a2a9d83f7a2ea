"""The record of a run under attack: its console, its lock file and its metrics."""

from __future__ import annotations

import os
import pty
import random
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from faults.common import Row, folder, random_of, wait_for
from faults.launches import Undisturbed
from faults.machine import _end, _words
from faults.runs import LIMIT_S, STEPS, Launched, _judge
from trainer.base.errors import ConfigError
from trainer.core.checkpoints.run_directory import Lease

TALKING = "task.trainer=faults.task.Talking"
Meddle = Callable[[Path, list[str]], str | None]  # run directory, command -> problem


# Console ------------------------------------------------------------------------------------------


def console(amount: int, seed: int) -> Row:
    """Run a task that prints, warns and logs into streams that fail, or cannot encode the text: the
    run ends like an undisturbed one, with code 0."""
    return _each("output that fails", CONSOLES, amount, seed)


def _shell(end: str, **environment: str) -> Callable[..., str | None]:
    def run(place: Path, size: int, chance: random.Random) -> str | None:
        words = shlex.join(_words(place, size, TALKING))
        shell = ["bash", "-c", f"set -o pipefail; {words} {end}"]
        started = Launched(shell, place, "run", **environment)
        code = started.end()
        return None if code == 0 else f"exit code {code}: {started.tail()}"

    return run


def _closed_terminal(place: Path, size: int, chance: random.Random) -> str | None:
    """Close a terminal that is not the controlling one, so that no signal tells of it."""
    return _on_terminal(place, size, f"step {chance.randrange(1, STEPS // 2)}")


def _frozen_terminal(place: Path, size: int, chance: random.Random) -> str | None:
    """Never read from the terminal."""
    return _on_terminal(place, size, "")


def _on_terminal(place: Path, size: int, closed_at: str) -> str | None:
    place.mkdir(parents=True, exist_ok=True)
    ours, theirs = pty.openpty()
    shell = f"{shlex.join(_words(place, size, TALKING))} > {os.ttyname(theirs)} 2>&1"
    run = Launched(["bash", "-c", shell], place, "run")
    try:
        if closed_at:
            wait_for(lambda: _emptied(ours) and run.has_marked(closed_at), LIMIT_S)
            os.close(theirs)
            os.close(ours)
        code = run.end()
    finally:
        if not closed_at:
            os.close(theirs)
            os.close(ours)
    return None if code == 0 else f"exit code {code}"


def _emptied(terminal: int) -> bool:
    os.set_blocking(terminal, False)
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        return True
    return True


CONSOLES: dict[str, Callable[..., str | None]] = {
    "reader gone": _shell("2>&1 | head -n 1 > /dev/null"),
    "ascii": _shell("> ascii.log", PYTHONIOENCODING="ascii:strict"),
    "full": _shell("> /dev/full 2>&1"),
    "terminal closed": _closed_terminal,
    "closed": _shell("<&- >&- 2>&-"),
    "LANG=C": _shell("> c.log", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    "terminal frozen": _frozen_terminal,
    "latin-1": _shell("> latin.log", PYTHONIOENCODING="latin-1:strict"),
}


# Files --------------------------------------------------------------------------------------------


def writer(amount: int, seed: int) -> Row:
    """Remove, copy or restore .writer, or copy the run directory: a second writer is still refused,
    and the run ends like an undisturbed one."""
    return _each("lock file that is changed", _meddled(WRITERS), amount, seed)


def metrics(amount: int, seed: int) -> Row:
    """Edit, move, empty or remove metrics.jsonl, TensorBoard's folder or the run directory: the run
    says so, ends like an undisturbed one, and has each line once."""
    return _each("record that is changed", _meddled(RECORDS), amount, seed)


def _each(
    title: str, kinds: Mapping[str, Callable[..., str | None]], amount: int, seed: int
) -> Row:
    row, chance, hit = Row(title, amount), random_of(seed), Counter[str]()
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number in range(amount):
            kind, size = list(kinds)[number % len(kinds)], chance.choice((1, 2))
            place = base / str(number)
            problem = kinds[kind](place, size, chance)
            if problem is None:
                problem = _judge(place / "slow/run", _end(undisturbed, size))
            row.note(f"{kind}, {size} rank(s)", problem)
            hit[kind] += problem is None
    row.detail = ", ".join(f"{kind} {hit[kind]}" for kind in kinds if hit[kind])
    return row


def _meddled(kinds: Mapping[str, Meddle]) -> dict[str, Callable[..., str | None]]:
    """Return cases that run, meddle with the directory in mid-run, and expect code 0."""

    def case(meddle: Meddle) -> Callable[..., str | None]:
        def run(place: Path, size: int, chance: random.Random) -> str | None:
            words = _words(place, size, "task.options.pause_s=0.1")
            started = Launched(words, place, "run")
            at = chance.randrange(6, STEPS - 14)
            wait_for(lambda: started.has_marked(f"step {at}") or started.is_over(), LIMIT_S)
            problem = meddle(place / "slow/run", words)
            code = started.end()
            if code or problem:
                return f"{problem}, exit code {code}: {started.tail()}"
            is_told = "warning: " in started.log.read_text()
            return None if is_told or meddle in SILENT else "nothing was said"

        return run

    return {name: case(meddle) for name, meddle in kinds.items()}


def _find_second(directory: Path) -> str | None:
    """Return a problem unless a second writer is refused by a line that names the first."""
    try:
        Lease.check_free(directory)
    except ConfigError as error:
        is_named = "writes there; wait until it exits" in str(error)
        return None if is_named else str(error)
    return "a second process could write there"


def _copy_directory(directory: Path, words: list[str]) -> str | None:
    """Copy the directory, which closes a descriptor of each file in it; other processes may."""
    shutil.copytree(directory, directory.parent.parent / "copy")
    return _find_second(directory)


def _remove_writer(directory: Path, words: list[str]) -> str | None:
    (directory / ".writer").unlink()
    repaired = wait_for((directory / ".writer").exists, LIMIT_S)
    time.sleep(0.1)  # until it is locked
    return _find_second(directory) if repaired else ".writer was not written again"


def _copy_writer(directory: Path, words: list[str]) -> str | None:
    shutil.copy2(directory / ".writer", directory / "copy")
    (directory / "copy").replace(directory / ".writer")
    return None


def _shell_in(command: str) -> Meddle:
    def meddle(directory: Path, words: list[str]) -> str | None:
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, cwd=directory, capture_output=True)
        return done.stderr.decode() or None

    return meddle


WRITERS: dict[str, Meddle] = {
    "removed, then a second writer": _remove_writer,
    "replaced by its copy": _copy_writer,
    "emptied": _shell_in("truncate -s 0 .writer"),
    "directory copied, then a second writer": _copy_directory,
    "directory replaced by its copy": _shell_in(
        "cp -a . ../copy && rm -rf ../run && mv ../copy ../run"
    ),
}
RECORDS: dict[str, Meddle] = {
    "sed -i": _shell_in("sed -i s/x/x/ metrics.jsonl"),
    "rm": _shell_in("rm metrics.jsonl"),
    "truncate": _shell_in("truncate -s 300 metrics.jsonl"),
    "rm -r tensorboard": _shell_in("rm -r tensorboard"),
    "in place": _shell_in("head -n 2 metrics.jsonl > x; cat x > metrics.jsonl; rm x"),
    "exit.json is a folder": _shell_in(
        "mkdir exit.json; rm metrics.jsonl; sleep 1; rmdir exit.json"
    ),
}
SILENT = (_copy_directory,)  # nothing has changed
