"""`Trainer`, the base class of every task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config.schema import Config
from trainer.data.batches import LocalBatch
from trainer.distributed.world import World
from trainer.engine.engine import Engine
from trainer.engine.evaluation import Evaluator
from trainer.engine.optimizers import check_optimizers
from trainer.engine.step import Outcome
from trainer.engine.values import Values, check_name
from trainer.errors import ConfigError, visible
from trainer.loop.folder_export import export_at_end
from trainer.loop.run import Run
from trainer.loop.training import FitResult, examine, start, train
from trainer.record.startup import Summary
from trainer.setup.build import Setup
from trainer.setup.notebook_launch import train_on_ranks
from trainer.strategy.tensor_parallel.loss_parallel import gather_parts, sizes_of
from trainer.task import Task


def gather_rows(engine: Engine, tensor: torch.Tensor, num_batches: int) -> tuple[torch.Tensor, int]:
    """Return the rows of all ranks, and the number of this rank's first one among them."""
    if engine.checks.row_check.gathering.is_on:
        return engine.checks.row_check.gathering.take(tensor)
    rows = engine.recorder.count_rows()
    if rows is None:
        return tensor, 0
    given = "gather_rows: needs the whole global batch at once"
    if num_batches > 1:
        raise ConfigError(f"""{given}, and a rank has {num_batches} micro-batches;
            set data.micro_batch=null, or use more ranks""")
    if not tensor.dim() or len(tensor) != rows:
        raise ConfigError(f"gather_rows got shape {tuple(tensor.shape)}: must have {rows} rows")
    axis = engine.strategy.world.groups["data"]
    total = engine.strategy.spec.config.data.global_batch
    sizes = sizes_of(total, axis)
    if sizes[axis.rank] != rows:
        raise ConfigError(f"""data.global_batch={total}:
            must be a multiple of {axis.size} x run.norm_rows for gather_rows""")
    first = sum(sizes[: axis.rank])
    if axis.size == 1:
        return tensor, 0
    return gather_parts(tensor, 0, total, axis), first


Found = TypeVar("Found")


class Trainer(Task):
    """Base class of a task, which trains and evaluates it in any layout.

    A subclass must define `build_model`, `build_dataset` and `loss`. See `Task` for all hooks.
    """

    def __init__(self, config: Config, world: World | None = None):
        super().__init__(config, world)
        self._run: Setup | Run | FitResult | None = None

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
        if self._run is None:
            raise RuntimeError("model: is not built yet; call fit or evaluate first")
        if self._run.model is None:
            advice = "read the weights with python -m trainer.use RUN out=FILE.safetensors"
            raise RuntimeError(f"model: was in the ranks, whose group has ended; {advice}")
        return self._run.model

    @property
    def step(self) -> int:
        """Number of global batches trained on so far."""
        return self._run.step if isinstance(self._run, (Run, FitResult)) else 0

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that `build_optimizer` returned, as a list.

        Raises RuntimeError unless `fit` is running.
        """
        return list(active_run(self).engine.optimizers)

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
        return active_run(self).engine.update(batch, loss or self.loss, optimizers, name)

    def record(self, name: str, values: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Log the mean of values over the global batches of an interval, as `train/<name>`.

        Call it in `loss` or `train_step`, with a tensor (rows, ...) and weights of its shape. It is
        reduced as the loss is, so it does not depend on the layout. Values get no gradient. Outside
        of training it does nothing. Raises ConfigError for a scalar, for other rows than those of
        the micro-batch, and for the name of an update, such as "loss".

            self.record("accuracy", (outputs.argmax(1) == targets).float())
        """
        if isinstance(self._run, Run):
            returned = values if weights is None else (values, weights)
            self._run.engine.recorder.record(name, returned)

    def stop(self, reason: str) -> None:
        """End the run on all ranks after this step, evaluated and saved, with exit code 0.

        Call it on one rank or more, in `loss`, `train_step`, `metrics` or `summarize`. Outside of
        training it does nothing. A resume ends at once too, unless it gives the run more steps.

            if means["accuracy"] > 0.94: self.stop("accuracy above 0.94")
        """
        if isinstance(self._run, Run) and not self._run.engine.checks.is_running:
            self._run.requests.ask_for_end(visible(str(reason or "the task asked for it")))

    def gather_rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows (global batch, ...) of all ranks, and the number of this rank's first.

        For contrastive losses: call it in `loss`, on every rank. The gradient of each row is the
        sum over the ranks. Outside of an update, as in an evaluation, it returns only this
        micro-batch. Raises ConfigError if a rank has several micro-batches.

            others, first = self.gather_rows(images)
            targets = first + torch.arange(len(texts), device=texts.device)
            return F.cross_entropy(texts @ others.T, targets, reduction="none")
        """
        if not isinstance(self._run, Run):
            return tensor, 0
        return gather_rows(self._run.engine, tensor, self._run.batches.plan.accumulation)

    def save_checkpoint(self) -> Path:
        """Request a checkpoint of the state after this step, and return its future path.

        Call it in `train_step`, on every rank.
        """
        return active_run(self).request_save()

    def load_checkpoint(self, path: Path) -> None:
        """Start the next `fit` or `evaluate` from a checkpoint, as with `run.resume`."""
        if isinstance(self._run, Run):
            raise RuntimeError("load_checkpoint: must be called before fit or evaluate")
        run = replace(self.config.run, resume=str(path))
        self.config = replace(self.config, run=run)

    def fit(self) -> Summary:
        """Train until the end of the run or a stop request, and return a summary. A collective.

        Raises ConfigError or CheckpointError for a mistake that the user can fix, and RunError if
        the run cannot continue.
        """
        summary = start(self, train)
        export_at_end(self, summary)
        return summary

    def launch(self, ranks: int) -> Summary:
        """Fit on `ranks` new processes of this machine, for example from a notebook.

        Their output appears here, and an interrupt makes them save and stop. `evaluate` then
        evaluates the run. Raises what `fit` raises, and ConfigError without cloudpickle.
        """
        summary = train_on_ranks(self, ranks)
        self._run = FitResult(None, summary.step, summary.directory)
        return summary

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the splits of `eval.splits`, `{"eval/loss": ...}`. A collective.

        While `fit` runs, evaluate the model in training. Otherwise evaluate the checkpoint of
        `run.resume`, else of the last run of this task, else the newly built model. Return an
        empty dict without such data. Raises KeyboardInterrupt after a stop request.
        """
        if isinstance(self._run, Run):
            return self._run.evaluate()
        return examine(self, Evaluator.evaluate)


def active_run(task: Trainer) -> Run:
    """Return the run that `fit` of a task trains: its engine, batches, state, record, checkpoints.

    Verbs and tests that record or examine steps read a run here. It is no property of `Trainer`,
    whose names are the user's. Raises RuntimeError unless `fit` is running.
    """
    if not isinstance(task._run, Run):
        raise RuntimeError("there only while fit trains; use it in train_step, loss or metrics")
    return task._run


def set_model(task: Trainer, setup: Setup) -> None:
    """Make `task.model` the model of a setup, for the hooks of a task that does not train."""
    task._run = setup
