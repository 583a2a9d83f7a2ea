"""The engine: one model in training, independent of files and rank numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from trainer.config.schema import Config
from trainer.distributed.watch.heartbeat import Phase
from trainer.engine.buffers import Buffers, load_buffers
from trainer.engine.ema import Ema
from trainer.engine.means import Means
from trainer.engine.objective import Objective, Share
from trainer.engine.optimizers import (
    check_count,
    check_groups,
    check_optimizers,
    check_state,
    load_named_state,
    named_state,
    parameter_state,
    remember_options,
    restore_groups,
    step_unless,
)
from trainer.engine.outcome import Outcome
from trainer.engine.parts import Parts
from trainer.engine.recording import Loss, Recorder
from trainer.errors import ConfigError
from trainer.micro_batch import take_rows
from trainer.rng.philox import seed_all
from trainer.schedule import Factor, rate_scale
from trainer.strategy.base import MicroBatches
from trainer.strategy.modules.dry_run import untouched
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
        config = parts.config
        strategy = parts.strategy
        self.strategy = strategy
        self.precision = parts.precision
        self.means = Means(strategy.leaves)
        self._global_batch = config.data.global_batch
        self._clip_norm = config.run.clip_norm
        self._group = parts.ranks.group
        self.draws = parts.draws
        self._heartbeat = parts.ranks.heartbeat
        self._end_child = parts.ranks.end_child
        self._wants_stop = wants_stop
        self.schedule = schedule
        self._rate_scale = rate_scale(config)
        self._objectives: dict[str, Objective] = {}
        mesh = strategy.mesh
        zero = torch.zeros((), dtype=parts.precision.wide, device=parts.ranks.group.world.device)
        is_counted = mesh.has_loss and not mesh["tensor"]
        self._share = Share(is_counted, mesh.context, zero)
        hooks = parts.hooks if config.log.train_metrics else None
        self.recorder = Recorder(self.means, self._objectives, is_counted, hooks)
        self._wants_norm = False
        self._norms: dict[str, torch.Tensor] = {}
        rehearsal = next(iter(batch))
        seed_all(config.run.seed)  # lazy layers initialise their weights in the rehearsal
        strategy.prepare(rehearsal, self._new_objective("loss").of(parts.hooks.loss))
        self.tensors = strategy.tensors
        self._unit = config.norm_rows or 1
        self._few_rows = take_rows(rehearsal, 3 * self._unit)
        self._rehearse_draws("loss", parts.hooks.loss)
        self.means.clear()
        self.optimizers = check_optimizers(parts.hooks.build_optimizer(self.tensors.structure))
        self._updated = {each: self._adopt(each) for each in self.optimizers}
        self._groups = self._list_groups()
        self.ema = open_ema(config, self.tensors)
        self.buffers = Buffers(self.tensors)

    def _adopt(self, optimizer: Optimizer) -> list[nn.Parameter]:
        remember_options(optimizer, self.tensors.names())
        return self.tensors.adopt(optimizer)

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
        self._end_child()
        strategy = self.strategy
        objective = self._objectives.get(name) or self._new_objective(name)
        objective.of(self.recorder.watched(loss))
        if not self.draws.is_known(name):
            self._rehearse_draws(name, loss)
        with self.draws.update(name):
            totals = strategy.forward_backward(batch, objective)
        self._heartbeat.enter(Phase.UPDATE)
        if optimizers is not None:
            known, tensors = self._updated, self.tensors
            updated = [known[e] if e in known else tensors.adopt(e) for e in optimizers]
            tensors.drop_gradients([p for parameters in updated for p in parameters])
        found_inf = self.precision.unscale(self.tensors.gradients(), objective.factor(totals))
        wants_norm = self._clip_norm is not None or self._wants_norm
        found_inf, norm = strategy.reduce(found_inf, wants_norm)
        if norm is not None:
            self._norms[name] = norm
        return Gradients(totals, found_inf, norm)

    def step(self, gradients: Gradients, optimizers: Sequence[Optimizer] | None = None) -> Outcome:
        """Clip, step and free the gradients: the second half of an update."""
        found_inf = gradients.found_inf
        if self._clip_norm is not None and gradients.norm is not None:
            clip_grads_with_norm_(self.tensors.trained, self._clip_norm, gradients.norm)
        step_unless(optimizers or self.optimizers, found_inf)
        if self.precision.is_scaled:
            self.precision.update_scale(found_inf)
        self.strategy.statistics.undo(found_inf)
        self.tensors.drop_gradients()
        return Outcome(((gradients.totals, found_inf),))

    def _rehearse_draws(self, name: str, loss: Loss) -> None:
        """Find the random draws of an update by a rehearsal, which leaves the model unchanged."""

        def compute(inputs: Any, targets: Any) -> None:
            self.strategy.compute(inputs, targets, loss)

        is_compiled = self.strategy.blueprint.config.run.compile
        eagerly = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        with eagerly, untouched(self.model), self.recorder.closed():
            self.draws.rehearse(name, compute, self._few_rows, self._unit)
        if self.strategy.mesh.divides_model:
            self.draws.agree(name, self._group.max)
        self.tensors.refresh()

    def _new_objective(self, name: str, elements: int = 0) -> Objective:
        self._objectives[name] = Objective(
            name,
            self.means,
            self._global_batch,
            self.strategy.mesh.data_size if self.strategy.averages else 1,
            elements,
            lambda number: int(self._group.max(number)[0]),
            self._wants_stop,
            self._share,
            self.draws.rows,
        )
        return self._objectives[name]

    def set_rate(self, step: int, wants_norm: bool = False) -> None:
        """Begin the 0-based `step`: set the learning rate of every parameter group for it.

        If `wants_norm`, its gradients' norm is computed, for `norms`.
        """
        self._wants_norm = wants_norm
        self.recorder.begin_step()
        factor = self.schedule(step) * self._rate_scale
        for group, initial in self._groups:
            group["lr"] = initial * factor

    def end_step(self) -> None:
        """Close the step's row of means, and advance the moving average of the weights."""
        self._end_child()
        self.means.end_row()
        if self.ema is not None:
            self.ema.update()
        self.recorder.end_step()

    def rates(self) -> dict[str, float]:
        """Return the learning rate of the first parameter group that has one, by name."""
        return {"optim/lr": float(self._groups[0][0]["lr"])} if self._groups else {}

    def norms(self) -> dict[str, float]:
        """Return the norm of each update's last gradients before clipping, by name, once."""
        norms = {name: float(norm) for name, norm in self._norms.items()}
        self._norms.clear()
        return norms

    def gather_rows(self, tensor: torch.Tensor, num_batches: int) -> tuple[torch.Tensor, int]:
        """Return the rows of all ranks, and the number of this rank's first one among them."""
        rows = self.recorder.rows
        if rows is None:
            return tensor, 0
        given = "gather_rows: needs the whole global batch at once"
        if num_batches > 1:
            why = f"a rank has {num_batches} micro-batches"
            raise ConfigError(f"{given}, and {why}; set data.micro_batch=null, or use more ranks")
        if not tensor.dim() or len(tensor) != rows:
            raise ConfigError(f"gather_rows got shape {tuple(tensor.shape)}: must have {rows} rows")
        axis = self.strategy.world.groups["data"]
        sizes = sizes_of(self._global_batch, axis)
        if sizes[axis.rank] != rows:
            must = f"must be a multiple of {axis.size} x run.norm_rows"
            raise ConfigError(f"data.global_batch={self._global_batch}: {must} for gather_rows")
        first = sum(sizes[: axis.rank])
        if axis.size == 1:
            return tensor, 0
        return gather_parts(tensor, 0, self._global_batch, axis), first

    def averaged(self) -> AbstractContextManager[None]:
        """Use the moving average of the weights, if any, during the block, as in evaluation."""
        return self.ema.swapped() if self.ema else nullcontext()

    def check(self) -> None:
        """Raise ConfigError for a model that was changed, or state that no resume could load."""
        if line := self.tensors.find_change() or self.buffers.find_change():
            raise ConfigError(line)
        names = self.tensors.names()
        is_divided = self.strategy.mesh.is_divided
        for optimizer in self.optimizers:
            check_groups(optimizer, names, is_divided)
            check_state(optimizer, names, is_divided)

    def state_dict(self) -> dict[str, Any]:
        """Return the training state without the tensors of `shards`.

        Collective: every rank must call it.
        """
        names = self.tensors.names()
        states = [named_state(optimizer, names) for optimizer in self.optimizers]
        return {
            "optimizers": self.tensors.collect_plain(states, self._group),
            "rows": self.means.reduced(self._group),
            "elements": {name: each.elements for name, each in self._objectives.items()},
            "precision": self.precision.state_dict(),
            "extra": self.tensors.extra_state(),
        }

    def shards(self) -> Shards:
        """Return this rank's parts of the model, the optimizers' state and the moving average."""
        names = self.tensors.names()
        state: dict[str, Shard] = {}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, values in parameter_state(optimizer).items():
                shard = self.tensors.shard_of(parameter, is_state=True)
                prefix = f"{number}/{names[parameter]}"
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        state[f"{prefix}/{key}"] = shard.holding(value)
        averages = self.ema.shards() if self.ema else {}
        kinds = {"model": self.tensors.shards(), "optimizer": state, "ema": averages}
        return {**kinds, "buffer": self.buffers.shards()}

    def load(self, sources: Mapping[str, TensorSource], training: Mapping[str, Any]) -> None:
        """Load the tensors by kind as `shards` names them, and what `state_dict` returned.

        Raises CheckpointError if they are of another model or optimizer.
        """
        self.means.load(training["rows"])
        self._objectives.clear()
        for name, elements in training["elements"].items():
            self._new_objective(name, elements)
        self.precision.load_state_dict(training["precision"])
        self.tensors.load(sources["model"], training.get("extra", {}))
        load_buffers(self.tensors, sources["buffer"])
        check_count(self.optimizers, training["optimizers"])
        names = self.tensors.names()
        for number, optimizer in enumerate(self.optimizers):
            restore_groups(optimizer, names, training["optimizers"][number])
            tensors = self._read_state(number, sources["optimizer"])
            load_named_state(optimizer, names, training["optimizers"][number], tensors)
        self._groups = self._list_groups()
        if self.ema:
            self.ema.load(sources["ema"])

    def initialise(self, source: TensorSource) -> None:
        """Start from the weights of a source, which may have some of the model's tensors only."""
        read_into(self.tensors.shards(), source)
        self.tensors.refresh()
        if self.ema:
            self.ema.restart()

    def _read_state(self, number: int, source: TensorSource) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's parts of an optimizer's state, by parameter name and key."""
        groups = self.optimizers[number].param_groups
        names = self.tensors.names()
        own = {names[p]: self.tensors.shard_of(p) for group in groups for p in group["params"]}
        state: dict[str, dict[str, torch.Tensor]] = {}
        for place, shape in source.shapes().items():
            first, _, rest = place.partition("/")
            name, _, key = rest.rpartition("/")
            if first != str(number):
                continue
            if name not in own:
                source.skip(place)
                continue
            if shape and shape == own[name].shape:
                value = own[name].read(source, place)
            else:
                value = source.read(place, (0,) * len(shape), shape)
            state.setdefault(name, {})[key] = value
        return state

    def _list_groups(self) -> list[tuple[dict[str, Any], float]]:
        """Return each group as built that has a learning rate, with it; not those added later."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [(g, g["initial"]["lr"]) for g in groups if "lr" in g.get("initial", {})]


def open_ema(config: Config, tensors: Tensors) -> Ema | None:
    decay = config.run.ema_decay
    return None if decay is None else Ema(tensors, decay)
