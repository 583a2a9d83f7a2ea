"""`python -m trainer -m ...`: run a sweep; and answer Hydra's `--cfg` and `--info`."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.cli import HYDRA_FLAGS, QUESTIONS, SWEEP_FLAGS, check_alone, split_arguments
from trainer.config.compose import answer, load_config
from trainer.errors import ConfigError
from trainer.sweep.combinations import expand, run_combinations
from trainer.sweep.search import SWEEPER, search
from trainer.sweep.submit import cluster_of

_ADVICE = "start a sweep with python, and launch=elastic launch.nproc_per_node=<ranks of each job>"


def answer_or_sweep(arguments: Sequence[str]) -> int:
    """Run a sweep, or let Hydra answer `--cfg` and `--info`. Return the exit code.

    Hydra does not run the jobs: it would instantiate any object that a file of --config-dir names
    in `hydra.callbacks` or `hydra.job_logging`.
    """
    check_alone("-m and Hydra's flags", _ADVICE)
    is_sweep = any(word in SWEEP_FLAGS for word in arguments)
    others = [word for word in arguments if word not in SWEEP_FLAGS]
    words, config_dirs = split_arguments(others, HYDRA_FLAGS)
    settings = [word for word in words if _is_setting(word)]
    steering = [word for word in settings if is_sweep and word.startswith(("hydra/", "hydra."))]
    overrides = [word for word in settings if word not in steering]
    if SWEEPER in steering:
        return search(steering, overrides, config_dirs)
    cluster = cluster_of(steering)
    if steering and cluster is None:
        allowed = f"{SWEEPER}, or hydra/launcher=submitit_slurm and its settings"
        raise ConfigError(f"{steering[0]}: must be {allowed} in a sweep")
    jobs = expand(overrides)
    configs = [
        load_config(job, config_dirs) for job in jobs
    ]  # check all before the first one starts
    flags = [word for word in words if word not in settings]
    if any(word.split("=")[0] in QUESTIONS for word in flags):
        answer(overrides, [*flags, *(["-m"] if is_sweep else [])], config_dirs)
        return 0
    if not is_sweep:
        given = [word for word in arguments if word.split("=")[0] in HYDRA_FLAGS]
        advice = "use -m without a value, and --resolve and --package with --cfg job"
        raise ConfigError(f"{given[0]}: {advice}")
    submission = (cluster, steering) if cluster else None
    return run_combinations(jobs, configs, config_dirs, submission)


def _is_setting(word: str) -> bool:
    return ("=" in word or word.startswith("~")) and not word.startswith("-")
