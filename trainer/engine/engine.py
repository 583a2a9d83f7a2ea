"""The engine: one model in training, independent of files and rank numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config.schema import Config
from trainer.distributed.watch.heartbeat import Phase
from trainer.engine.buffers import Buffers, load_buffers
from trainer.engine.ema import Ema
from trainer.engine.means import Means
from trainer.engine.objective import Objective, Share
from trainer.engine.optimizers import Norms, Optimizers
from trainer.engine.outcome import Outcome
from trainer.engine.parts import Parts
from trainer.engine.proof.holders import outside_kept
from trainer.engine.proof.proof import Proof
from trainer.engine.recording import Loss, Recorder
from trainer.errors import ConfigError
from trainer.rng.philox import seed_all
from trainer.schedule import Factor, rate_scale
from trainer.strategy.base import MicroBatches
from trainer.strategy.shards import Shard, TensorSource, read_into
from trainer.strategy.tensor_parallel.collectives import gather_parts, sizes_of
from trainer.strategy.tensors import Tensors

Shards = dict[str, dict[str, Shard]]


@dataclass(slots=True)
class Gradients:
    """Reduced gradients of the mean over the global batch, in `parameter.grad`, before clipping."""

    totals: torch.Tensor  # (2,): weight of the batch, stop requests, summed over the ranks
    found_inf: torch.Tensor  # (): 1 if a gradient is not finite
    norm: torch.Tensor | None  # () of the whole model, with run.clip_norm or to be logged


class Engine:
    """Update of a model: objective, strategy, precision, optimizers, means, moving average."""

    def __init__(
        self, parts: Parts, schedule: Factor, batch: MicroBatches, wants_stop: Callable[[], bool]
    ):
        """Rehearse the first micro-batch of `batch`, then build the optimizers and the EMA.

        `wants_stop` returns True if this rank asks all ranks to stop.
        """
        config, strategy, ranks = parts.config, parts.strategy, parts.ranks
        self.strategy = strategy
        self.precision = parts.precision
        means = Means(strategy.leaves)
        self.draws = parts.draws
        self._ranks = ranks
        mesh = strategy.mesh
        is_counted = mesh.has_loss and not mesh["tensor"]
        zero = torch.zeros((), dtype=parts.precision.wide, device=ranks.group.world.device)
        self._open_objective = partial(
            Objective,
            means=means,
            global_batch=config.data.global_batch,
            ranks=mesh.data_size if strategy.averages else 1,
            agree=lambda number: int(ranks.group.max(number)[0]),
            wants_stop=wants_stop,
            share=Share(is_counted, mesh.context, zero),
            rows=self.draws.rows,
        )
        self._objectives: dict[str, Objective] = {}
        hooks = parts.hooks if config.log.train_metrics else None
        compiles = config.run.compile
        self.recorder = Recorder(means, self._objectives, is_counted, hooks, compiles)
        self.norms = Norms(config.run.clip_norm)
        rehearsal = next(iter(batch))
        seed_all(config.run.seed)  # lazy layers initialise their weights in the rehearsal
        others = None if parts.has_own_step else ()
        with outside_kept(self.model, parts.hooks):
            strategy.prepare(rehearsal, self._objective("loss").of(parts.hooks.loss, others))
        self.proof = Proof(parts, self.recorder, rehearsal)
        self.proof.rehearse("loss", parts.hooks.loss)
        self.recorder.means.clear()
        built = parts.hooks.build_optimizer(self.tensors.structure)
        self.optimizers = Optimizers(built, self.tensors, schedule, rate_scale(config))
        self.ema = open_ema(config, self.tensors)
        self.buffers = Buffers(self.tensors)

    @property
    def tensors(self) -> Tensors:
        return self.strategy.tensors

    @property
    def model(self) -> nn.Module:
        """The user's model, without any wrapper."""
        return self.strategy.module

    @property
    def is_in_step(self) -> bool:
        """True from `set_rate` to `end_step`: the state may be half updated."""
        return self.recorder.is_open

    def update(
        self,
        batch: MicroBatches,
        loss: Loss,
        optimizers: Sequence[Optimizer] | None = None,
        name: str = "loss",
    ) -> Outcome:
        """Update on the mean of `loss` over the global batch, logged as `train/<name>`.

        If a reduced gradient is not finite, all ranks skip the update: neither the weights nor the
        optimizer state change.
        """
        return self.step(self.backward(batch, loss, optimizers, name), optimizers)

    @contextmanager
    def updating_by(self, update: Callable[..., Outcome]) -> Iterator[None]:
        """Let another function take the place of `update` in the block."""
        vars(self)["update"] = update
        try:
            yield
        finally:
            del vars(self)["update"]

    def backward(
        self,
        batch: MicroBatches,
        loss: Loss,
        optimizers: Sequence[Optimizer] | None = None,
        name: str = "loss",
    ) -> Gradients:
        """Compute the gradients, the first half of an update, before clipping.

        Only parameters of `optimizers` (by default all) keep a gradient.
        """
        self._ranks.end_child()
        strategy = self.strategy
        others = () if optimizers is None else self.optimizers.find_others(optimizers)
        objective = self._objective(name).of(self.recorder.watched(loss), others)
        self.proof.of(name, loss)
        with self.draws.update(name):
            totals = strategy.forward_backward(batch, objective)
        self._ranks.heartbeat.enter(Phase.UPDATE)
        for parameter in others:
            parameter.grad = None
        found_inf = self.precision.unscale(self.tensors.gradients(), objective.factor(totals))
        found_inf, norm = strategy.reduce(found_inf, self.norms.are_wanted)
        self.norms.note(name, norm)
        return Gradients(totals, found_inf, norm)

    def step(self, gradients: Gradients, optimizers: Sequence[Optimizer] | None = None) -> Outcome:
        """Clip, step and free the gradients: the second half of an update."""
        found_inf = gradients.found_inf
        self.proof.end_update()
        self.norms.clip(self.tensors.trained, gradients.norm)
        self.optimizers.step(found_inf, optimizers)
        if self.precision.is_scaled:
            self.precision.update_scale(found_inf)
        self.strategy.statistics.undo(found_inf)
        self.tensors.drop_gradients()
        return Outcome(((gradients.totals, found_inf),))

    def _objective(self, name: str) -> Objective:
        if name not in self._objectives:
            self._objectives[name] = self._open_objective(name)
        return self._objectives[name]

    def open_unread(self, name: str) -> Objective:
        """Return an objective like that of an update, whose means nobody reads."""
        means = Means(self.strategy.leaves)
        return self._open_objective(name, means=means, elements=self._objective(name).elements)

    def set_rate(self, step: int, wants_norm: bool = False) -> None:
        """Begin the 0-based `step`: set the learning rate of every parameter group for it.

        If `wants_norm`, its gradients' norm is computed, for `norms`.
        """
        self.norms.begin_step(wants_norm)
        self.proof.begin_step(step)
        self.recorder.begin_step()
        self.optimizers.set_rate(step)

    def end_step(self) -> None:
        """Close the step's row of means, and advance the moving average of the weights."""
        self._ranks.end_child()
        self.recorder.means.end_row()
        if self.ema is not None:
            self.ema.update()
        self.recorder.end_step()

    def gather_rows(self, tensor: torch.Tensor, num_batches: int) -> tuple[torch.Tensor, int]:
        """Return the rows of all ranks, and the number of this rank's first one among them."""
        if self.proof.judge.gathering.is_on:
            return self.proof.judge.gathering.take(tensor)
        rows = self.recorder.count_rows()
        if rows is None:
            return tensor, 0
        given = "gather_rows: needs the whole global batch at once"
        if num_batches > 1:
            why = f"a rank has {num_batches} micro-batches"
            raise ConfigError(f"{given}, and {why}; set data.micro_batch=null, or use more ranks")
        if not tensor.dim() or len(tensor) != rows:
            raise ConfigError(f"gather_rows got shape {tuple(tensor.shape)}: must have {rows} rows")
        axis = self.strategy.world.groups["data"]
        total = self.strategy.blueprint.config.data.global_batch
        sizes = sizes_of(total, axis)
        if sizes[axis.rank] != rows:
            must = f"must be a multiple of {axis.size} x run.norm_rows"
            raise ConfigError(f"data.global_batch={total}: {must} for gather_rows")
        first = sum(sizes[: axis.rank])
        if axis.size == 1:
            return tensor, 0
        return gather_parts(tensor, 0, total, axis), first

    def check(self) -> None:
        """Raise ConfigError for a model that was changed, or state that no resume could load."""
        if line := self.tensors.find_change() or self.buffers.find_change():
            raise ConfigError(line)
        self.optimizers.check(self.strategy.mesh.is_divided)

    def state_dict(self) -> dict[str, Any]:
        """Return the training state without the tensors of `shards`.

        Collective: every rank must call it.
        """
        group = self._ranks.group
        return {
            "optimizers": self.tensors.collect_plain(self.optimizers.state(), group),
            "rows": self.recorder.means.reduced(group),
            "elements": {name: each.elements for name, each in self._objectives.items()},
            "precision": self.precision.state_dict(),
            "extra": self.tensors.extra_state(),
        }

    def shards(self) -> Shards:
        """Return this rank's parts of the model, the optimizers' state and the moving average."""
        return {
            "model": self.tensors.shards(),
            "optimizer": self.optimizers.shards(),
            "ema": self.ema.shards() if self.ema else {},
            "buffer": self.buffers.shards(),
        }

    def load(self, sources: Mapping[str, TensorSource], training: Mapping[str, Any]) -> None:
        """Load the tensors by kind as `shards` names them, and what `state_dict` returned.

        Raises CheckpointError if they are of another model or optimizer.
        """
        self.recorder.means.load(training["rows"])
        self._objectives.clear()
        for name, elements in training["elements"].items():
            self._objectives[name] = self._open_objective(name, elements=elements)
        self.precision.load_state_dict(training["precision"])
        self.tensors.load(sources["model"], training.get("extra", {}))
        load_buffers(self.tensors, sources["buffer"])
        self.optimizers.load(sources["optimizer"], training["optimizers"])
        if self.ema:
            self.ema.load(sources["ema"])

    def initialise(self, source: TensorSource) -> None:
        """Start from the weights of a source, which may have some of the model's tensors only."""
        read_into(self.tensors.shards(), source)
        self.tensors.refresh()
        if self.ema:
            self.ema.restart()


def open_ema(config: Config, tensors: Tensors) -> Ema | None:
    decay = config.run.ema_decay
    return None if decay is None else Ema(tensors, decay)
