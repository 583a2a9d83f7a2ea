"""`python -m trainer.evaluate DIR [key=value ...]`: the metrics of a run, or of one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trainer.cli import load_task, run, run_directory
from trainer.config.compose import load_run_config
from trainer.errors import ConfigError
from trainer.record.directory import strict

HELP = """usage: python -m trainer.evaluate DIR [key=value ...] [--config-dir DIR]

DIR is a run directory (its newest valid checkpoint counts) or one directory step-<number> in its
checkpoints. The layout is free: torchrun --nproc_per_node=2 -m trainer.evaluate DIR gives the same
metrics. Prints one JSON object."""


def main(arguments: Sequence[str]) -> int:
    advice = "give one run directory: python -m trainer.evaluate DIR [key=value ...]"
    config = load_run_config(*run_directory(arguments, advice))
    task = load_task(config)(config)
    metrics = task.evaluate()
    if not metrics:
        why = "has no evaluation data: build_dataset('eval') returned None"
        raise ConfigError(f"task {config.task.name} {why}")
    if task.world.rank == 0:
        print(json.dumps({"step": task.step, **strict(metrics)}))
    return 0


if __name__ == "__main__":
    run(main, HELP)
