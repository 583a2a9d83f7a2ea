"""`python -m trainer task=<name> [key=value ...]`: train. Under torchrun every rank runs this."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.cli import HYDRA_FLAGS, check_alone, load_task, run, split_arguments
from trainer.config.compose import find_options, load_config
from trainer.config.schema import Config
from trainer.distributed.launchers import MARK, find_launcher
from trainer.distributed.signals import catch_early
from trainer.errors import visible
from trainer.record.gate import check_soon

HELP = """usage: python -m trainer task=<name> [group=option ...] [key=value ...] [--config-dir DIR]
       torchrun --nproc_per_node=<ranks> -m trainer task=<name> ...

  one process, the bundled images:
      python -m trainer task=cifar
  two ranks, another rate, 2 epochs:
      torchrun --nproc_per_node=2 -m trainer task=cifar optim.lr=0.1 run.epochs=2
  two ranks without torchrun:
      python -m trainer task=cifar launch=elastic launch.nproc_per_node=2
  resume a run, with its own settings:
      python -m trainer run.resume=runs/cifar/first

groups (one option each, values in conf/<group>/<option>.yaml):
{groups}

most used settings:
  run.epochs, run.steps    how long; steps wins when given
  run.name                 the run's folder, runs/<task>/<name>; a timestamp by default
  run.resume               a run directory or one of its checkpoints; auto: the task's newest run
  run.seed                 order of the samples, augmentation, initial weights, dropout
  data.global_batch        examples per step over all ranks: part of what is learned
  data.micro_batch         rows per rank per forward: less memory, same result
  data.workers             DataLoader processes per rank
  optim.lr                 the learning rate, times the schedule's factor
  strategy.precision       fp64, fp32, amp_bf16
  eval.every_epochs        how often to evaluate; checkpoint.every_epochs how often to save

flags:
  --config-dir DIR         adds a folder of yours with task/<name>.yaml
  -m                       runs a sweep, as in -m optim.lr=0.1,0.2
  --cfg job                prints the composed config

Exit codes: 0 done, 1 failed, 2 bad configuration, 75 stopped by a signal after saving.

More verbs, each with --help: trainer.verify (proves that layouts and kills change nothing),
trainer.evaluate, trainer.checkpoints, trainer.audit, trainer.replay, trainer.doctor (tries the
ranks, their network and disk)."""


def main(arguments: Sequence[str]) -> int:
    if any(word.split("=")[0] in HYDRA_FLAGS for word in arguments):
        from trainer.sweep.command import answer_or_sweep

        return answer_or_sweep(arguments)
    catch_early()
    overrides, config_dirs = split_arguments(arguments)
    config = load_config(overrides, config_dirs)
    if config.launch.name == "inline" or MARK in os.environ:
        return train(config)
    check_alone(f"launch={config.launch.name}", "leave it out")
    from trainer.distributed.launch import launch

    return launch(config.launch, arguments)


def train(config: Config) -> int:
    check_soon(config, find_launcher())
    return load_task(config)(config).fit().exit_code


def describe(arguments: Sequence[str]) -> str:
    """The help, with the options of each group, also of the folders of `--config-dir`."""
    _, config_dirs = split_arguments(arguments)
    groups = [
        f"  {group:<11}{visible(', '.join(sorted(options)))}"
        for group, options in find_options(config_dirs).items()
    ]
    return HELP.format(groups="\n".join(groups))


if __name__ == "__main__":
    run(main, describe)
