"""The Trainer, which a task derives from, and the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.checkpoints.state import read_on_all_ranks
from trainer.config.schema import Config
from trainer.data.batches import LocalBatch
from trainer.decisions import RolledBack
from trainer.distributed.ranks import open_ranks
from trainer.distributed.world import World
from trainer.engine.engine import open_ema
from trainer.engine.means import Values
from trainer.engine.outcome import Outcome
from trainer.errors import visible
from trainer.record import fingerprint, resume
from trainer.run import Run, Summary
from trainer.setup import (
    Setup,
    agree_on_origin,
    check_evaluation,
    check_training,
    failures_named,
    gather_starters,
    try_optimizer,
)
from trainer.task import Task


@dataclass(frozen=True)
class Finished:
    """The part of a run that a Trainer keeps: of a fitted run also its directory."""

    model: nn.Module
    step: int
    directory: Path | None


class Trainer(Task):
    """Trains a task in any layout: `build_model`, `build_dataset` and `loss` are enough."""

    def __init__(self, config: Config, world: World | None = None):
        super().__init__(config, world)
        self._run: Setup | Run | Finished | None = None

    @property
    def model(self) -> nn.Module:
        """The model, once `fit` or `evaluate` has built it."""
        if self._run is None:
            raise RuntimeError("model: is built by fit or evaluate, and neither has run yet")
        return self._run.model

    @property
    def step(self) -> int:
        """How many global batches have been trained on."""
        return 0 if self._run is None else self._run.step

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that `build_optimizer` returned, while `fit` runs."""
        return _running(self._run).engine.optimizers

    def train_step(self, batch: LocalBatch) -> Outcome:
        return self.update(batch)

    def update(
        self,
        batch: LocalBatch,
        loss: Callable[[Any, Any], Values] | None = None,
        optimizers: Sequence[Optimizer] | None = None,
        name: str = "loss",
    ) -> Outcome:
        """Make one step on the mean of `loss` over the global batch; call it in `train_step`.

        `loss` returns values in the form of `Trainer.loss`, which is the default; its mean is
        logged as `train/<name>`. Only `optimizers` (all by default) step. A second update may
        take the same `batch` again: return the sum of both outcomes.
        """
        return _running(self._run).engine.update(batch, loss or self.loss, optimizers, name)

    def save_checkpoint(self) -> Path:
        """Have the state after this step published; where it will be.

        Call it in `train_step`, on every rank.
        """
        return _running(self._run).request_save()

    def load_checkpoint(self, path: Path) -> None:
        """Begin the next `fit` or `evaluate` from a checkpoint, as `run.resume` does."""
        if isinstance(self._run, Run):
            why = "a step cannot be taken back amid a run"
            raise RuntimeError(f"load_checkpoint: call it before fit or evaluate; {why}")
        run = replace(self.config.run, resume=str(path))
        self.config = replace(self.config, run=run)

    def fit(self) -> Summary:
        """Train to the end, or until asked to stop.

        Raises ConfigError and CheckpointError, one line for the user, and RunError where the
        run cannot continue.
        """
        self._run = None
        origin = check_training(self.config, self.world)
        try_optimizer(self.config)
        facts = fingerprint.of_start(self.config, type(self))
        rolled_back: set[int] = set()
        with open_ranks(self.config.dist, self.world, facts) as ranks:
            self.world = gather_starters(self.world, ranks.group)
            origin = agree_on_origin(self.config, self.world, ranks.group, origin)
            while True:
                try:
                    with failures_named(ranks.group):
                        self._run = Setup(self, ranks, ("train", "eval"))
                        opened = Run(self, self._run, origin, rolled_back)
                        with opened as self._run, failures_named(ranks.group):
                            del opened  # no name may keep DDP's wrapper beyond its group
                            summary = loop(self, self._run)
                        self._run = Finished(self.model, self.step, summary.directory)
                        return summary
                except RolledBack as back:
                    rolled_back.add(back.step)
                    origin = resume.roll_back(back.directory, origin)
                    self._run = None  # the wrapper goes before the next

    def evaluate(self) -> dict[str, float]:
        """The metrics on the eval split, `{"eval/loss": ...}`.

        While `fit` runs, those of the model in training; else of `run.resume`, or of the run
        that was fitted last.
        """
        if isinstance(self._run, Run):
            return self._run.evaluate()
        fitted = self._run.directory if isinstance(self._run, Finished) else None
        self._run = None
        origin = check_evaluation(self.config, self.world, fitted)
        facts = fingerprint.of_start(self.config, type(self))
        opened = open_ranks(self.config.dist, self.world, facts)
        with opened as ranks, failures_named(ranks.group):
            setup = Setup(self, ranks, ("eval",))
            self._run = setup
            ema = open_ema(self.config, setup.parts.strategy)
            restored, skipped = read_on_all_ranks(ranks.group, lambda: resume.read(origin))
            if restored:
                restored.load(setup.parts.strategy, ema)
                self._run = Finished(setup.model, restored.manifest.step, fitted)
            metrics = setup.open_evaluator(ema, lambda: bool(ranks.stop)).evaluate()
        if self.world.rank == 0:
            for line in skipped:
                print(visible(line), file=sys.stderr)
        if metrics is None:
            raise KeyboardInterrupt
        self._run = Finished(self.model, self.step, fitted)
        return metrics


def _running(run: object) -> Run:
    if not isinstance(run, Run):
        raise RuntimeError("only while fit runs")
    return run


def loop(task: Trainer, run: Run) -> Summary:
    """Train step by step until the run is over."""
    config = task.config
    batches = run.batches
    engine = run.engine
    state = run.state
    run.announce()
    if run.is_evaluation_owed:
        run.note(task.evaluate())
    while not run.is_over:
        epoch, first = divmod(state.step, batches.steps_per_epoch)
        for batch in batches.epoch(epoch, first):
            engine.set_rate(state.step)
            outcome = task.train_step(batch)
            state.advance()
            engine.end_step()
            run.react(outcome)  # to the step before: the device never waits for the host
            if run.is_due(config.log):
                run.record.scalars(state.step, run.scalars())
            run.observe()
            if run.is_stopped:
                break
            if run.is_due(config.eval):
                run.note(task.evaluate())
            if run.is_due(config.checkpoint) or run.wants_save:
                run.save()
            if run.is_over:
                break
    return run.finish()
