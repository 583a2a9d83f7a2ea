"""Training: `python -m trainer task=<name> [key=value ...]`. Under torchrun, each rank runs it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.cli import HYDRA_FLAGS, JSON, check_alone, load_task, run, split_arguments, starter
from trainer.config.compose import load_config
from trainer.config.options import find_options
from trainer.config.schema import Config
from trainer.distributed.entry import VERBS
from trainer.distributed.launchers import MARK, find_launcher
from trainer.distributed.signals import catch_early
from trainer.errors import ConfigError, visible
from trainer.setup.early_checks import check_soon

HELP = """usage: python -m trainer task=<name> [group=option ...] [key=value ...] [--config-dir DIR]
       torchrun --nproc_per_node=<ranks> -m trainer task=<name> ...

  train on one process, with the bundled images:
      python -m trainer task=cifar
  train on two ranks, for 2 epochs, with a different learning rate:
      torchrun --nproc_per_node=2 -m trainer task=cifar optim.lr=0.1 run.epochs=2
  start two ranks without torchrun:
      python -m trainer task=cifar launch=elastic launch.nproc_per_node=2
  resume a run with its original settings:
      python -m trainer run.resume=runs/cifar/first

groups (choose one option each, as group=option; values are in conf/<group>/<option>.yaml):
{groups}

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

flags:
  --config-dir DIR         add your own config folder, with task/<name>.yaml
  -m                       run a sweep, as in -m optim.lr=0.1,0.2
  --cfg job                print the composed config

Exit codes: 0 done, 1 failed, 2 bad configuration, 75 stopped by a signal after saving,
130 interrupted before the first step.

other commands (python -m <command> --help):
  trainer.new              create a starter project
  trainer.plan             estimate memory, messages and time on many ranks before a run
  trainer.verify           prove that layouts, kills and resumes do not change the result
  trainer.prove            compare two commands of any training script, step by step
  trainer.evaluate         evaluate a checkpoint
  trainer.predict          write what a checkpoint predicts
  trainer.export           write a trained model as ONNX, safetensors or a TensorRT engine
  trainer.checkpoints      check the files of a run's checkpoints, or export the weights
  trainer.compare          show how runs differ, and the first step that does
  trainer.report           write one page about a run
  trainer.audit            check that no example was repeated or skipped, over all restarts
  trainer.replay           repeat a step and name examples that are not finite
  trainer.shards           write, index and check data in shards
  trainer.doctor           test the ranks, their network and disk
  trainer.completion       complete verbs, settings and tasks in bash, zsh or fish"""


def main(arguments: Sequence[str]) -> int:
    if JSON in arguments:
        where = "read metrics.jsonl and exit.json of the run, or sweep.json of a sweep"
        raise ConfigError(f"{JSON}: is a flag of the other commands; {where}")
    if arguments and arguments[0] in VERBS:
        command = f"python -m trainer.{arguments[0]}".removesuffix(".train")
        raise ConfigError(f"{arguments[0]}: must be key=value; that command is {command}")
    if any(word.split("=")[0] in HYDRA_FLAGS for word in arguments):
        from trainer.sweep.command import answer_or_sweep

        return answer_or_sweep(arguments)
    catch_early()
    overrides, config_dirs = split_arguments(arguments, own=("-m", "--cfg", "--info"))
    config = load_config(overrides, config_dirs)
    is_asked = any(word.partition("=")[0] in ("launch", "launch.name") for word in overrides)
    # the saved settings of a run to resume may have one: under a launcher it does not count
    if config.launch.name == "inline" or MARK in os.environ or (starter() and not is_asked):
        return train(config)
    check_alone(f"launch={config.launch.name}", "leave it out")
    from trainer.distributed.launch import launch

    return launch(config.launch, arguments)


def train(config: Config) -> int:
    """Train in this process and return the exit code."""
    check_soon(config, find_launcher())
    return load_task(config)(config).fit().exit_code


def describe(arguments: Sequence[str]) -> str:
    """Return the help text, with the options of each group, including those of --config-dir."""
    _, config_dirs = split_arguments(arguments)
    groups = [
        f"  {group:<11}{visible(', '.join(sorted(options)))}"
        for group, options in find_options(config_dirs).items()
    ]
    return HELP.format(groups="\n".join(groups))


if __name__ == "__main__":
    run(main, describe, has_json=False)
