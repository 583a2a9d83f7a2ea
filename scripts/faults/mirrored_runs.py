"""Kills of whole runs that mirror, with damaged disks, stores that fail, and lost nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from harness.internals import checkpoint
from harness.s3 import Proxy

from faults.common import Row, difference, folder, random_of, state_of, wait_for, words_of
from faults.mirror import in_child, served
from faults.runs import Launched
from trainer.base.errors import CheckpointError, ConfigError
from trainer.base.process.table import read_stat, send
from trainer.core.checkpoints import transaction
from trainer.core.config.copies import copy_of

STEPS = 16
SETTLED_S = 0.3  # a killed rank's last request reaches the store within this time
LIMIT_S = 240.0
WORDS = [
    *("strategy=exact", f"run.steps={STEPS}", "checkpoint.every_steps=3"),
    *("checkpoint.every_epochs=null", "eval.every_steps=5", "eval.every_epochs=null"),
    *("log.trackers=[]", "dist.hang_timeout_s=60", "task.options.pause_s=0.1"),
]
LAUNCHERS = {
    "one rank": (1, ["run.resume=auto"]),
    "elastic": (2, ["launch=elastic", "launch.nproc_per_node=2", "launch.max_restarts=3"]),
    "ray": (
        2,
        ["launch=ray", "launch.ranks=2", "launch.cpus_per_rank=0.5", "launch.max_restarts=3"],
    ),
}
# of ten cases; a start of Ray takes 20 s
LAUNCHES = ["one rank"] * 6 + ["elastic"] * 3 + ["ray"]
STORES = ["sound", "sound", "failing", "slow"]
FAULTS = ("503", "cut", "lost", "torn", "slow")  # of a store that fails


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _largest(step: Path) -> Path:
    return max(step.iterdir(), key=lambda path: path.stat().st_size)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a truncated file": lambda step: _truncate(_largest(step)),
    "a flipped bit": lambda step: _flip(_largest(step)),
    "a missing file": lambda step: _largest(step).unlink(),
    "an empty file": lambda step: os.truncate(_largest(step), 0),
    "a truncated manifest": lambda step: _truncate(step / transaction.MANIFEST),
    "no manifest": lambda step: (step / transaction.MANIFEST).unlink(),
    "a file instead of the folder": lambda step: (shutil.rmtree(step), step.write_text("")),
    "no folder": shutil.rmtree,
}
LOST = "a lost node"  # without its run directory


@dataclass
class Case:
    """One run: how it is started, what happens to its disk and its store, and when."""

    launcher: str
    disk: str
    store: str
    keep_last: int
    at: int
    is_later: bool  # the newest local checkpoint and the one before are damaged
    pause_s: float

    @staticmethod
    def draw(number: int, chance: Random) -> Case:
        disk = ""
        if number % 2:
            disk = chance.choice([*DAMAGES, LOST, LOST])
        return Case(
            launcher=LAUNCHES[number % len(LAUNCHES)],
            disk=disk,
            store=chance.choice(STORES),
            keep_last=chance.choice((1, 1, 2, 3)),
            at=chance.randrange(2, STEPS),
            is_later=chance.random() < 0.25,
            pause_s=chance.random() * 0.2,
        )

    def __str__(self) -> str:
        disk = self.disk or "a sound disk"
        both = ", of two checkpoints" if self.is_later else ""
        when = f"step {self.at} and {self.pause_s:.3f} s"
        return f"{self.launcher}, {disk}{both}, {self.store} store, {self.keep_last} kept, {when}"


def _plan(store: str, chance: Random) -> Callable[[int, str, str], str]:
    if store == "slow":
        return lambda number, method, path: "slow" if method in ("PUT", "POST") else ""
    if store == "failing":
        return lambda *request: chance.choice(FAULTS) if chance.random() < 1 / 8 else ""
    return lambda number, method, path: ""


def _newest_whole(root: Path) -> int:
    """Return the step of the newest checkpoint whose bytes are those that were saved, else 0."""
    for step, path in reversed(transaction.steps(root).items()):
        with contextlib.suppress(CheckpointError, OSError):
            checkpoint.load(path)
            return step
    return 0


def _newest_in(address: str) -> int:
    with tempfile.TemporaryDirectory() as place, contextlib.suppress(ConfigError):
        return _newest_whole(copy_of(address, Path(place)) / "checkpoints")
    return 0  # nothing is there yet


def _ranks_of(place: Path) -> dict[int, int]:
    """Return rank to process id of the ranks that were started in a folder."""
    ranks = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if (process / "cwd").readlink() != place or b"watch" in (
                process / "cmdline"
            ).read_bytes():
                continue
            variables = (process / "environ").read_bytes().split(b"\0")
            ranks |= {
                int(each[5:]): int(process.name) for each in variables if each[:5] == b"RANK="
            }
    return ranks


class Supervised:
    """The ranks of a run, which are killed while what would restart them is stopped."""

    def __init__(self, run: Launched, place: Path, size: int):
        self._run = run
        self._place = place
        self._size = size

    def ranks(self) -> list[int]:
        if self._size == 1:
            return [] if self._run.is_over() else [self._run.process.pid]
        found = _ranks_of(self._place)
        return [found[rank] for rank in sorted(found)]

    def kill(self, while_stopped: Callable[[], None]) -> bool:
        """Kill all ranks, rank 0 first; return False if they had ended."""
        ranks = self.ranks()
        if not ranks:
            return False
        parent = int(read_stat(ranks[0])[1])
        if self._size > 1 and parent > 1:
            os.kill(parent, signal.SIGSTOP)
        try:
            for pid in ranks:
                send(pid, signal.SIGKILL)
            time.sleep(SETTLED_S)
            while_stopped()
        finally:
            if self._size > 1 and parent > 1:
                os.kill(parent, signal.SIGCONT)
        return True


def _hurt(case: Case, directory: Path) -> None:
    """Damage the newest checkpoints on the disk, or lose it all."""
    if case.disk == LOST:
        shutil.rmtree(directory, ignore_errors=True)
    elif case.disk:
        for path in [*transaction.steps(directory / "checkpoints").values()][-1 - case.is_later :]:
            DAMAGES[case.disk](path)


def _resumed_at(log: str) -> int:
    """Return the step at which the last start in a log went on, 0 for the first step."""
    steps = re.findall(r"resumed at step ([\d,]+) of", log)
    return int(steps[-1].replace(",", "")) if steps else 0


def _kill_one(
    case: Case, proxy: Proxy, place: Path, address: str, undisturbed: Any, chance: Random
) -> str | None:
    """Kill a run and let it go on; return what is wrong."""
    size, words = LAUNCHERS[case.launcher]
    # A launcher's restart is of the same launch: it needs no run.resume.
    settings = [*WORDS, *words, f"checkpoint.mirror={address}"]
    settings.append(f"checkpoint.keep_last={case.keep_last}")
    command = words_of("slow", place, *settings)
    directory = place / "slow/run"
    proxy.begin(_plan(case.store, chance))
    # a cluster of its own; paths of its sockets are short
    own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(place)}
    run = Launched(command, place, "run", **own)
    ready = lambda: run.has_marked(f"step {case.at}") or run.is_over()  # noqa: E731
    if not wait_for(ready, LIMIT_S):
        run.kill()
        return f"step {case.at} was not reached: {run.tail()}"
    time.sleep(case.pause_s)
    expected = [0]
    is_lost = [False]  # the only checkpoint is damaged, and the bucket has none yet

    def damage() -> None:
        _hurt(case, directory)
        proxy.begin(lambda number, method, path: "")
        root = directory / "checkpoints"
        expected[0] = max(_newest_whole(root), in_child(lambda: _newest_in(address)))
        is_lost[0] = not expected[0] and bool(transaction.steps(root))

    was_killed = Supervised(run, place, size).kill(damage)
    if size == 1 and was_killed:
        run.process.wait()
        run = Launched(command, place, "again", **own)
    code = _end(run)
    if is_lost[0]:  # to begin anew is for the user to decide
        is_told = "no checkpoint is valid" in run.log.read_text(errors="replace")
        return None if code == 2 and is_told else f"exit code {code}, not 2: {run.tail()}"
    if code:
        return f"exit code {code}: {run.tail()}"
    if not was_killed:
        return None
    resumed = _resumed_at(run.log.read_text(errors="replace"))
    if resumed != expected[0]:
        return f"resumed at step {resumed}, and step {expected[0]} was whole: {run.tail()}"
    if problem := difference(state_of(directory), undisturbed):
        return problem
    newest = in_child(lambda: _newest_in(address))
    return None if newest == STEPS else f"the bucket has step {newest}, not {STEPS}"


def _end(run: Launched) -> int | None:
    try:
        return run.process.wait(LIMIT_S)
    except Exception:
        run.kill()
        return -1


def mirrored_runs(amount: int, seed: int) -> Row:
    """Kill runs that mirror, half with damaged disks or lost nodes: the newest whole one counts."""
    row = Row("SIGKILL of a run that mirrors", amount)
    chance = random_of(seed)
    counts: Counter[str] = Counter()
    undisturbed: dict[int, Any] = {}
    with served() as proxy, folder() as base:
        for size in (1, 2):
            place = base / f"whole-{size}"
            more = ["launch=elastic", "launch.nproc_per_node=2"] if size > 1 else []
            whole = Launched(words_of("slow", place, *WORDS, *more), place, "whole")
            assert whole.end() == 0, whole.tail()
            undisturbed[size] = state_of(place / "slow/run")
        for number in range(amount):
            case = Case.draw(number, chance)
            if case.launcher == "ray" and find_spec("ray") is None:
                case.launcher = "elastic"
            size = LAUNCHERS[case.launcher][0]
            place = base / str(number)
            address = f"s3://data/run-{seed}-{number}"
            try:
                problem = _kill_one(case, proxy, place, address, undisturbed[size], chance)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"[-600:]
            counts[case.launcher] += 1
            counts["damaged"] += bool(case.disk) and case.disk != LOST
            counts["lost"] += case.disk == LOST
            counts["disturbed"] += case.store != "sound"
            row.note(str(case), problem)
            shutil.rmtree(place, ignore_errors=True)
    launches = ", ".join(f"{name} {counts[name]}" for name in LAUNCHERS if counts[name])
    row.detail = f"{launches}; {counts['damaged']} disks damaged, {counts['lost']} nodes lost,"
    row.detail += f" {counts['disturbed']} stores slow or failing; each went on from the newest"
    row.detail += " whole checkpoint anywhere, to the bits of an undisturbed run"
    return row


ROWS = {"mirrored_runs": (mirrored_runs, 300, 2)}
