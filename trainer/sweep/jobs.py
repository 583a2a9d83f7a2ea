"""`python -m trainer -m key=a,b`: each combination is a run of its own, in processes of its own, one after another."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config.compose import load_config
from trainer.config.schema import Config
from trainer.distributed.signals import SIGNALS
from trainer.errors import ConfigError, visible
from trainer.record import directory as rundir
from trainer.record.lease import Lease, check_free
from trainer.sweep.search import search
from trainer.sweep.submit import is_known, open_executor, submit

STOPPED = 75


@dataclass
class Job:
    """One run of the sweep; `state` is waiting, running, done, failed or stopped, or submitted, as job `submitted`."""

    number: int
    swept: dict[str, str]
    words: list[str]
    directory: str
    state: str = "waiting"
    code: int | None = None
    value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    submitted: str = ""

    def read_end(self, before: Mapping[str, Any] | None) -> None:
        """What exit.json in its run directory says, where it was a job of the start `before`."""
        if before is None:
            return
        self.submitted, self.seconds = str(before.get("submitted", "")), before.get("seconds", 0.0)
        told = _told(Path(self.directory))
        self.take(told.get("code"), told)

    def take(self, code: int | None, told: Mapping[str, Any]) -> None:
        self.code, self.metrics, self.value = code, told.get("metrics") or {}, told.get("best")
        self.state = {0: "done", STOPPED: "stopped", None: self.state}.get(code, "failed")


class Sweep:
    """The jobs so far, and what stands of them on disk; one process runs it at a time."""

    def __init__(self, name: str, config: Config):
        self.name, self.config, self.place = name, config, Path(config.run.dir) / "sweeps" / name
        self.jobs: list[Job] = []
        self.is_stopped = False
        self.place.mkdir(parents=True, exist_ok=True)
        self._lease = Lease(self.place)
        self.before = _before(self.place)

    def run(self, job: Job, spoken: str) -> None:
        """In a process of its own, unless it is finished; what asks this one to stop is passed on to it."""
        if job.state == "done":
            print(f"{spoken} is finished: {_spell(job)}", flush=True)
            return
        job.state = "running"
        self.record()
        print(f"{spoken}: {_spell(job)}", flush=True)
        began = time.monotonic()
        code, is_asked = _code_of(job.words)
        job.seconds = time.monotonic() - began
        job.take(code, _told(Path(job.directory)))
        is_over = job.state == "failed" and self.config.launch.on_failed_job == "stop"
        self.is_stopped |= is_asked or is_over or job.state == "stopped"
        self.record()

    def ordered(self) -> list[Job]:
        """Best first; those without a value at the end."""
        sign = 1 if self.config.checkpoint.best_mode == "min" else -1
        return sorted(
            self.jobs,
            key=lambda job: (job.state != "done", job.value is None, sign * (job.value or 0)),
        )

    def record(self) -> None:
        rundir.replace(
            self.place / "sweep.json",
            json.dumps([asdict(job) for job in self.jobs], indent=1) + "\n",
        )
        names, keys = (
            sorted({name for job in self.jobs for name in job.metrics}),
            list(self.jobs[0].swept),
        )
        staged = self.place / ".results.csv.new"
        with open(staged, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["job", "state", "code", *keys, "best", *names, "seconds", "directory"])
            for job in self.ordered():
                values = [
                    job.value,
                    *(job.metrics.get(name) for name in names),
                    round(job.seconds, 1),
                    job.directory,
                ]
                writer.writerow(
                    [
                        job.number,
                        job.state,
                        job.code,
                        *(job.swept.get(key) for key in keys),
                        *values,
                    ]
                )
        os.replace(staged, self.place / "results.csv")

    def end(self) -> int:
        """Show all. The exit code, 0: all are done; 1: some failed; 75: stopped."""
        from rich.console import Console
        from rich.table import Table

        metric = self.config.checkpoint.metric
        table = Table(
            "job",
            *self.jobs[0].swept,
            "state",
            f"best {metric}",
            "directory",
            box=None,
            header_style="bold",
        )
        for job in self.ordered():
            value = "" if job.value is None else f"{job.value:.4f}"
            table.add_row(
                *map(
                    visible, (str(job.number), *job.swept.values(), job.state, value, job.directory)
                )
            )
        Console(width=None if sys.stdout.isatty() else 200).print(table)
        print(f"files: {self.place}/results.csv, {self.place}/sweep.json")
        states = {job.state for job in self.jobs}
        return 0 if states == {"done"} else 1 if "failed" in states else STOPPED


def run_sweep(
    jobs: Sequence[list[str]],
    configs: Sequence[Config],
    config_dirs: Sequence[str],
    load_task: Callable[[Config], Any],
    submitted: tuple[str, Sequence[str]] | None = None,
) -> int:
    """Run what is not finished yet, and show all; the exit code.

    `load_task` gives the Trainer of a job as its rank 0 will have it. `submitted`: (cluster, settings) for submitit;
    then the jobs are handed over, and not waited for.

    Raises ConfigError, before the first job starts, for one that cannot run.
    """
    name = _name(jobs, configs)
    check_free(Path(configs[0].run.dir) / "sweeps" / name)
    words = [word for job in jobs for word in job]
    found = []
    for number, (told, config) in enumerate(zip(jobs, configs, strict=True), 1):
        swept = [word for word in told if words.count(word) < len(jobs)]
        found.append(_job(number, swept, told, config, config_dirs, name))
    _check(
        [load_task(_named(config, job)) for job, config in zip(found, configs, strict=True)],
        submitted is None,
    )
    sweep = Sweep(name, configs[0])
    sweep.jobs = found
    for job in found:
        before = sweep.before.get(job.directory)
        if Path(job.directory).exists() and (before is None or before["words"] != job.words):
            raise ConfigError(
                f"job {job.number}: {job.directory} is another job's run; choose another run.name"
            )
        job.read_end(before)
    if submitted is not None:
        return _submit(
            sweep, submitted[0], open_executor(submitted[0], sweep.place / "submitit", submitted[1])
        )
    for job in found:
        sweep.run(job, f"job {job.number} of {len(found)}")
        if sweep.is_stopped:
            break
    return sweep.end()


def _submit(sweep: Sweep, cluster: str, executor: Any) -> int:
    for job in sweep.jobs:
        if job.state != "done":
            is_new = not job.submitted or not is_known(cluster, job.submitted)
            job.state, job.submitted = (
                "submitted",
                submit(executor, job.words) if is_new else job.submitted,
            )
            sweep.record()
        spoken = job.state if job.state == "done" else f"submitted as {job.submitted}"
        print(f"job {job.number} of {len(sweep.jobs)} ({_spell(job)}): {spoken}", flush=True)
    sweep.end()
    print(
        f"output: {sweep.place}/submitit; the same command later shows and submits what is not finished"
    )
    return 0


def search_jobs(
    steering: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[str]
) -> int:
    """The jobs that Optuna asks for, one after another; then all of them, best first."""
    sweep: Sweep | None = None

    def run_job(number: int, name: str, words: list[str]) -> float:
        """The metric of checkpoint.best_metric, for Optuna to minimise or maximise; the worst where the job failed."""
        nonlocal sweep
        config = load_config(words, config_dirs)
        sweep = sweep or Sweep(name, config)
        job = _job(
            number,
            [word for word in words if word not in overrides],
            words,
            config,
            config_dirs,
            name,
        )
        job.read_end(sweep.before.get(job.directory))
        sweep.jobs.append(job)
        sweep.run(job, f"job {number}")
        if sweep.is_stopped:
            raise KeyboardInterrupt  # through Hydra and Optuna, who go on after any other error
        worst = math.inf if config.checkpoint.best_mode == "min" else -math.inf
        return worst if job.value is None else job.value  # Optuna's plugin breaks down over nan

    name = hashlib.sha256(json.dumps([*steering, *overrides]).encode()).hexdigest()[:8]
    try:
        search(steering, overrides, config_dirs, name, run_job)
    except KeyboardInterrupt:
        if sweep is None:
            raise
    if sweep is None:
        raise ConfigError(
            "hydra.sweeper.n_trials: Optuna asked for no job; give a number of at least 1"
        )
    return sweep.end()


def _before(place: Path) -> dict[str, dict[str, Any]]:
    """The jobs of the start before, by directory."""
    try:
        return {job["directory"]: job for job in json.loads((place / "sweep.json").read_text())}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _told(directory: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((directory / "exit.json").read_text())
        return found
    except (OSError, ValueError):
        return {}


def _name(jobs: Sequence[list[str]], configs: Sequence[Config]) -> str:
    names = {config.run.name for config in configs}
    if len(names) == 1 and (name := configs[0].run.name):
        return name
    return hashlib.sha256(json.dumps(list(jobs)).encode()).hexdigest()[:8]


def _job(
    number: int,
    swept: Sequence[str],
    words: Sequence[str],
    config: Config,
    config_dirs: Sequence[str],
    sweep: str,
) -> Job:
    """Its directory is named by what it is told, so that another job never goes on with it."""
    given = dict(word.lstrip("+").split("=", 1) for word in swept if "=" in word)
    kept = [word for word in words if not word.startswith(("run.name=", "run.resume="))]
    kept = [word for folder in config_dirs for word in ("--config-dir", folder)] + kept
    digest = hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:6]
    name = config.run.name if "run.name" in given else f"{sweep}-{digest}"
    resume = config.run.resume or "auto"  # what was begun goes on
    kept += [f"run.name={name}", f"run.resume={resume}"]
    return Job(number, given, kept, str(Path(config.run.dir) / config.task.name / str(name)))


def _named(config: Config, job: Job) -> Config:
    return replace(
        config,
        run=replace(config.run, name=Path(job.directory).name, resume=config.run.resume or "auto"),
    )


def _check(tasks: Sequence[Any], is_here: bool) -> None:
    """The first gate of every job; how many ranks a cluster will give is not known here."""
    for task in tasks if is_here else ():
        task.check(is_training=True)
    for task in tasks:
        task.try_optimizer()


def _code_of(words: Sequence[str]) -> tuple[int, bool]:
    """(exit code, whether this process was asked to stop) of a job, in a session of its own: a terminal's Ctrl-C comes
    to this process alone, and so once."""
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        if process is not None:
            process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", *words], start_new_session=True
        )
        for number in asked:  # before it was there
            process.send_signal(number)
        return process.wait(), bool(asked)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _spell(job: Job) -> str:
    return visible(" ".join(f"{key}={value}" for key, value in job.swept.items()) or "as given")
