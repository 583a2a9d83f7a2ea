"""`Trainer`, the base class of every task, and the training loop."""

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
    resolve_precision,
    try_optimizer,
)
from trainer.strategy.base import Strategy
from trainer.task import Task


@dataclass(frozen=True)
class Finished:
    """The part of a finished run that a Trainer keeps; `directory` is None if `fit` never ran.

    `model` is None if it was divided over the ranks.
    """

    model: nn.Module | None
    step: int
    directory: Path | None


class Trainer(Task):
    """Base class of a task: trains and evaluates it in any layout.

    A subclass must define `build_model`, `build_dataset` and `loss`. See `Task` for all hooks.
    """

    def __init__(self, config: Config, world: World | None = None):
        super().__init__(config, world)
        self._run: Setup | Run | Finished | None = None

    @property
    def model(self) -> nn.Module:
        """The model as `build_model` returned it.

        Raises RuntimeError before `fit` or `evaluate` has built it, and afterwards if it was
        divided over ranks, whose group has then ended.
        """
        if self._run is None:
            raise RuntimeError("model: is not built yet; call fit or evaluate first")
        if self._run.model is None:
            why = "was divided over the ranks, whose group has ended"
            advice = "read the weights with python -m trainer.checkpoints DIR --export FILE"
            raise RuntimeError(f"model: {why}; {advice}")
        return self._run.model

    @property
    def step(self) -> int:
        """Number of global batches trained on so far."""
        return 0 if self._run is None else self._run.step

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that `build_optimizer` returned, as a list.

        Raises RuntimeError unless `fit` is running.
        """
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
        """Make one optimizer step on the mean of `loss` over the global batch. A collective.

        Call it in `train_step`. `loss(outputs, targets)` returns values in the form of
        `Trainer.loss`, which is the default. The mean is logged as `train/<name>`. Only
        `optimizers` step, by default all of them. A second update may use the same `batch`: return
        the sum of both outcomes.
        """
        return _running(self._run).engine.update(batch, loss or self.loss, optimizers, name)

    def save_checkpoint(self) -> Path:
        """Request a checkpoint of the state after this step, and return its future path.

        Call it in `train_step`, on every rank.
        """
        return _running(self._run).request_save()

    def load_checkpoint(self, path: Path) -> None:
        """Start the next `fit` or `evaluate` from a checkpoint, as with `run.resume`."""
        if isinstance(self._run, Run):
            must = "must be called before fit or evaluate"
            raise RuntimeError(f"load_checkpoint: {must}, not while fit runs")
        run = replace(self.config.run, resume=str(path))
        self.config = replace(self.config, run=run)

    def fit(self) -> Summary:
        """Train until the end of the run or a stop request, and return a summary. A collective.

        Raises ConfigError or CheckpointError, with a one-line message, for a mistake that the user
        can fix, and RunError if the run cannot continue.
        """
        self._run = None
        origin = check_training(self.config, self.world)
        try_optimizer(self.config)
        facts = fingerprint.of_start(self.config, type(self))
        rolled_back: set[int] = set()
        with open_ranks(self.config.dist, self.world, facts) as ranks:
            self.world = gather_starters(self.world, ranks.group)
            origin = agree_on_origin(self.config, self.world, ranks.group, origin)
            self.config, notes = resolve_precision(self.config, self.world, ranks.group, origin)
            while True:
                try:
                    with failures_named(ranks.group):
                        self._run = Setup(self, ranks, ("train", "eval"), notes)
                        opened = Run(self, self._run, origin, rolled_back)
                        with opened as self._run, failures_named(ranks.group):
                            del opened  # a reference to DDP's wrapper must not outlive its group
                            summary = loop(self, self._run)
                        strategy = self._run.engine.strategy
                        self._run = _finished(strategy, self.step, summary.directory)
                        del strategy
                        return summary
                except RolledBack as back:
                    rolled_back.add(back.step)
                    origin = resume.roll_back(back.directory, origin)
                    self._run = None  # free the wrapper before the next one is built

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the eval split, `{"eval/loss": ...}`. A collective.

        While `fit` runs, evaluate the model in training. Otherwise evaluate the checkpoint of
        `run.resume`, else of the run that was fitted last, else the newly built model. Return an
        empty dict if there is no eval split. Raises KeyboardInterrupt after a stop request.
        """
        if isinstance(self._run, Run):
            return self._run.evaluate()
        fitted = self._run.directory if isinstance(self._run, Finished) else None
        self._run = None
        origin = check_evaluation(self.config, self.world, fitted)
        facts = fingerprint.of_start(self.config, type(self))
        opened = open_ranks(self.config.dist, self.world, facts)
        with opened as ranks, failures_named(ranks.group):
            self.config, notes = resolve_precision(self.config, self.world, ranks.group, origin)
            setup = Setup(self, ranks, ("eval",))
            self._run = setup
            ema = open_ema(self.config, setup.parts.strategy)
            found = read_on_all_ranks(ranks.group, lambda: resume.find_checkpoints(origin))
            restored, skipped = found
            if restored:
                restored.load(setup.parts.strategy, ema)
                self._run = Finished(setup.model, restored.manifest.step, fitted)
            metrics = setup.open_evaluator(ema, lambda: bool(ranks.stop)).evaluate()
            self._run = _finished(setup.parts.strategy, self.step, fitted)
            del setup, ema  # a divided model must not outlive its group
        if self.world.rank == 0:
            for line in [*notes, *skipped]:
                print(visible(line), file=sys.stderr)
        if metrics is None:
            raise KeyboardInterrupt
        return metrics


def _finished(strategy: Strategy, step: int, directory: Path | None) -> Finished:
    return Finished(strategy.close(), step, directory)


def _running(run: object) -> Run:
    if not isinstance(run, Run):
        raise RuntimeError("available only while fit runs")
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
            # Handles the previous step's outcome, so the GPU is not kept waiting.
            run.react(outcome)
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
