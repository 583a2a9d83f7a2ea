"""`python -m trainer task=<name> [key=value ...]`: train. Under torchrun every rank runs this."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from trainer.cli import check_alone, collect_less, load_task, run, split_arguments
from trainer.config import CONF
from trainer.config.compose import expand_sweep, list_choices, load_config
from trainer.config.schema import Config
from trainer.config.targets import check_name, check_target
from trainer.distributed.launchers import MARK, find_launcher
from trainer.distributed.signals import catch_early
from trainer.errors import ConfigError, visible
from trainer.record.resume import locate

SWEEP = ("-m", "--multirun")
QUESTIONS = ("-c", "--cfg", "-i", "--info", "--hydra-help")
HYDRA_FLAGS = (*SWEEP, *QUESTIONS, "--resolve", "-p", "--package")

HELP = """usage: python -m trainer task=<name> [group=option ...] [key=value ...] [--config-dir DIR ...]
       torchrun --nproc_per_node=<ranks> -m trainer task=<name> ...

  one process, the bundled images:    python -m trainer task=cifar
  two ranks, another rate, 2 epochs:  torchrun --nproc_per_node=2 -m trainer task=cifar optim.lr=0.1 run.epochs=2
  the same without torchrun:          python -m trainer task=cifar launch=elastic launch.nproc_per_node=2
  go on with a run, as it was begun:  python -m trainer run.resume=runs/cifar/first

groups (one option each, values in conf/<group>/<option>.yaml):
{groups}

most used settings:
  run.epochs, run.steps    how long; steps wins when given
  run.name                 the run's folder, runs/<task>/<name>; a timestamp by default
  run.resume               a run directory or one of its checkpoints; auto: the newest of the task, or of run.name
  run.seed                 order of the samples, augmentation, initial weights, dropout
  data.global_batch        examples per step over all ranks: part of what is learned
  data.micro_batch         rows per rank per forward: less memory, same result
  data.workers             DataLoader processes per rank
  optim.lr                 the learning rate, times the schedule's factor
  strategy.precision       fp64, fp32, amp_bf16
  eval.every_epochs        how often to evaluate; checkpoint.every_epochs how often to save

flags: --config-dir DIR adds a folder of yours with task/<name>.yaml; -m runs a sweep; --cfg job prints the composed
config. Exit codes: 0 done, 1 failed, 2 bad configuration, 75 stopped by a signal after saving.

more verbs, each with --help: trainer.verify (proves that layouts and kills change nothing), trainer.evaluate,
trainer.checkpoints, trainer.audit, trainer.replay, trainer.doctor (tries the ranks, their network and disk)."""


def main(arguments: Sequence[str]) -> int:
    collect_less()
    if "-h" in arguments or "--help" in arguments:
        overrides, config_dirs = split_arguments(
            [a for a in arguments if a not in ("-h", "--help")]
        )
        groups = "\n".join(
            f"  {group:<11}{visible(', '.join(found))}"
            for group, found in list_choices(config_dirs).items()
        )
        print(HELP.format(groups=groups))
        return 0
    if any(a.split("=")[0] in HYDRA_FLAGS for a in arguments):
        return _hydra(arguments)
    catch_early()
    overrides, config_dirs = split_arguments(arguments)
    config = load_config(overrides, config_dirs)
    if config.launch.name == "inline" or MARK in os.environ:
        return train(config)
    check_alone(f"launch={config.launch.name}", "leave it out")
    from trainer.distributed.launch import launch

    return launch(config.launch, arguments)


def train(config: Config) -> int:
    _check_soon(config)
    return load_task(config)(config).fit().exit_code


def _check_soon(config: Config) -> None:
    """What environment, names and disk tell without torch, whose import takes a second. `fit` looks again."""
    launcher = find_launcher()
    rank, _, _, size, *_ = launcher.place()
    if config.dist.init == "env" and size > 1:
        _ = launcher.master
    check_name(config.optim["_target_"], "optim._target_", config.packages)
    check_target(config.schedule, "schedule", config.packages)
    if rank == 0:
        locate(config, launcher)


def _hydra(arguments: Sequence[str]) -> int:
    """Sweeps, and Hydra's own questions.

    Jobs run here and not under Hydra's sweeper: it would build what a file of --config-dir names in `hydra.callbacks`
    or `hydra.job_logging`, whatever that is. Its questions are only answered, nothing is run.
    """
    check_alone(
        "-m and Hydra's flags",
        "start a sweep with python, and launch=elastic launch.nproc_per_node=<ranks of each job>",
    )
    from trainer.sweep.search import SWEEPER
    from trainer.sweep.submit import cluster_of

    is_sweep = bool(set(SWEEP) & set(arguments))
    words, config_dirs = split_arguments([a for a in arguments if a not in SWEEP], HYDRA_FLAGS)
    overrides = [
        word for word in words if ("=" in word or word.startswith("~")) and not word.startswith("-")
    ]
    steering = (
        [word for word in overrides if word.startswith(("hydra/", "hydra."))] if is_sweep else []
    )
    overrides = [word for word in overrides if word not in steering]
    if SWEEPER in steering:
        from trainer.sweep.jobs import search_jobs

        return search_jobs(steering, overrides, config_dirs)
    cluster = cluster_of(steering)
    if steering and cluster is None:
        raise ConfigError(
            f"{steering[0]}: a sweep takes {SWEEPER}, or hydra/launcher=submitit_slurm and its settings"
        )
    jobs = expand_sweep(overrides)
    configs = [
        load_config(job, config_dirs) for job in jobs
    ]  # all of them, before the first starts
    if any(a.split("=")[0] in QUESTIONS for a in arguments):
        return _answer(overrides, [word for word in arguments if word not in overrides])
    if not is_sweep:
        flags = [word for word in arguments if word.split("=")[0] in HYDRA_FLAGS]
        raise ConfigError(
            f"{flags[0]}: -m takes no value, --resolve and --package go with --cfg job"
        )
    _check_names(configs)
    from trainer.sweep.jobs import run_sweep  # with torch

    return run_sweep(
        jobs, configs, config_dirs, _as_rank_0, (cluster, steering) if cluster else None
    )


def _check_names(configs: Sequence[Config]) -> None:
    """Raises ConfigError where two jobs would write to one directory."""
    names = [config.run.name for config in configs]
    if len(set(names)) > 1 and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"run.name={twice}: two jobs of the sweep would have it; sweep it alone, or leave it out"
        )


def _as_rank_0(config: Config) -> Any:
    """The Trainer of a job of a sweep."""
    from trainer.distributed.launchers import MASTER, Launcher
    from trainer.distributed.world import World, count_ranks

    ranks = (
        1 if config.launch.name == "inline" else count_ranks(config.launch.nproc_per_node or "auto")
    )
    launcher = Launcher(config.launch.name, dict(zip(MASTER, ("localhost", "1"), strict=True)))
    return load_task(config)(
        config, World(world_size=ranks, local_world_size=ranks, launcher=launcher)
    )


def _answer(overrides: list[str], flags: list[str]) -> int:
    import hydra
    from hydra.errors import HydraException

    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # errors come through as they are, for `run` to say in one line
    )
    sys.argv = [sys.argv[0], *overrides, *flags]  # argparse wants the overrides together
    _check_flags(sys.argv[1:])
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(
            lambda config: None
        )()
    except (HydraException, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    return 0


def _check_flags(words: Sequence[str]) -> None:
    """Refuse in one line what Hydra would answer with its usage."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from None


if __name__ == "__main__":
    run(main)
