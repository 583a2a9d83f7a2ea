"""The setup of a task: the first gate, the ranks, and data and model before any training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config.schema import Config
from trainer.config.targets import call_target, check_target
from trainer.data.batches import Batches, EvalBatches, Preparation
from trainer.data.order import check_batch
from trainer.data.sources import check_dataset
from trainer.data.workers import workers_named
from trainer.distributed.group import Group, choose_backend
from trainer.distributed.ranks import Ranks
from trainer.distributed.rendezvous import check_init
from trainer.distributed.watch.heartbeat import Phase
from trainer.distributed.world import World
from trainer.draws.mode import Draws
from trainer.engine.ema import Ema
from trainer.engine.evaluation import Evaluator
from trainer.engine.parts import Parts
from trainer.engine.precision import Precision
from trainer.errors import ConfigError, RunError, place_of
from trainer.loading import uncollected
from trainer.record import fingerprint, resume
from trainer.record.gate import check_soon
from trainer.schedule import Factor
from trainer.strategy.base import Strategy, convert, find_strategy
from trainer.strategy.mesh import Mesh
from trainer.task import FUSED, Split, Task

# The first gate: what config, environment and manifests can tell, before any socket or directory


def check_layout(config: Config, world: World) -> None:
    """Refuse what this layout cannot run. Raises ConfigError."""
    Precision.check(config.strategy.precision, world.device)
    kind = find_strategy(config.strategy.name)
    kind.check(config, world)
    choose_backend(config.dist, world)
    check_init(config.dist, world)
    check_batch(config.data.global_batch, kind.cut(config), world.world_size)


def check_training(config: Config, world: World) -> resume.Origin:
    """The first gate of `fit`; where the run lives and what it continues from, on rank 0."""
    check_layout(config, world)
    check_target(config.optim, "optim", config.packages, Optimizer)
    return check_soon(config, world.launcher)


@uncollected()
def try_optimizer(config: Config) -> None:
    """The end of the first gate: torch's optimizers check their own arguments in a second."""
    if config.optim["_target_"] in FUSED:
        weights = [torch.zeros(1, requires_grad=True)]
        call_target(config.optim, "optim", config.packages, Optimizer, weights)


def check_evaluation(config: Config, world: World, fitted: Path | None) -> resume.Origin:
    """The first gate of `evaluate`: of `run.resume`, else of the run that was fitted, if any."""
    check_layout(config, world)
    if world.rank:
        return resume.Origin()
    return resume.find_checkpoint(config, config.run.resume or (str(fitted) if fitted else None))


@contextmanager
def failures_named(group: Group) -> Iterator[None]:
    """Raise RunError, one line, where a peer or a data worker is gone or silent, or sys.exit is
    called: a run that ends in the middle is not done, whatever its exit code.
    """
    with group.peers_named(), workers_named():
        try:
            yield
        except SystemExit as error:
            what = f"sys.exit({error.code!r}) was called at {place_of(error)}"
            raise RunError(f"{what}; raise an error, or set run.steps to end earlier") from None


def agree_on_origin(
    config: Config, world: World, group: Group, origin: resume.Origin
) -> resume.Origin:
    """Look for a previous attempt again, with the starters of all ranks. A collective."""
    with group.agreed("finding the run directory"):
        if world.rank == 0:
            origin = resume.find_previous_attempt(config, world.launcher) or origin
        if origin.refused:
            raise ConfigError(origin.refused)
    return origin


def gather_starters(world: World, group: Group) -> World:
    """This rank's world, on rank 0 with the starters of all ranks. A collective."""
    lines = group.collect_text(" ".join(world.launcher.starters))
    starters = tuple(dict.fromkeys(" ".join(lines).split()))
    return replace(world, launcher=replace(world.launcher, starters=starters))


class Setup:
    """Data and model of a task, built alike on every rank before anything is trained."""

    step = 0

    def __init__(self, task: Task, ranks: Ranks, splits: Sequence[Split]):
        """Raises ConfigError for what a task's methods return wrongly. A collective."""
        config = task.config
        world = task.world
        precision = Precision(config.strategy.precision, world.device)
        to_model = partial(convert, precision, config.strategy.channels_last)
        self.config = config
        self.world = world
        kind = find_strategy(config.strategy.name)
        self.threads = kind.set_threads(world)
        self._cut = kind.cut(config)
        self.datasets: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._mesh = Mesh.replicated(world)
        seed = config.run.seed
        methods = (task.split_batch, task.augment, to_model)
        draws = Draws(seed, world.device, kind.draws_by_example(config, world))
        self._prepare = Preparation(*methods, seed, world.device, draws)
        ranks.heartbeat.enter(Phase.BUILD)
        with ranks.group.agreed("building data and model"):
            for split in splits:
                self._open_data(task, split)
            strategy = _build_model(task, precision)
            ranks.end_child()
        self.parts = Parts(config, task, strategy, precision, draws, ranks)
        ranks.group.check_equal(fingerprint.of_built(self.datasets, self.model))

    @property
    def model(self) -> nn.Module:
        return self.parts.strategy.module

    def _open_data(self, task: Task, split: Split) -> None:
        data: Any = task.build_dataset(split)
        if data is None and split == "eval":
            return
        check_dataset(data, split, self.config.data.path)
        self.datasets[split] = data
        if split == "eval":
            metrics = task.build_metrics(split)
            device = self.world.device
            self._metrics = {name: metric.to(device) for name, metric in metrics.items()}

    def open_batches(self) -> Batches:
        data = self.datasets["train"]
        mesh = self._mesh
        numbers = (mesh.data_rank, mesh.data_size)
        return Batches(data, self.config, self._cut, *numbers, self._prepare, self.parts.ranks)

    def open_evaluator(self, ema: Ema | None, wants_stop: Callable[[], bool]) -> Evaluator:
        batches: EvalBatches | None = None
        if (data := self.datasets.get("eval")) is not None:
            numbers = (self._mesh.data_rank, self._mesh.data_size)
            batches = EvalBatches(data, self.config, self._cut, *numbers, self._prepare)
        return Evaluator(self.parts, batches, self._metrics, ema, wants_stop)


def _build_model(task: Task, precision: Precision) -> Strategy:
    torch.manual_seed(task.config.run.seed)
    model = task.build_model()
    if not isinstance(model, nn.Module):
        given = f"a {type(model).__name__}"
        raise ConfigError(f"build_model returned {given}: must be a torch.nn.Module")
    kind = find_strategy(task.config.strategy.name)
    return kind.build(task.config, task.world, precision, model.train())


def build_schedule(task: Task, num_steps: int) -> Factor:
    """The task's schedule. Raises ConfigError unless it gives finite numbers."""
    schedule = task.build_schedule(num_steps)
    is_configured = type(task).build_schedule is Task.build_schedule
    target = f"schedule ({task.config.schedule['_target_']})"
    name = target if is_configured else "build_schedule"
    try:
        ends = [float(schedule(step)) for step in (0, num_steps - 1)]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: must give factor(step), a number: {error}") from None
    if not all(map(math.isfinite, ends)):
        raise ConfigError(f"{name}: gives the factors {ends}: must be finite")
    return schedule
