"""`python -m trainer.sweep key=a,b`: train with each combination of the values."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer import Config, load_config
from trainer.base.errors import ConfigError
from trainer.cli import (
    HYDRA_FLAGS,
    JSON,
    QUESTION_FLAGS,
    check_alone,
    load_task,
    run,
    split_arguments,
)
from trainer.core.api import Launcher, Lease, answer, parse
from trainer.sweep.jobs import (
    MOST_JOBS,
    TOO_MANY_JOBS,
    Job,
    Sweep,
    cluster_of,
    find_known,
    open_executor,
    submit,
)
from trainer.sweep.study import SWEEPER, search


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep."""
    choices = []
    for override in parse(overrides, "choices"):
        values = []
        if override.is_sweep_override():
            key = override.get_key_element()
            some = itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)
            values = [f"{key}={value}" for value in some]
        choices.append(values or [override.input_line])
        if math.prod(map(len, choices)) > MOST_JOBS:
            raise ConfigError(f"{override.input_line}: {TOO_MANY_JOBS}")
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
    Lease.check_free(Path(configs[0].run.dir) / "sweeps" / name)
    words = [word for combination in combinations for word in combination]
    jobs = []
    for job_number, (overrides, config) in enumerate(zip(combinations, configs, strict=True), 1):
        swept = [word for word in overrides if words.count(word) < len(combinations)]
        jobs.append(Job.of(job_number, swept, overrides, config, config_dirs, name))
    _check_jobs(jobs, configs, is_here=submission is None)
    sweep = Sweep(name, configs[0])
    for job in jobs:
        sweep.add(job)
        sweep.check_own(job)
    if submission is not None:
        return _submit(sweep, *submission)
    sweep.run(jobs, len(jobs))
    return sweep.end()


def _submit(sweep: Sweep, cluster: str, settings: Sequence[str]) -> int:
    executor = open_executor(cluster, sweep.place / "submitit", settings)
    before = [job.submitted for job in sweep.jobs if job.state != "done" and job.submitted]
    queued = find_known(cluster, before)
    for job in sweep.jobs:
        if job.state != "done":
            is_waiting = job.submitted in queued
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
    from trainer.core.api import check_job

    for job, config in zip(jobs, configs, strict=True):
        task = _as_rank_0(job, config)
        check_job(task.config, task.world, is_here)


def _as_rank_0(job: Job, config: Config) -> Any:
    """Return the Trainer of a job, as its rank 0 will build it."""
    # imported late, with torch, so that errors of load_task are reported first
    task = load_task(config)
    from trainer import World
    from trainer.core.api import count_ranks

    ranks = 1
    if config.launch.name != "inline":
        ranks = count_ranks(config.launch.nproc_per_node or "auto")
    launcher = Launcher.on_this_machine(config.launch.name)
    name = Path(job.directory).name
    run = replace(config.run, name=name, resume=config.run.resume or "auto")
    world = World(world_size=ranks, local_world_size=ranks, launcher=launcher)
    checkpoint = config.checkpoint
    if checkpoint.mirror is not None:
        checkpoint = replace(checkpoint, mirror=f"{checkpoint.mirror}/{name}")
    return task(replace(config, run=run, checkpoint=checkpoint), world)


_SWEEP_ADVICE = (
    "start a sweep with python, and launch=elastic launch.nproc_per_node=<ranks of each job>"
)


def answer_questions(arguments: Sequence[str]) -> int:
    """Let Hydra answer `--cfg` and `--info` about one run, and return the exit code."""
    check_alone("Hydra's flags", _SWEEP_ADVICE)
    words, config_dirs = split_arguments(arguments, HYDRA_FLAGS)
    overrides = [word for word in words if _is_setting(word)]
    load_config(overrides, config_dirs)
    flags = [word for word in words if word not in overrides]
    if not _is_question(flags):
        advice = "use --resolve and --package with --cfg job"
        raise ConfigError(f"{flags[0]}: {advice}")
    answer(overrides, flags, config_dirs)
    return 0


def _is_question(flags: Sequence[str]) -> bool:
    return any(word.split("=")[0] in QUESTION_FLAGS for word in flags)


def _is_setting(word: str) -> bool:
    return ("=" in word or word.startswith("~")) and not word.startswith("-")


HELP = """usage: python -m trainer.sweep task=<name> key=value,value ... [--config-dir DIR]

  python -m trainer.sweep task=cifar optim.lr=0.1,0.2                   two runs
  python -m trainer.sweep task=cifar optim.lr=0.1,0.2 run.seed=range(3) six runs
  python -m trainer.sweep task=cifar optim.lr=0.1,0.2 launch=elastic launch.nproc_per_node=2

Trains with each combination of the values, and prints a table with the best run first. One line
says how each run ended; its output is in the folder of the sweep. Repeat the command to continue
with the runs that are not finished.
  launch.jobs=4                       run this many at a time, each on its part of the machine
  hydra/sweeper=optuna                search instead of trying each combination (extra optuna)
  hydra/launcher=submitit_slurm       submit the runs to SLURM (extra slurm)
  --cfg job                           print the composed configs

docs/results.md says more. Exit codes: 0 all runs are done, 1 a run failed, 2 wrong settings, 75
stopped by a signal."""


def main(arguments: Sequence[str]) -> int:
    """Run a sweep, or let Hydra print what its jobs would be, and return the exit code.

    Hydra does not run the jobs: it would instantiate any object that a file of --config-dir names
    in `hydra.callbacks` or `hydra.job_logging`.
    """
    check_alone("trainer.sweep", _SWEEP_ADVICE)
    if JSON in arguments:
        raise ConfigError(f"{JSON}: is a flag of the other verbs; read sweep.json of the sweep")
    words, config_dirs = split_arguments(arguments, HYDRA_FLAGS)
    settings = [word for word in words if _is_setting(word)]
    steering = [word for word in settings if word.startswith(("hydra/", "hydra."))]
    overrides = [word for word in settings if word not in steering]
    if SWEEPER in steering:
        return search(steering, overrides, config_dirs)
    cluster = cluster_of(steering)
    if steering and cluster is None:
        allowed = f"{SWEEPER}, or hydra/launcher=submitit_slurm and its settings"
        raise ConfigError(f"{steering[0]}: must be {allowed} in a sweep")
    jobs = expand(overrides)
    # check all before the first one starts
    configs = [load_config(job, config_dirs) for job in jobs]
    flags = [word for word in words if word not in settings]
    if _is_question(flags):
        answer(overrides, [*flags, "-m"], config_dirs)
        return 0
    if flags:
        raise ConfigError(f"{flags[0]}: must be key=value, or --cfg job")
    submission = (cluster, steering) if cluster else None
    return run_combinations(jobs, configs, config_dirs, submission)


if __name__ == "__main__":
    run(main, HELP, has_json=False)
