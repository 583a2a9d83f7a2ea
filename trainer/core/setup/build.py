"""The data and the model of a task, built alike on all ranks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from trainer.base.errors import ConfigError, one_line, place_of
from trainer.base.process.streams import outlive_terminal, without_bars
from trainer.core.checkpoints.tensor_files import check_tensors
from trainer.core.config.typed import suggest
from trainer.core.data.batches import Batches
from trainer.core.data.eval_batches import EvalBatches
from trainer.core.data.loaders import check_dataset
from trainer.core.data.preparation import Preparation
from trainer.core.data.sampling import Sampling, Shuffle
from trainer.core.distributed.group import Group
from trainer.core.distributed.ranks import Ranks
from trainer.core.distributed.watch.heartbeat import Phase
from trainer.core.engine.context import Parts
from trainer.core.engine.evaluation import EvalSplit, Evaluator, check_torchmetrics
from trainer.core.engine.precision import Precision
from trainer.core.engine.training_state import Ema, describe_frozen
from trainer.core.engine.trial import TaskRun
from trainer.core.extensions import EXPORT
from trainer.core.micro_batch import take_rows
from trainer.core.record import fingerprint
from trainer.core.rng import seed_all
from trainer.core.rng.forward import ExampleRng
from trainer.core.schedule import Schedule
from trainer.core.setup.early_checks import check_hooks, find_unused_hooks
from trainer.core.strategy import find_strategy
from trainer.core.strategy.base import ModelSpec, Strategy, convert
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.strategy.modules.tensor_memory import make_dense
from trainer.core.strategy.structure import build_structure, drop_values
from trainer.core.task import Task

PREPARATION = timedelta(days=7)  # for downloads, while dist.timeout_s is for collectives


class Setup(TaskRun):
    """Data and model of a task, built identically on every rank before training."""

    def __init__(
        self,
        task: Task,
        ranks: Ranks,
        splits: Sequence[str],
        notes: Sequence[str] = (),
        datasets: dict[str, Any] | None = None,
    ):
        """Raise ConfigError if a hook of the task returns an invalid object. A collective.

        `notes` are lines that the start shows, `datasets` those that are open already.
        """
        config = task.config
        self.config = config
        self.world = world = task.world
        precision = Precision(config.strategy.precision, world.device)
        check_hooks(task)
        self.notes = [*find_unused_hooks(type(task)), *notes]
        self._ranks = ranks
        self.kind = find_strategy(config.strategy)
        self.threads = self.kind.set_threads(world)
        self.datasets = {} if datasets is None else datasets
        self.sampling: Sampling = Shuffle(0)
        self._metrics: dict[str, dict[str, Any]] = {}  # torchmetrics by split and name
        self.mesh = Mesh.of(config.strategy.mesh, world)
        self._prepare = build_preparation(task, precision)
        ranks.heartbeat.enter(Phase.BUILD)
        if not self.datasets:
            _prepare_data(task, ranks.group)
        with ranks.group.agreed("building data and model"):
            for split in splits:
                self._open_data(task, split)
            model = self._build_model(task)
            ranks.end_child()
        outlive_terminal()  # the task may have replaced the streams
        if self.kind.builds_on_rank_0:
            model = _build_in_turns(task, ranks.group, model)
        frozen = describe_frozen(model, ranks.group)
        with ranks.group.agreed("dividing the model"):
            assert model is not None
            strategy = self._build_strategy(self._describe_model(task, model, precision))
        self.parts = Parts(config, task, strategy, precision, self._prepare.draws, ranks, frozen)
        facts = fingerprint.of_built(self.datasets, self.sampling, strategy.tensors.structure)
        ranks.group.check_equal(facts)

    @property
    def model(self) -> nn.Module:
        return self.parts.strategy.module

    @property
    def is_split_fixed(self) -> bool:
        """Return True if the micro-batches have the same rows in every layout."""
        return self.kind.batch_split(self.config).is_fixed

    def _build_model(self, task: Task) -> nn.Module | None:
        """Return the model; None on a rank that needs the structure only and cannot build it."""
        model = make_model(task, self.kind.builds_on_rank_0 and task.world.rank > 0)
        if model is not None and self.config.checkpoint.export is not None:
            EXPORT.load().check_export(self.config, model)
        return model

    def _describe_model(self, task: Task, model: nn.Module, precision: Precision) -> ModelSpec:
        reduce_begun = self._ranks.heartbeat.reduce_begun
        draws = self._prepare.draws
        return make_model_spec(task, model, precision, draws, self._read_inputs, reduce_begun)

    def _build_strategy(self, spec: ModelSpec) -> Strategy:
        return self.kind.build(spec)

    def _read_inputs(self) -> Any:
        """Return the inputs of a micro-batch."""
        if "train" in self.datasets:
            return next(iter(self.batches.of_step(0)))[0]
        return next(iter(self._evaluated[0].batches))[0]

    def _open_data(self, task: Task, split: str) -> None:
        data = self.datasets.get(split)
        if data is None:
            data = build_dataset(task, split)
        if data is None:
            return
        self.datasets[split] = data
        if split == "train":
            self.sampling = find_sampling(task, data)
        if split in self.config.eval.splits:
            metrics = check_torchmetrics(task.build_metrics(split))
            device = self.world.device
            self._metrics[split] = {name: metric.to(device) for name, metric in metrics.items()}

    @cached_property
    def batches(self) -> Batches:
        """The training data as local batches."""
        return Batches(
            self.datasets["train"],
            self.sampling,
            self.config,
            self.kind.batch_split(self.config),
            rank=self.mesh.data_rank,
            size=self.mesh.data_size,
            prepare=self._prepare,
            ranks=self._ranks,
            is_counted=self.mesh.is_first,
        )

    def open_evaluator(self, ema: Ema | None, wants_stop: Callable[[], bool]) -> Evaluator:
        """Return the evaluator of `eval.splits`."""
        return Evaluator(self.parts, self._evaluated, ema, wants_stop)

    @cached_property
    def _evaluated(self) -> list[EvalSplit]:
        batch_split = self.kind.batch_split(self.config)
        numbers = (self.mesh.data_rank, self.mesh.data_size)
        splits = []
        for split, metrics in self._metrics.items():
            data = self.datasets[split]
            batches = EvalBatches(data, self.config, batch_split, *numbers, self._prepare, split)
            splits.append(EvalSplit(split, batches, metrics))
        return splits


def build_dataset(task: Task, split: str) -> Any:
    """Return the task's data set, None if it has none for a split of the evaluation.

    Raises ConfigError for an invalid one, or if the task does not know a split of the user's.
    """
    try:
        with without_bars():
            data = task.build_dataset(split)
    except (ValueError, KeyError) as error:
        if split == "train" or (split == "eval" and repr(split) not in str(error)):
            raise
        why = f"build_dataset raised {type(error).__name__}: {one_line(error)}"
        advice = "name a split that it knows"
        if split == "eval":  # the default, which a task with other names must change
            advice = "set eval.splits to the splits that it knows, such as [val]"
        raise ConfigError(f"split {split!r}: {why} ({place_of(error)}); {advice}") from error
    if data is not None or split == "train":
        check_dataset(data, split, task.config.data.path)
    return data


def find_sampling(task: Task, dataset: Any) -> Sampling:
    """Return the sampling of the training data: the task's, that of shards, or a plain shuffle.

    Raises ConfigError if the task's is for other data.
    """
    chosen = task.sampling("train")
    if chosen is None:
        own = getattr(dataset, "sampling", None)
        return own if isinstance(own, Sampling) else Shuffle(len(dataset))
    if not isinstance(chosen, Sampling):
        raise ConfigError(f"""sampling returned a {type(chosen).__name__}:
            must be Weighted, Mixture, ClassBalanced or None""")
    if chosen.num_examples != len(dataset):
        raise ConfigError(f"""sampling returned {type(chosen).__name__} for {chosen.num_examples:,}
            examples, and the train data has {len(dataset):,}: must be equal""")
    return chosen


def build_preparation(task: Task, precision: Precision) -> Preparation:
    """Return the preparation of a run's micro-batches, with its random draws."""
    config = task.config
    seed = config.run.seed
    device = task.world.device
    is_by_example = find_strategy(config.strategy).draws_by_example(config, task.world)
    draws = ExampleRng(seed, device, is_by_example, bool(config.run.compile))
    to_model = partial(convert, precision, config.strategy.channels_last)
    augments = not _is_default(task.augment, Task.augment)
    methods = (task.split_batch, task.augment if augments else None, to_model)
    is_own = type(task).collate is not Task.collate
    collate = task.collate if is_own else default_collate
    takes_pairs = _is_default(task.split_batch, Task.split_batch)
    return Preparation(*methods, seed, device, draws, collate, takes_pairs)


def _is_default(method: Any, default: Any) -> bool:
    """Return True if a method of a task is that of its base class."""
    return getattr(method, "__func__", None) is default


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters whose names match from training."""
    names = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            some = ", ".join(list(names)[:4])
            near = suggest(pattern, names)
            if any(name.startswith(f"{pattern}.") for name in names):  # a module's name
                near = f"; write {pattern}.*"
            raise ConfigError(f"""run.freeze: {pattern}: no parameter has such a name;
                the model has {some}{near}""")
        for name in matched:
            names[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in names.values()):
        raise ConfigError(f"run.freeze={list(patterns)}: must leave a parameter to train")


def make_model(task: Task, is_structure_enough: bool) -> nn.Module | None:
    """Build and check the task's model; without values where these come from rank 0.

    Returns None if it cannot be built without values. Values may still come from a checkpoint: what
    looks at them belongs into `Run`, after they were restored.
    """
    seed_all(task.config.run.seed)
    with without_bars():
        build = partial(build_structure, task.build_model, task)
        model = build() if is_structure_enough else task.build_model()
    if not isinstance(model, nn.Module):
        if is_structure_enough:
            return None
        raise ConfigError(f"""build_model returned a {type(model).__name__}:
            must be a torch.nn.Module""")
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        raise ConfigError(f"""build_model returned a {type(model).__name__}:
            must be the model without a wrapper; the strategy wraps it""")
    check_tensors(model, is_structure_enough)
    _freeze(model, task.config.run.freeze)
    make_dense(model)
    return model


def _build_in_turns(task: Task, group: Group, model: nn.Module | None) -> nn.Module | None:
    """Build the model with values where it could not be built without, a rank of a node at a time.

    Returns its structure only. A collective.
    """
    world = task.world
    (missing,) = group.max(float(model is None))
    if not missing:
        return model
    for turn in range(world.local_world_size):
        with group.agreed("building the model"):
            if model is None and turn == world.local_rank:
                model = make_model(task, False)
                assert model is not None
                drop_values(model)
    return model


def make_model_spec(
    task: Task,
    model: nn.Module,
    precision: Precision,
    draws: ExampleRng,
    read_inputs: Callable[[], Any],
    reduce_begun: Callable[[Any], Any],
) -> ModelSpec:
    """Return a model for training, with the task's description of its parts.

    `read_inputs` returns the inputs of a micro-batch. Raises ConfigError for invalid blocks, or for
    a train_step that a pipeline cannot run.
    """
    _check_step(task)
    blocks = _list_blocks(task, model)
    is_divided = Mesh.of(task.config.strategy.mesh, task.world).tensor > 1
    plan = task.tensor_plan() if is_divided else {}
    model = model.train()
    rows = 2 * (task.config.norm_rows or 1)
    return ModelSpec(
        config=task.config,
        world=task.world,
        precision=precision,
        model=model,
        blocks=blocks,
        tensor_plan=plan,
        draws=draws,
        sample=lambda: take_rows(read_inputs(), rows),
        reduce_begun=reduce_begun,
    )


def _list_blocks(task: Task, model: nn.Module) -> list[nn.Module]:
    """Return the task's blocks. Raise ConfigError unless they are different parts of the model."""
    blocks = task.blocks(model)
    parts = set(map(id, model.modules()))
    if not isinstance(blocks, list) or any(id(block) not in parts for block in blocks):
        raise ConfigError("blocks(model): must return a list of modules of the model")
    if len(set(blocks)) < len(blocks) or model in blocks:
        raise ConfigError("blocks(model): must not name a module twice, or the model itself")
    return blocks


def _check_step(task: Task) -> None:
    """Raise ConfigError for a train_step of the task's own over a pipeline."""
    mesh = Mesh.of(task.config.strategy.mesh, task.world)
    step = inspect.unwrap(type(task).train_step)
    if mesh.pipeline > 1 and step.__module__ != "trainer.core.trainer":
        raise ConfigError(f"""strategy.mesh.pipeline={mesh.pipeline}:
            {type(task).__name__} has a train_step of its own, and a stage has no outputs;
            choose another axis, or leave train_step out""")


def _prepare_data(task: Task, group: Group) -> None:
    """Call the task's own `prepare` on one rank of each node. A collective."""
    if type(task).prepare is not Task.prepare:
        with group.agreed("preparing the data", PREPARATION):
            if task.world.local_rank == 0:
                with nullcontext() if sys.stderr.isatty() else without_bars():
                    task.prepare()


def build_schedule(task: Task, num_steps: int) -> Schedule:
    """Return the task's schedule. Raise ConfigError unless its factors are numbers."""
    is_configured = type(task).build_schedule is Task.build_schedule
    target = f"schedule ({task.config.schedule['_target_']})"
    schedule = Schedule(
        task.build_schedule(num_steps), target if is_configured else "build_schedule"
    )
    schedule.check(num_steps)
    return schedule
