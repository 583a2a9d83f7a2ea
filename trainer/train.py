"""The verb `train`: `python -m trainer task=<name> [key=value ...]`. Each rank runs it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from trainer.base.errors import ConfigError, visible
from trainer.cli import (
    HYDRA_FLAGS,
    JSON,
    SWEEP_FLAGS,
    check_alone,
    load_task,
    run,
    split_arguments,
    starter,
)
from trainer.core.config.compose import load_config
from trainer.core.config.schema import Config
from trainer.core.config.working_folder import find_options
from trainer.core.distributed.launchers import MARK, find_launcher
from trainer.core.distributed.signals import catch_early
from trainer.core.extensions import LAUNCHERS, QUESTIONS
from trainer.core.setup import check_soon
from trainer.verbs import STRATEGY_TEXTS, VERBS, list_verbs, no_verb

HELP = """usage: lockstep VERB [key=value ...] [--flag ...]     or: python -m trainer.VERB ...
       lockstep VERB --help

{verbs}

train: lockstep train task=<name> [group=option ...] [key=value ...] [-n RANKS] [--config-dir DIR]
  python -m trainer task=cifar                                    one process, with bundled images
  python -m trainer task=cifar -n 2 optim.lr=0.1 run.epochs=2     two ranks of this machine
  torchrun --nproc_per_node=2 -m trainer task=cifar               the same, started by torchrun
  python -m trainer run.resume=runs/cifar/first                   resume it, with its settings

groups (choose one option of each, as group=option; conf/<group>/<option>.yaml has the values):
{groups}
  meshes of tensor, context and pipeline parallel: docs/parallelism.md

most used settings (docs/settings.md has all):
  run.epochs, run.steps    length of the run; run.steps overrides run.epochs
  run.name                 folder of the run, runs/<task>/<name>; a timestamp by default
  run.resume               run directory or checkpoint to resume; auto: the task's newest run
  run.seed                 seed of sample order, augmentation, initial weights and dropout
  data.global_batch        rows per optimizer step over all ranks: changes what is learned
  data.micro_batch         rows per forward pass on a rank: saves memory, same result; or auto
  data.workers             DataLoader processes per rank
  optim.lr                 learning rate; the schedule multiplies it
  strategy.precision       fp32, amp_bf16, auto, ... (docs/parallelism.md)
  eval.every_epochs        epochs between evaluations
  checkpoint.every_epochs  epochs between checkpoints

flags of train:
  -n RANKS                 start this many ranks on this machine; auto: one per GPU or core
  --config-dir DIR         add your own config folder, with task/<name>.yaml
  --cfg job                print the composed config

Exit codes of all verbs: 0 done, proved or the same; 1 failed, or a difference was found; 2
invalid arguments or settings; 75 stopped by a signal after saving; 130 interrupted early."""
RANKS_FLAG = "-n"


def main(arguments: Sequence[str]) -> int:
    if JSON in arguments:
        where = "read metrics.jsonl and exit.json of the run, or sweep.json of a sweep"
        raise ConfigError(f"{JSON}: is a flag of the other verbs; {where}")
    if arguments and arguments[0] in VERBS:
        raise ConfigError(f"""{arguments[0]}: must be key=value; that verb is
            python -m trainer.{arguments[0]}""")
    if arguments and arguments[0].isidentifier():
        raise ConfigError(no_verb(arguments[0]))
    flags = [word for word in arguments if word.split("=")[0] in HYDRA_FLAGS]
    if any(word.split("=")[0] in SWEEP_FLAGS for word in flags):
        others = shlex.join(word for word in arguments if word.split("=")[0] not in SWEEP_FLAGS)
        raise ConfigError(f"{flags[0]}: use sweep: python -m trainer.sweep {others}")
    if flags:
        answered: int = QUESTIONS.load().answer_questions(arguments)
        return answered
    catch_early()
    arguments = _ask_for_ranks(arguments)
    overrides, config_dirs = split_arguments(arguments, own=(RANKS_FLAG, "--cfg", "--info"))
    config = load_config(overrides, config_dirs)
    is_asked = any(word.partition("=")[0] in ("launch", "launch.name") for word in overrides)
    # the saved settings of a run to resume may have one: under a launcher it does not count
    if config.launch.name == "inline" or MARK in os.environ or (starter() and not is_asked):
        return train(config)
    check_alone(f"launch={config.launch.name}", "leave it out")
    if config.launch.name in LAUNCHERS:
        code: int = LAUNCHERS[config.launch.name].load().launch(config, arguments)
        return code
    from trainer.core.distributed.launch import launch

    return launch(config.launch, arguments, config.checkpoint.copy_s)


def _ask_for_ranks(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `-n 2` as the settings that it stands for."""
    words: list[str] = []
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag != RANKS_FLAG:
            words.append(word)
            continue
        ranks = value if equals else next(rest, "")
        if ranks != "auto" and not (ranks.isdecimal() and int(ranks) > 0):
            raise ConfigError(f"-n {ranks}: must be a number of ranks, or auto, as in -n 2")
        words += ["launch=elastic", f"launch.nproc_per_node={ranks}"]
    return words


def train(config: Config) -> int:
    """Train in this process and return the exit code."""
    check_soon(config, find_launcher())
    return load_task(config)(config).fit().exit_code


def describe(arguments: Sequence[str]) -> str:
    """Return the help text, with the options of each group, including those of --config-dir."""
    _, config_dirs = split_arguments(arguments, (RANKS_FLAG,))
    groups = []
    for group, options in find_options(config_dirs).items():
        shown = STRATEGY_TEXTS if group == "strategy" else sorted(options)
        names = [name for name in shown if name in options]
        groups.append(f"  {group:<11}{visible(', '.join(names))}")
    return HELP.format(groups="\n".join(groups), verbs=list_verbs())


if __name__ == "__main__":
    run(main, describe, has_json=False)
