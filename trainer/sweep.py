"""`python -m trainer -m key=a,b`: each combination is a run of its own, in processes of its own, one after another."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer import rundir
from trainer.config import Config, load_config
from trainer.distributed.signals import stop_requests
from trainer.errors import ConfigError, visible
from trainer.search import search
from trainer.submit import open_executor, submit

STOPPED = 75


@dataclass
class Job:
    """One run of the sweep; `state` is waiting, running, done, failed or stopped."""

    number: int
    swept: dict[str, str]
    words: list[str]
    directory: str
    state: str = "waiting"
    code: int | None = None
    value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def read_end(self) -> None:
        """What exit.json in its run directory says; a finished run is done, whoever ran it."""
        try:
            told = json.loads((Path(self.directory) / "exit.json").read_text())
        except (OSError, ValueError):
            return
        self.code, self.metrics = told["code"], told.get("metrics") or {}
        self.value = told.get("best")
        self.state = {0: "done", STOPPED: "stopped"}.get(told["code"], "failed")


def run_sweep(
    jobs: Sequence[list[str]],
    configs: Sequence[Config],
    config_dirs: Sequence[str],
    submitted: tuple[str, Sequence[str]] | None = None,
) -> int:
    """Run what is not finished yet, and show all. Exit code 0: all are done; 75: stopped; 1: some failed.

    `submitted`: (cluster, settings) for submitit; then the jobs are handed over, and not waited for.
    """
    _check_names(configs)
    first = configs[0]
    name = _name(jobs, configs)
    place = Path(first.run.dir) / "sweeps" / name
    found = [_job(number, jobs, config, config_dirs, name, number - 1) for number, config in enumerate(configs, 1)]
    place.mkdir(parents=True, exist_ok=True)
    before = _before(place)
    for job in found:
        if before.get(job.directory) == job.words:  # else it was another job: with fewer epochs, say
            job.read_end()
    if submitted is not None:
        return _submit(found, place, open_executor(submitted[0], place / "submitit", submitted[1]))
    with stop_requests() as stop:
        for job in found:
            if job.state == "done":
                print(f"job {job.number} of {len(found)} is finished: {_spell(job)}", flush=True)
                continue
            job.state = "running"
            _record(place, found)
            print(f"job {job.number} of {len(found)}: {_spell(job)}", flush=True)
            _run(job, stop)
            _record(place, found)
            if job.state == "stopped" or stop or (job.state == "failed" and first.launch.on_failed_job == "stop"):
                break
    _show(found, first, place)
    states = {job.state for job in found}
    return 0 if states == {"done"} else STOPPED if "stopped" in states and "failed" not in states else 1


def _submit(jobs: Sequence[Job], place: Path, executor: Any) -> int:
    for job in jobs:
        if job.state != "done":
            job.state = f"submitted as {submit(executor, job.words)}"
        print(f"job {job.number} of {len(jobs)} ({_spell(job)}): {job.state}", flush=True)
        _record(place, jobs)
    print(f"output: {place}/submitit; the same command later shows and submits what is not finished")
    return 0


def search_jobs(steering: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[str]) -> int:
    """The jobs that Optuna asks for, one after another; then all of them, best first."""
    found: list[Job] = []
    begun: list[tuple[Config, Path]] = []  # of each job
    name = hashlib.sha256(json.dumps([*steering, *overrides]).encode()).hexdigest()[:8]

    def run_job(number: int, place: Path, words: list[str]) -> float:
        """The metric of checkpoint.best_metric, for Optuna to minimise or maximise; nan where the job failed."""
        config = load_config(words, config_dirs)
        job = _job(number, [words, [word for word in overrides if word in words]], config, config_dirs, place.name, 0)
        begun.append((config, place))
        found.append(job)
        place.mkdir(parents=True, exist_ok=True)
        print(f"job {number}: {_spell(job)}", flush=True)
        with stop_requests() as stop:
            _run(job, stop)
        _record(place, found)
        if job.state == "stopped":
            raise KeyboardInterrupt
        return math.nan if job.value is None else job.value

    search(steering, overrides, config_dirs, name, run_job)
    _show(found, *begun[0])
    return int(any(job.state != "done" for job in found))


def _before(place: Path) -> dict[str, list[str]]:
    try:
        return {job["directory"]: job["words"] for job in json.loads((place / "sweep.json").read_text())}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _name(jobs: Sequence[list[str]], configs: Sequence[Config]) -> str:
    names = {config.run.name for config in configs}
    if len(names) == 1 and (name := configs[0].run.name):
        return name
    return hashlib.sha256(json.dumps(list(jobs)).encode()).hexdigest()[:8]


def _job(
    number: int, jobs: Sequence[list[str]], config: Config, config_dirs: Sequence[str], sweep: str, at: int
) -> Job:
    words, others = jobs[at], [word for job in jobs for word in job]
    swept = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word and others.count(word) < len(jobs))
    name = config.run.name if "run.name" in swept else f"{sweep}-{number}"
    kept = [word for word in words if not word.startswith(("run.name=", "run.resume="))]
    dirs = [word for folder in config_dirs for word in ("--config-dir", folder)]
    resume = config.run.resume or "auto"  # what was begun goes on
    words = [*dirs, *kept, f"run.name={name}", f"run.resume={resume}"]
    return Job(number, swept, words, str(Path(config.run.dir) / config.task.name / str(name)))


def _run(job: Job, stop: Any) -> None:
    began, told = time.monotonic(), Path(job.directory) / "exit.json"
    before = told.stat().st_mtime_ns if told.exists() else 0
    process = subprocess.Popen([sys.executable, "-m", "trainer", *job.words])  # noqa: S603
    is_told = False
    while (code := process.poll()) is None:
        if stop and not is_told and stop.name != "SIGINT":  # which the terminal gives to both
            process.terminate()
            is_told = True
        time.sleep(0.05)
    job.state, job.seconds = "failed", time.monotonic() - began
    if told.exists() and told.stat().st_mtime_ns != before:
        job.read_end()
    job.code = code
    if code:
        job.state = "stopped" if code == STOPPED else "failed"


def _record(place: Path, jobs: Sequence[Job]) -> None:
    rundir.replace(place / "sweep.json", json.dumps([asdict(job) for job in jobs], indent=1) + "\n")
    names = sorted({name for job in jobs for name in job.metrics})
    keys = list(jobs[0].swept)
    staged = place / ".results.csv.new"
    with open(staged, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["job", "state", "code", *keys, "best", *names, "seconds", "directory"])
        for job in jobs:
            values = [job.metrics.get(name) for name in names]
            swept = [job.swept.get(key) for key in keys]
            writer.writerow(
                [job.number, job.state, job.code, *swept, job.value, *values, round(job.seconds, 1), job.directory]
            )
    os.replace(staged, place / "results.csv")


def _show(jobs: Sequence[Job], config: Config, place: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    metric, sign = config.checkpoint.metric, 1 if config.checkpoint.best_mode == "min" else -1
    ordered = sorted(jobs, key=lambda job: (job.state != "done", job.value is None, sign * (job.value or 0)))
    table = Table(*("job", *jobs[0].swept, "state", f"best {metric}", "directory"), box=None, header_style="bold")
    for job in ordered:
        value = "" if job.value is None else f"{job.value:.4f}"
        cells = (str(job.number), *job.swept.values(), job.state, value, job.directory)
        table.add_row(*map(visible, cells))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(f"files: {place}/results.csv, {place}/sweep.json")


def _spell(job: Job) -> str:
    return visible(" ".join(f"{key}={value}" for key, value in job.swept.items()) or "as given")


def _check_names(configs: Sequence[Config]) -> None:
    """Raises ConfigError where two jobs would write to one directory."""
    names = [config.run.name for config in configs]
    if len(set(names)) > 1 and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"run.name={twice}: two jobs of the sweep would have it; sweep it alone, or leave it out")
