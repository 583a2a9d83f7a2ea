"""`Trainer`, the base class of every task, and the training loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoints.state import read_on_all_ranks
from trainer.config.schema import Config
from trainer.data.batches import LocalBatch
from trainer.distributed.world import World
from trainer.engine.decisions import RolledBack
from trainer.engine.engine import open_ema
from trainer.engine.evaluation import Evaluator
from trainer.engine.means import Values, check_name
from trainer.engine.optimizers import check_optimizers
from trainer.engine.outcome import Outcome
from trainer.errors import ConfigError, visible
from trainer.record import resume
from trainer.record.startup import Summary
from trainer.run import Run
from trainer.setup.agreement import Session, open_session
from trainer.setup.build import Setup
from trainer.setup.cell import train_on_ranks
from trainer.setup.checks import check_evaluation, check_training, try_optimizer
from trainer.setup.failures import failures_named
from trainer.task import Task

Found = TypeVar("Found")


@dataclass(frozen=True)
class FitResult:
    """The part of a finished run that a Trainer keeps; `directory` is None if `fit` never ran.

    `model` is None if it was divided over the ranks, or theirs alone.
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
        self._run: Setup | Run | FitResult | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("model", "step", "optimizers"):
            raise ConfigError(f"self.{name}: is set by the trainer; choose another name")
        super().__setattr__(name, value)

    @property
    def model(self) -> nn.Module:
        """The model as `build_model` returned it.

        Raises RuntimeError before `fit` or `evaluate` has built it, and afterwards if it was
        divided over ranks, whose group has then ended, or in the processes of `launch`.
        """
        if self._run is None:
            raise RuntimeError("model: is not built yet; call fit or evaluate first")
        if self._run.model is None:
            advice = "read the weights with python -m trainer.checkpoints DIR --export FILE"
            raise RuntimeError(f"model: was in the ranks, whose group has ended; {advice}")
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
        return list(_running(self._run).engine.optimizers)

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
        `optimizers` step, by default all that `build_optimizer` returned. A second update may use
        the same `batch`: return the sum of both outcomes.
        """
        if not isinstance(batch, (LocalBatch, list)):
            raise ConfigError(f"update got a {type(batch).__name__}: must be train_step's batch")
        check_name("update got", name)
        if optimizers is not None:
            some = list(optimizers) if isinstance(optimizers, tuple) else optimizers
            optimizers = check_optimizers(some, "update got")
        return _running(self._run).engine.update(batch, loss or self.loss, optimizers, name)

    def record(self, name: str, values: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Log the mean of values over the global batches of an interval, as `train/<name>`.

        Call it in `loss` or `train_step`, with a value per example: a tensor (rows, ...), and
        weights of its shape. It is reduced as the loss is, so it does not depend on the layout.
        Outside of training it does nothing. Values need no gradient, and get none. Raises
        ConfigError for a scalar, for other rows than those of the micro-batch, and for the name of
        an update, such as "loss".

            self.record("accuracy", (outputs.argmax(1) == targets).float())
        """
        if isinstance(self._run, Run):
            returned = values if weights is None else (values, weights)
            self._run.engine.recorder.record(name, returned)

    def stop(self, reason: str) -> None:
        """End the run after this step, with exit code 0, evaluated and saved; on all ranks.

        Call it on one rank or more, in `loss`, `train_step`, `metrics` or `summarize`. Outside of
        training it does nothing. A resume knows of it: it ends at once, unless it gives the run
        more steps.

            if means["accuracy"] > 0.94: self.stop("accuracy above 0.94")
        """
        if isinstance(self._run, Run) and not self._run.engine.proof.is_running:
            self._run.requests.ask_for_end(visible(str(reason or "the task asked for it")))

    def gather_rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows (global batch, ...) of all ranks, and the number of this rank's first.

        For losses that compare the rows of a batch, such as a contrastive loss. Call it in `loss`,
        on every rank. The gradient of each row is the sum over the ranks. Outside of an update, as
        in an evaluation, it returns this micro-batch alone. Raises ConfigError if a rank has
        several micro-batches: the whole batch is then never there at once.

            others, first = self.gather_rows(images)
            targets = first + torch.arange(len(texts), device=texts.device)
            return F.cross_entropy(texts @ others.T, targets, reduction="none")
        """
        if not isinstance(self._run, Run):
            return tensor, 0
        return self._run.engine.gather_rows(tensor, self._run.batches.plan.accumulation)

    def save_checkpoint(self) -> Path:
        """Request a checkpoint of the state after this step, and return its future path.

        Call it in `train_step`, on every rank.
        """
        return _running(self._run).request_save()

    def load_checkpoint(self, path: Path) -> None:
        """Start the next `fit` or `evaluate` from a checkpoint, as with `run.resume`."""
        if isinstance(self._run, Run):
            raise RuntimeError("load_checkpoint: must be called before fit or evaluate")
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
        try:
            with open_session(self, origin, first_steps) as session:
                return _train(self, session)
        finally:
            if not isinstance(self._run, FitResult):
                self._run = None  # nothing is open any more

    def launch(self, ranks: int) -> Summary:
        """Fit as `ranks` new processes of this machine, as from a cell that defines the class.

        Their output appears here; an interrupt makes them save and stop. `evaluate` then evaluates
        the run. Raises what `fit` raises, and ConfigError without the package cloudpickle.
        """
        summary = train_on_ranks(self, ranks)
        self._run = FitResult(None, summary.step, summary.directory)
        return summary

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the splits of `eval.splits`, `{"eval/loss": ...}`. A collective.

        While `fit` runs, evaluate the model in training. Otherwise evaluate the checkpoint of
        `run.resume`, else of the run that was trained last, else the newly built model. Return an
        empty dict if there is no such data. Raises KeyboardInterrupt after a stop request.
        """
        if isinstance(self._run, Run):
            return self._run.evaluate()
        return examine(self, Evaluator.evaluate)


def _train(task: Trainer, session: Session) -> Summary:
    """Train, again from the newest checkpoint after each rollback."""
    group = session.ranks.group
    origin = session.origin
    rolled_back: set[int] = set()
    while True:
        try:
            with failures_named(group, task.config):
                splits = ("train", *task.config.eval.splits)
                task._run = Setup(task, session.ranks, splits, session.notes)
                opened = Run(task, task._run, origin, rolled_back)
                with opened as task._run, failures_named(group, task.config):
                    del opened  # a reference to DDP's wrapper must not outlive its group
                    summary = loop(task, task._run)
                model = task._run.engine.strategy.close()
                task._run = FitResult(model, task.step, summary.directory)
                return summary
        except RolledBack as back:
            rolled_back.add(back.step)
            origin = resume.roll_back(back.directory, origin)
            task._run = None  # free the wrapper before the next one is built


def examine(task: Trainer, use: Callable[[Evaluator], Found | None]) -> Found:
    """Load the weights as `Trainer.evaluate` does, and return `use(evaluator)`. A collective.

    Raises KeyboardInterrupt after a stop request, if `use` returns None.
    """
    fitted = task._run.directory if isinstance(task._run, FitResult) else None
    task._run = None
    origin = check_evaluation(task.config, task.world, fitted)
    opened = open_session(task, origin)
    with opened as session, failures_named(session.ranks.group, task.config):
        setup = Setup(task, session.ranks, task.config.eval.splits)
        task._run = setup
        ema = open_ema(task.config, setup.parts.strategy.tensors)
        found = read_on_all_ranks(session.ranks.group, lambda: resume.find_checkpoints(origin))
        restored, skipped = found
        if restored:
            restored.load(setup.parts.strategy.tensors, ema)
            task._run = FitResult(setup.model, restored.manifest.step, fitted)
        made = use(setup.open_evaluator(ema, lambda: bool(session.ranks.stop)))
        task._run = FitResult(setup.parts.strategy.close(), task.step, fitted)
        del setup, ema  # a divided model must not outlive its group
    if task.world.rank == 0:
        for line in [*session.notes, *skipped]:
            print(visible(line), file=sys.stderr)
    if made is None:
        raise KeyboardInterrupt
    return made


def first_steps(task: Trainer) -> None:
    """Make two updates on the first batch: the optimizer's state is there from the second one on.

    A collective.
    """
    with open_session(task, resume.Origin()) as session:
        setup = Setup(task, session.ranks, ("train", *task.config.eval.splits))
        with Run(task, setup, resume.Origin()) as run:
            task._run = run
            run.engine.proof.close()
            for _ in range(2):
                run.engine.set_rate(0, True)
                task.train_step(run.batches.of_step(0))
                run.engine.end_step()


def _running(run: object) -> Run:
    if not isinstance(run, Run):
        raise RuntimeError("there only while fit trains; use it in train_step, loss or metrics")
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
        for batch in batches.epoch(epoch, first, run.num_steps):
            engine.set_rate(state.step, run.is_due(config.log, 1))
            outcome = task.train_step(batch)
            state.advance()
            engine.end_step()
            # Handles the previous step's outcome, so the GPU is not kept waiting.
            run.react(outcome)
            run.log()
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
