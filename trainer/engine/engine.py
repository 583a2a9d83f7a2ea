"""The engine: one model in training. It knows no files and no rank numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from trainer.config.schema import Config
from trainer.distributed.watch.heartbeat import Phase
from trainer.draws.mode import take_rows
from trainer.engine.ema import Ema
from trainer.engine.means import Means, Values
from trainer.engine.objective import Objective
from trainer.engine.optimizers import (
    check_count,
    check_optimizers,
    load_named_state,
    named_state,
    remember_options,
    step_unless,
)
from trainer.engine.outcome import Outcome
from trainer.engine.parts import Parts
from trainer.schedule import Factor, rate_scale
from trainer.strategy.base import MicroBatches, Strategy, call
from trainer.strategy.rehearsal import untouched

Loss = Callable[[Any, Any], Values]


@dataclass(slots=True)
class Gradients:
    """Reduced gradients in `parameter.grad`, of the mean over the global batch, not clipped."""

    totals: torch.Tensor  # (2,): weight of the batch, stop requests, summed over the ranks
    found_inf: torch.Tensor  # (): 1 where one is not finite


class Engine:
    """Updates a model: objective, strategy, precision, optimizers, means, moving average."""

    def __init__(
        self, parts: Parts, schedule: Factor, batch: MicroBatches, wants_stop: Callable[[], bool]
    ):
        """Rehearse the first micro-batch of `batch` and build what needs the parameters.

        `wants_stop` says whether this rank asks all ranks to stop.
        """
        config = parts.config
        strategy = parts.strategy
        self.strategy = strategy
        self.precision = parts.precision
        self.means = Means(strategy.leaves)
        self._global_batch = config.data.global_batch
        self._clip_norm = config.run.clip_norm
        self._is_compiled = config.run.compile
        self._group = parts.ranks.group
        self.draws = parts.draws
        self._heartbeat = parts.ranks.heartbeat
        self._end_child = parts.ranks.end_child
        self._wants_stop = wants_stop
        self._schedule = schedule
        self._rate_scale = rate_scale(config)
        self._objectives: dict[str, Objective] = {}
        rehearsal = next(iter(batch))
        torch.manual_seed(config.run.seed)  # lazy layers draw their weights in the rehearsal
        strategy.prepare(rehearsal, self._new_objective("loss").of(parts.hooks.loss))
        strategy.on_gradients(self._heartbeat.reduce_begun)
        self._unit = config.norm_rows or 1
        self._few_rows = take_rows(rehearsal, 3 * self._unit)
        self._rehearse_draws("loss", parts.hooks.loss)
        self.means.clear()
        self.optimizers = check_optimizers(parts.hooks.build_optimizer(strategy.module))
        for optimizer in self.optimizers:
            remember_options(optimizer)
        self._groups = self._list_groups()
        self._parameters = [local.parameter for local in strategy.local_parameters()]
        self.ema = open_ema(config, strategy)

    @property
    def model(self) -> nn.Module:
        """The user's model, whatever wraps it."""
        return self.strategy.module

    def update(
        self,
        batch: MicroBatches,
        loss: Loss,
        optimizers: Sequence[Optimizer] | None = None,
        name: str = "loss",
    ) -> Outcome:
        """Make one step on the mean of `loss` over the global batch, logged as `train/<name>`.

        Where a gradient is not finite, on all ranks alike, neither weights nor state change.
        """
        return self.step(self.backward(batch, loss, optimizers, name), optimizers)

    def backward(
        self,
        batch: MicroBatches,
        loss: Loss,
        optimizers: Sequence[Optimizer] | None = None,
        name: str = "loss",
    ) -> Gradients:
        """The first half of an update: the gradients, before clipping.

        Only parameters of `optimizers` (all by default) keep one.
        """
        self._end_child()
        strategy = self.strategy
        objective = (self._objectives.get(name) or self._new_objective(name)).of(loss)
        if not self.draws.is_known(name):
            self._rehearse_draws(name, loss)
        with self.draws.update(name):
            totals = strategy.forward_backward(batch, objective)
        self._heartbeat.enter(Phase.UPDATE)
        if optimizers is not None:
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            strategy.drop_gradients([p for group in groups for p in group["params"]])
        found_inf = self.precision.unscale(strategy.gradients_by_kind(), objective.factor(totals))
        return Gradients(totals, found_inf)

    def step(self, gradients: Gradients, optimizers: Sequence[Optimizer] | None = None) -> Outcome:
        """The second half of an update: clip, step, free the gradients."""
        found_inf = gradients.found_inf
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        step_unless(optimizers or self.optimizers, found_inf)
        if self.precision.is_scaled:
            self.precision.update_scale(found_inf)
        self.strategy.statistics.undo(found_inf)
        self.strategy.drop_gradients()
        return Outcome(((gradients.totals, found_inf),))

    def _rehearse_draws(self, name: str, loss: Loss) -> None:
        """Find out what an update draws at random; nothing changes."""

        def compute(inputs: Any, targets: Any) -> None:
            with self.precision.autocast():
                loss(call(self.model, inputs), targets)

        eagerly = torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()
        with eagerly, untouched(self.model):
            self.draws.rehearse(name, compute, self._few_rows, self._unit)

    def _clip(self, max_norm: float) -> None:
        """Scale the gradients down to the global norm `max_norm`."""
        gradients = self.strategy.gradients()
        if self.precision.dtype in (torch.bfloat16, torch.float16):
            gradients = [g.float() for g in gradients]  # their sum of squares would overflow
        norm = self.strategy.reduce(get_total_norm(gradients))
        clip_grads_with_norm_(self._parameters, max_norm, norm)

    def _new_objective(self, name: str, elements: int = 0) -> Objective:
        self._objectives[name] = Objective(
            name,
            self.means,
            self._global_batch,
            self.strategy.mesh.data_size if self.strategy.averages else 1,
            elements,
            self._group.tell_all,
            self._wants_stop,
        )
        return self._objectives[name]

    def set_rate(self, step: int) -> None:
        """Set every group's rate for the update made at 0-based `step`."""
        factor = self._schedule(step) * self._rate_scale
        for group, initial in self._groups:
            group["lr"] = initial * factor

    def end_step(self) -> None:
        """Close the step's row of means, and advance the moving average of the weights."""
        self._end_child()
        self.means.end_row()
        if self.ema is not None:
            self.ema.update()

    def averaged(self) -> AbstractContextManager[None]:
        """The model as it is evaluated: with the moving average of its weights, if any."""
        return self.ema.swapped() if self.ema else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """All that training needs but the model's own tensors. A collective."""
        return {
            "optimizers": self.optimizer_states(),
            "rows": self.means.reduced(self._group),
            "elements": {name: found.elements for name, found in self._objectives.items()},
            "precision": self.precision.state_dict(),
            "ema": self.ema.state_dict() if self.ema else {},
        }

    def optimizer_states(self) -> list[dict[str, Any]]:
        names = self._names()
        return [named_state(optimizer, names) for optimizer in self.optimizers]

    def load_state_dict(self, model: dict[str, torch.Tensor], training: dict[str, Any]) -> None:
        """Raises CheckpointError for the state of another model or optimizer."""
        self.means.load(training["rows"])
        self._objectives.clear()
        for name, elements in training["elements"].items():
            self._new_objective(name, elements)
        self.precision.load_state_dict(training["precision"])
        self.strategy.load(model)
        check_count(self.optimizers, training["optimizers"])
        names = self._names()
        for optimizer, saved in zip(self.optimizers, training["optimizers"], strict=True):
            load_named_state(optimizer, names, saved)
        self._groups = self._list_groups()
        if self.ema:
            self.ema.load_state_dict(training["ema"])

    def _list_groups(self) -> list[tuple[dict[str, Any], float]]:
        """Every parameter group, and the rate that it was built with."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [(group, group["initial"]["lr"]) for group in groups]

    def _names(self) -> dict[Any, str]:
        return {parameter: name for name, parameter in self.model.named_parameters()}


def open_ema(config: Config, strategy: Strategy) -> Ema | None:
    decay = config.run.ema_decay
    return None if decay is None else Ema(strategy.module, decay)
