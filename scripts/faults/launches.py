"""Launchers: ranks that are killed and restarted, signals in every phase, and jobs that SLURM
requeues."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness.internals import checkpoint

from faults.common import (
    Row,
    errors_in,
    folder,
    random_of,
    state_of,
    wait_for,
    words_of,
)
from faults.runs import EVERY, LIMIT_S, PHASES, STEPS, Launched, _judge, _saving, _wait_for_phase
from trainer.base.process.table import is_ending, read_stat, send

STOPPED = 75


def command(
    launcher: str, task: str, place: Path, size: int, *more: str, restarts: int = 0
) -> list[str]:
    """Return the command that starts `size` ranks with `launcher`: torchrun, elastic or spawn."""
    if launcher == "torchrun":
        return words_of(task, place, *EVERY, *more, ranks=size, restarts=restarts)
    own = [f"launch={launcher}", f"launch.nproc_per_node={size}"]
    own += [f"launch.max_restarts={restarts}"] if restarts else []
    return words_of(task, place, *EVERY, *own, *more)


class Undisturbed:
    """Final states of undisturbed runs and their seconds to the first step; each run is made on
    first use."""

    def __init__(self, base: Path):
        self.base, self.found = base, dict[tuple[str, ...], tuple[Any, float]]()

    def __call__(self, task: str, size: int, *more: str) -> tuple[Any, float]:
        key = (task, str(size), *more)
        if key not in self.found:
            place, begun = self.base / f"whole-{len(self.found)}", time.monotonic()
            run = Launched(command("torchrun", task, place, size, *more), place, "whole")
            wait_for(lambda: run.has_marked("step 1") or run.is_over(), LIMIT_S)
            start_s = time.monotonic() - begun
            assert run.end() == 0, run.tail()
            self.found[key] = state_of(place / task / "run"), start_s
        return self.found[key]


def seconds_until_gone(run: Launched, pids: Collection[int], since: float) -> float | str:
    """Return the seconds from `since` until all have exited; at the limit, kill them and return
    the problem."""
    if wait_for(lambda: all(map(is_ending, pids)), LIMIT_S):
        return time.monotonic() - since
    run.kill(*pids)
    return f"the ranks did not end within {LIMIT_S:.0f} s: {run.tail()}"


# Restarted ranks ----------------------------------------------------------------------------------


def restarts(amount: int, seed: int) -> Row:
    """Kill one rank: its launcher restarts the ranks, and the run resumes automatically and ends
    like an undisturbed run."""
    row, chance, hit = (
        Row("rank killed, restarted by its launcher", amount),
        random_of(seed),
        Counter[str](),
    )
    cases = [
        (phase, size, kind)
        for phase in PHASES
        for size in (2, 3)
        for kind in ("torchrun", "elastic")
    ]
    cases = (chance.sample(cases, len(cases)) * (1 + amount // len(cases)))[:amount]
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number, (phase, size, kind) in enumerate(cases):
            settings = [f"run.steps={STEPS}", f"strategy={'fsdp' if number % 2 else 'ddp'}"]
            end, _ = undisturbed("slow", size, *settings)
            place, is_named = base / str(number), chance.random() < 0.5
            more = [*settings, *([] if is_named else ["run.name=null"])]
            run = Launched(command(kind, "slow", place, size, *more, restarts=3), place, "killed")
            name = "named" if is_named else "no name"
            case = f"rank of {size}, {settings[1]}, {kind}, {phase}, {name}"
            row.note(case, _restart(run, place / "slow", phase, end, chance, hit))
    row.detail = (
        f"{hit['killed']} ranks were killed (rank 0: {hit['rank 0']}), {hit['over']} runs had "
        f"ended; " + (", ".join(f"{phase} {hit[phase]}" for phase in PHASES if hit[phase]))
    )
    row.detail += f"; at most {hit['longest']} s from the kill to the end"
    return row


def _restart(
    run: Launched, base: Path, phase: str, end: Any, chance: random.Random, hit: Counter[str]
) -> str | None:
    _wait_for_phase(run, base, phase, chance)
    alive = run.ranks()
    if alive:
        rank = chance.choice(sorted(alive))
        send(alive[rank], signal.SIGKILL)
        hit["rank 0"] += rank == 0
    hit["killed" if alive else "over"] += 1
    hit[phase] += bool(alive)
    begun = time.monotonic()
    if code := run.end():
        return f"exit code {code}: {run.tail()}"
    if code is None:
        return f"did not end within {LIMIT_S:.0f} s: {run.tail()}"
    hit["longest"] = max(hit["longest"], round(time.monotonic() - begun))
    places = [*base.iterdir()]
    return (
        _judge(places[0], end)
        if len(places) == 1
        else f"{len(places)} run directories: a restart made its own"
    )


# Signals ------------------------------------------------------------------------------------------

TARGETS = ("rank 0", "another rank", "all ranks", "the launcher")
MOMENTS = ("init", "first step", "mid step", "evaluation", "saving", "exit")
LAUNCHERS = ("torchrun", "elastic", "spawn")
SECONDS = 5.0


def signals(amount: int, seed: int) -> Row:
    """Send SIGTERM or SIGUSR1 in every phase: all ranks end within 5 s with a checkpoint, and a
    resume finishes the run."""
    row, chance, hit = Row("SIGTERM or SIGUSR1", amount), random_of(seed), Counter[str]()
    cases = [(target, moment) for target in TARGETS for moment in MOMENTS]
    cases = (chance.sample(cases, len(cases)) * (1 + amount // len(cases)))[:amount]
    longest = Counter[str]()
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number, (target, moment) in enumerate(cases):
            kind, size = LAUNCHERS[number % 3], chance.choice((2, 3)) if amount > 3 else 2
            stop = chance.choice((signal.SIGTERM, signal.SIGUSR1))
            workers = number // 3 % 2  # the signal may reach data workers too
            case = _Signal(base / str(number), kind, size, target, moment, stop, workers)
            row.note(str(case), case.problem(undisturbed, chance))
            hit[case.outcome] += 1
            longest[moment] = max(longest[moment], round(1000 * case.seconds))
    row.detail = ", ".join(f"{name} {hit[name]}" for name in sorted(hit)) + "; longest "
    row.detail += ", ".join(
        f"{moment} {longest[moment] / 1000:.1f} s" for moment in MOMENTS if longest[moment]
    )
    return row


class _Signal:
    """One case; its result is in `outcome` and `seconds`."""

    def __init__(
        self,
        place: Path,
        kind: str,
        size: int,
        target: str,
        moment: str,
        stop: signal.Signals,
        workers: int,
        task: str = "slow",
        layout: Collection[str] = (),
    ):
        self.place, self.directory, self.kind, self.size = place, place / task / "run", kind, size
        self.target, self.moment, self.stop = target, moment, stop
        self.workers = workers
        self.undisturbed = (task, size, f"run.steps={STEPS}", *layout)
        more = [f"run.steps={STEPS}", *layout, "run.resume=auto", f"data.workers={workers}"]
        self.words = command(kind, task, place, size, *more)
        self.outcome, self.seconds, self.start_s = "failed", 0.0, 0.0

    def __str__(self) -> str:
        workers = ", data.workers=1" * self.workers
        return (
            f"{self.stop.name} to {self.target} of {self.size} with {self.kind}, "
            f"{self.moment}{workers}"
        )

    def problem(self, undisturbed: Undisturbed, chance: random.Random) -> str | None:
        end, self.start_s = undisturbed(*self.undisturbed)
        run = Launched(self.words, self.place, "asked")
        self._wait(run, chance)
        ranks = run.ranks()
        aims = {
            "rank 0": [0],
            "another rank": [r for r in ranks if r][-1:],
            "all ranks": sorted(ranks),
        }
        pids = (
            [ranks[r] for r in aims[self.target] if r in ranks]
            if self.target in aims
            else [run.process.pid]
        )
        begun = time.monotonic()
        for pid in pids:
            send(pid, self.stop)
        seconds = seconds_until_gone(run, ranks.values(), begun)
        if isinstance(seconds, str):
            return seconds
        self.seconds = seconds
        code = run.end()
        return self._judge_stop(run, code, is_over=not pids) or self._judge_resume(end)

    def _wait(self, run: Launched, chance: random.Random) -> None:
        at = chance.randrange(2, STEPS)
        if self.moment == "init":
            wait_for(lambda: len(run.ranks()) == self.size and self._can_be_asked(run), LIMIT_S)
            wait_for(lambda: run.has_marked("step 1"), chance.random() * self.start_s * 0.7)
            return
        wanted = {
            "first step": lambda: run.has_marked("step 1"),
            "mid step": lambda: run.has_marked(f"step {at}"),
            "evaluation": lambda: run.has_marked(f"evaluation {at // 6 * 6 or 6}"),
            "saving": lambda: run.has_marked(f"step {at}") and _saving(self.directory),
            "exit": lambda: run.has_marked(f"step {STEPS}"),
        }[self.moment]
        wait_for(lambda: wanted() or run.is_over(), LIMIT_S, 0.0005)
        time.sleep(
            chance.random() * {"saving": 0.004, "exit": 0.4}.get(self.moment, 0.03)
            + 0.02 * (at == STEPS)
        )

    def _can_be_asked(self, run: Launched) -> bool:
        """Return True once the ranks have signal handlers; Python's own start has none.

        With launch=spawn that start takes less than half a second too.
        """
        ranks = run.ranks().values()
        return all(map(_catches, ranks)) or (self.kind == "spawn" and min(map(_age_s, ranks)) > 1.0)

    def _judge_stop(self, run: Launched, code: int | None, is_over: bool) -> str | None:
        is_lost = (
            self.kind == "torchrun"
            and self.target == "the launcher"
            and self.stop == signal.SIGUSR1
        )
        # a rank that has not started yet must start first
        if self.seconds > SECONDS + self.start_s * (self.moment == "init"):
            return f"the ranks ended after {self.seconds:.1f} s: {run.tail()}"
        if not (self.directory / "exit.json").exists():
            is_told = len(errors_in(run.log.read_text(errors="replace"))) > 0
            if not (is_lost and self.moment == "init" and is_told):
                return f"no exit.json: {run.tail()}"
            self.outcome = (
                "no store, nothing to save"  # it died with torchrun, before the rendezvous
            )
            return None
        told = json.loads((self.directory / "exit.json").read_text())
        if told["code"] not in (STOPPED, *([0] if is_over or self.moment == "exit" else [])):
            return f"exit.json says {told}: {run.tail()}"
        if self.kind != "torchrun" and code != told["code"]:
            return f"exit.json has code {told['code']}, the command ended with {code}: {run.tail()}"
        found, skipped = checkpoint.find_newest(self.directory / "checkpoints", checkpoint.load)
        if found is None or skipped or found.manifest["step"] != told["step"] or not told["step"]:
            newest = None if found is None else found.manifest["step"]
            return (
                f"exit.json says step {told['step']}, the newest checkpoint is {newest}; {skipped}"
            )
        self.outcome = "over before the signal" if is_over else f"code {told['code']}"
        return None

    def _judge_resume(self, end: Any) -> str | None:
        again = Launched(self.words, self.place, "again")
        code = again.end()
        return (
            f"the resume ended with code {code}: {again.tail()}"
            if code
            else _judge(self.directory, end)
        )


def _catches(pid: int) -> bool:
    """Return True if the process has its handlers; it sets that of SIGUSR1 last."""
    with contextlib.suppress(OSError):
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return bool(found and int(found[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def _age_s(pid: int) -> float:
    started = int(read_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started
