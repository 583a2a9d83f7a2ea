"""The engine: one model in training, independent of files and rank numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer.base.errors import ConfigError
from trainer.core.distributed.ranks import FORKS
from trainer.core.distributed.watch.heartbeat import Phase
from trainer.core.engine.context import Parts
from trainer.core.engine.means import Means
from trainer.core.engine.objective import CountedPart, Objective, Objectives
from trainer.core.engine.optimizers import Optimizers
from trainer.core.engine.recording import Loss, LossWatcher, Recorder
from trainer.core.engine.step import OpenStep, Outcome, step_unless
from trainer.core.engine.training_state import TrainingState
from trainer.core.engine.trial import Inspection, TaskRun, Trial
from trainer.core.micro_batch import MicroBatch, MicroBatches, count_rows, take_rows
from trainer.core.rng import seed_all, seed_step
from trainer.core.rng.draw_traces import uses_global_rngs
from trainer.core.schedule import Factor
from trainer.core.state.effects import Effects
from trainer.core.state.sandbox import keep_attributes, keep_passes, sandbox
from trainer.core.strategy.modules.dry_run import eager


@dataclass(frozen=True)
class Sample:
    """A few rows of a run's first micro-batch, and the bytes of one of its rows."""

    rows: MicroBatch
    row_bytes: float

    @classmethod
    def of(cls, batch: MicroBatch, most: int) -> Sample:
        """Return at most so many rows of a micro-batch."""
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        size = sum(tensor.nbytes for tensor in tensors if tensor.dim())
        return cls(take_rows(batch, most), size / count_rows(batch))


class Engine:
    """Updates of a model: objectives, strategy, optimizers, and the state that they change.

    `with engine.step(number):` opens a step, in which `update` is called.
    """

    def __init__(
        self, parts: Parts, schedule: Factor, batch: MicroBatches, wants_stop: Callable[[], bool]
    ):
        """Run the first micro-batch of `batch` dry, then build the optimizers and the EMA.

        `wants_stop` returns True if this rank asks all ranks to stop.
        """
        config, strategy = parts.config, parts.strategy
        self.strategy = strategy
        self.draws = parts.draws
        self.step = OpenStep(self._begin_step, self._end_step)
        self._parts = parts
        is_counted = strategy.mesh.has_loss and not strategy.mesh["tensor"]
        means = Means(strategy.leaves)
        self.objectives = _open_objectives(parts, means, is_counted, wants_stop)
        self.recorder = Recorder(self.step, means, self.objectives.by_name, is_counted)
        hooks = parts.hooks if config.log.train_metrics else None
        self._losses = LossWatcher(self.recorder, hooks, config.run.compile)
        first = next(iter(batch))
        seed_all(config.run.seed)  # lazy layers initialise their weights in the dry run
        others = None if parts.has_own_step else ()
        with sandbox(keep_attributes(self.model, parts.hooks)):
            strategy.prepare(first, self.objectives["loss"].of(parts.hooks.loss, others))
        self.sample = Sample.of(first, 3 * (config.norm_rows or 1))
        self.inspection = Inspection()
        self.effects = Effects()  # of trials: what nothing undoes
        self._begun: set[str] = set()  # names of updates that were made
        if any(parts.ranks.group.max(not self.draws.is_known("loss"))):
            self.trace_draws("loss", parts.hooks.loss)
        else:
            strategy.tensors.refresh()
        means.clear()
        built = parts.hooks.build_optimizer(strategy.tensors.structure)
        self.optimizers = Optimizers(built, strategy.tensors, schedule, config)
        self.state = TrainingState(parts, self.objectives, means, self.optimizers)
        self._has_updated = False  # in this step
        if not uses_global_rngs(parts.list_code([strategy.module, *self.optimizers])):
            self.draws.traces.leave_global_rngs()

    @property
    def model(self) -> nn.Module:
        """The user's model, without any wrapper."""
        return self.strategy.module

    def _begin_step(self) -> None:
        self._has_updated = False
        step = self.step.number
        if step in self.inspection.due:
            self.inspection.begin_step(step)
        if self._parts.may_draw:
            parts, has_global_draws = self._parts, self.draws.traces.has_global_draws
            seed_step(parts.config.run.seed, step, parts.ranks.group.world.device, has_global_draws)
        self.optimizers.rates.set(step)

    def _end_step(self) -> None:
        ranks = self._parts.ranks
        if len(FORKS) != ranks.generation:
            ranks.end_child()
        self.recorder.means.end_row()
        if self.state.ema is not None:
            self.state.ema.update()

    def update(
        self,
        batch: MicroBatches,
        loss: Loss,
        optimizers: Sequence[Optimizer] | None = None,
        name: str = "loss",
    ) -> Outcome:
        """Update on the mean of `loss` over the global batch, logged as `train/<name>`.

        Only parameters of `optimizers` (by default all) get a gradient and a step. If a reduced
        gradient is not finite, all ranks skip the update: neither the weights nor the optimizer
        state change.
        """
        parts, strategy, norms = self._parts, self.strategy, self.optimizers.norms
        if len(FORKS) != parts.ranks.generation:
            parts.ranks.end_child()
        if self.inspection.is_due or name not in self._begun:
            self._inspect(name, loss)

        # Forward, loss and backward of each micro-batch; gradients are sums over these and ranks.
        objective = self.objectives[name]
        others = () if optimizers is None else self.optimizers.find_others(optimizers)
        update_loss = objective.of(self._losses.watch(loss, name), others)
        with self.draws.update(name):
            totals = strategy.forward_backward(batch, update_loss)
        parts.ranks.heartbeat.enter(Phase.UPDATE)
        for parameter in others:
            parameter.grad = None

        # Backward divided by the nominal weight; what is left are the loss scale and the weight.
        # From here on each gradient is that of the mean over the global batch.
        factor = objective.factor(totals) if objective.is_weighted else None
        found_inf = parts.precision.unscale(strategy.tensors.gradients(), factor)
        wants_norm = self.step.is_logged or norms.limit is not None
        if wants_norm or strategy.divides_gradients:
            found_inf, norm = strategy.reduce(found_inf, wants_norm)
            if wants_norm and norm is not None:
                norms.note_and_clip(name, strategy.tensors.trained, norm)

        # Step, or put back what the skipped update has changed.
        self._has_updated = True
        step_unless(optimizers or self.optimizers.every, found_inf)
        if parts.precision.is_scaled:
            parts.precision.update_scale(found_inf)
        if strategy.statistics.are_used:
            strategy.statistics.undo(found_inf)
        strategy.tensors.drop_gradients()
        return Outcome(((totals, found_inf),))

    def inspect_by(self, inspection: Inspection) -> None:
        """Have `inspection` look at the updates from now on."""
        self.inspection = inspection

    @contextmanager
    def trial(self, model: nn.Module | None = None) -> Iterator[Trial]:
        """Try hooks of the task in the block: they reach a trial, and compile nothing.

        Their model is `model`, or that of the run.
        """
        task: Any = self._parts.hooks
        outer: TaskRun = task._run
        task._run = trial = Trial(outer, model)
        try:
            with eager(self._parts.config), self.effects.watched(self.model, task):
                yield trial
        finally:
            task._run = outer

    def trace_draws(self, name: str, loss: Loss) -> None:
        """Find the random draws of an update by a dry run, which leaves the model unchanged."""
        parts, strategy, draws = self._parts, self.strategy, self.draws

        def compute(inputs: Any, targets: Any) -> None:
            strategy.compute(inputs, targets, loss)

        restores = keep_passes(self.model), keep_attributes(self.model, parts.hooks)
        with self.trial(), sandbox(*restores):
            draws.trace_draws(name, compute, self.sample.rows, parts.config.norm_rows or 1)
        if strategy.mesh.divides_model:
            draws.agree(name, parts.ranks.group.max)
        strategy.tensors.refresh()

    def _inspect(self, name: str, loss: Loss) -> None:
        self._begun.add(name)
        if not self.draws.is_known(name):
            self.trace_draws(name, loss)
        try:
            self.inspection.examine(name, loss, self.step.number)
        except ConfigError:
            if not self._has_updated:
                self.step.leave()  # the state is whole, and is saved
            raise

    def open_objective(self, name: str) -> Objective:
        """Return an objective like that of an update, whose means nobody reads."""
        means = Means(self.strategy.leaves)
        return self.objectives.open(name, means=means, elements=self.objectives[name].elements)


def _open_objectives(
    parts: Parts, means: Means, is_counted: bool, wants_stop: Callable[[], bool]
) -> Objectives:
    """Return the objectives of a run's updates; their values are added to `means`."""
    strategy, group = parts.strategy, parts.ranks.group
    mesh = strategy.mesh
    zero = torch.zeros((), dtype=parts.precision.wide, device=group.world.device)
    return Objectives(
        partial(
            Objective,
            means=means,
            global_batch=parts.config.data.global_batch,
            ranks=mesh.data_size if strategy.averages else 1,
            agree=lambda number: int(group.max(number)[0]),
            wants_stop=wants_stop,
            share=CountedPart(is_counted, mesh.context, zero),
            rows=parts.draws.rows,
        )
    )
