"""`python -m trainer.replay DIR step=N`: one step of a run again, on one process, example by example."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoints import transaction as checkpoint
from trainer.cli import load_task, run, run_directory
from trainer.config.compose import load_run_config
from trainer.data.order import BatchPlan
from trainer.engine.diagnosis import Example, examine
from trainer.errors import CheckpointError, ConfigError, visible
from trainer.record import directory as rundir
from trainer.strategy.batchnorm import has_batchnorm
from trainer.trainer import STOPPED

HELP = """usage: python -m trainer.replay DIR step=N [key=value ...] [--config-dir DIR]

DIR is a run directory. Goes from the newest checkpoint before step N (or from the start) to step N on one process, in
micro-batches of the run's size, and shows the loss of each example of that step: those that are not finite, or whose
gradient is not, and the largest. Writes nothing. Exit codes: 0 the step is finite, 1 it is not, 2 it is not there."""
SHOWN = 5


class Replayed(Exception):
    """The step was reached and told."""


def main(arguments: Sequence[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(HELP)
        return 0
    advice = "give one run directory and one step: python -m trainer.replay DIR step=N"
    place, words, config_dirs = run_directory(arguments, advice)
    wanted = [word.removeprefix("step=") for word in words if word.startswith("step=")]
    if len(wanted) != 1 or not wanted[0].isdecimal() or int(wanted[0]) < 1:
        raise ConfigError(advice)
    directory, step = Path(place), int(wanted[0])
    if (directory / checkpoint.MANIFEST).is_file():
        raise ConfigError(f"{directory}: is one checkpoint; {advice}")
    overrides = [word for word in words if not word.startswith("step=")]
    config = load_run_config(str(directory), overrides, config_dirs)
    ours, theirs = config.flat(), load_run_config(str(directory), [], config_dirs).flat()
    if fixed := next((key for key in rundir.FIXED if ours[key] != theirs[key]), None):
        raise ConfigError(
            f"{fixed}={ours[fixed]}: the run has {theirs[fixed]}, and its steps have other samples else"
        )
    config.run.resume = _newest_before(directory, step)
    config.run.name, config.strategy.name, config.strategy.comm_hook = "replay", "single", "none"
    config.data.micro_batch = _micro_batch(directory, config)
    with tempfile.TemporaryDirectory() as scratch:
        config.run.dir = scratch
        task = _stopping_at(load_task(config), step)(config)
        try:
            task.fit()
        except Replayed:
            if has_batchnorm(task.model):
                print(
                    "BatchNorm took its running statistics for this, so these are not the losses of training"
                )
            return _tell(task.examples, step, directory)
    return STOPPED


def _newest_before(directory: Path, step: int) -> str | None:
    """The newest valid checkpoint before the step."""
    for number, path in reversed(checkpoint.steps(directory / "checkpoints").items()):
        try:
            if number < step and checkpoint.load(path):
                return str(path)
        except CheckpointError as error:
            print(visible(f"skipped {path.name}: {error}"))
    return None


def _micro_batch(directory: Path, config: Any) -> int:
    """The size of the run's micro-batches as it was last laid out: what dropout draws depends on it, and BatchNorm.

    Under SyncBN the ranks' shares are one. Says where the run's pieces cannot be had on one process.
    """
    manifest = checkpoint.newest_manifest(directory / "checkpoints")
    if manifest:
        checkpoint.check_run(manifest, directory)
    ranks, batch = manifest["world_size"] if manifest else 1, config.data.global_batch
    was = BatchPlan(batch, batch, min(config.data.micro_batch or batch, -(-batch // ranks)), ranks)
    joined = 1 if config.strategy.sync_batchnorm else ranks
    micro_batch = -(-batch // (joined * was.accumulation))
    ours = BatchPlan(batch, batch, micro_batch, 1).micro_batches(0)
    theirs = [piece for rank in range(ranks) for piece in was.micro_batches(rank)]
    if ours != theirs and not (joined < ranks and was.accumulation == 1):
        print(
            "its micro-batches were cut otherwise than one process can: with dropout or BatchNorm losses will differ"
        )
    return micro_batch


def _stopping_at(base: type, step: int) -> Any:
    class Replay(base):
        examples: list[Example]

        def build_schedule(self, num_steps: int) -> Any:
            if step > num_steps:
                raise ConfigError(f"step={step}: the run has only {num_steps:,} steps")
            return super().build_schedule(num_steps)

        def train_step(self, micro_batches: Any) -> None:
            if self.step == step - 1:
                self.examples = examine(self._now, self.step)
                raise Replayed
            super().train_step(micro_batches)

    return Replay


def _tell(examples: Sequence[Example], step: int, directory: Path) -> int:
    bad = [e for e in examples if not (e.is_finite and e.has_finite_gradient)]
    mean = sum(e.loss for e in examples) / len(examples)
    print(
        f"step {step:,}: {len(examples):,} examples, mean loss {mean:.6g}{_logged(directory, step)}"
    )
    for e in bad:
        print(
            f"example {e.index}: loss {e.loss:.6g}, {'its gradient' if e.is_finite else 'it'} is not finite"
        )
    finite = sorted((e for e in examples if math.isfinite(e.loss)), key=lambda e: -e.loss)[:SHOWN]
    print("largest losses: " + ", ".join(f"{e.loss:.6g} (example {e.index})" for e in finite))
    return int(bool(bad))


def _logged(directory: Path, step: int) -> str:
    """What metrics.jsonl has for the step; with log.every_steps above 1 a mean over several."""
    for _, entry in rundir.entries(directory / rundir.METRICS):
        if entry["step"] == step and entry.get("train/loss") is not None:
            return f"; metrics.jsonl has {entry['train/loss']:.6g} up to that step"
    return ""


if __name__ == "__main__":
    run(main)
