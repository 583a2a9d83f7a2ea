"""Replay of one step of a run, example by example."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer import Config
from trainer.base.errors import STOPPED, CheckpointError, ConfigError, counted, visible
from trainer.base.process.streams import HidingStream
from trainer.cli import answer, load_task, run_directory, take_words
from trainer.core.api import (
    FIXED,
    MANIFEST,
    BatchPlan,
    Example,
    Manifest,
    MeshSizes,
    examine_step,
    find_strategy,
    load_run_config,
    read_values,
    transaction,
)
from trainer.show.run_reading import mesh_of

EXAMPLES_SHOWN = 5
REPLAY_ADVICE = "give one run directory and one step: python -m trainer.show RUN step=N"


class EndOfReplay(Exception):
    """The step was reached and examined."""

    def __init__(self, examples: list[Example], has_batchnorm: bool):
        super().__init__()
        self.examples = examples
        self.has_batchnorm = has_batchnorm


def replay(arguments: Sequence[str]) -> int:
    """Train to the step that `step=N` names, print its examples, and return the exit code."""
    own, rest = take_words(arguments, ("step",))
    path, overrides, config_dirs = run_directory(rest, REPLAY_ADVICE)
    wanted = own.get("step", "")
    if not wanted.isdecimal() or int(wanted) < 1:
        problem = f"step={wanted}: must be an integer of at least 1; " if wanted else ""
        raise ConfigError(f"{problem}{REPLAY_ADVICE}")
    directory = Path(path)
    step = int(wanted)
    if (directory / MANIFEST).is_file():
        raise ConfigError(f"{directory}: is one checkpoint; {REPLAY_ADVICE}")
    config = load_run_config(str(directory), overrides, config_dirs)
    others = [word for word in overrides if word.partition("=")[0] not in FIXED]
    _check_fixed(config, load_run_config(str(directory), others, config_dirs))
    start, resume = _find_newest_before(directory, step)
    print(_announce(step, start, resume), flush=True)
    scratch_folder = tempfile.TemporaryDirectory()
    with scratch_folder as scratch, redirect_stdout(HidingStream(sys.stdout, scratch)):
        config = _on_one_process(config, directory, resume, scratch)
        try:
            _stopping_at(load_task(config), step)(config).fit()
        except EndOfReplay as replayed:
            if replayed.has_batchnorm:
                why = "BatchNorm used its running statistics"
                print(f"{why}, so these are not the losses of training")
            return _answer(replayed.examples, step, start, directory)
    return STOPPED


def _announce(step: int, start: int, resume: Path | None) -> str:
    """Return a line about the steps that are trained before the one that is examined."""
    origin = f"from {resume.name}" if resume else "from the start: no checkpoint before it is kept"
    line = f"step {step:,} needs {counted(step - 1 - start, 'step')} of training, {origin}"
    advice = "a run with checkpoint.keep_last=<n> keeps more checkpoints"
    return f"{line}; {advice}" if step - 1 > start else line


def _check_fixed(config: Config, saved: Config) -> None:
    new = config.flat()
    old = saved.flat()
    for key in FIXED:
        if new[key] != old[key]:
            raise ConfigError(f"""{key}={new[key]}: must be {old[key]}, as in the run;
                another value changes the samples of a step""")


def _on_one_process(config: Config, directory: Path, resume: Path | None, scratch: str) -> Config:
    """Return the run's configuration, to resume from a checkpoint on one process."""
    micro_batch = _find_micro_batch(directory, config)
    is_fixed = find_strategy(config.strategy).batch_split(config).is_fixed
    name = config.strategy.name if is_fixed else "single"
    return replace(
        config,
        run=replace(config.run, resume=str(resume) if resume else None, name="replay", dir=scratch),
        strategy=replace(config.strategy, name=name, comm_hook="none", mesh=MeshSizes.of_copies()),
        data=replace(config.data, micro_batch=micro_batch),
        checkpoint=replace(config.checkpoint, mirror=None),
    )


def _find_newest_before(directory: Path, step: int) -> tuple[int, Path | None]:
    """Return the newest valid checkpoint before a step, and its step; (0, None) without one."""
    for saved_step, path in reversed(transaction.steps(directory / "checkpoints").items()):
        try:
            if saved_step < step:
                transaction.load(path)
                return saved_step, path
        except CheckpointError as error:
            print(visible(f"skipped {path.name}: {error}"))
    return 0, None


def _find_micro_batch(directory: Path, config: Config) -> int:
    """Return the micro-batch size of the run's last layout: dropout and BatchNorm depend on it.

    Under SyncBN a micro-batch spans all ranks. Prints a line if one process cannot form the same
    micro-batches.
    """
    raw = transaction.newest_manifest(directory / "checkpoints")
    ranks = mesh_of(Manifest.of_run(raw, directory)).data_size if raw else 1
    batch = config.data.global_batch
    largest = -(-batch // ranks)
    batch_split = find_strategy(config.strategy).batch_split(config)
    unit = batch_split.unit
    largest += -largest % unit
    was = BatchPlan(batch, batch, min(batch_split.micro_batch or batch, largest), ranks, unit)
    joined = 1 if config.strategy.sync_batchnorm else ranks
    micro_batch = -(-batch // (joined * was.accumulation))
    micro_batch += -micro_batch % unit
    new = BatchPlan(batch, batch, micro_batch, 1, unit).micro_batches(0)
    old = [piece for rank in range(ranks) for piece in was.micro_batches(rank)]
    if new != old and not (joined < ranks and was.accumulation == 1):
        why = "one process cannot form the micro-batches of the run"
        print(f"{why}: with BatchNorm, or run.dropout=torch, losses will differ")
    return micro_batch


def _stopping_at(base: type, step: int) -> Any:
    class Replay(base):
        def build_schedule(self, num_steps: int) -> Any:
            if step > num_steps:
                raise ConfigError(f"step={step}: must be at most the run's {num_steps:,} steps")
            return super().build_schedule(num_steps)

        def train_step(self, batch: Any) -> Any:
            if self.step == step - 1:
                raise EndOfReplay(*examine_step(self, batch))
            return super().train_step(batch)

    return Replay


def _answer(examples: Sequence[Example], step: int, start: int, directory: Path) -> int:
    """Print the examples of a step, and return the exit code."""
    bad = [e for e in examples if e.is_bad]
    weight = sum(e.weight for e in examples)
    mean = sum(e.loss * e.weight for e in examples) / weight if weight else math.nan
    finite = sorted((e for e in examples if math.isfinite(e.loss)), key=lambda e: -e.loss)
    since, logged = _find_logged_loss(directory, step)
    lines = [f"step {step:,}: {len(examples):,} examples, mean loss {mean:.6g}"]
    if logged is not None:
        over = f"the mean of steps {since + 1:,} to {step:,}, "
        lines[0] += f"; metrics.jsonl has {over * (step - since > 1)}{logged:.6g}"
    for e in bad:
        what = "its gradient" if e.is_finite else "it"
        lines.append(f"example {e.index}: loss {e.loss:.6g}, {what} is not finite")
    largest = [f"{e.loss:.6g} (example {e.index})" for e in finite[:EXAMPLES_SHOWN]]
    lines.append("largest losses: " + ", ".join(largest))
    facts = {
        "step": step,
        "from_step": start,
        "examples": len(examples),
        "mean_loss": mean,
        "logged_loss": logged,
        "not_finite": [{"example": e.index, "loss": e.loss} for e in bad],
        "largest": [{"example": e.index, "loss": e.loss} for e in finite[:EXAMPLES_SHOWN]],
    }
    result = "not finite" if bad else "finite"
    return answer(int(bool(bad)), result, facts, lambda: print(*lines, sep="\n"))


def _find_logged_loss(directory: Path, step: int) -> tuple[int, float | None]:
    """Return the loss in metrics.jsonl, and the step since which it is the mean."""
    before = 0
    for logged, name, value in read_values(directory):
        if name != "train/loss":
            continue
        if logged == step and value is not None:
            return before, value
        before = logged
    return before, None
