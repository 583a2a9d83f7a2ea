"""`python -m trainer.evaluate DIR [key=value ...]`: print the metrics of a run or checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from trainer.cli import answer, load_task, run, run_directory, take_words
from trainer.config.compose import load_run_config
from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.record.files import strict

HELP = """usage: python -m trainer.evaluate DIR [split=test] [key=value ...] [--config-dir DIR]

Evaluates a checkpoint and prints the metrics as one JSON object. DIR is a run directory (its newest
valid checkpoint is used) or one directory step-<number> in its checkpoints. split is one or more
splits, as build_dataset names them (split=val,test); by default those of eval.splits. Any layout
gives the same metrics: torchrun --nproc_per_node=2 -m trainer.evaluate DIR."""


def load_for_these_ranks(
    place: str, own: Mapping[str, str], overrides: list[str], config_dirs: Sequence[str]
) -> Config:
    """Return the settings of a run, with the split of `own`, and a layout that these ranks have."""
    if "split" in own:
        overrides = [*overrides, f"eval.splits=[{own['split']}]"]
    config = load_run_config(place, overrides, config_dirs)
    if any(word.startswith("strategy") for word in overrides):
        return config
    from trainer.setup.checks import for_these_ranks

    return for_these_ranks(config)


def main(arguments: Sequence[str]) -> int:
    """Evaluate on all ranks, print on rank 0, and return the exit code."""
    own, rest = take_words(arguments, ("split",))
    advice = "give one run directory: python -m trainer.evaluate DIR [split=test] [key=value ...]"
    place, overrides, config_dirs = run_directory(rest, advice)
    config = load_for_these_ranks(place, own, overrides, config_dirs)
    task = load_task(config)(config)
    metrics = task.evaluate()
    if not metrics:
        advice = f"return a dataset from build_dataset({config.eval.splits[0]!r})"
        raise ConfigError(f"task={config.task.name}: has no evaluation data; {advice}")
    found = {"step": task.step, **strict(metrics)}
    if task.world.rank:
        return 0
    return answer(0, "evaluated", found, lambda: print(json.dumps(found)))


if __name__ == "__main__":
    run(main, HELP)
