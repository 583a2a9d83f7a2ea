"""`python -m trainer task=<name> [key=value ...]`: train. Under torchrun every rank runs this."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from trainer.config import CONF, Config, choices, jobs_of_sweep, load_config, load_run_config
from trainer.distributed.launchers import CODES, MARK, find_launcher
from trainer.distributed.signals import catch_early, leave_pid_1, let_go
from trainer.errors import ConfigError, RunError, visible
from trainer.rundir import locate
from trainer.targets import check_name, check_target, resolve

# torchrun kills all ranks at the first exit, and with it the line that rank 0 is about to print
WAIT_S, SOON_S = 3.0, 0.9
SWEEP = ("-m", "--multirun")
QUESTIONS = ("-c", "--cfg", "-i", "--info", "--hydra-help")
HYDRA_FLAGS = (*SWEEP, *QUESTIONS, "--resolve", "-p", "--package")

# Python's collector looks through torch again and again while it is imported: 0.1 s of 1.4 s
_COLLECTIONS, _FEW_COLLECTIONS = gc.get_threshold(), 100_000

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
    gc.set_threshold(_FEW_COLLECTIONS)  # until the task is loaded
    if "-h" in arguments or "--help" in arguments:
        overrides, config_dirs = split_arguments(
            [a for a in arguments if a not in ("-h", "--help")]
        )
        groups = "\n".join(
            f"  {group:<11}{visible(', '.join(found))}"
            for group, found in choices(config_dirs).items()
        )
        print(HELP.format(groups=groups))
        return 0
    if any(a.split("=")[0] in HYDRA_FLAGS for a in arguments):
        return _hydra(arguments)
    catch_early()
    overrides, config_dirs = split_arguments(arguments)
    config = _config(overrides, config_dirs)
    if config.launch.name == "inline" or MARK in os.environ:
        return train(config)
    check_alone(f"launch={config.launch.name}", "leave it out")
    from trainer.distributed.launch import launch

    return launch(config.launch, arguments)


def check_alone(what: str, advice: str) -> None:
    """Raises ConfigError within a launch; one task of srun or mpirun is as good as none."""
    found = find_launcher()
    is_one = found.name in ("srun", "mpirun") and found.variables.get("WORLD_SIZE") == "1"
    if found.name != "python" and not is_one:
        raise ConfigError(f"{what}: the ranks were started already, by {found.name}; {advice}")


def split_arguments(
    arguments: Sequence[str], others: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """(overrides, config dirs). Raises ConfigError for a flag that does not exist; `others` are passed over."""
    overrides, folders, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("--config-dir", "-cd"):
            if not rest:
                raise ConfigError("--config-dir: needs a directory")
            folders.append(rest.pop(0))
        elif word.startswith("--config-dir="):
            folders.append(word.split("=", 1)[1])
        elif word.startswith(("--local-rank=", "--local_rank=")):
            continue  # torch.distributed.launch gives it beside LOCAL_RANK
        elif word.startswith("-") and word.split("=")[0] not in others:
            raise ConfigError(
                f"{word.split('=')[0]} is not a flag: there are --config-dir, --help, -m, --cfg, --info and key=value"
            )
        else:
            overrides.append(word)
    return overrides, folders


def run_directory(arguments: Sequence[str], advice: str) -> tuple[str, list[str], list[str]]:
    """(the one run directory among the words, overrides, config dirs). Raises ConfigError with `advice`."""
    words, config_dirs = split_arguments(arguments)
    places = [word for word in words if "=" not in word]
    if len(places) != 1:
        raise ConfigError(advice)
    return places[0], [word for word in words if "=" in word], config_dirs


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


def _config(overrides: Sequence[str], config_dirs: Sequence[str]) -> Config:
    """As composed; where no task is named, a run to resume brings its own configuration."""
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    place = given.get("run.resume", "auto")
    if "task" in given or place in ("auto", "null", ""):
        return load_config(overrides, config_dirs)
    return load_run_config(place, overrides, config_dirs, prefix="run.resume=")


def load_task(config: Config) -> Any:
    """The Trainer that `task.trainer` names. Raises ConfigError for anything else."""
    name = config.task.trainer
    if "." not in name:
        raise ConfigError(f"task.trainer={name}: must be <module>.<class>")
    found = resolve(name, "task.trainer", config.packages)
    from trainer.trainer import Trainer

    gc.freeze()  # what was imported stays
    gc.set_threshold(*_COLLECTIONS)
    if not (isinstance(found, type) and issubclass(found, Trainer)) or found is Trainer:
        raise ConfigError(f"task.trainer={name}: must be a subclass of trainer.Trainer")
    return found


def _hydra(arguments: Sequence[str]) -> int:
    """Sweeps, and Hydra's own questions.

    Jobs run here and not under Hydra's sweeper: it would build what a file of --config-dir names in `hydra.callbacks`
    or `hydra.job_logging`, whatever that is. Its questions are only answered, nothing is run.
    """
    check_alone(
        "-m and Hydra's flags",
        "start a sweep with python, and launch=elastic launch.nproc_per_node=<ranks of each job>",
    )
    from trainer.search import SWEEPER
    from trainer.submit import cluster_of

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
        from trainer.sweep import search_jobs

        return search_jobs(steering, overrides, config_dirs)
    cluster = cluster_of(steering)
    if steering and cluster is None:
        raise ConfigError(
            f"{steering[0]}: a sweep takes {SWEEPER}, or hydra/launcher=submitit_slurm and its settings"
        )
    jobs = jobs_of_sweep(overrides)
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
    from trainer.sweep import run_sweep  # with torch

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


def _patience() -> float:
    """Seconds: by hand each rank has a terminal of its own, and ranks that were about to meet fail together."""
    if find_launcher().name == "hand":
        return 0.0
    return (
        SOON_S
        if getattr(sys.modules.get("trainer.distributed.meet"), "has_begun", False)
        else WAIT_S
    )


def run(verb: Callable[[Sequence[str]], int]) -> None:
    """Run a verb on the command line and exit. What one line can tell is one line, by rank 0; settings give code 2."""
    rank, is_first = "", True
    leave_pid_1()
    try:
        given = find_launcher().variables
        rank, size = given.get("RANK", ""), given.get("WORLD_SIZE", "")
        is_first = not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))
        code = verb(sys.argv[1:])
    except (ConfigError, RunError) as error:
        is_ending = let_go()
        if is_first:
            print(visible(f"error: {error}"), file=sys.stderr, flush=True)
        elif not is_ending:
            time.sleep(_patience())  # still here: rank 0 has not failed, so it is ours to say
            print(visible(f"error: rank {rank}: {error}"), file=sys.stderr, flush=True)
        code = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        if is_first:
            print("interrupted; nothing was saved", file=sys.stderr, flush=True)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if path := os.environ.get(CODES):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{code}\n")
    if code == 0:
        sys.exit(0)
    for child in multiprocessing.active_children():
        child.kill()  # data workers hold our sockets open: peers would not notice the end
    # Peers may sit in a collective: an orderly end would wait for them. It also takes torch half a second.
    os._exit(code)


if __name__ == "__main__":
    run(main)
