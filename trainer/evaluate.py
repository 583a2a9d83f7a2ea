"""`python -m trainer.evaluate DIR [key=value ...]`: print the metrics of a run or checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trainer.cli import load_task, run, run_directory
from trainer.config.compose import load_run_config
from trainer.errors import ConfigError
from trainer.record.directory import strict

HELP = """usage: python -m trainer.evaluate DIR [key=value ...] [--config-dir DIR]

Evaluates a checkpoint and prints the metrics as one JSON object. DIR is a run directory (its newest
valid checkpoint is used) or one directory step-<number> in its checkpoints. Any layout gives the
same metrics: torchrun --nproc_per_node=2 -m trainer.evaluate DIR."""


def main(arguments: Sequence[str]) -> int:
    """Evaluate on all ranks, print on rank 0, and return the exit code."""
    advice = "give one run directory: python -m trainer.evaluate DIR [key=value ...]"
    config = load_run_config(*run_directory(arguments, advice))
    task = load_task(config)(config)
    metrics = task.evaluate()
    if not metrics:
        advice = "return a dataset from build_dataset('eval')"
        raise ConfigError(f"task={config.task.name}: has no evaluation data; {advice}")
    if task.world.rank == 0:
        print(json.dumps({"step": task.step, **strict(metrics)}))
    return 0


if __name__ == "__main__":
    run(main, HELP)
