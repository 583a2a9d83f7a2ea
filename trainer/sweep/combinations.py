"""`-m key=a,b`: run each combination of the values, one after another or as SLURM jobs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.cli import load_task
from trainer.config.compose import SWEPT, parse
from trainer.config.schema import Config
from trainer.distributed.launchers import MASTER, Launcher
from trainer.errors import ConfigError
from trainer.record.lease import check_free
from trainer.sweep.jobs import Job, Sweep
from trainer.sweep.submit import is_known, open_executor, submit

MOST_JOBS = 2_000


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep."""
    choices = []
    for override in parse(overrides, SWEPT):
        values = []
        if override.is_sweep_override():
            key = override.get_key_element()
            some = itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)
            values = [f"{key}={value}" for value in some]
        choices.append(values or [override.input_line])
        if math.prod(map(len, choices)) > MOST_JOBS:
            must = f"a sweep must have at most {MOST_JOBS:,} jobs; give fewer values"
            raise ConfigError(f"{override.input_line}: {must}")
    return [list(job) for job in itertools.product(*choices)]


def run_combinations(
    combinations: Sequence[list[str]],
    configs: Sequence[Config],
    config_dirs: Sequence[str],
    submission: tuple[str, Sequence[str]] | None = None,
) -> int:
    """Run the jobs that are not finished, print a table of all, and return the exit code.

    `submission` is (cluster, settings) for submitit: jobs are submitted and not waited for.
    Raises ConfigError before the first job starts if any job has invalid settings.
    """
    _check_names(configs)
    name = _name(combinations, configs)
    check_free(Path(configs[0].run.dir) / "sweeps" / name)
    words = [word for combination in combinations for word in combination]
    jobs = []
    for number, (overrides, config) in enumerate(zip(combinations, configs, strict=True), 1):
        swept = [word for word in overrides if words.count(word) < len(combinations)]
        jobs.append(Job.of(number, swept, overrides, config, config_dirs, name))
    _check_jobs(jobs, configs, is_here=submission is None)
    sweep = Sweep(name, configs[0])
    for job in jobs:
        sweep.add(job)
        sweep.check_own(job)
    if submission is not None:
        return _submit(sweep, *submission)
    for job in jobs:
        sweep.run(job, f"job {job.number} of {len(jobs)}")
        if sweep.is_stopped:
            break
    return sweep.end()


def _submit(sweep: Sweep, cluster: str, settings: Sequence[str]) -> int:
    executor = open_executor(cluster, sweep.place / "submitit", settings)
    for job in sweep.jobs:
        if job.state != "done":
            is_waiting = job.submitted and is_known(cluster, job.submitted)
            job.hand_over(job.submitted if is_waiting else submit(executor, job.words))
            sweep.record()
        state = job.state if job.state == "done" else f"submitted as {job.submitted}"
        print(f"job {job.number} of {len(sweep.jobs)} ({job.label}): {state}", flush=True)
    sweep.end()
    advice = "repeat this command to show the jobs and to submit unfinished ones"
    print(f"output: {sweep.place}/submitit; {advice}")
    return 0


def _check_names(configs: Sequence[Config]) -> None:
    """Raise ConfigError if two jobs would write to one directory."""
    names = [config.run.name for config in configs]
    if len(set(names)) > 1 and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        advice = "two jobs of the sweep have this name; sweep run.name alone, or leave it out"
        raise ConfigError(f"run.name={twice}: {advice}")


def _name(combinations: Sequence[list[str]], configs: Sequence[Config]) -> str:
    names = {config.run.name for config in configs}
    if len(names) == 1 and (name := configs[0].run.name):
        return name
    return hashlib.sha256(json.dumps(list(combinations)).encode()).hexdigest()[:8]


def _check_jobs(jobs: Sequence[Job], configs: Sequence[Config], is_here: bool) -> None:
    """Run the early checks of every job. The number of ranks on a cluster is not known here."""
    from trainer.setup.checks import check_training, try_optimizer

    tasks = [_as_rank_0(job, config) for job, config in zip(jobs, configs, strict=True)]
    for task in tasks if is_here else ():
        check_training(task.config, task.world)
    for task in tasks:
        try_optimizer(task.config)


def _as_rank_0(job: Job, config: Config) -> Any:
    """Return the Trainer of a job, as its rank 0 will build it."""
    # imported late, with torch, so that errors of load_task are reported first
    task = load_task(config)
    from trainer.distributed.world import World, count_ranks

    ranks = 1
    if config.launch.name != "inline":
        ranks = count_ranks(config.launch.nproc_per_node or "auto")
    launcher = Launcher(config.launch.name, dict(zip(MASTER, ("localhost", "1"), strict=True)))
    name = Path(job.directory).name
    run = replace(config.run, name=name, resume=config.run.resume or "auto")
    world = World(world_size=ranks, local_world_size=ranks, launcher=launcher)
    return task(replace(config, run=run), world)
