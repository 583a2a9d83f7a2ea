"""The Trainer: the loop, evaluation, saving and restoring. Subclass it for a task."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainer import checkpoint, report, rundir
from trainer.config import Config, build, call_target, check_target, suggest
from trainer.data.loaders import check_dataset, index_device, open_loader
from trainer.data.order import BatchPlan, EpochSampler, FixedSampler, ShardSampler, check_batch
from trainer.data.randomness import Random, seed_layers
from trainer.distributed.group import Group, choose_backend, process_group
from trainer.distributed.signals import OneStepLate, StopRequest, stop_requests
from trainer.distributed.world import World
from trainer.errors import CheckpointError, ConfigError
from trainer.means import Means, Objective, Values, count_rows, weigh
from trainer.precision import Precision
from trainer.strategy import STRATEGIES, Strategy, build_strategy
from trainer.strategy.base import MicroBatch, MicroBatches, remember_options
from trainer.writers import Writer, open_writer

Split = Literal["train", "eval"]
STOPPED = 75  # EX_TEMPFAIL: ended by a signal after a published checkpoint; start it again
MAX_SKIPPED = 10
STOP_EVERY_S = 0.5


@dataclass
class Summary:
    """What `fit` returns, alike on every rank."""

    directory: Path
    step: int
    metrics: dict[str, float]
    best: float | None
    best_step: int | None
    seconds: float
    examples_per_s: float
    exit_code: int


@dataclass
class Session:
    """What exists only while `fit` or `evaluate` runs."""

    group: Group
    strategy: Strategy
    stop: StopRequest
    writer: Writer = field(default_factory=Writer)
    directory: Path = Path()
    datasets: dict[str, Any] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    means: Means = field(default_factory=Means)
    verdicts: OneStepLate = field(default_factory=OneStepLate)
    num_steps: int = 0
    is_stopped: bool = False
    num_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated: int = -1
    best: float | None = None
    best_step: int | None = None
    paused_s: float = 0.0
    began: tuple[int, float] = (0, 0.0)
    logged: tuple[int, float] = (0, 0.0)
    plan: BatchPlan = field(init=False)
    sampler: EpochSampler = field(init=False)
    shard: ShardSampler = field(init=False)
    loaders: dict[str, Any] = field(default_factory=dict)
    objective: Objective = field(init=False)
    wrapped: nn.Module = field(init=False)
    factor: Callable[[int], float] = field(init=False)
    verdict: torch.Tensor = field(init=False)

    def clock(self) -> float:
        """Seconds that count as training: evaluating and saving do not."""
        return time.monotonic() - self.paused_s

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.paused_s += time.monotonic() - begun


class Stopped(Exception):
    """All ranks agreed, within an evaluation, to stop."""


class Trainer:
    """Trains a model over any layout; a task gives `build_model`, `build_dataset` and `loss` and may replace more.

    `Options`, where a task names a dataclass so, types `task.options`: then typos there are refused too.
    """

    Options: type | None = None
    command: Sequence[str] = ()  # the overrides as typed, for the line that says how to resume

    def __init__(self, config: Config, world: World | None = None):
        self.config = config
        self.world = world or World.from_environment()
        self.options: Any = build(self.Options, config.task.options, "task.options.") if self.Options else config.task.options
        self.step = 0
        self.model: nn.Module
        self._session: Session | None = None

    # What a task writes -----------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """The model, on the CPU; the generators are seeded with `run.seed` before the call."""
        raise NotImplementedError

    def build_dataset(self, split: Split) -> Dataset | None:
        """A map-style dataset; None for "eval" if there is nothing to evaluate on."""
        raise NotImplementedError

    def loss(self, outputs: Any, targets: Any) -> Values:
        """Values (batch, ...), or (values, weights) of equal shape; never a mean over the batch."""
        raise NotImplementedError

    # What a task may replace ------------------------------------------------------------------------------------------

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Values]:
        """Further values to average in evaluation, by name, in the manner of `loss`."""
        return {}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """What is derived from the means of an evaluation, {"perplexity": exp(means["loss"])}."""
        return {}

    def augment(self, inputs: Any, targets: Any, random: Random, train: bool) -> tuple[Any, Any]:
        """A micro-batch on the device, in training and in evaluation."""
        return inputs, targets

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) from what the dataset gives."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        given = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
        raise ConfigError(f"the dataset gives {given}: must be (inputs, targets), or replace Trainer.split_batch")

    def build_optimizer(self, model: nn.Module) -> Optimizer | list[Optimizer]:
        """From the `optim` group; fused where torch can. Several optimizers all step at every step."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        return call_target(self.config.optim, "optim", self.packages, parameters, fused=True)

    def build_schedule(self, num_steps: int) -> Callable[[int], float]:
        """The factor on every group's rate, for the update made at 0-based step."""
        return call_target(self.config.schedule, "schedule", self.packages, num_steps)

    def train_step(self, micro_batches: MicroBatches) -> None:
        """One update from this rank's share of a global batch."""
        now, max_norm = self._now, self.config.run.clip_norm
        totals = now.strategy.forward_backward(now.wrapped, micro_batches, now.objective)
        factor = now.objective.factor(totals)
        made = now.strategy.precision.update(now.optimizers, now.strategy.gradients(), factor, lambda: now.strategy.clip(now.wrapped, max_norm))
        now.wrapped.zero_grad(set_to_none=True)
        now.verdict = torch.stack([*totals, made])

    # What one calls ---------------------------------------------------------------------------------------------------

    def fit(self) -> Summary:
        """Train to the end, or until asked to stop. Raises ConfigError and CheckpointError, one line for the user."""
        origin = self._check(is_training=True)
        with process_group(self.config.dist, self.world) as group:
            with stop_requests() as stop:
                self._session = now = self._open(group, stop)
                try:
                    self._start(origin)
                    self._train()
                    summary = self._finish()
                except BaseException as error:
                    now.writer.exit(1, f"{type(error).__name__}: {error}", step=self.step)
                    raise
                finally:
                    now.writer.close()
            del now
            self._session = None  # frees the wrapper before its group ends
        return summary

    def evaluate(self) -> dict[str, float]:
        """The metrics on the eval split, `{"eval/loss": ...}`: of the model in training, or of `run.resume`."""
        if self._session is not None:
            return self._evaluate()
        origin = self._check(is_training=False)
        with process_group(self.config.dist, self.world) as group, stop_requests() as stop:
            self._session = self._open(group, stop)
            with group.agreed("building the evaluation"):
                self._build_model()
                self._open_eval()
            self._session.strategy.place(self.model)
            self._restore(origin)
            metrics = self._evaluate()
            self._session = None
        return metrics

    def save_checkpoint(self) -> Path:
        """Publish the state after `step`, called on every rank; a step that is published already is left as it is."""
        now = self._now
        path = now.directory / "checkpoints" / f"step-{self.step:08d}"
        state = now.strategy.state_dict(now.wrapped, now.optimizers)
        training = {
            "optimizers": state["optimizers"],
            "rows": now.means.reduced(now.group),
            "elements": now.objective.elements,
            "evaluated": now.evaluated,
            "best": now.best,
            "best_step": now.best_step,
        }
        facts = {
            "config": self.config.flat(),
            "data": _data_facts(now.datasets),
            "world_size": self.world.world_size,
            "metrics": now.metrics if now.evaluated == self.step else {},
            "metric": now.metrics.get(self._best_metric) if now.evaluated == self.step else None,
        }
        with now.group.agreed("saving a checkpoint"):
            if not path.exists():
                now.writer.save(self.step, {"model.pt": state["model"], "training.pt": training}, facts, self.config.checkpoint)
        return path

    def load_checkpoint(self, path: Path) -> None:
        """Take weights, and in training all other state, from a checkpoint; before `fit` or `evaluate`, when they run."""
        if self._session is None:
            self.config.run.resume = str(path)
        else:
            self._restore(rundir.Origin(checkpoint=Path(path)))

    # The loop ---------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        now = self._now
        now.began = now.logged = (self.step, now.clock())
        try:
            if self._is_due(self.config.eval) and now.evaluated < self.step:
                self._evaluate_and_log()
            while self.step < now.num_steps and not now.is_stopped:
                epoch, start = divmod(self.step, now.plan.steps_per_epoch)
                now.sampler.set_epoch(epoch, start)
                batches = iter(now.loaders["train"])
                for _ in range(start, now.plan.steps_per_epoch):
                    self._set_rates(now.factor(self.step))
                    now.objective.stop = bool(now.stop)
                    self.train_step(_Share(self, epoch, list(islice(batches, now.plan.accumulation))))
                    self.step += 1
                    if self._at_boundary():
                        break
        except Stopped:
            now.is_stopped = True

    def _at_boundary(self) -> bool:
        """What is due after a step; True to leave the epoch."""
        now, is_last = self._now, self.step == self._now.num_steps
        now.means.end_row()
        now.is_stopped = self._judge(now.verdicts.push(now.verdict), self.step - 1)
        now.writer.progress(self.step, now.num_steps)
        if is_last or self.step % self.config.log.every_steps == 0:
            self._log()
        if now.is_stopped:
            return True
        is_better = self._evaluate_and_log() if self._is_due(self.config.eval) else False
        if self._is_due(self.config.checkpoint) or is_better:
            with now.off_the_clock():
                self.save_checkpoint()
        return is_last

    def _judge(self, verdict: list[float] | None, step: int) -> bool:
        """What the host learns of a step, one later: whether all ranks stop. Alike on every rank."""
        if verdict is None:
            return False
        now, (weight, stops, made) = self._now, verdict
        if weight == 0:
            now.writer.say(f"warning: step {step}: the weights of its examples sum to 0, so it changed nothing")
        elif not made:
            now.num_skipped += 1
            now.writer.say(f"warning: step {step}: the gradient is not finite, so the update was skipped")
            if now.num_skipped == MAX_SKIPPED:
                raise FloatingPointError(f"no finite gradient in {MAX_SKIPPED} steps up to step {step}; the newest checkpoint is from before or amid them")
        else:
            now.num_skipped = 0
        return stops > 0

    def _log(self) -> None:
        now = self._now
        means = now.means.read(now.group)
        (step, then), at = now.logged, now.clock()
        speed = (self.step - step) * self.config.data.global_batch / max(at - then, 1e-9)
        rate = now.optimizers[0].param_groups[0]["lr"]
        now.writer.scalars(self.step, {"train/loss": means["loss"], "optim/lr": float(rate), "speed/examples_per_s": speed})
        now.logged = (self.step, at)

    def _evaluate_and_log(self) -> bool:
        """Evaluate; True if checkpoints are kept by a metric and this is the best so far."""
        now = self._now
        with now.off_the_clock():
            metrics = self._evaluate()
        if not metrics:
            return False
        now.metrics, now.evaluated = metrics, self.step
        now.writer.scalars(self.step, metrics)
        now.writer.say(f"step {self.step:,}: {report.metric_line(metrics)}")
        value, sign = metrics[self._best_metric], 1 if self.config.checkpoint.best_mode == "max" else -1
        if math.isnan(value) or (now.best is not None and sign * value <= sign * now.best):
            return False
        now.best, now.best_step = value, self.step
        return self.config.checkpoint.keep_best > 0

    @torch.no_grad()
    def _evaluate(self, limit: int | None = None) -> dict[str, float]:
        """Each example once: what pads a shard is cut off before it is counted. `limit` micro-batches only."""
        now, means, every, begun = self._now, Means(), 1, time.monotonic()
        if "eval" not in now.loaders:
            return {}
        self.model.eval()
        batches = zip(islice(now.loaders["eval"], limit), now.shard.rows, strict=False)
        for number, ((batch, indices), rows) in enumerate(batches, 1):
            inputs, targets = self._prepare(batch, indices, "eval", 0)
            seed_layers(self.config.run.seed, -1, number, self.world.device)
            self._count(means, now.strategy.forward(now.wrapped, inputs), targets, rows)
            if number % every == 0 and limit is None:
                asked, seconds = now.group.max(float(bool(now.stop)), time.monotonic() - begun)
                if asked:
                    raise Stopped
                every = max(1, int(number * STOP_EVERY_S / max(seconds, 1e-9)))
        self.model.train()
        values = means.read(now.group)
        return {f"eval/{name}": value for name, value in (values | self.summarize(dict(values))).items()}

    def _count(self, means: Means, outputs: Any, targets: Any, rows: int) -> None:
        with self._now.strategy.precision.autocast():
            returned = {"loss": self.loss(outputs, targets), **self.metrics(outputs, targets)}
        for name, value in returned.items():
            values, weights = weigh(name, value, count_rows(targets, outputs))
            means.add(name, values[:rows], None if weights is None else weights[:rows])

    def _finish(self) -> Summary:
        now, config = self._now, self.config
        self._judge(now.verdicts.flush(), self.step)
        if now.is_stopped:
            self.save_checkpoint()
        seconds, num_examples = now.clock() - now.began[1], (self.step - now.began[0]) * config.data.global_batch
        summary = Summary(
            now.directory, self.step, now.metrics, now.best, now.best_step, seconds, num_examples / max(seconds, 1e-9), STOPPED if now.is_stopped else 0
        )
        again = report.resume_command(self.world, self.command, now.directory.name)
        for line in report.ending(summary, now.num_steps, now.began[0], self._best_metric, now.stop.name, again):
            now.writer.say(line)
        now.writer.exit(summary.exit_code, "stopped" if now.is_stopped else "done", step=self.step, metrics=now.metrics)
        return summary

    # What the loop stands on ------------------------------------------------------------------------------------------

    @property
    def _now(self) -> Session:
        if self._session is None:
            raise RuntimeError("only while fit or evaluate runs")
        return self._session

    @property
    def packages(self) -> list[str]:
        """The packages a `_target_` may lie under beside torch's and ours: the task's own and `task.packages`."""
        return [self.config.task.trainer.split(".")[0], *self.config.task.packages]

    @property
    def _best_metric(self) -> str:
        name = self.config.checkpoint.best_metric or "loss"
        return name if name.startswith("eval/") else f"eval/{name}"

    def _is_due(self, block: Any) -> bool:
        epoch = self._now.plan.steps_per_epoch
        periods = [block.every_steps, block.every_epochs and block.every_epochs * epoch]
        return self.step > 0 and (self.step == self._now.num_steps or any(p and self.step % p == 0 for p in periods))

    def _set_rates(self, factor: float) -> None:
        for optimizer in self._now.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial"]["lr"] * factor

    def _prepare(self, batch: Any, indices: torch.Tensor, split: Split, epoch: int) -> MicroBatch:
        inputs, targets = self.split_batch(batch)
        random = Random(self.config.run.seed, split, epoch, indices)
        return self._now.strategy.precision.cast(tuple(self.augment(inputs, targets, random, split == "train")))

    # Building ---------------------------------------------------------------------------------------------------------

    def _check(self, is_training: bool) -> rundir.Origin:
        """The first gate: all that config, environment and manifests can tell, before a socket or a directory."""
        config, world = self.config, self.world
        STRATEGIES[config.strategy.name].check(config, world)
        choose_backend(config.dist, world)
        check_batch(config.data.global_batch, config.data.micro_batch, world.world_size)
        if not is_training:
            return rundir.find(config.run.resume)
        check_target(config.optim, "optim", self.packages)
        check_target(config.schedule, "schedule", self.packages)
        return rundir.locate(config)

    def _open(self, group: Group, stop: StopRequest) -> Session:
        self.world.divide_threads()
        precision = Precision(self.config.strategy.precision, self.world.device)
        return Session(group, build_strategy(self.config.strategy, self.world, precision), stop)

    def _start(self, origin: rundir.Origin) -> None:
        now = self._now
        with now.group.agreed("building data and model"):
            self._open_train()
            self._open_eval()
            self._build_model()
        self._wrap()
        manifest, notes = self._restore(origin)
        with now.group.agreed("making the run directory"):
            made = str(rundir.create(self.config, origin)) if self.world.rank == 0 else None
        now.directory = Path(now.group.share_text(made))
        recorded = json.loads(now.group.share_text(json.dumps(rundir.recorded(now.directory, self.step)) if made else None))
        if recorded:
            now.metrics, now.evaluated = recorded, self.step
        now.writer = open_writer(self.world.rank, now.directory, self.step, manifest is not None)
        self._announce(manifest, notes)
        names = self._evaluate(limit=1)  # a mistake in `metrics` shows now and not after an epoch
        if names and self._best_metric not in names:
            raise ConfigError(f"checkpoint.best_metric={self._best_metric}: must be one of {', '.join(names)}{suggest(self._best_metric, names)}")

    def _open_train(self) -> None:
        now, config = self._now, self.config
        data = now.datasets["train"] = self.build_dataset("train")
        num_examples = check_dataset(data, "train", config.data.path)
        if config.data.global_batch > num_examples:
            raise ConfigError(f"data.global_batch={config.data.global_batch}: must be at most the {num_examples} training examples")
        ranks, rank = now.strategy.data_parallel_size, now.strategy.data_parallel_rank
        micro_batch = check_batch(config.data.global_batch, config.data.micro_batch, ranks)
        now.plan = BatchPlan(num_examples, config.data.global_batch, micro_batch, ranks)
        device = index_device(data, config.data.path, self.world.device)
        now.sampler = EpochSampler(now.plan, config.run.seed, rank, device)
        now.loaders["train"] = open_loader(data, now.sampler, config.data, config.run.seed, "train", self.world.device)
        now.num_steps = config.run.steps or config.run.epochs * now.plan.steps_per_epoch
        now.factor = self.build_schedule(now.num_steps)

    def _open_eval(self) -> None:
        now, config = self._now, self.config
        data = self.build_dataset("eval")
        if data is None:
            return
        now.datasets["eval"] = data
        ranks, rank = now.strategy.data_parallel_size, now.strategy.data_parallel_rank
        micro_batch = config.eval.micro_batch or check_batch(config.data.global_batch, config.data.micro_batch, ranks)
        device = index_device(data, config.data.path, self.world.device)
        now.shard = ShardSampler(check_dataset(data, "eval", config.data.path), micro_batch, rank, ranks, device)
        now.loaders["eval"] = open_loader(data, now.shard, config.data, config.run.seed, "eval", self.world.device)

    def _build_model(self) -> None:
        torch.manual_seed(self.config.run.seed)
        self.model = self.build_model()
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"build_model returned a {type(self.model).__name__}: must be a torch.nn.Module")
        self.model.train()
        self._now.wrapped = self.model

    def _wrap(self) -> None:
        """Wrap the model around a rehearsed micro-batch, then build what needs its parameters."""
        now, config = self._now, self.config
        now.objective = Objective(self.loss, now.means, config.data.global_batch, now.strategy.data_parallel_size)
        first = FixedSampler([next(iter(now.sampler))])
        loader = open_loader(now.datasets["train"], first, replace(config.data, workers=0), config.run.seed, "train", self.world.device)
        now.wrapped = now.strategy.wrap(self.model, self._prepare(*next(iter(loader)), "train", 0), now.objective)
        now.objective.elements = int(now.group.share_text(str(now.objective.elements)))
        now.means.clear()
        built = self.build_optimizer(self.model)
        now.optimizers = built if isinstance(built, list) else [built]
        for optimizer in now.optimizers:
            remember_options(optimizer)

    def _restore(self, origin: rundir.Origin) -> tuple[dict[str, Any] | None, list[str]]:
        """Rank 0 reads and verifies, all ranks load the same bytes; (manifest, what was skipped), None for a fresh start."""
        now, found, notes = self._now, None, []
        with now.group.agreed("reading the checkpoint"):
            if self.world.rank == 0:
                found, notes = rundir.read(origin)
        manifest = json.loads(now.group.share_text(json.dumps(found.manifest if found else None)))
        if manifest is None:
            return None, notes
        names = sorted(manifest["files"])
        state = {n: checkpoint.unpack(now.group.share_bytes(found.files[n] if found else None), torch.device("cpu")) for n in names}
        training = state["training.pt"]
        loaded = {"model": state["model.pt"], "optimizers": training["optimizers"]}
        now.strategy.load_state_dict(now.wrapped, now.optimizers, loaded)
        self.step = manifest["step"]
        if now.optimizers:
            _check_data(_data_facts(now.datasets), manifest["data"])
            now.means.load(training["rows"])
            now.objective.elements = training["elements"]
            now.evaluated, now.best, now.best_step = training["evaluated"], training["best"], training["best_step"]
            now.metrics = manifest["metrics"]
        return manifest, notes

    def _announce(self, manifest: dict[str, Any] | None, notes: list[str]) -> None:
        now = self._now
        now.writer.table(report.RANK_COLUMNS, report.rank_rows(now.group.gather_text(report.describe_rank(self.world))))
        backend = choose_backend(self.config.dist, self.world)
        lines = [report.layout(self.config, self.world, backend), *report.arithmetic(self.config, now.plan, now.num_steps)]
        lines += [report.describe_data(split, data) for split, data in now.datasets.items()]
        lines += [report.describe_model(self.model), f"run directory: {now.directory}"]
        if manifest is not None:
            lines += report.resumed(self.config, manifest, self.step, now.num_steps)
        else:
            now.writer.hyper_parameters(self.config.flat())
        for line in [*lines, *notes]:
            now.writer.say(line)


class _Share:
    """This rank's micro-batches of one step, prepared one by one as they are taken."""

    def __init__(self, trainer: Trainer, epoch: int, batches: list[tuple[Any, torch.Tensor]]):
        self.trainer, self.epoch, self.batches = trainer, epoch, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        trainer = self.trainer
        first = trainer._now.strategy.data_parallel_rank * len(self.batches)
        for number, (batch, indices) in enumerate(self.batches, first):
            prepared = trainer._prepare(batch, indices, "train", self.epoch)
            seed_layers(trainer.config.run.seed, trainer.step, number, trainer.world.device)
            yield prepared


def _data_facts(datasets: dict[str, Any]) -> dict[str, Any]:
    return {split: {"examples": len(data), "digest": getattr(data, "digest", "")} for split, data in datasets.items()}


def _check_data(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for split, facts in theirs.items():
        for name, value in facts.items():
            given = ours.get(split, {}).get(name)
            if given != value:
                raise CheckpointError(f"the {split} data set has {name} {given}, and {value} in the run to resume: give it the same data, or start a new run")
