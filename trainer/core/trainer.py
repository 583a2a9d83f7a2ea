"""`Trainer`, the base class of every task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.base.errors import ConfigError, visible
from trainer.core.config.schema import Config
from trainer.core.data.batches import LocalBatch
from trainer.core.distributed.world import World
from trainer.core.engine.evaluation import Evaluator
from trainer.core.engine.optimizers import check_optimizers
from trainer.core.engine.step import Outcome
from trainer.core.engine.trial import NO_RUN, ONLY_IN_FIT, TaskRun
from trainer.core.engine.values import Values, check_name
from trainer.core.extensions import EXPORT, NOTEBOOK
from trainer.core.loop.diagnosis import Example
from trainer.core.loop.diagnosis import examine as examine_batch
from trainer.core.loop.run import Run
from trainer.core.loop.training import FitResult, examine, start, train
from trainer.core.record.startup import Summary
from trainer.core.setup.build import Setup
from trainer.core.strategy.modules.batchnorm import has_batchnorm
from trainer.core.task import Task

Found = TypeVar("Found")


class Trainer(Task):
    """Base class of a task, which trains and evaluates it in any layout.

    A subclass must define `build_model`, `build_dataset` and `loss`. See `Task` for all hooks.
    """

    def __init__(self, config: Config, world: World | None = None):
        super().__init__(config, world)
        self._run: TaskRun = NO_RUN

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("model", "step", "optimizers"):
            raise ConfigError(f"self.{name}: is set by the trainer; choose another name")
        super().__setattr__(name, value)

    @property
    def model(self) -> nn.Module:
        """The model as `build_model` returned it.

        Raises RuntimeError before `fit` or `evaluate` has built it, and after a run that divided it
        over ranks or ran in the processes of `launch`.
        """
        model = self._run.model
        if model is None:
            raise RuntimeError(f"model: {self._run.without_model}")
        return model

    @property
    def step(self) -> int:
        """Number of global batches trained on so far."""
        return self._run.step

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that `build_optimizer` returned, as a list.

        Raises RuntimeError unless `fit` is running.
        """
        return self._run.list_optimizers()

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
        `optimizers` step, by default all of them. A second update may use the same `batch`.
        """
        if not isinstance(batch, (LocalBatch, list)):
            raise ConfigError(f"update got a {type(batch).__name__}: must be train_step's batch")
        if name != "loss":
            check_name("update got", name)
        if optimizers is not None:
            some = list(optimizers) if isinstance(optimizers, tuple) else optimizers
            optimizers = check_optimizers(some, "update got")
        return self._run.update(batch, loss or self.loss, optimizers, name)

    def record(self, name: str, values: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Log the mean of values over the global batches of an interval, as `train/<name>`.

        Call it in `loss` or `train_step`, with a tensor (rows, ...) and weights of its shape. It is
        reduced as the loss is, so it does not depend on the layout. Values get no gradient. Outside
        of training it does nothing. Raises ConfigError for a scalar, for other rows than those of
        the micro-batch, and for the name of an update, such as "loss".

            self.record("accuracy", (outputs.argmax(1) == targets).float())
        """
        self._run.record_values(name, values if weights is None else (values, weights))

    def stop(self, reason: str) -> None:
        """End the run on all ranks after this step, evaluated and saved, with exit code 0.

        Call it on one rank or more, in `loss`, `train_step`, `metrics` or `summarize`. Outside of
        training it does nothing. A resume ends at once too, unless it gives the run more steps.

            if means["accuracy"] > 0.94: self.stop("accuracy above 0.94")
        """
        self._run.stop(visible(str(reason or "the task asked for it")))

    def gather_rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows (global batch, ...) of all ranks, and the number of this rank's first.

        For contrastive losses: call it in `loss`, on every rank. The gradient of each row is the
        sum over the ranks. Outside of an update, as in an evaluation, it returns only this
        micro-batch. Raises ConfigError if a rank has several micro-batches.

            others, first = self.gather_rows(images)
            targets = first + torch.arange(len(texts), device=texts.device)
            return F.cross_entropy(texts @ others.T, targets, reduction="none")
        """
        return self._run.gather_rows(tensor)

    def save_checkpoint(self) -> Path:
        """Request a checkpoint of the state after this step, and return its future path.

        Call it in `train_step`, on every rank.
        """
        return self._run.request_save()

    def load_checkpoint(self, path: Path) -> None:
        """Start the next `fit` or `evaluate` from a checkpoint, as with `run.resume`."""
        if self._run.is_open:
            raise RuntimeError("load_checkpoint: must be called before fit or evaluate")
        run = replace(self.config.run, resume=str(path))
        self.config = replace(self.config, run=run)

    def fit(self) -> Summary:
        """Train until the end of the run or a stop request, and return a summary. A collective.

        Raises ConfigError or CheckpointError for a mistake that the user can fix, and RunError if
        the run cannot continue.
        """
        summary = start(self, train)
        if self.config.checkpoint.export is not None:
            EXPORT.load().export_at_end(self, summary)
        return summary

    def launch(self, ranks: int) -> Summary:
        """Fit on `ranks` new processes of this machine, for example from a notebook.

        Their output appears here, and an interrupt makes them save and stop. `evaluate` then
        evaluates the run. Raises what `fit` raises, and ConfigError without cloudpickle.
        """
        summary: Summary = NOTEBOOK.load().train_on_ranks(self, ranks)
        self._run = FitResult(None, summary.step, summary.directory)
        return summary

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the splits of `eval.splits`, `{"eval/loss": ...}`. A collective.

        While `fit` runs, evaluate the model in training. Otherwise evaluate the checkpoint of
        `run.resume`, else of the last run of this task, else the newly built model. Return an
        empty dict without such data. Raises KeyboardInterrupt after a stop request.
        """
        if self._run.is_open:
            return self._run.evaluate()
        return examine(self, Evaluator.evaluate)


def active_run(task: Trainer) -> Run:
    """Return the run that `fit` of a task trains: its engine, batches, state, record, checkpoints.

    Verbs and tests that record or examine steps read a run here. It is no property of `Trainer`,
    whose names are the user's. Raises RuntimeError unless `fit` is running.
    """
    if not isinstance(task._run, Run):
        raise RuntimeError(ONLY_IN_FIT)
    return task._run


def examine_step(task: Trainer, batch: LocalBatch) -> tuple[list[Example], bool]:
    """Recompute the examples of a step that `fit` of a task is about to train.

    The second result says whether BatchNorm used its running statistics, as training does not.
    """
    return examine_batch(active_run(task).engine, task, batch), has_batchnorm(task.model)


def set_model(task: Trainer, setup: Setup) -> None:
    """Make `task.model` the model of a setup, for the hooks of a task that does not train."""
    task._run = setup
